"""Reads a GGUF file (versions 2 and 3, little endian). Knows the format, and nothing of architectures.

The header is parsed here and not by `gguf.GGUFReader`, which follows the counts and lengths of a file without bounds: a
crafted count keeps it looping while its lists grow. Here every count is bounded by the bytes that are left for it
before anything is allocated. Types and their sizes are the gguf package's.
"""

from __future__ import annotations

import hashlib
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from deepinfer_workers.checkpoint import TensorInfo, bad_file, unsupported
from deepinfer_workers.dequantize import Bytes, dequantize

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_FIELDS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 20
MAX_DIMS: Final = 4
MAX_HEADER_BYTES: Final = 512 << 20
DEFAULT_ALIGNMENT: Final = 32
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MIN_FIELD_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8


class _Entry(NamedTuple):
    info: TensorInfo
    type: Type
    offset: int
    """From the start of the file."""


class GGUFFile:
    """An open GGUF file: a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._data = _map(path)
        cursor = _Cursor(self._data, self.name)
        num_tensors, num_fields = cursor.preamble()
        fields = {cursor.string(): cursor.value(cursor.u32()) for _ in range(num_fields)}
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise bad_file(self.name, f"general.alignment: a small positive number was expected, {alignment!r} came")
        table = [cursor.tensor() for _ in range(num_tensors)]
        start = -(-cursor.offset // alignment) * alignment
        self._entries = {name: self._entry(name, shape, type_, start + at) for name, shape, type_, at in table}
        if len(self._entries) != num_tensors:
            raise bad_file(self.name, "a tensor name occurs twice")
        self.metadata = MappingProxyType(fields)
        self.tensors = MappingProxyType({name: entry.info for name, entry in self._entries.items()})
        header = self._data[: cursor.offset].tobytes()
        self.version = hashlib.sha256(f"{self.name}:{len(self._data)}:".encode() + header).hexdigest()[:16]

    @property
    def architecture(self) -> str:
        return f"gguf:{self.metadata.get('general.architecture')}"

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        span = self._data[entry.offset : entry.offset + entry.info.num_bytes]
        try:
            values = dequantize(span, entry.type)
        except NotImplementedError:
            raise unsupported(self.name, f"tensor {name} has type {entry.type.name}, which cannot be read") from None
        return torch.from_numpy(values).view(entry.info.shape)

    def _entry(self, name: str, shape: tuple[int, ...], type_: int, offset: int) -> _Entry:
        try:
            known = Type(type_)
        except ValueError:
            raise unsupported(self.name, f"tensor {name} has the unknown type {type_}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[known]
        if not shape or shape[-1] % block_size:
            raise bad_file(
                self.name, f"tensor {name}: rows of {known.name} blocks of {block_size} expected, {shape} came"
            )
        num_bytes = prod(shape) // block_size * block_bytes
        if offset + num_bytes > len(self._data):
            text = f"tensor {name} ends at byte {offset + num_bytes}, the file has {len(self._data)}"
            raise bad_file(self.name, f"{text}: it is truncated or damaged")
        return _Entry(TensorInfo(shape, num_bytes, known.name), known, offset)


class _Cursor:
    """Reads the header front to back; every step is inside the file or a `WorkerFault`."""

    def __init__(self, data: Bytes, name: str) -> None:
        self._data = data
        self._name = name
        self.offset = 0

    def preamble(self) -> tuple[int, int]:
        """Number of tensors, number of fields."""
        magic = self.take(4, "magic").tobytes()
        if magic != MAGIC:
            raise bad_file(self._name, f"a GGUF file starts with {MAGIC!r}, {magic!r} came")
        version = self.u32()
        if version not in VERSIONS:
            raise bad_file(self._name, f"GGUF version 2 or 3, little endian, was expected, {version} came")
        num_tensors, num_fields = self.u64(), self.u64()
        self._bound("tensors", num_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES)
        self._bound("fields", num_fields, MAX_FIELDS, _MIN_FIELD_BYTES)
        return num_tensors, num_fields

    def take(self, num_bytes: int, what: str) -> Bytes:
        end = self.offset + num_bytes
        if end > min(len(self._data), MAX_HEADER_BYTES):
            raise bad_file(self._name, f"{what} at byte {self.offset} ends at {end}, beyond the header or the file")
        part = self._data[self.offset : end]
        self.offset = end
        return part

    def u32(self) -> int:
        return int(self.take(4, "a number").view("<u4")[0])

    def u64(self) -> int:
        return int(self.take(8, "a number").view("<u8")[0])

    def string(self) -> str:
        raw = self.take(self.u64(), "a string").tobytes()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise bad_file(self._name, f"a string before byte {self.offset} is not UTF-8") from None

    def value(self, type_: int) -> Any:
        """A scalar, a string, a list of strings, or an array of numbers."""
        if type_ == _STRING:
            return self.string()
        if type_ in _SCALARS:
            return self._numbers(type_, 1)[0].item()
        if type_ != _ARRAY:
            raise bad_file(self._name, f"a field before byte {self.offset} has the unknown type {type_}")
        item_type, count = self.u32(), self.u64()
        if item_type == _STRING:
            self._bound("strings", count, MAX_HEADER_BYTES, 8)
            return [self.string() for _ in range(count)]
        if item_type not in _SCALARS:
            raise bad_file(self._name, f"an array before byte {self.offset} has items of type {item_type}")
        return self._numbers(item_type, count)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type, offset in the data."""
        name = self.string()
        num_dims = self.u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise bad_file(self._name, f"tensor {name}: 1 to {MAX_DIMS} dimensions were expected, {num_dims} came")
        dims = [self.u64() for _ in range(num_dims)]
        if not all(dims):
            raise bad_file(self._name, f"tensor {name} has the empty shape {dims}")
        return name, tuple(reversed(dims)), self.u32(), self.u64()

    def _numbers(self, type_: int, count: int) -> Any:
        dtype = np.dtype(_SCALARS[type_])
        return self.take(count * dtype.itemsize, "an array").view(dtype)

    def _bound(self, what: str, count: int, limit: int, min_bytes: int) -> None:
        if count > limit or count * min_bytes > len(self._data) - self.offset:
            raise bad_file(self._name, f"{count} {what} announced, more than the file of {len(self._data)} bytes holds")


def _map(path: Path) -> Bytes:
    try:
        # Copy on write: torch warns about read-only arrays. Nothing writes.
        return np.memmap(path, np.uint8, "c").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise bad_file(path.name, f"cannot be read: {error}") from None
