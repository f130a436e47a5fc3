"""Random weights in the shapes that a config.json tells: a model's cost without its file. Its answers mean nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer_workers.checkpoint import Checkpoint, TensorInfo
from deepinfer_workers.config_file import config_architecture, read_config

POOL_SIZE: Final = (1 << 20) + 7
"""Numbers that are drawn. Tensors repeat them, each from a place of its own: drawing billions would take minutes."""
SCALE: Final = 0.02


class RandomWeights:
    """A `Checkpoint` that no file is behind, but for its config.json."""

    def __init__(self, folder: Path, shapes_of: Callable[[Checkpoint], Mapping[str, tuple[int, ...]]]) -> None:
        """`shapes_of` tells the tensors of the architecture. Raises `WorkerFault`."""
        self.name = folder.name
        self.metadata: Mapping[str, Any] = MappingProxyType(read_config(folder))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType({})
        self.tensors = MappingProxyType(
            {name: TensorInfo(shape, 4 * prod(shape), "F32") for name, shape in shapes_of(self).items()}
        )
        table = json.dumps(["random", dict(self.metadata)], sort_keys=True)
        self.version = hashlib.sha256(table.encode()).hexdigest()[:16]
        self._pool = torch.randn(POOL_SIZE, generator=torch.Generator().manual_seed(0)) * SCALE

    @property
    def architecture(self) -> str:
        return config_architecture(self.metadata)

    def read(self, name: str) -> Tensor:
        shape = self.tensors[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        size = prod(shape)
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % POOL_SIZE
        pool = self._pool.roll(-start)
        return pool.repeat(-(-size // POOL_SIZE))[:size].view(shape)
