"""Fills masks in a thread, for a core that lives on an event loop. Knows nothing of grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from deepinfer.deep_thread import deep_thread
from deepinfer.home import call_threadsafe
from deepinfer.masks import FilledMasks, MaskJob, fill_masks


class MaskThread:
    """One thread: the masks of one job after those of another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._executor = deep_thread("deepinfer-masks")

    def fill(self, job: MaskJob, hand_on: Callable[[FilledMasks], None]) -> None:
        """Implements `FillMasks`: `hand_on` is called on the loop, unless that has come to its end."""
        self._executor.submit(self._fill, job, hand_on)

    def _fill(self, job: MaskJob, hand_on: Callable[[FilledMasks], None]) -> None:
        call_threadsafe(self._loop, partial(hand_on, fill_masks(job)))

    def close(self) -> None:
        """What is not filled never will be."""
        self._executor.shutdown(wait=False, cancel_futures=True)
