"""The loop that runs here, as far as streams and clients need one: asyncio's, uvloop's, or trio's by `trio_loop`.

Knows nothing of what runs on it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Protocol


class Waiter(Protocol):
    """What one task waits for, once. Done when it is set, or when who waited for it was cancelled."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...

    def __await__(self) -> Generator[Any, Any, Any]: ...


class Timer(Protocol):
    """A call that is still to come."""

    def cancel(self) -> object: ...


class Loop(Protocol):
    """Names and meanings are those of asyncio's loops, which are some."""

    def create_future(self) -> Waiter: ...

    def call_soon(self, callback: Callable[[], object], /) -> object: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *arguments: Any) -> object:
        """Raises `RuntimeError` when the loop is over."""

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> Timer: ...

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> object: ...

    def remove_reader(self, fd: int, /) -> object: ...

    def is_closed(self) -> bool: ...


def running_loop() -> Loop:
    """Raises `RuntimeError` where none runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        if "trio" not in sys.modules:
            raise
    from deepinfer.trio_loop import running_trio_loop

    return running_trio_loop()


async def pause(seconds: float) -> None:
    """Sleep."""
    loop = running_loop()
    waiter = loop.create_future()
    timer = loop.call_later(seconds, partial(wake, waiter))
    try:
        await waiter
    finally:
        timer.cancel()


def wake(waiter: Waiter) -> None:
    """Whoever waits goes on; nobody need."""
    if not waiter.done():
        waiter.set_result(None)


async def run_together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Return when all have. Raises an `ExceptionGroup` with the first error, when the rest has been cancelled."""
    if isinstance(running_loop(), asyncio.AbstractEventLoop):
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    else:
        from deepinfer.trio_loop import run_in_nursery

        await run_in_nursery(works)
