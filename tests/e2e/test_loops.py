"""One engine and several loops: who may read where, and that a reader elsewhere is as safe as one here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from deepinfer import Engine, EngineClosed, SlowConsumer, TokenChunk, WrongLoop
from deepinfer.stream import Mailbox, TokenStream
from doubles.reading import FAKE, PROMPT, greedy, tokens_of, wanted

T = TypeVar("T")
Settle = Callable[[Engine], Awaitable[None]]

both_homes = pytest.mark.parametrize("own_thread", [False, True], ids=["on the caller's loop", "in its own thread"])

pytestmark = pytest.mark.usefixtures("no_tasks_left")


async def in_a_thread(work: Callable[[], Awaitable[T]]) -> T:
    """`work` on a new loop in a new thread."""

    async def run() -> T:
        return await work()

    with ThreadPoolExecutor(1) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, lambda: asyncio.run(run()))


async def test_a_stream_read_on_another_loop_is_refused_at_the_first_read(engine: Engine, settle: Settle) -> None:
    stream = engine.stream(PROMPT, greedy(5))
    with pytest.raises(WrongLoop, match="another event loop"):
        await in_a_thread(lambda: anext(stream))
    await settle(engine)
    with pytest.raises(WrongLoop, match="another event loop"):  # although there is something to read
        await in_a_thread(lambda: anext(stream))
    assert await tokens_of(stream) == wanted(5)


async def test_a_reader_that_goes_to_another_loop_between_its_reads_is_refused() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    stream = TokenStream("alone", mailbox, lambda: None, lambda: None, 8)
    for token in range(2):
        mailbox.push((0, token, "", None, None))
        assert (await anext(stream)).token_ids == (token,)
        with pytest.raises(WrongLoop, match="another event loop"):
            await in_a_thread(lambda: anext(stream))


async def test_an_engine_used_on_another_loop_refuses_at_the_first_read(engine: Engine) -> None:
    async def use() -> TokenChunk:
        return await anext(engine.stream(PROMPT))

    with pytest.raises(WrongLoop, match="belongs to the loop that opened it"):
        await in_a_thread(use)


async def test_a_stream_made_without_a_loop_says_what_to_use(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as executor:
        stream = executor.submit(engine.stream, PROMPT).result()
    with pytest.raises(WrongLoop, match="SyncEngine"):
        await anext(stream)


async def test_an_engine_with_its_own_thread_serves_two_loops_at_once() -> None:
    async with Engine("fake", own_thread=True, **FAKE) as engine:

        async def read(first: int) -> list[list[int]]:
            streams = [engine.stream([first, index], greedy(100)) for index in range(10)]
            return await asyncio.gather(*[tokens_of(stream) for stream in streams])

        results = await asyncio.gather(*[in_a_thread(lambda first=first: read(first)) for first in (1, 2)], read(3))  # type: ignore[misc]
        for first, result in zip((1, 2, 3), results, strict=True):
            assert result == [wanted(100, [first, index]) for index in range(10)]


async def test_a_slow_reader_of_an_engine_with_its_own_thread_pauses_and_goes_on(settle: Settle) -> None:
    async with Engine("fake", own_thread=True, max_unread_tokens=16, **FAKE) as engine:
        unread = engine.stream(PROMPT, greedy(300))
        assert await tokens_of(engine.stream([1], greedy(100))) == wanted(100, [1])
        assert 16 <= unread._mailbox.num_pushed <= 18
        assert await tokens_of(unread) == wanted(300)


async def test_a_slow_reader_of_an_engine_with_its_own_thread_is_ended_in_time(settle: Settle) -> None:
    async with Engine("fake", own_thread=True, max_unread_tokens=8, slow_consumer_s=0.05, **FAKE) as engine:
        unread = engine.stream(PROMPT, greedy(300))
        await anext(unread)
        await settle(engine)
        with pytest.raises(SlowConsumer):
            await tokens_of(unread)


@both_homes
async def test_what_a_paused_stream_holds_can_be_read_after_the_close(own_thread: bool) -> None:
    async with Engine("fake", own_thread=own_thread, max_unread_tokens=16, **FAKE) as engine:
        unread = engine.stream(PROMPT, greedy(300))
        await tokens_of(engine.stream([1], greedy(60)))
    chunk = await anext(unread)
    assert list(chunk.token_ids) == wanted(len(chunk.token_ids)) and len(chunk.token_ids) >= 16
    with pytest.raises(EngineClosed):
        await anext(unread)


async def test_a_reader_whose_loop_was_closed_under_it_hurts_nobody(settle: Settle) -> None:
    async with Engine("fake", own_thread=True, max_unread_tokens=8, slow_consumer_s=0.05, **FAKE) as engine:

        def leave_a_reader_behind() -> asyncio.Task[TokenChunk]:
            loop = asyncio.new_event_loop()

            async def open_stream() -> asyncio.Task[TokenChunk]:
                reading = asyncio.ensure_future(anext(engine.stream(PROMPT, greedy(5000))))
                await asyncio.sleep(0)
                return reading

            reading = loop.run_until_complete(open_stream())
            loop.close()
            return reading

        with ThreadPoolExecutor(1) as executor:
            reading = executor.submit(leave_a_reader_behind).result()
        assert await tokens_of(engine.stream([1], greedy(50))) == wanted(50, [1])
        await settle(engine)
        reading._log_destroy_pending = False  # type: ignore[attr-defined]


@both_homes
async def test_two_engines_live_in_one_process(own_thread: bool) -> None:
    async with Engine("fake", own_thread=own_thread, **FAKE) as one, Engine("fake", **FAKE) as two:
        results = await asyncio.gather(*[tokens_of(e.stream(PROMPT, greedy(50))) for e in (one, two, one, two)])
    assert results == [wanted(50)] * 4


async def test_an_engine_lives_on_a_loop_in_a_thread_that_is_not_the_main_one() -> None:
    async def use() -> list[int]:
        async with Engine("fake", **FAKE) as engine:
            return await tokens_of(engine.stream(PROMPT, greedy(20)))

    assert await in_a_thread(use) == wanted(20)


def test_an_engine_is_closed_on_another_loop_once_its_own_is_over() -> None:
    engine = asyncio.run(Engine.start("fake"))
    assert len(engine.worker_pids) == 1
    asyncio.run(engine.aclose())
    assert engine.worker_pids == []


async def test_an_engine_is_not_closed_on_another_loop_while_its_own_lives(engine: Engine) -> None:
    with pytest.raises(WrongLoop, match="close it there"):
        await asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(engine.aclose()))


async def test_an_error_in_the_progress_report_does_not_stop_the_start() -> None:
    heard: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["exception"]))

    def report(text: str) -> None:
        raise ArithmeticError(text)

    async with asyncio.timeout(20):
        engine = await Engine.start("fake", on_progress=report)
        await engine.aclose()
    assert heard and all(isinstance(error, ArithmeticError) for error in heard)
