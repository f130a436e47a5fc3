"""Writes a folder of safetensors files, tensor by tensor, so that a model never has to be in memory whole.

A tensor that is never written is a hole in a sparse file: it reads as zeros and takes no room. Knows no architecture.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.safetensors_file import DTYPES
from deepinfer_workers.safetensors_folder import INDEX

ALIGNMENT: Final = 64
"""Of a file's first tensor, in bytes. The widest dtypes come first: every tensor lies on a multiple of its item."""
_LENGTH: Final = struct.Struct("<Q")


class Slot(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class SafetensorsWriter:
    """The files have their headers, their full size and their index, once constructed; `write` fills in."""

    def __init__(self, folder: Path, slots: Iterable[Slot], *, shard_bytes: int) -> None:
        """Tensors go into files of about `shard_bytes`, in the order of `slots`."""
        self._places: dict[str, tuple[Path, int]] = {}
        self._slots: dict[str, Slot] = {}
        shards = _split(slots, shard_bytes)
        for number, shard in enumerate(shards, start=1):
            self._lay_out(folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard)
        index = {
            "metadata": {"total_size": sum(slot.num_bytes for slot in self._slots.values())},
            "weight_map": {name: path.name for name, (path, _) in self._places.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def write(self, name: str, tensor: Tensor) -> None:
        """Its content, in the dtype and shape of its slot."""
        slot = self._slots[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[slot.dtype], slot.shape), (
            slot,
            tensor.dtype,
            tensor.shape,
        )
        path, start = self._places[name]
        with path.open("r+b") as file:
            file.seek(start)
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def _lay_out(self, path: Path, shard: list[Slot]) -> None:
        offset = 0
        fields: dict[str, dict[str, Any]] = {}
        for slot in sorted(shard, key=lambda slot: -DTYPES[slot.dtype].itemsize):
            end = offset + slot.num_bytes
            fields[slot.name] = {"dtype": slot.dtype, "shape": slot.shape, "data_offsets": [offset, end]}
            offset = end
        header = header_bytes(fields)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + offset)
        for slot in shard:
            self._slots[slot.name] = slot
            self._places[slot.name] = path, len(header) + fields[slot.name]["data_offsets"][0]


def header_bytes(fields: dict[str, dict[str, Any]]) -> bytes:
    """What a file begins with: the length of its table of tensors, and the table."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + _LENGTH.size) // ALIGNMENT) * ALIGNMENT - _LENGTH.size)
    return _LENGTH.pack(len(text)) + text


def _split(slots: Iterable[Slot], shard_bytes: int) -> list[list[Slot]]:
    shards: list[list[Slot]] = []
    room = 0
    for slot in slots:
        if not shards or slot.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(slot)
        room -= slot.num_bytes
    return shards
