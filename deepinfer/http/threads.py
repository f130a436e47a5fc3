"""Where bodies are read and prompts encoded: at once if that is quick, else in a thread; large ones have another one.

A long prompt is encoded at about a second a megabyte, with a hundred times its memory: one at a time, and short ones do
not wait for it. Knows nothing of what a body says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from deepinfer.http.fault import RETRY_AFTER_S, HttpFault

T = TypeVar("T")

INLINE_BYTES: Final = 2048
INLINE_A_TURN: Final = 8
"""So many of these in one turn of the loop; of a crowd the others wait for the next."""
SMALL_BYTES: Final = 64 << 10
MAX_WAITING_BYTES: Final = 4 << 20
"""Bodies before a thread; with as much there, a further one is asked to come later."""


class BodyThreads:
    """Of one server. A thread is there while it has something to read."""

    def __init__(self) -> None:
        self._inline = asyncio.Semaphore(INLINE_A_TURN)
        self._small = _BodyThread("deepinfer-http")
        self._large = _BodyThread("deepinfer-http-large")

    async def run(self, work: Callable[[bytes], T], body: bytes) -> T:
        """`work(body)`. Raises `HttpFault` (429), and what it raises."""
        if _is_quick(body):
            async with self._inline:
                found = work(body)
                await asyncio.sleep(0)  # the place is free in the next turn
            return found
        return await (self._small if len(body) <= SMALL_BYTES else self._large).run(work, body)


class _BodyThread:
    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._num_waiting_bytes = 0

    async def run(self, work: Callable[[bytes], T], body: bytes) -> T:
        if self._num_waiting_bytes >= MAX_WAITING_BYTES:
            raise HttpFault(429, "overloaded", "too many large requests wait", retry_after_s=RETRY_AFTER_S)
        executor = self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._num_waiting_bytes += len(body)
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work, body)
        finally:
            self._num_waiting_bytes -= len(body)
            if not self._num_waiting_bytes:
                executor.shutdown(wait=False)
                self._executor = None


def _is_quick(body: bytes) -> bool:
    """Small, and without tools, whose schemas say much in few words; a name may be spelt with escapes."""
    return len(body) <= INLINE_BYTES and b"tools" not in body and b"\\u" not in body
