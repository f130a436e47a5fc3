"""The state of every slot on the device: its tokens, its length, its blocks. Belongs to the device thread.

Nothing here waits for the device, and nothing asks it: what may be written is checked by the `ledger`. Knows nothing of
models and of how sampling is done.

Legend: `N` slots, and one null slot behind them for padding; `T` packed positions, `R` sampled rows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer_workers.batch import Limits

MIN_POSITIONS: Final = 64
"""That a block table covers, however short sequences are: a GPU's warm-up runs a tile of as many on the null slot."""


def slot_bytes(max_len: int, block_size: int) -> int:
    """On the device, for one slot."""
    return 4 * (max_len + 1 + _num_columns(max_len, block_size)) + 8


class SlotState:
    """Tokens, lengths and block tables by slot."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        num_slots = limits.num_slots + 1
        self._block_size = limits.block_size
        # One column more than positions: the token after the last position has a place.
        self.tokens = torch.zeros(num_slots, limits.max_len + 1, dtype=torch.int32, device=device)
        """[N + 1, positions]: every token known."""
        num_columns = _num_columns(limits.max_len, limits.block_size)
        self.tables = torch.zeros(num_slots, num_columns, dtype=torch.int32, device=device)
        """[N + 1, blocks]: block ids; those of the null slot are the null block."""
        self.tables[-1] = limits.num_blocks
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """[N + 1]: positions whose keys and values are written."""

    def write_tokens(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """`tokens` become known."""
        self.tokens[slots, positions] = tokens.to(torch.int32)

    def write_blocks(self, slots: Tensor, columns: Tensor, blocks: Tensor) -> None:
        self.tables[slots, columns] = blocks.to(torch.int32)

    def write_lengths(self, slots: Tensor, lengths: Tensor) -> None:
        self.lengths[slots] = lengths

    def write_drafts(self, slots: Tensor, offsets: Tensor, tokens: Tensor) -> None:
        """`tokens` [D] are guessed for the positions `offsets` [D] past the lengths of `slots` [D]."""
        self.write_tokens(slots, self.lengths[slots] + offsets, tokens)

    def gather(self, slots: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and cache indices, [T] each, of the positions `offsets` [T] past their slot's length."""
        positions = self.lengths[slots] + offsets
        tokens = self.tokens[slots, positions].long()
        blocks = self.tables[slots, positions // self._block_size].long()
        return tokens, positions, blocks * self._block_size + positions % self._block_size

    def advance(self, slots: Tensor) -> None:
        """The keys and values of these positions' `slots` [T] are written."""
        self.lengths.index_add_(0, slots, torch.ones_like(slots))
        self.lengths[-1:].zero_()

    def take_back(self, slots: Tensor, counts: Tensor) -> None:
        """The last `counts` [R] positions of `slots` [R] held other tokens than those that were taken."""
        self.lengths.index_add_(0, slots, -counts)


def _num_columns(max_len: int, block_size: int) -> int:
    return -(-max(max_len, MIN_POSITIONS) // block_size)
