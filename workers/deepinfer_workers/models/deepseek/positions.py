"""Indices of a step's positions into caches: made when a layer first asks, and shared by all that ask again.

Knows nothing of what the caches hold.

Legend: `S` pieces, `T` positions, `W` window, `G` groups that are complete, `K` rows chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer_workers.batch import Ints
from deepinfer_workers.models.deepseek.caches import Rings
from deepinfer_workers.models.deepseek.compressor import GroupShape
from deepinfer_workers.models.deepseek.pieces import Lookback, Pieces
from deepinfer_workers.models.deepseek.sparse_attention import pad_keys


@dataclass(frozen=True)
class RingWrite:
    """What a ring keeps of a step."""

    kept: Tensor
    """Indices among the `T`."""
    slots: Tensor
    places: Tensor


class Exchange(Protocol):
    """How the values of a step meet those that a ring holds of earlier ones."""

    @property
    def write(self) -> RingWrite: ...

    def exchange(self, ring: Rings, own: Tensor, rounded: Tensor) -> Tensor:
        """What positions look back on, [n, D]; afterwards the ring holds the step's `own` [T, D].

        `rounded` are these as the ring gives them back.
        """


@dataclass(frozen=True)
class AroundStep:
    """An `Exchange`: what the ring holds of before, and behind it the step's own, which need not all fit."""

    ring_slots: Tensor
    ring_places: Tensor
    write: RingWrite

    def exchange(self, ring: Rings, own: Tensor, rounded: Tensor) -> Tensor:
        known = torch.cat((ring.read(self.ring_slots, self.ring_places), rounded))
        ring.write(self.write.slots, self.write.places, own.index_select(0, self.write.kept))
        return known


@dataclass(frozen=True)
class WindowKeys:
    """Where each position finds the keys of its window."""

    around: Exchange
    index: Tensor
    """[T, W in whole tiles] into what `around` gives."""
    is_hidden: Tensor
    """[T, W in whole tiles] bool"""


@dataclass(frozen=True)
class Groups:
    """Compressed rows that a step completes."""

    around: Exchange
    """Of the states of tokens."""
    index: Tensor
    """[G, L] into what `around` gives; where groups need no ring, into the step's own states."""
    is_missing: Tensor
    """[G, L] bool"""
    token_positions: Tensor
    """[G]: the first token of each."""
    indices: Tensor
    """[G]: where the row goes in the paged cache."""


class StepPositions:
    """The positions that a layer computes in a step."""

    def __init__(
        self, pieces: Pieces, tokens: Tensor, tables: Tensor, block_size: int, window_floors: Ints, row_floors: Ints
    ) -> None:
        """`tokens` [T], `tables` [slots, blocks].

        Below `window_floors` [S] the slot's state knows nothing; rows that begin below `row_floors` [S] are there
        already and stay as they are.
        """
        self.pieces = pieces
        self.tokens = tokens
        self.positions = torch.from_numpy(pieces.positions).to(tokens.device)  # [T]
        self._slots = torch.from_numpy(pieces.slots[pieces.piece_of]).to(tokens.device)  # [T]
        self._tables = tables
        self._block_size = block_size
        self._window_floors, self._row_floors = window_floors, row_floors
        self._window: WindowKeys | None = None
        self._groups: dict[tuple[int, int, int], Groups] = {}

    def __len__(self) -> int:
        return len(self.positions)

    def tail(self, starts: Ints) -> tuple[StepPositions, Tensor]:
        """Those at or behind `starts` [S], whose windows begin there, and which of the `T` they are."""
        pieces, kept = self.pieces.tail(starts)
        of_piece = np.unique(self.pieces.piece_of[kept])
        index = torch.from_numpy(kept).to(self.positions.device)
        floors = np.maximum(self._window_floors, starts)[of_piece]
        tokens = self.tokens.index_select(0, index)
        tail = StepPositions(pieces, tokens, self._tables, self._block_size, floors, self._row_floors[of_piece])
        return tail, index

    def window(self, length: int, capacity: int) -> WindowKeys:
        """The `length` keys that end with each position, from rings of `capacity`; the same at every call."""
        if self._window is None:
            found = self.pieces.lookback(length, capacity, self._window_floors)
            index, is_hidden = pad_keys(found.index, found.is_missing)
            self._window = WindowKeys(self._around(found, capacity), index, is_hidden)
        return self._window

    def groups(self, shape: GroupShape, pending: Rings | None) -> Groups:
        """Groups that end among the positions, and where their tokens' states are: `pending` or the step's own."""
        capacity = 1 if pending is None else pending.capacity
        key = (shape.ratio, shape.lookback, capacity)
        if key not in self._groups:
            ends, rows = self.pieces.complete_groups(shape.ratio, self._row_floors)
            lookback = self.pieces.lookback(shape.lookback, capacity, self._window_floors, ends)
            where, numbers = (torch.from_numpy(array).to(self.positions.device) for array in (ends, rows))
            indices = self.row_indices(where, numbers[:, None], shape.ratio, null_row=0)[:, 0]
            around = self._around(lookback, capacity)
            self._groups[key] = Groups(around, lookback.index, lookback.is_missing, numbers * shape.ratio, indices)
        return self._groups[key]

    def _around(self, lookback: Lookback, capacity: int) -> AroundStep:
        return AroundStep(lookback.ring_slots, lookback.ring_places, RingWrite(*self.pieces.last(capacity)))

    def most_visible(self, ratio: int) -> int:
        """Of `num_visible`."""
        return (int(self.pieces.positions.max()) + 1) // ratio

    def num_visible(self, ratio: int) -> Tensor:
        """[T]: rows of `ratio` tokens that each position sees, those that it completes itself among them."""
        return torch.div(self.positions + 1, ratio, rounding_mode="floor")

    def row_indices(self, where: Tensor | slice, rows: Tensor, ratio: int, null_row: int) -> Tensor:
        """Where the paged cache has `rows` [t, K] of the positions `where` [t]; `null_row` for row -1: [t, K]."""
        return paged_indices(self._tables, self._slots[where], rows, self._block_size // ratio, null_row)


def paged_indices(tables: Tensor, slots: Tensor, rows: Tensor, rows_per_block: int, null_row: int) -> Tensor:
    """Where the paged cache has `rows` [t, K] of `slots` [t]; `null_row` for row -1: [t, K]."""
    blocks = torch.div(rows.clamp(min=0), rows_per_block, rounding_mode="floor")
    found = tables[slots[:, None], blocks].long()
    return torch.where(rows < 0, null_row, found * rows_per_block + rows % rows_per_block)
