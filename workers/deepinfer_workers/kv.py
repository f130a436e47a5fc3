"""Paged storage of keys and values: one pool of blocks for all sequences. Knows nothing of who owns a block.

Legend: `N` layers, `K` kv heads, `D` head dim, `P` positions a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_kernels import KEY_LANES


class CacheShape(NamedTuple):
    """What a model keeps for every position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def position_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedKVCache:
    """`num_blocks` blocks and a null block behind them, where padding writes."""

    def __init__(self, shape: CacheShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        # Rounded up: the compiled operations keep keys in tiles of so many positions.
        num_positions = -(-(num_blocks + 1) * block_size // KEY_LANES) * KEY_LANES
        # Heads outermost, so that a gather of keys comes out as the batch of matrices that attention multiplies.
        self._store = torch.zeros(
            shape.num_layers, 2, shape.num_kv_heads, num_positions, shape.head_dim, dtype=shape.dtype, device=device
        )  # [N, 2, K, (blocks + 1) * P, D]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [K, positions, D] each: views to read and to write."""
        return self._store[index, 0], self._store[index, 1]
