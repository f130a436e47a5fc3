"""The queue: sequences that wait for a slot, in order, and those whose reader is too slow set aside.

Knows nothing of slots, blocks or clocks.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from deepinfer.request import Request, Sequence, State

_SLACK: Final = 64
"""Ended entries that a heap may hold before it is worth a clean-up."""


class WaitingQueue:
    """Sequences in the state `WAITING`. The smallest `request.order` is its head."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._set_aside: dict[Sequence, None] = {}

    def push(self, seq: Sequence) -> None:
        """`seq` waits from now on."""
        self.num_waiting += 1
        if seq.request.is_paused:
            self._set_aside[seq] = None  # not ahead of the one that it has just made way for
            return
        self._push(seq)
        if len(self._heap) > 2 * self.num_waiting + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].state is State.WAITING]
            heapify(self._heap)

    def head(self) -> Sequence | None:
        """Who is next."""
        while self._heap:
            seq = self._heap[0][2]
            if seq.state is State.WAITING and not seq.request.is_paused:
                return seq
            heappop(self._heap)
            if seq.state is State.WAITING:
                self._set_aside[seq] = None
        return None

    def pop(self) -> None:
        """The head waits no more."""
        heappop(self._heap)
        self.num_waiting -= 1

    def discard(self, seq: Sequence) -> None:
        """`seq`, which is about to leave the state, waits no more."""
        self._set_aside.pop(seq, None)
        self.num_waiting -= 1

    def resume(self, request: Request) -> None:
        """The reader of `request` has caught up."""
        for seq in request.samples:
            if seq in self._set_aside:
                del self._set_aside[seq]
                self._push(seq)

    def _push(self, seq: Sequence) -> None:
        heappush(self._heap, (seq.request.order, seq.sample_index, seq))

    @property
    def num_entries(self) -> int:
        """Places taken, those of ended sequences included."""
        return len(self._heap) + len(self._set_aside)

    def check_integrity(self, waiting: list[Sequence]) -> None:
        """`waiting`: every sequence in the state. Raises `AssertionError`."""
        assert len(waiting) == self.num_waiting, f"{len(waiting)} wait, {self.num_waiting} are counted"
        held = {id(entry[2]) for entry in self._heap} | {id(seq) for seq in self._set_aside}
        assert all(id(seq) in held for seq in waiting), "a waiting sample is not in the queue"
