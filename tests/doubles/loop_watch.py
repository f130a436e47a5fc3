"""How long an event loop keeps its callbacks waiting, told apart from how long the machine keeps the loop waiting.

A beat is due every millisecond. One that comes late was kept by what the process does: by a callback, by a thread that
holds the interpreter's lock, by a call that blocks. Or it was kept by the system, which had the loop's thread wait for
a CPU: the kernel counts that time, and it is taken off. Knows nothing of what runs on the loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Final

BEAT_S: Final = 0.001


class LoopWatch:
    """Watches the running loop, from `start` on."""

    def __init__(self) -> None:
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._worst_s = 0.0

    def start(self) -> None:
        """On the loop."""
        self._loop = asyncio.get_running_loop()
        self._arm()

    def take_worst_s(self) -> float:
        """The longest stall since the last call, or since `start`; includes the one under way."""
        self._look()
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def _arm(self) -> None:
        self._due_s = time.perf_counter() + BEAT_S
        self._waited_s = self._waited_for_cpu_s()
        self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        self._look()
        self._arm()

    def _look(self) -> None:
        late_s = time.perf_counter() - self._due_s
        if late_s > self._worst_s:
            self._worst_s = max(self._worst_s, late_s - (self._waited_for_cpu_s() - self._waited_s))

    def _waited_for_cpu_s(self) -> float:
        """Of the loop's thread, since it began: able to run, and without a CPU."""
        return 1e-9 * int(self._schedstat.read_text().split()[1])
