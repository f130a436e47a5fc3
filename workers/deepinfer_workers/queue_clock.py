"""The streams of a CUDA device, and how long its queue was busy and empty, by the device's own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepinfer_workers.runner import StepTimes


class QueueClock:
    """Frames every step's work with events on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.copy_stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # whatever was done on other streams so far
        self._last = self._mark()

    @contextmanager
    def step(self) -> Iterator[Callable[[], StepTimes]]:
        """Work inside goes to the compute stream; the times can be asked for when it is done."""
        with torch.cuda.stream(self._stream):
            before, started, ended = self._last, self._mark(), torch.cuda.Event(enable_timing=True)
            self._last = ended
            yield lambda: StepTimes(_elapsed_us(started, ended), _elapsed_us(before, started))
            ended.record()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def _elapsed_us(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return max(int(1000 * start.elapsed_time(end)), 0)
