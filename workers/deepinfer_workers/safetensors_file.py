"""One safetensors file: a checked header, and tensors as views of the mapped file. Knows nothing of folders or models.

The header is parsed here: every length and offset in it is compared with dtype, shape and the file before anything is
mapped, and the tensors must fill the file without a gap or an overlap. The file is mapped private and without a
reservation of memory: the safetensors library maps it writable with one, which a machine with less memory than an
n-gram table of 100 GB refuses. Nothing is read until a tensor's numbers are.
"""

from __future__ import annotations

import json
import mmap
import platform
import struct
import sys
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.checkpoint import MAX_TENSORS, TensorInfo, bad_file, check_regular, unsupported
from deepinfer_workers.runner import WorkerFault

MAX_HEADER_BYTES: Final = 100_000_000
"""As the safetensors library has it."""
MAX_DIMS: Final = 8
DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I64": torch.int64,
}
_LENGTH: Final = struct.Struct("<Q")
_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})


class Entry(NamedTuple):
    """Where a tensor is."""

    info: TensorInfo
    start: int
    """From the start of the file, in bytes."""


class SafetensorsFile:
    """An open file; its header is whole and true, once constructed."""

    def __init__(self, path: Path, holds: str = "") -> None:
        """`holds`: what an index expects in it, for messages. Raises `WorkerFault`."""
        self.name = path.name
        self._path = path
        self._holds = f" ({holds} was expected in it)" if holds else ""
        self._map: mmap.mmap | None = None
        self.size_bytes, self._entries = self._read_header()

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """In the order of the file."""
        return self._entries

    def view(self, name: str) -> Tensor:
        """The tensor as stored, on the pages of the file. Not to be written to."""
        info, start = self._entries[name]
        dtype = DTYPES[info.dtype]
        if not info.num_bytes:
            return torch.empty(info.shape, dtype=dtype)
        if self._map is None:
            self._map = _map(self._path)
        source: Any = self._map
        if start % dtype.itemsize:  # such a file is legal
            source, start = bytearray(source[start : start + info.num_bytes]), 0
        count = info.num_bytes // dtype.itemsize
        return torch.frombuffer(source, dtype=dtype, count=count, offset=start).view(info.shape)

    def release(self, name: str) -> None:
        """Give the pages of the tensor back: the system reads them again when they are used again. Only a hint."""
        info, start = self._entries[name]
        if self._map is None or not info.num_bytes or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, start + info.num_bytes - first)

    def _read_header(self) -> tuple[int, dict[str, Entry]]:
        try:
            check_regular(self._path)
            with self._path.open("rb") as file:
                size_bytes = self._path.stat().st_size
                length_bytes = file.read(_LENGTH.size)
                if len(length_bytes) < _LENGTH.size:
                    raise self._bad(f"a header of at least {_LENGTH.size} bytes was expected, {size_bytes} came")
                (length,) = _LENGTH.unpack(length_bytes)
                limit = min(size_bytes - _LENGTH.size, MAX_HEADER_BYTES)
                if length > limit:
                    raise self._bad(f"a header of at most {limit} bytes was expected, {length} were announced")
                header = self._parse(file.read(length))
        except OSError as error:
            raise self._bad(f"no readable safetensors file: {error.strerror}") from None
        return size_bytes, self._place(header, _LENGTH.size + length, size_bytes)

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text, object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"a header in JSON was expected: {error}") from None
        if not isinstance(header, dict):
            raise self._bad(f"a header of tensors was expected, {type(header).__name__} came")
        header.pop("__metadata__", None)  # text for people
        if len(header) > MAX_TENSORS:
            raise self._bad(f"at most {MAX_TENSORS} tensors were expected in its header, {len(header)} came")
        return header

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise bad_file(self.name, f"tensor {key}: one entry in the header was expected, two came")
        return found

    def _place(self, header: dict[str, Any], data_start: int, size_bytes: int) -> dict[str, Entry]:
        """Tensors by their place. They fill what is behind the header."""
        spans = {name: self._span(name, fields) for name, fields in header.items()}
        entries: dict[str, Entry] = {}
        end = data_start
        for name, (info, offset) in sorted(spans.items(), key=lambda item: (item[1][1], item[1][0].num_bytes)):
            start = data_start + offset
            if start != end:
                raise self._bad_tensor(name, f"its data was expected at byte {end} of the file, {start} came")
            end = start + info.num_bytes
            if end > size_bytes:
                text = f"data up to byte {end} was expected, the file ends at {size_bytes}: it is truncated"
                raise self._bad_tensor(name, text)
            entries[name] = Entry(info, start)
        if end != size_bytes:
            raise self._bad(f"{end} bytes were expected by its header, {size_bytes} came")
        return entries

    def _span(self, name: str, fields: Any) -> tuple[TensorInfo, int]:
        """What the header says of a tensor: the offset is from the header's end."""
        if not isinstance(fields, dict) or fields.keys() != _KEYS:
            raise self._bad_tensor(name, f"{', '.join(sorted(_KEYS))} were expected, {fields!r:.200} came")
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise unsupported(self.name, f"tensor {name} has dtype {dtype!r:.80}; {', '.join(DTYPES)} can be read")
        if not _are_sizes(shape, MAX_DIMS) or not _are_sizes(offsets, 2) or len(offsets) != 2:
            expected = f"a shape of at most {MAX_DIMS} sizes and two offsets were expected"
            raise self._bad_tensor(name, f"{expected}, {shape!r:.200} and {offsets!r:.200} came")
        num_bytes = prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != num_bytes:
            text = f"{dtype} of shape {tuple(shape)} takes {num_bytes} bytes, offsets {offsets} came"
            raise self._bad_tensor(name, text)
        return TensorInfo(tuple(shape), num_bytes, dtype), offsets[0]

    def _bad(self, text: str) -> WorkerFault:
        return bad_file(self.name, text + self._holds)

    def _bad_tensor(self, name: str, text: str) -> WorkerFault:
        return bad_file(self.name, f"tensor {name}: {text}")


def _are_sizes(values: Any, most: int) -> bool:
    """A list of at most so many."""
    if not isinstance(values, list) or len(values) > most:
        return False
    for value in values:  # noqa: SIM110 (a generator for each of a hundred thousand tensors takes as long as the rest)
        if type(value) is not int or not 0 <= value < 1 << 62:
            return False
    return True


def _map(path: Path) -> mmap.mmap:
    """All of it, copy on write: torch warns about read-only memory. Nothing writes."""
    with path.open("rb") as file:
        try:
            if not hasattr(mmap, "MAP_PRIVATE"):
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            flags = mmap.MAP_PRIVATE | _no_reserve()
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise bad_file(path.name, f"cannot be mapped: {error}") from None


def _no_reserve() -> int:
    """The flag that asks for no memory behind private pages; Python 3.11 does not name it."""
    is_known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return int(getattr(mmap, "MAP_NORESERVE", 0x4000 if is_known else 0))
