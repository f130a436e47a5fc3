"""A loop without waiting: callbacks in the order of their virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class VirtualTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Implements the core's `Clock`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, VirtualTimer]] = []
        self._serial = count()

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Callable[[], object]) -> VirtualTimer:
        return self.call_at(self._now_s, callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> VirtualTimer:
        timer = VirtualTimer(callback)
        heappush(self._events, (max(when, self._now_s), next(self._serial), timer))
        return timer

    def run_one(self) -> bool:
        """Run the next callback. False when none is left."""
        while self._events:
            self._now_s, _, timer = heappop(self._events)
            if timer.callback is not None:
                timer.callback()
                return True
        return False
