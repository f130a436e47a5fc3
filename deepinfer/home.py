"""Where an engine's core runs: on the loop that started it, or on a loop in a thread of its own.

Knows nothing of what runs there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class CallerLoop:
    """The loop that runs when this is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()

    def is_here(self) -> bool:
        """Is this the thread of the loop?"""
        return threading.get_ident() == self._thread_id

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the loop."""
        return await work

    def close(self) -> None:
        """Nothing to do: the loop is not ours."""


class OwnThread:
    """A daemon thread with a loop of its own; uvloop's where it is installed."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="deepinfer-core", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def close(self) -> None:
        """End the loop, then the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


def call_threadsafe(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """`callback` on `loop`, soon, from any thread; nothing if the loop is over."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        pass


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
