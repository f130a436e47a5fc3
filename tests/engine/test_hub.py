"""Models by org/name: what is fetched and what never is, what is checked, and what an end in between leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.catalog import list_models, pull, remove, resolve
from deepinfer.errors import ModelError, ModelFileError, UnknownModel
from deepinfer.hub import HubFile, hub_folder, is_hub_name, pull_from_hub

REPO = "org/tiny-model"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": bytes(range(256)) * 50,
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "original/params.json": b"{}",
    "../escape.json": b"{}",
    ".hidden.json": b"{}",
    "README.md": b"words",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"}


class Shelf:
    """A hub in memory."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.described = dict(FILES if files is None else files)
        self.content = dict(self.described)
        self.downloads: list[str] = []
        self.is_reachable = True

    def files(self, repo: str) -> tuple[str, list[HubFile]]:
        if not self.is_reachable:
            raise ConnectionError("nobody answers\nand here is a long explanation")
        return "f00d" * 10, [_described(name, content) for name, content in self.described.items()]

    def download(self, repo: str, revision: str, file: HubFile, folder: Path, on_bytes: Callable[[int], None]) -> None:
        self.downloads.append(file.name)
        if file.name not in self.content:
            raise TimeoutError("the line is down")
        (folder / file.name).write_bytes(self.content[file.name])
        on_bytes(len(self.content[file.name]))


def _described(name: str, content: bytes) -> HubFile:
    if name.endswith(".safetensors"):
        return HubFile(name, len(content), sha256=hashlib.sha256(content).hexdigest())
    return HubFile(name, len(content), git_sha1=hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())


def fetch(shelf: Shelf, cache_dir: Path, on_bytes: Callable[[int, int], None] = lambda done, total: None) -> Path:
    return pull_from_hub(REPO, cache_dir=cache_dir, report=lambda text: None, on_bytes=on_bytes, hub=shelf)


def test_weights_json_and_tokenizer_come_and_nothing_else(tmp_path: Path) -> None:
    shelf = Shelf()
    folder = fetch(shelf, tmp_path)
    assert set(shelf.downloads) == WANTED == {path.name for path in folder.iterdir()}
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)


def test_a_pulled_model_has_its_name_everywhere(tmp_path: Path) -> None:
    folder = fetch(Shelf(), tmp_path)
    found = resolve(REPO, cache_dir=tmp_path)
    assert (found.name, found.path) == (REPO, folder) == (REPO, hub_folder(REPO, tmp_path))
    (listed,) = list_models(cache_dir=tmp_path, catalog=(), shipped=())
    assert (listed.name, listed.state, listed.path) == (REPO, "pulled", folder)
    assert listed.size_bytes == sum(len(FILES[name]) for name in WANTED)
    assert remove(REPO, cache_dir=tmp_path) == folder and not folder.exists()
    with pytest.raises(ModelError, match="nothing to remove"):
        remove(REPO, cache_dir=tmp_path)


def test_a_second_pull_asks_nobody(tmp_path: Path) -> None:
    folder, shelf = fetch(Shelf(), tmp_path), Shelf()
    shelf.is_reachable = False
    assert fetch(shelf, tmp_path) == folder


def test_bytes_are_counted_up_to_all_of_them(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    fetch(Shelf(), tmp_path, on_bytes=lambda done, total: told.append((done, total)))
    total = sum(len(FILES[name]) for name in WANTED)
    assert told == sorted(told) and told[-1] == (total, total)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content[::-1]])
def test_a_file_that_is_not_what_the_hub_said_is_refused(
    name: str, change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    shelf = Shelf()
    shelf.content[name] = change(FILES[name])
    with pytest.raises(ModelFileError, match=r"expected .*, found .*; pull again") as caught:
        fetch(shelf, tmp_path)
    assert caught.value.file == name and not hub_folder(REPO, tmp_path).exists()
    shelf.content[name] = FILES[name]
    assert (fetch(shelf, tmp_path) / name).read_bytes() == FILES[name]


def test_a_pull_that_breaks_off_leaves_no_model(tmp_path: Path) -> None:
    shelf = Shelf()
    del shelf.content["tokenizer.json"]
    with pytest.raises(ModelError, match=r"org/tiny-model: tokenizer\.json could not be fetched: the line is down"):
        fetch(shelf, tmp_path)
    assert list(list_models(cache_dir=tmp_path, catalog=(), shipped=())) == []
    with pytest.raises(UnknownModel, match="deepinfer models pull org/tiny-model"):
        resolve(REPO, cache_dir=tmp_path)


def test_what_an_older_revision_had_begun_is_not_kept(tmp_path: Path) -> None:
    part = tmp_path / "hub/.org--tiny-model.part"
    (part / ".cache").mkdir(parents=True)
    (part / "model-00001-of-00002.safetensors").write_bytes(b"old")
    assert {path.name for path in fetch(Shelf(), tmp_path).iterdir()} == WANTED


def test_an_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    shelf = Shelf()
    shelf.is_reachable = False
    with pytest.raises(ModelError, match="the hub could not be asked: nobody answers") as caught:
        fetch(shelf, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_without_safetensors_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    shelf = Shelf({"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
    with pytest.raises(ModelError, match="no safetensors files"):
        fetch(shelf, tmp_path)
    assert shelf.downloads == []


@pytest.mark.parametrize("name", ["a", "a/b/c", "../b", "a/..", "a/b--c", "/b", "a/", "a b/c", "~/x", "a\n/b", "./b"])
def test_what_is_no_name_of_a_hub_is_not_looked_for(name: str, tmp_path: Path) -> None:
    assert not is_hub_name(name)
    with pytest.raises(UnknownModel):
        pull(name, cache_dir=tmp_path, catalog=())
