"""When which request ends for want of time. Knows nothing of clocks, and of what an end means."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final

from deepinfer.request import FinishReason, Request

_SLACK: Final = 64
"""Entries that no longer count before a clean-up is worth it."""


class Deadlines:
    """A heap of (time, request, reason). What no longer applies is passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request, FinishReason]] = []
        self._serial = count()
        self._max_entries = _SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when_s: float, request: Request, reason: FinishReason) -> None:
        if when_s < inf:
            heappush(self._heap, (when_s, next(self._serial), request, reason))
            if len(self._heap) > self._max_entries:
                self._clean_up()

    def next(self) -> float:
        """When `expire` has something to say; `inf`: never."""
        while self._heap and not _applies(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def expire(self, now: float) -> list[tuple[Request, FinishReason]]:
        """The requests whose time is over."""
        over: list[tuple[Request, FinishReason]] = []
        while self.next() <= now:
            _, _, request, reason = heappop(self._heap)
            over.append((request, reason))
        return over

    def _clean_up(self) -> None:
        """Twice as many as apply may gather before the next one."""
        self._heap = [deadline for deadline in self._heap if _applies(deadline)]
        heapify(self._heap)
        self._max_entries = 2 * len(self._heap) + _SLACK


def _applies(deadline: tuple[float, int, Request, FinishReason]) -> bool:
    when_s, _, request, reason = deadline
    if request.num_unfinished == 0:
        return False
    if reason == "queue_timeout":
        return request.started_s is None
    return reason != "slow_consumer" or request.slow_since_s == when_s
