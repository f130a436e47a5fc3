"""Reads a folder of safetensors files with its config.json. Knows the layout, and nothing of architectures.

Only safetensors files are opened: pickled weights (.bin, .pt) are not read, code in the folder is not run. All headers
are checked before a tensor is given, and index and headers must say the same; a file is mapped when a tensor of it is
asked for, and its numbers are read when they are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer_workers.checkpoint import MAX_TENSORS, TensorInfo, bad_file, unsupported
from deepinfer_workers.config_file import config_architecture, read_config, read_json
from deepinfer_workers.safetensors_file import SafetensorsFile

MAX_INDEX_BYTES: Final = 64 << 20
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})


def has_weights(path: Path) -> bool:
    """Whether there is more in the folder than its config.json."""
    return (path / INDEX).is_file() or any(path.glob("*.safetensors"))


class SafetensorsFolder:
    """An open folder: a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.folder = path
        self.metadata: Mapping[str, Any] = MappingProxyType(read_config(path))
        self.announced_bytes: int | None = None
        """Of all tensors, by the index; `None` where it does not say."""
        shards = self._read_index(path)
        holds = _first_of_each(shards)
        self._files = {shard: SafetensorsFile(path / shard, holds.get(shard, "")) for shard in holds or [SINGLE]}
        self._shard_of: dict[str, str] = {}
        for shard, file in self._files.items():
            for name in file.tensors:
                self._place(name, shard, shards)
        for name, shard in shards.items():
            if self._shard_of.get(name) != shard:
                raise bad_file(INDEX, f"tensor {name} was expected in {shard} and is not there")
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: entry.info for file in self._files.values() for name, entry in file.tensors.items()}
        )
        sizes = {shard: file.size_bytes for shard, file in self._files.items()}
        table = json.dumps([self.name, dict(self.metadata), sizes, dict(self.tensors)], sort_keys=True)
        self.version = hashlib.sha256(table.encode()).hexdigest()[:16]

    @property
    def architecture(self) -> str:
        return config_architecture(self.metadata)

    def read(self, name: str) -> Tensor:
        if self.tensors[name].dtype not in _FLOATS:
            text = f"tensor {name} has dtype {self.tensors[name].dtype}; F32, F16, BF16 can be widened"
            raise unsupported(self.name, text)
        return self.stored(name).to(torch.float32)

    def stored(self, name: str) -> Tensor:
        """The tensor in its own dtype, on the pages of the file. Not to be written to."""
        return self._files[self._shard_of[name]].view(name)

    def release(self, name: str) -> None:
        """Its pages count as this process's no longer. Tensors stay good: what is read again is mapped again."""
        self._files[self._shard_of[name]].release(name)

    def _place(self, name: str, shard: str, shards: Mapping[str, str]) -> None:
        if name in self._shard_of:
            raise bad_file(shard, f"tensor {name} was expected once, and is in {self._shard_of[name]} too")
        if shards and name not in shards:
            raise bad_file(shard, f"tensor {name}: an entry in {INDEX} was expected, none came")
        self._shard_of[name] = shard

    def _read_index(self, path: Path) -> dict[str, str]:
        """Tensor -> file; empty without an index."""
        if not (path / INDEX).is_file():
            if not (path / SINGLE).is_file():
                num_files = len(list(path.glob("*.safetensors")))
                raise bad_file(
                    self.name, f"{SINGLE} or {INDEX} was expected, {num_files} other .safetensors files came"
                )
            return {}
        index = read_json(path / INDEX, MAX_INDEX_BYTES)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise bad_file(INDEX, f"a weight_map from tensors to files was expected, {weight_map!r:.80} came")
        if len(weight_map) > MAX_TENSORS:
            raise bad_file(INDEX, f"at most {MAX_TENSORS} tensors were expected, {len(weight_map)} came")
        for name, shard in weight_map.items():
            is_plain = shard.isprintable() and "/" not in shard and Path(shard).name == shard
            if not is_plain or not shard.endswith(".safetensors"):
                text = f"tensor {name}: a safetensors file in its folder was expected, {shard!r:.200} came"
                raise bad_file(INDEX, text)
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        self.announced_bytes = total if type(total) is int else None
        return weight_map


def _first_of_each(shards: Mapping[str, str]) -> dict[str, str]:
    """Shard -> one of its tensors by the index, in the order of the shards' names."""
    first: dict[str, str] = {}
    for name, shard in shards.items():
        first.setdefault(shard, f"tensor {name}")
    return dict(sorted(first.items()))
