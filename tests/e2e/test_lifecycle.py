"""Opening, closing, forking, forgetting: an engine fits into the process that embeds it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable

import pytest

from deepinfer import (
    Engine,
    EngineClosed,
    EngineError,
    ForkedEngine,
    InvalidRequest,
    SamplingParams,
)
from doubles.reading import FAKE, PROMPT, VOCAB_SIZE, greedy, tokens_of, wanted

Settle = Callable[[Engine], Awaitable[None]]
both_homes = pytest.mark.parametrize("own_thread", [False, True], ids=["on the caller's loop", "in its own thread"])

pytestmark = pytest.mark.usefixtures("no_tasks_left")


# ---- closing


@both_homes
async def test_every_waiting_reader_hears_of_the_close(own_thread: bool) -> None:
    async with Engine("fake", own_thread=own_thread, max_num_seqs=32, **FAKE) as engine:
        unread = engine.stream(PROMPT, greedy(5000))
        reads = [asyncio.ensure_future(tokens_of(engine.stream([index], greedy(5000)))) for index in range(64)]
        await anext(unread)
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(result) for result in results] == [EngineClosed] * 64
    with pytest.raises(EngineClosed):
        await tokens_of(unread)


@both_homes
async def test_closing_twice_and_from_another_task_is_one_close(own_thread: bool) -> None:
    engine = await Engine.start("fake", own_thread=own_thread, **FAKE)
    await asyncio.gather(engine.aclose(), asyncio.ensure_future(engine.aclose()))
    await engine.aclose()
    assert engine.worker_pids == []


async def test_a_cancelled_close_goes_on_and_can_be_awaited_again() -> None:
    engine = await Engine.start("fake", **FAKE)
    closing = asyncio.ensure_future(engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await engine.aclose()
    assert engine.worker_pids == []


async def test_use_after_the_close_is_refused() -> None:
    async with Engine("fake", **FAKE) as engine:
        pass
    for use in (engine.generate(PROMPT), engine.abort("any"), engine.open(), anext(engine.stream(PROMPT))):
        with pytest.raises(EngineClosed, match="closed"):
            await use
    with pytest.raises(EngineClosed, match="not opened"):
        await Engine("fake").generate(PROMPT)


@both_homes
async def test_a_start_that_is_cancelled_leaves_nothing(own_thread: bool) -> None:
    for num_turns in (0, 1, 2, 3, 5, 8, 13, 1000):
        starting = asyncio.ensure_future(Engine.start("fake", own_thread=own_thread, **FAKE))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():
            await starting.result().aclose()


@both_homes
async def test_an_engine_can_be_closed_while_it_starts(own_thread: bool) -> None:
    engine = Engine("fake", own_thread=own_thread, **FAKE)
    progress = asyncio.Event()

    async def open_and_go_on() -> str:
        try:
            progress.set()
            await engine.open()
        except EngineClosed as error:
            return str(error)
        return "opened"

    opening = asyncio.ensure_future(open_and_go_on())
    await progress.wait()
    await engine.aclose()
    assert "closed" in await opening
    with pytest.raises(EngineClosed):
        await engine.generate(PROMPT)


@both_homes
async def test_text_that_is_still_being_encoded_at_the_close_ends_with_it(own_thread: bool, word_model: str) -> None:
    async with Engine("fake", own_thread=own_thread, tokenizer=word_model, **FAKE) as engine:
        encoder_is_free = threading.Event()
        engine._executor.submit(encoder_is_free.wait)
        stream = engine.stream("word " * 300)
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
    encoder_is_free.set()
    with pytest.raises(EngineClosed):
        await reading


async def test_an_error_of_the_tokenizer_reaches_the_reader(word_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:

        def fail(text: str, *, add_special_tokens: bool) -> list[int]:
            raise ArithmeticError("a bug in the tokenizer")

        monkeypatch.setattr(engine._text, "encode", fail)
        with pytest.raises(EngineError, match="ArithmeticError: a bug in the tokenizer"):
            await engine.generate("word " * 300)


# ---- the process around it


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_child_is_refused_and_leaves_its_parent_s_engine_alone(engine: Engine) -> None:
    stream = engine.stream(PROMPT, greedy(30))
    child = os.fork()
    if child == 0:
        try:
            os._exit(_use_after_fork(engine))
        finally:
            os._exit(99)
    exit_code = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(exit_code[1]) == 0
    assert await tokens_of(stream) == wanted(30)


def _use_after_fork(engine: Engine) -> int:
    """In the child, without its loop. 0: refused as it should be."""
    try:
        engine.stream(PROMPT).__anext__().send(None)
    except ForkedEngine:
        pass
    else:
        return 1
    try:
        engine.aclose().send(None)
    except StopIteration:
        return 0
    return 2


async def test_the_loop_s_debug_mode_finds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 1.0  # a shared machine is slow at times
    async with Engine("fake", **FAKE) as engine:
        streams = [engine.stream([index], greedy(20)) for index in range(8)]
        streams[0].abort()
        assert [len(await tokens_of(stream)) for stream in streams[1:]] == [20] * 7
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_engine_changes_no_signal_handler_and_no_loop_policy() -> None:
    def owned_by_the_process() -> list[object]:
        numbers = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
        return [signal.getsignal(number) for number in numbers] + [asyncio.get_event_loop_policy()]

    before = owned_by_the_process()
    async with Engine("fake", **FAKE) as engine:
        await engine.generate(PROMPT, greedy(5))
        assert owned_by_the_process() == before
    assert owned_by_the_process() == before


@both_homes
async def test_an_engine_that_is_dropped_open_warns_and_takes_everything_along(own_thread: bool) -> None:
    engine = await Engine.start("fake", own_thread=own_thread, **FAKE)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del engine
        gc.collect()


# ---- many prompts


async def test_many_prompts_come_back_in_order_with_parameters_of_their_own(engine: Engine) -> None:
    prompts = [[index] for index in range(90)]
    params = [greedy(1 + index % 30) for index in range(90)]
    done = await engine.generate_many(prompts, params, progress=False)
    assert [each.token_ids for each in done] == [wanted(1 + index % 30, [index]) for index in range(90)]
    assert await engine.generate_many([], progress=False) == []
    with pytest.raises(InvalidRequest, match="1 came for 2"):
        await engine.generate_many([PROMPT, PROMPT], [greedy(1)], progress=False)


async def test_many_prompts_with_several_samples_never_overload_the_queue() -> None:
    async with Engine("fake", max_num_seqs=2, max_queued_requests=4, **FAKE) as engine:
        params = SamplingParams(max_tokens=5, temperature=0.0, n=4)
        done = await engine.generate_many([[index] for index in range(30)], params, progress=False)
    assert [len(each.samples) for each in done] == [4] * 30


async def test_the_first_error_among_many_prompts_ends_the_rest(engine: Engine, settle: Settle) -> None:
    prompts = [[1], [2], [VOCAB_SIZE], *([index] for index in range(40))]
    with pytest.raises(InvalidRequest, match=f"token id {VOCAB_SIZE}"):
        await engine.generate_many(prompts, greedy(1000), progress=False)
    await settle(engine)
    assert engine.stats().scheduler.num_blocks_used == 0
