"""Where an engine's core runs: on the loop that started it, or on a loop in a thread of its own.

Knows nothing of what runs there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from deepinfer.loop import Loop

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

    def call(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop's thread: now if this is it, or if the loop is over."""
        if self.is_here() or not call_threadsafe(self.loop, callback):
            callback()

    def close(self, *, wait: bool = True) -> None:
        """Nothing to do: the loop is not ours."""


class OwnThread:
    """A daemon thread with a loop of its own; uvloop's where it is installed."""

    def __init__(self) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, name="deepinfer-core", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(_cancel_tasks())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def call(self, callback: Callable[[], object]) -> None:
        call_threadsafe(self.loop, callback)

    def close(self, *, wait: bool = True) -> None:
        """End the loop after all that it was given, then the thread. Without `wait`: callable from anywhere."""
        call_threadsafe(self.loop, self.loop.stop)
        if wait:
            self._thread.join()


def call_threadsafe(loop: Loop, callback: Callable[[], object]) -> bool:
    """`callback` on `loop`, soon, from any thread. False if the loop is over."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return False
    return True


async def _cancel_tasks() -> None:
    """What still runs on this loop ends now."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
