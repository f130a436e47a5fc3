"""Models of a hub, by `org/name`: which of their files are fetched, how they are checked, and where they are kept.

Only weights in safetensors, JSON and what tokenizers need: never code, never a format that runs any. A model in the
cache is whole: it is fetched under another name, checked, and renamed; a fetch that was cut off goes on where it was.
Knows nothing of what is inside a model, of the environment or of terminals. The hub's own library is imported when a
model is pulled, and not before.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct

from deepinfer.errors import ModelError, ModelFileError, UnknownModel

Report = Callable[[str], None]
ReportBytes = Callable[[int, int], None]
"""Bytes that are here, and bytes in all."""

PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""What is fetched, of the files beside `config.json`; nothing of deeper folders."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TIMEOUT_S: Final = 10.0


class HubFile(Struct, frozen=True):
    """A file as the hub describes it."""

    name: str
    size_bytes: int
    sha256: str | None = None
    """Of large files."""
    git_sha1: str | None = None
    """Of small ones: the id of their git blob."""


class Hub(Protocol):
    """Where models come from."""

    def files(self, repo: str) -> tuple[str, list[HubFile]]:
        """The newest revision of `repo`, and its files."""

    def download(self, repo: str, revision: str, file: HubFile, folder: Path, on_bytes: Callable[[int], None]) -> None:
        """Put `file` into `folder`; `on_bytes` hears of every few that arrive."""


def is_hub_name(model: str) -> bool:
    """Could it be `org/name`?"""
    return _NAME.fullmatch(model) is not None and ".." not in model and "--" not in model


def hub_folder(repo: str, cache_dir: Path) -> Path:
    """Where a pulled model is kept."""
    return cache_dir.absolute() / "hub" / repo.replace("/", "--")


def pulled_from_hub(cache_dir: Path) -> Iterator[tuple[str, Path]]:
    """The names and folders of the models that were pulled."""
    for folder in sorted((cache_dir.absolute() / "hub").glob("*--*")):
        if folder.is_dir() and not folder.name.startswith("."):
            yield folder.name.replace("--", "/"), folder


def pull_from_hub(
    repo: str,
    *,
    cache_dir: Path,
    report: Report,
    on_bytes: ReportBytes = lambda done, total: None,
    hub: Hub | None = None,
) -> Path:
    """Fetch `repo` unless it is here. Raises `ModelError` when the hub cannot be asked, `ModelFileError` by file."""
    folder = hub_folder(repo, cache_dir)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():
                part = folder.parent / f".{folder.name}.part"
                _fetch(repo, hub or _HuggingFace(), part, report, on_bytes)
                part.rename(folder)
    except OSError as error:
        raise ModelError(f"{repo}: cannot be kept in {folder}: {error}") from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time fetches a model."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(repo: str, hub: Hub, part: Path, report: Report, on_bytes: ReportBytes) -> None:
    revision, files = _ask(repo, hub)
    total = sum(file.size_bytes for file in files)
    report(f"pulling {repo} at {revision[:12]} ({len(files)} files, {total / 1e6:.0f} MB)")
    num_before = 0

    for file in files:
        num_bytes = 0

        def count(more: int, before: int = num_before, size: int = file.size_bytes) -> None:
            nonlocal num_bytes
            num_bytes = min(num_bytes + more, size)
            on_bytes(before + num_bytes, total)

        part.mkdir(exist_ok=True)
        with _in_words(repo, f"{file.name} could not be fetched"):
            hub.download(repo, revision, file, part, count)
        _check(file, part / file.name)
        num_before += file.size_bytes
        on_bytes(num_before, total)
    _tidy(part, {file.name for file in files})


def _tidy(part: Path, names: set[str]) -> None:
    """Leave nothing else: the library's notes, or what a pull of an older revision had begun."""
    for entry in part.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in names:
            entry.unlink()


def _ask(repo: str, hub: Hub) -> tuple[str, list[HubFile]]:
    with _in_words(repo, "the hub could not be asked"):
        revision, files = hub.files(repo)
    wanted = [file for file in files if any(fnmatchcase(file.name, pattern) for pattern in PATTERNS)]
    wanted = [file for file in wanted if "/" not in file.name and not file.name.startswith(".")]
    if not any(file.name.endswith(".safetensors") for file in wanted):
        raise ModelError(f"{repo}: it has no safetensors files, and weights of other kinds are not fetched")
    return revision, wanted


@contextmanager
def _in_words(repo: str, what: str) -> Iterator[None]:
    """The library raises much of its own; one line of it is for people."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ModelError(f"{repo}: {what}: {said}") from error


def _check(file: HubFile, path: Path) -> None:
    """Raises `ModelFileError`, and takes the file away, when it is not what the hub said."""
    found: Any = path.stat().st_size
    expected: Any = file.size_bytes
    if found == expected:
        with path.open("rb") as content:
            if file.sha256 is not None:
                expected, found = (
                    f"sha256 {file.sha256}",
                    f"sha256 {hashlib.file_digest(content, 'sha256').hexdigest()}",
                )
            elif file.git_sha1 is not None:
                blob = b"blob %d\0" % file.size_bytes + content.read()
                expected, found = f"git id {file.git_sha1}", f"git id {hashlib.sha1(blob).hexdigest()}"
    if found != expected:
        path.unlink()
        raise ModelFileError(file.name, f"expected {expected}, found {found}; pull again")


class _HuggingFace:
    """`huggingface_hub`, where it is installed. Its own variables (`HF_TOKEN`, `HF_ENDPOINT`, ...) hold."""

    def __init__(self) -> None:
        try:
            import huggingface_hub
        except ModuleNotFoundError:
            raise UnknownModel("names of a hub need huggingface_hub: pip install huggingface_hub") from None
        self._library: Any = huggingface_hub

    def files(self, repo: str) -> tuple[str, list[HubFile]]:
        info = self._library.HfApi().model_info(repo, files_metadata=True, timeout=_TIMEOUT_S)
        return info.sha, [self._describe(sibling) for sibling in info.siblings]

    @staticmethod
    def _describe(sibling: Any) -> HubFile:
        if sibling.lfs is not None:
            return HubFile(sibling.rfilename, sibling.size or sibling.lfs.size, sha256=sibling.lfs.sha256)
        return HubFile(sibling.rfilename, sibling.size or 0, git_sha1=sibling.blob_id)

    def download(self, repo: str, revision: str, file: HubFile, folder: Path, on_bytes: Callable[[int], None]) -> None:
        self._library.hf_hub_download(
            repo, file.name, revision=revision, local_dir=folder, etag_timeout=_TIMEOUT_S, tqdm_class=_counter(on_bytes)
        )


def _counter(on_bytes: Callable[[int], None]) -> type:
    """A bar, as the library wants one, that shows nothing and counts."""
    from huggingface_hub import utils

    library: Any = utils

    class Counter(library.tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            on_bytes(options.get("initial") or 0)
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            on_bytes(int(n or 0))
            return None

    return Counter
