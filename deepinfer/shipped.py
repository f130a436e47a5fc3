"""Models that come with the packages: whole folders, there without a download. Imports nothing to find them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

import msgspec

_PACKAGE: Final = "deepinfer_workers"
_FOLDER: Final = "shipped"


class ShippedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder of the workers' package."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str
    license: str


SHIPPED: Final = (
    ShippedModel(
        name="v41-nano",
        aliases=("V4.1-Nano", "v4.1-nano"),
        summary="23M parameters, every part of DeepSeek-V4.1-Flash in its formats; simple English on any CPU",
        license="Apache-2.0",
    ),
)


def find_shipped(name: str) -> ShippedModel | None:
    """By its name or another that it goes by."""
    return next((shipped for shipped in SHIPPED if name in (shipped.name, *shipped.aliases)), None)


def shipped_folder(shipped: ShippedModel) -> Path | None:
    """Where it lies; `None` where the workers are not installed, or without it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(place).absolute() / _FOLDER / shipped.name
        if (folder / "config.json").is_file():
            return folder
    return None
