"""The positions that a layer computes in a step: pieces of sequences, one after another. Knows indices, no values.

What a position needs of those before it lies in a ring of its slot (written by earlier steps) or among the step's own:
`Lookback` says where. Indices are made once a step and serve all layers.

Legend: `S` pieces, `T` positions of all pieces, `G` places that look back, `L` positions that each looks back on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_workers.batch import Ints


@dataclass(frozen=True)
class Lookback:
    """For each of `G` places: the `L` positions that end there, oldest first."""

    ring_slots: Tensor
    """[S * (L - 1)]: what to read of the ring, to stand before the step's own values."""
    ring_places: Tensor
    index: Tensor
    """[G, L] into ring values and own values one behind the other. Where nothing is, the place's own value."""
    is_missing: Tensor
    """[G, L] bool: before the sequence, or before what the slot's state knows."""


@dataclass(frozen=True)
class Pieces:
    """`S` pieces of sequences on the host, and their `T` positions on the device."""

    slots: Ints
    """[S]"""
    starts: Ints
    """[S]: the first position of each."""
    counts: Ints
    """[S]"""
    device: torch.device

    @property
    def num_positions(self) -> int:
        return int(self.counts.sum())

    @property
    def firsts(self) -> Ints:
        """[S]: where each begins among the `T`."""
        return np.cumsum(self.counts) - self.counts

    @property
    def piece_of(self) -> Ints:
        """[T]"""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def positions(self) -> Ints:
        """[T]: indices in their sequences."""
        piece_of = self.piece_of
        return self.starts[piece_of] + np.arange(len(piece_of)) - self.firsts[piece_of]

    def tail(self, starts: Ints) -> tuple[Pieces, Ints]:
        """What of each piece lies at or behind `starts` [S], and where that is among the `T`."""
        kept = np.flatnonzero(self.positions >= starts[self.piece_of])
        counts = np.bincount(self.piece_of[kept], minlength=len(self.counts))
        has_some = counts > 0
        starts = np.maximum(self.starts, starts)
        return Pieces(self.slots[has_some], starts[has_some], counts[has_some], self.device), kept

    def parts(self, some: slice) -> Iterator[slice]:
        """Of `some` of the `T`: neighbours in one sequence each."""
        for first, count in zip(self.firsts.tolist(), self.counts.tolist(), strict=True):
            part = slice(max(first, some.start), min(first + count, some.stop))
            if part.start < part.stop:
                yield part

    def lookback(self, length: int, capacity: int, floors: Ints, ends: Ints | None = None) -> Lookback:
        """The `length` positions that end with each place, from rings of `capacity`; below `floors` [S] nothing is.

        `ends` are the places, as indices among the `T`; by default all.
        """
        num_before = length - 1
        before = self.starts[:, None] - num_before + np.arange(num_before)  # [S, L - 1]
        ends = np.arange(self.num_positions) if ends is None else ends
        piece_of = self.piece_of[ends]  # [G]
        positions = self.positions[ends][:, None] - num_before + np.arange(length)  # [G, L]
        offsets = positions - self.starts[piece_of][:, None]
        num_ring = before.size
        own = num_ring + self.firsts[piece_of][:, None] + offsets
        index = np.where(offsets >= 0, own, (piece_of[:, None] + 1) * num_before + offsets)
        is_missing = positions < np.maximum(floors, 0)[piece_of][:, None]
        index = np.where(is_missing, (num_ring + ends)[:, None], index)
        return Lookback(
            self._tensor(np.repeat(self.slots, num_before)),
            self._tensor((before % capacity).ravel()),
            self._tensor(index),
            self._tensor(is_missing),
        )

    def last(self, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a ring of `capacity` keeps of the step: indices among the `T`, slots and places, [kept] each."""
        left = self.counts[self.piece_of] - (np.arange(self.num_positions) - self.firsts[self.piece_of])  # [T]
        kept = np.flatnonzero(left <= capacity)
        return (
            self._tensor(kept),
            self._tensor(self.slots[self.piece_of[kept]]),
            self._tensor(self.positions[kept] % capacity),
        )

    def complete_groups(self, ratio: int, floors: Ints) -> tuple[Ints, Ints]:
        """Groups of `ratio` tokens that end among the `T`: where, and their numbers, [G] each.

        Those that begin below `floors` [S] are left out.
        """
        positions = self.positions
        ends = np.flatnonzero((positions + 1) % ratio == 0)
        rows = positions[ends] // ratio
        is_new = rows * ratio >= floors[self.piece_of[ends]]
        return ends[is_new], rows[is_new]

    def _tensor(self, values: Ints | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
