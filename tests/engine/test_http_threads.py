"""Where bodies are read: large ones wait for each other and not in front of small ones."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deepinfer.http.fault import HttpFault
from deepinfer.http.threads import INLINE_BYTES, MAX_WAITING_BYTES, SMALL_BYTES, BodyThreads

pytestmark = pytest.mark.usefixtures("no_tasks_left")


async def test_a_quick_body_is_read_at_once_and_one_with_tools_never_is() -> None:
    threads, here = BodyThreads(), threading.get_ident()
    quick, slow = b'{"model":"m"}', (b'{"tools":[]}', b'{"\\u0074ools":[]}', b" " * (INLINE_BYTES + 1))
    assert await threads.run(lambda _: threading.get_ident(), quick) == here
    for body in slow:
        assert await threads.run(lambda _: threading.get_ident(), body) != here, body


async def test_large_bodies_are_read_one_at_a_time_and_small_ones_do_not_wait_for_them() -> None:
    threads, may_end = BodyThreads(), threading.Event()
    at_once: list[None] = []

    def read(body: bytes) -> int:
        at_once.append(None)
        num_reading = len(at_once)
        may_end.wait(10)
        at_once.pop()
        return num_reading

    async with asyncio.TaskGroup() as group:
        large = [group.create_task(threads.run(read, b" " * (SMALL_BYTES + 1))) for _ in range(4)]
        assert await threads.run(len, b" " * SMALL_BYTES) == SMALL_BYTES
        assert not any(task.done() for task in large)
        may_end.set()
    assert [task.result() for task in large] == [1, 1, 1, 1]


async def test_more_than_a_few_megabytes_do_not_wait() -> None:
    threads, may_end = BodyThreads(), threading.Event()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(threads.run(lambda _: may_end.wait(10), b" " * MAX_WAITING_BYTES))
        await asyncio.sleep(0)
        with pytest.raises(HttpFault) as caught:
            await threads.run(len, b" " * (SMALL_BYTES + 1))
        assert (caught.value.status, caught.value.code, caught.value.headers) == (
            429,
            "overloaded",
            {"retry-after": "1"},
        )
        may_end.set()
        assert await first
    assert await threads.run(len, b" " * MAX_WAITING_BYTES) == MAX_WAITING_BYTES
