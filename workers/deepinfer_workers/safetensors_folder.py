"""Reads a folder of safetensors files with its config.json. Knows the layout, and nothing of architectures.

Only safetensors files are opened: pickled weights (.bin, .pt) are not read, code in the folder is not run. The
safetensors library checks headers (their length, that the offsets lie in the file and fit dtypes and shapes) before
it allocates anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer_workers.checkpoint import TensorInfo, bad_file, unsupported
from deepinfer_workers.config_file import config_architecture, read_config, read_json

MAX_INDEX_BYTES: Final = 64 << 20
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsFolder:
    """An open folder: a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.metadata: Mapping[str, Any] = MappingProxyType(read_config(path))
        shards = _shards(path)
        self._files = {shard: _open(path / shard) for shard in sorted(set(shards.values()))} if shards else {}
        if not self._files:
            self._files = {SINGLE: _open(path / SINGLE)}
        self._shard_of = {
            name: shard
            for shard, file in self._files.items()
            for name in file.keys()  # noqa: SIM118 (it is no mapping)
        }
        for name, shard in shards.items():
            if self._shard_of.get(name) != shard:
                raise bad_file(INDEX, f"tensor {name} was expected in {shard} and is not there")
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({name: self._info(name) for name in self._shard_of})
        sizes = {shard: (path / shard).stat().st_size for shard in self._files}
        table = json.dumps([self.name, dict(self.metadata), sizes, dict(self.tensors)], sort_keys=True)
        self.version = hashlib.sha256(table.encode()).hexdigest()[:16]

    @property
    def architecture(self) -> str:
        return config_architecture(self.metadata)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._shard_of[name]].get_tensor(name)
        return tensor.to(torch.float32)

    def _info(self, name: str) -> TensorInfo:
        entry = self._files[self._shard_of[name]].get_slice(name)
        shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
        if dtype not in _ITEM_BYTES:
            raise unsupported(self.name, f"tensor {name} has dtype {dtype}; {', '.join(_ITEM_BYTES)} can be read")
        return TensorInfo(shape, prod(shape) * _ITEM_BYTES[dtype])


def _shards(path: Path) -> dict[str, str]:
    """Tensor -> file, from the index; empty without one."""
    if not (path / INDEX).is_file():
        return {}
    weight_map = read_json(path / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise bad_file(INDEX, "a weight_map from tensors to files was expected")
    for shard in set(weight_map.values()):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise bad_file(INDEX, f"the name of a safetensors file in its folder was expected, {shard!r} came")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError, ValueError) as error:
        raise bad_file(path.name, f"no readable safetensors file: {error}") from None
