"""Named tensors in safetensors files of a bounded size, so that each can travel. Knows nothing of models.

Reading and writing need only torch. A set of parts is replaced as a whole: the last file written names the others.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PART_BYTES = 16 << 20
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_ROOM = 1 << 18
_LENGTH = struct.Struct("<Q")


def write_parts(folder: Path, stem: str, tensors: Mapping[str, Tensor], part_bytes: int = PART_BYTES) -> list[Path]:
    """Files `stem`.NN.safetensors of at most `part_bytes` each; older ones of this stem are gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(tensors, part_bytes))
    paths = [folder / f"{stem}.{index:02}.safetensors" for index in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        draft = path.with_suffix(".draft")
        _write(draft, part)
        draft.replace(path)
    for path in set(folder.glob(f"{stem}.*.safetensors")) - set(paths):
        path.unlink()
    return paths


def read_parts(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of the files `stem`.NN.safetensors. Raises `FileNotFoundError` where there are none."""
    paths = sorted(folder.glob(f"{stem}.*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no {stem}.*.safetensors")
    return {name: tensor for path in paths for name, tensor in _read(path)}


def _parts(tensors: Mapping[str, Tensor], part_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > part_bytes - _HEADER_ROOM:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    data = np.fromfile(path, np.uint8)
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    base = _LENGTH.size + length
    for name, entry in json.loads(data[_LENGTH.size : base].tobytes()).items():
        start, end = (base + offset for offset in entry["data_offsets"])
        content = torch.from_numpy(data[start:end].copy())
        yield name, content.view(_DTYPES[entry["dtype"]]).view(entry["shape"])
