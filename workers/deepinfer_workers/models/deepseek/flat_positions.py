"""The positions of a step whose shapes depend on their number alone, so that a CUDA graph can hold it.

Every position is treated by itself: it writes what caches keep, and then reads what it looks back on, whether that was
written by this step or by others before it. So rings have to have room for all positions of a row behind a whole
window. Everything is found on the device; that no position's decoder half is left out is the caller's word.

Legend: `T` positions, padding included, which is the null slot's; `W` window, `L` tokens that a row looks back on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from deepinfer_kernels import PackedRows
from deepinfer_workers.batch import Ints
from deepinfer_workers.models.deepseek.caches import Rings
from deepinfer_workers.models.deepseek.compressor import GroupShape
from deepinfer_workers.models.deepseek.positions import Groups, RingWrite, StepPositions, WindowKeys, paged_indices
from deepinfer_workers.models.deepseek.sparse_attention import pad_keys

NOWHERE: Final = 1 << 62
"""A floor above all positions."""


@dataclass(frozen=True)
class ThroughRing:
    """An `Exchange`: all of the step's values go into the ring, and what is looked back on comes out of it."""

    write: RingWrite
    slots: Tensor
    """[n]: what to read."""
    places: Tensor

    def exchange(self, ring: Rings, own: Tensor, rounded: Tensor) -> Tensor:
        ring.write(self.write.slots, self.write.places, own)
        return ring.read(self.slots, self.places)


@dataclass(frozen=True)
class DeviceFloors:
    """`SlotFloors` on the device, those of the null slot behind them, [slots + 1] each."""

    window: Tensor
    rows: Tensor
    decoder: Tensor

    @classmethod
    def of_nobody(cls, num_slots: int, device: torch.device) -> Self:
        """What the null slot makes goes nowhere."""
        window = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        return cls(window, torch.full_like(window, NOWHERE), torch.zeros_like(window))

    def take(self, window: Ints, rows: Ints, decoder: Ints) -> None:
        """Of the slots, [slots] each."""
        for target, values in ((self.window, window), (self.rows, rows), (self.decoder, decoder)):
            target[:-1].copy_(torch.from_numpy(values))


class FlatPositions:
    """The same questions as `StepPositions` answers."""

    def __init__(
        self, tokens: Tensor, rows: PackedRows, block_size: int, floors: DeviceFloors, most_positions: int
    ) -> None:
        """`tokens` [T]. No position is at or behind `most_positions`, on which shapes depend, too."""
        self.tokens = tokens
        self.positions = rows.positions
        self.most_positions = most_positions
        self._slots, self._tables, self._block_size = rows.slots, rows.tables, block_size
        self._floors = floors
        self._every = torch.arange(len(tokens), device=tokens.device)
        self._window: WindowKeys | None = None
        self._groups: dict[tuple[int, int, int], Groups] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, length: int, capacity: int) -> WindowKeys:
        """As `StepPositions`."""
        if self._window is None:
            places, is_missing = self._lookback(length)
            index = torch.arange(places.numel(), device=places.device).view_as(places)
            index, is_hidden = pad_keys(index, is_missing)
            self._window = WindowKeys(self._through(places, capacity), index, is_hidden)
        return self._window

    def groups(self, shape: GroupShape, pending: Rings | None) -> Groups:
        """One for every position; those of positions that complete none go where nobody reads."""
        capacity = 1 if pending is None else pending.capacity
        key = (shape.ratio, shape.lookback, capacity)
        if key not in self._groups:
            places, is_missing = self._lookback(shape.lookback)
            index = self._every[:, None]
            if pending is not None:
                index = torch.arange(places.numel(), device=places.device).view_as(places)
            numbers = torch.div(self.positions, shape.ratio, rounding_mode="floor")
            starts = numbers * shape.ratio
            is_new = ((self.positions + 1) % shape.ratio == 0) & (starts >= self._floors.rows[self._slots])
            indices = self.row_indices(slice(None), numbers[:, None], shape.ratio, null_row=0)[:, 0]
            indices = torch.where(is_new, indices, -1)
            self._groups[key] = Groups(self._through(places, capacity), index, is_missing, starts, indices)
        return self._groups[key]

    def most_visible(self, ratio: int) -> int:
        """No `num_visible` is above it."""
        return self.most_positions // ratio

    def num_visible(self, ratio: int) -> Tensor:
        """As `StepPositions`: [T]."""
        return torch.div(self.positions + 1, ratio, rounding_mode="floor")

    def row_indices(self, where: Tensor | slice, rows: Tensor, ratio: int, null_row: int) -> Tensor:
        """As `StepPositions`: [t, K]."""
        return paged_indices(self._tables, self._slots[where], rows, self._block_size // ratio, null_row)

    def _lookback(self, length: int) -> tuple[Tensor, Tensor]:
        """The `length` positions that end with each, oldest first, and which of them nothing is known of: [T, length].

        Where nothing is, the position itself stands.
        """
        offsets = torch.arange(1 - length, 1, device=self.positions.device)
        places = self.positions[:, None] + offsets
        is_missing = places < self._floors.window[self._slots].clamp(min=0)[:, None]
        return torch.where(is_missing, self.positions[:, None], places), is_missing

    def _through(self, places: Tensor, capacity: int) -> ThroughRing:
        """`places` [T, n] are positions in the sequences."""
        write = RingWrite(self._every, self._slots, self.positions % capacity)
        slots = self._slots[:, None].expand_as(places).flatten()
        return ThroughRing(write, slots, (places % capacity).flatten())


Positions = StepPositions | FlatPositions
