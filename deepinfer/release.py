"""Deferred release: the one place where slots and blocks go back to their pools.

A step that was sent names slots and blocks, and the device may still touch them until that step's result has been
applied. Whatever is given up meanwhile waits here behind the last step that names it, and counts as capacity on its
way. Pure; knows nothing of why something was given up.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple


class Held(NamedTuple):
    """Given up, but named by a step in flight."""

    fence: int
    """Last step sent that names it."""
    order: int
    slot: int
    block_ids: list[int]
    then: Callable[[], None] | None
    """Called once everything is back in the pools."""


class DeferredRelease:
    """What one rank has given up and may not use yet."""

    def __init__(self, give_back: Callable[[int, list[int]], None]) -> None:
        """`give_back(slot, block_ids)` puts them into the pools."""
        self._give_back = give_back
        self._held: list[Held] = []
        self._order = 0
        self._applied = -1

    def release(self, fence: int, slot: int, block_ids: list[int], then: Callable[[], None] | None = None) -> None:
        """Give `slot` and `block_ids` back, now or when step `fence` has been applied."""
        if fence <= self._applied:
            self._finish(Held(fence, 0, slot, block_ids, then))
        else:
            self._order += 1
            heappush(self._held, Held(fence, self._order, slot, block_ids, then))

    def applied(self, step_id: int) -> None:
        """The result of `step_id`, and of every step before it, has been applied."""
        self._applied = step_id
        while self._held and self._held[0].fence <= step_id:
            self._finish(heappop(self._held))

    def is_in_flight(self, step_id: int) -> bool:
        return step_id > self._applied

    @property
    def num_slots(self) -> int:
        """Slots on their way back."""
        return len(self._held)

    def slots(self) -> list[int]:
        return [held.slot for held in self._held]

    def block_ids(self) -> list[int]:
        """Blocks on their way back, one entry an owner."""
        return [block for held in self._held for block in held.block_ids]

    def _finish(self, held: Held) -> None:
        self._give_back(held.slot, held.block_ids)
        if held.then is not None:
            held.then()
