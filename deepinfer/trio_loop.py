"""Trio's loop under the names of asyncio's. Imported only where trio runs: nothing here needs it elsewhere.

Knows nothing of what runs on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Final

import trio

log = logging.getLogger(__name__)


class TrioLoop:
    """One run of trio. What it calls runs in system tasks, which end with the run."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._readers: dict[int, trio.CancelScope] = {}

    def create_future(self) -> TrioWaiter:
        return TrioWaiter()

    def call_soon(self, callback: Callable[..., object], /, *arguments: Any) -> None:
        self._token.run_sync_soon(_call, callback, *arguments)

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *arguments: Any) -> None:
        """Raises `RuntimeError` when the run is over."""
        self.call_soon(callback, *arguments)

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> trio.CancelScope:
        scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(_call_later, scope, delay_s, callback)
        return scope

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> None:
        self._readers[fd] = scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(_watch, scope, fd, callback)

    def remove_reader(self, fd: int, /) -> None:
        """The descriptor may be closed right after."""
        self._readers.pop(fd).cancel()

    def is_closed(self) -> bool:
        """There is nothing that must not be called after the end."""
        return False


class TrioWaiter:
    """What one task waits for, once."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def done(self) -> bool:
        return self._event.is_set()

    def set_result(self, result: None, /) -> None:
        self._event.set()

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield from self._event.wait().__await__()
        finally:
            self._event.set()  # also when it was cancelled: nobody waits any more


_LOOP: Final = trio.lowlevel.RunVar[TrioLoop]("deepinfer loop")
"""Each run of trio has its own."""


def running_trio_loop() -> TrioLoop:
    """Always the same one in a run. Raises `RuntimeError` outside of trio."""
    try:
        return _LOOP.get()
    except LookupError:
        _LOOP.set(loop := TrioLoop())
        return loop


async def run_in_nursery(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    async with trio.open_nursery() as nursery:
        for work in works:
            nursery.start_soon(_await, work)


async def _await(work: Coroutine[Any, Any, None]) -> None:
    await work


def _call(callback: Callable[..., object], *arguments: Any) -> None:
    try:
        callback(*arguments)
    except Exception:  # a system task that fails ends all of trio
        log.exception("a callback has failed")


async def _call_later(scope: trio.CancelScope, delay_s: float, callback: Callable[[], object]) -> None:
    with scope:
        await trio.sleep(delay_s)
    if not scope.cancel_called:
        _call(callback)


async def _watch(scope: trio.CancelScope, fd: int, callback: Callable[[], object]) -> None:
    with scope:
        while not scope.cancel_called:  # looked at before each wait: the descriptor may be closed then
            await trio.lowlevel.wait_readable(fd)
            if not scope.cancel_called:
                _call(callback)
