"""Where the positions and logits of a step lie whose rows verify as many drafts as the device alone knows.

Each row has its newest position and, behind it, the drafts that it verifies; all positions have logits. How many there
are together is known on the host, so that nothing waits for the device.

Legend: `R` rows, `K` drafts, `P` positions, `T` positions with padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DeviceLayout(NamedTuple):
    """All int64, on the device."""

    slots: Tensor
    """[R]"""
    counts: Tensor
    """[R]: how many drafts each verifies."""
    firsts: Tensor
    """[R]: its first position."""
    owners: Tensor
    """[P]: the row of each."""
    offsets: Tensor
    """[P]: places in their rows."""

    @classmethod
    def of(cls, slots: Tensor, counts: Tensor, num_positions: int) -> DeviceLayout:
        """Of rows with `counts` [R] drafts, which have `num_positions` together."""
        sizes = counts + 1
        ends = sizes.cumsum(0)
        firsts = ends - sizes
        places = torch.arange(num_positions, device=slots.device)
        owners = torch.searchsorted(ends, places, right=True)
        return cls(slots, counts, firsts, owners, places - firsts[owners])

    def positions(self, num_padded: int, null_slot: int) -> Tensor:
        """[2, T]: slots, and offsets from their lengths before the step; padding is the null slot's."""
        found = self.owners.new_zeros(2, num_padded)
        found[0, len(self.owners) :] = null_slot
        found[0, : len(self.owners)] = self.slots[self.owners]
        found[1, : len(self.owners)] = self.offsets
        return found

    def padded(self, width: int) -> Tensor:
        """[R, width]: the first positions of every row; behind its last, the last again."""
        places = torch.arange(width, device=self.counts.device)
        return self.firsts[:, None] + torch.minimum(places, self.counts[:, None])


def best_lengths(survivals: Tensor, most: Tensor, budget: int) -> Tensor:
    """How many drafts each row verifies, at most `most` [R], and `budget` together: those of the best `survivals`.

    `survivals` [R, K] never rise within a row; among equals earlier places count first, then earlier rows. `budget` is
    at most the sum of `most`.
    """
    num_rows, num_places = survivals.shape
    is_there = torch.arange(num_places, device=survivals.device) < most[:, None]
    # What is no number is as good as never accepted: else it would be sorted behind what is not there.
    keys = torch.where(is_there, survivals.nan_to_num(nan=0.0), -1.0).T.flatten()
    best = keys.sort(stable=True, descending=True).indices[:budget]
    return torch.zeros_like(most).index_add_(0, best % num_rows, torch.ones_like(best))
