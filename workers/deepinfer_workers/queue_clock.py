"""The streams of a CUDA device, and how long its queue was busy and empty, by the device's own clock.

Knows nothing of what a step computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepinfer_workers.runner import StepTimes


class Timing:
    """One step on the compute stream."""

    def __init__(self, before: torch.cuda.Event) -> None:
        self._before = before
        self._started = _mark()
        self._drafts: torch.cuda.Event | None = None
        self.ended: torch.cuda.Event

    def begin_drafts(self) -> None:
        """What follows, to the end, makes drafts."""
        self._drafts = _mark()

    def end(self) -> None:
        """All of the step's work is queued."""
        self.ended = _mark()

    def read(self) -> StepTimes:
        """Waits for the step's end."""
        self.ended.synchronize()
        return StepTimes(_elapsed_us(self._started, self.ended), _elapsed_us(self._before, self._started))

    def read_drafts_us(self) -> int:
        """After the step's end."""
        return 0 if self._drafts is None else _elapsed_us(self._drafts, self.ended)


class QueueClock:
    """Frames every step's work with events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.copy_stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # whatever was done on other streams so far
        with torch.cuda.stream(self._stream):
            self._last = _mark()

    @contextmanager
    def step(self) -> Iterator[Timing]:
        """Work inside goes to the compute stream. Whoever enters calls `end` before the exit."""
        with torch.cuda.stream(self._stream):
            timing = Timing(self._last)
            yield timing
            self._last = timing.ended


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_us(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return max(int(1000 * start.elapsed_time(end)), 0)
