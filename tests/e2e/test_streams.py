"""What a reader of a stream can rely on: nothing lost, nothing twice, nothing mixed, whatever the reader does."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from deepinfer import (
    DuplicateRequestId,
    Engine,
    InvalidRequest,
    Overloaded,
    SamplingParams,
    SlowConsumer,
    TokenChunk,
    TokenStream,
)
from deepinfer.stream import Mailbox, Piece
from deepinfer_protocol import AnyMessage, StepPlan
from doubles.reading import FAKE, PROMPT, VOCAB_SIZE, greedy, tokens_of, wanted

Settle = Callable[[Engine], Awaitable[None]]

pytestmark = pytest.mark.usefixtures("no_tasks_left")


# ---- reads that are given up


async def test_timed_out_reads_lose_no_token(engine: Engine) -> None:
    rand, tokens, ends = random.Random(1), list[int](), Counter[str]()
    stream = engine.stream(PROMPT, greedy(300))
    while ends["end"] == 0:
        try:
            chunk = await asyncio.wait_for(anext(stream), rand.choice((0.0, 0.0002, 0.001, 0.002)))
            tokens += chunk.token_ids
        except TimeoutError:
            ends["timeout"] += 1
        except StopAsyncIteration:
            ends["end"] += 1
    assert tokens == wanted(300)
    assert ends["timeout"] > 20


def lone_stream() -> tuple[Mailbox, TokenStream]:
    mailbox = Mailbox(asyncio.get_running_loop())
    return mailbox, TokenStream("alone", mailbox, lambda: None, lambda: None, 8)


def piece(token: int) -> Piece:
    return (0, token, "", None, None)


async def test_a_read_that_is_cancelled_after_its_token_came_leaves_it_for_the_next_read() -> None:
    mailbox, stream = lone_stream()
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    mailbox.push(piece(1))
    reading.cancel()
    mailbox.push(piece(2))
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert (await anext(stream)).token_ids == (1, 2)


async def test_a_second_reader_at_the_same_time_is_refused_and_the_first_goes_on() -> None:
    mailbox, stream = lone_stream()
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="being read already"):
        await anext(stream)
    mailbox.push(piece(1))
    assert (await reading).token_ids == (1,)


# ---- deltas


async def test_streams_of_a_list_comprehension_run_together(engine: Engine) -> None:
    streams = [engine.stream([*PROMPT, index], greedy(30)) for index in range(8)]
    for index, stream in enumerate(streams):
        assert await tokens_of(stream) == wanted(30, [*PROMPT, index])
    assert engine.stats().core.num_steps < 2 * 30


async def test_deltas_are_the_whole_without_gaps(engine: Engine) -> None:
    chunks: list[TokenChunk] = []
    async for chunk in engine.stream(PROMPT, greedy(100)):
        assert chunk.first_index == sum(len(earlier.token_ids) for earlier in chunks)
        chunks.append(chunk)
        await asyncio.sleep(0.003 if len(chunks) % 5 == 0 else 0)  # now and then, tokens pile up
    whole = await engine.generate(PROMPT, greedy(100))
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids == wanted(100)
    assert any(len(chunk.token_ids) > 1 for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


async def test_samples_are_not_mixed_when_their_reader_is_slow(engine: Engine, settle: Settle) -> None:
    params = SamplingParams(max_tokens=40, n=4, seq_seed=7)
    stream = engine.stream(PROMPT, params)
    await settle(engine)
    tokens: list[list[int]] = [[] for _ in range(4)]
    async for chunk in stream:
        assert chunk.first_index == len(tokens[chunk.sample_index])
        tokens[chunk.sample_index] += chunk.token_ids
    whole = await engine.generate(PROMPT, params)
    assert tokens == [sample.token_ids for sample in whole.samples]
    assert len({tuple(sample) for sample in tokens}) == 4


# ---- ends


async def test_finish_reasons_say_why(engine: Engine) -> None:
    assert (await engine.generate(PROMPT, greedy(5))).finish_reason == "length"
    stop_id = wanted(20)[7]
    stopped = await engine.generate(PROMPT, SamplingParams(temperature=0.0, stop_token_ids=[stop_id]))
    assert stopped.finish_reason == "stop" and stopped.token_ids[-1] == stop_id
    late = await engine.generate(PROMPT, greedy(5000), timeout_s=0.02)
    assert late.finish_reason == "timeout"
    assert late.token_ids == wanted(len(late.token_ids))


async def test_a_request_whose_queue_time_is_over_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine("fake", **FAKE, max_num_seqs=1) as engine:
        admitted = record_admissions(engine, monkeypatch)
        async with engine.stream(PROMPT, greedy(5000)) as running:
            await anext(running)
            queued = await engine.generate([1, 2, 3, 4], greedy(5), queue_timeout_s=0.01)
        after = await engine.generate([9], greedy(2), queue_timeout_s=10.0)
    assert (queued.finish_reason, queued.token_ids) == ("queue_timeout", [])
    assert after.finish_reason == "length"
    assert admitted == [len(PROMPT), 1]


async def test_an_aborted_request_in_the_queue_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine("fake", **FAKE, max_num_seqs=1) as engine:
        admitted = record_admissions(engine, monkeypatch)
        async with engine.stream(PROMPT, greedy(5000)) as running:
            await anext(running)
            queued, behind = engine.stream([1, 2], greedy(5, n=4)), engine.stream([9], greedy(2))
            await anext(running)
            assert engine.stats().scheduler.num_waiting == 2
            queued.abort()
        assert len(await tokens_of(behind)) == 2
        assert [chunk.finish_reason async for chunk in queued] == ["abort"] * 4
    assert admitted == [len(PROMPT), 1]


def record_admissions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Known tokens of every sequence that is given a slot from here on."""
    admitted: list[int] = []
    send = engine._group.link.send

    def record(rank: int, message: AnyMessage) -> None:
        if isinstance(message, StepPlan):
            admitted.extend(len(admit.tokens) // 4 for admit in message.admits)
        send(rank, message)

    monkeypatch.setattr(engine._group.link, "send", record)
    return admitted


# ---- readers that are too slow


async def test_a_stream_that_is_not_read_pauses_at_its_cap_and_goes_on_when_read() -> None:
    async with Engine("fake", **FAKE, max_unread_tokens=16) as engine:
        unread = engine.stream(PROMPT, greedy(200))
        assert len(await tokens_of(engine.stream([1], greedy(100)))) == 100
        assert 16 <= unread._mailbox.num_pushed <= 16 + 2
        assert await tokens_of(unread) == wanted(200)


async def test_a_paused_stream_does_not_keep_others_from_its_slot() -> None:
    async with Engine("fake", **FAKE, max_unread_tokens=8, max_num_seqs=1) as engine:
        unread = engine.stream(PROMPT, greedy(60))
        async with asyncio.timeout(10):
            assert await tokens_of(engine.stream([1], greedy(30))) == wanted(30, [1])
        assert await tokens_of(unread) == wanted(60)


async def test_a_stream_that_is_never_read_ends_as_a_slow_consumer_and_others_do_not(settle: Settle) -> None:
    async with Engine("fake", **FAKE, max_unread_tokens=16, slow_consumer_s=0.05) as engine:
        unread = engine.stream(PROMPT, greedy(200))
        assert await tokens_of(engine.stream([1], greedy(100))) == wanted(100, [1])
        await settle(engine)
        tokens: list[int] = []
        with pytest.raises(SlowConsumer, match="16 tokens"):
            async for chunk in unread:
                tokens += chunk.token_ids
        assert tokens == wanted(len(tokens)) and 16 <= len(tokens) <= 18
        assert engine.stats().scheduler.num_blocks_used == 0


# ---- ids and refusals


async def test_a_duplicate_id_is_refused_and_the_first_is_undisturbed(engine: Engine) -> None:
    first = engine.stream(PROMPT, greedy(50), request_id="mine")
    second = engine.stream([1], greedy(50), request_id="mine")
    with pytest.raises(DuplicateRequestId, match="'mine'"):
        await anext(second)
    second.abort()
    assert await tokens_of(first) == wanted(50)


async def test_an_id_can_be_used_again_at_once(engine: Engine) -> None:
    for _ in range(200):
        async with engine.stream(PROMPT, greedy(2), request_id="mine") as stream:
            assert await tokens_of(stream) == wanted(2)


async def test_an_id_of_ones_own_never_collides_with_one_that_the_engine_gives(engine: Engine) -> None:
    given = engine.stream(PROMPT, greedy(5))
    chosen = [engine.stream(PROMPT, greedy(5), request_id=f"r{index}") for index in range(5)]
    for stream in [given, *chosen, engine.stream(PROMPT, greedy(5))]:
        assert await tokens_of(stream) == wanted(5)


async def test_refusals_come_at_the_first_read(engine: Engine) -> None:
    refused = [engine.stream([VOCAB_SIZE]), engine.stream(PROMPT, greedy(-1)), engine.stream(PROMPT, request_id="a b")]
    for stream, field in zip(refused, ("prompt", "max_tokens", "request_id"), strict=True):
        with pytest.raises(InvalidRequest, match=rf"^{field}: "):
            await anext(stream)
    with pytest.raises(InvalidRequest, match=r"^n: "):
        await engine.generate(PROMPT, greedy(1, n=2**40))


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async with Engine("fake", **FAKE, max_num_seqs=1, max_queued_requests=2) as engine:
        async with engine.stream(PROMPT, greedy(5000)) as running:
            await anext(running)
            queued = [engine.stream([index], greedy(3)) for index in range(2)]
            with pytest.raises(Overloaded) as refusal:
                await anext(engine.stream([1]))
            assert refusal.value.retry_after_s > 0
        assert [len(await tokens_of(stream)) for stream in queued] == [3, 3]


async def test_a_kept_traceback_keeps_no_request(engine: Engine, settle: Settle) -> None:
    """Notebooks keep the last one, debuggers and loggers too."""

    async def read() -> None:
        async for _ in engine.stream(PROMPT, greedy(5000)):
            started.set()

    started = asyncio.Event()
    reading = asyncio.ensure_future(read())
    await asyncio.wait([reading, asyncio.ensure_future(started.wait())], return_when=asyncio.FIRST_COMPLETED)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError) as kept:
        await reading
    await settle(engine)
    assert kept.traceback
