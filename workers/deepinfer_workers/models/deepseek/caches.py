"""What a DeepSeek model keeps between steps: paged rows that prefixes share, and rings that belong to slots.

Rows are stored as codes in the released packing, or as floats for reference. Knows nothing of who owns a block or of
what the values mean.

Legend: `D` dims of a row, `B` its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class RowFormat(NamedTuple):
    """How rows of `D` numbers lie in memory."""

    width: int
    """Elements stored of a row."""
    dtype: torch.dtype
    pack: Callable[[Tensor], Tensor]
    """Numbers [..., D] float32 to what is stored, [..., width]."""
    unpack: Callable[[Tensor], Tensor]
    """Back, to the numbers that `round` gives."""
    round: Callable[[Tensor], Tensor]
    """Numbers as they come back from the store."""

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


def float_format(dim: int, dtype: torch.dtype, round: Callable[[Tensor], Tensor]) -> RowFormat:
    """Rows of floats, rounded by `round` before they are stored."""
    return RowFormat(dim, dtype, lambda x: round(x).to(dtype), lambda x: x.to(torch.float32), round)


class PagedRows:
    """Rows of compressed keys: those of all blocks, and behind them those of the null block, which stay zero.

    The very last row is nobody's: what is written to row -1 goes there.
    """

    def __init__(self, row_format: RowFormat, num_blocks: int, rows_per_block: int, device: torch.device) -> None:
        self.rows_per_block = rows_per_block
        self._format = row_format
        self.null_row = num_blocks * rows_per_block
        num_rows = self.null_row + rows_per_block + 1
        self._store = torch.zeros(num_rows, row_format.width, dtype=row_format.dtype, device=device)

    def write(self, indices: Tensor, rows: Tensor) -> None:
        """`rows` [G, D] float32 at `indices` [G], -1 for what nobody reads."""
        self._store.index_copy_(0, indices % len(self._store), self._format.pack(rows))

    def read(self, indices: Tensor) -> Tensor:
        """[..., D] float32 of `indices` [...]."""
        rows = self._format.unpack(self._store.index_select(0, indices.flatten()))
        return rows.view(*indices.shape, rows.shape[-1])


class Rings:
    """The last `capacity` rows of every slot, each at its position modulo `capacity`."""

    def __init__(self, row_format: RowFormat, num_slots: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self._format = row_format
        self._store = torch.zeros(num_slots, capacity, row_format.width, dtype=row_format.dtype, device=device)

    def write(self, slots: Tensor, places: Tensor, rows: Tensor) -> None:
        """`rows` [G, D] float32."""
        self._store[slots, places] = self._format.pack(rows)

    def read(self, slots: Tensor, places: Tensor) -> Tensor:
        """[G, D] float32"""
        return self._format.unpack(self._store[slots, places])
