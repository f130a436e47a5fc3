"""Ten thousand streams that end early, in every way that a reader can go away: the engine keeps nothing of them."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deepinfer import Engine, SamplingParams, TokenStream
from deepinfer.request import Request, Sequence
from deepinfer.stream import Mailbox
from deepinfer_protocol import SlotSampling
from doubles.oracle import completion

NUM_WAVES = 20
WAVE = 250
VOCAB_SIZE = 97

pytestmark = pytest.mark.usefixtures("no_tasks_left")


class Reader:
    """Opens streams of random shape on one engine, and reads a few chunks of them."""

    def __init__(self, engine: Engine, rand: random.Random) -> None:
        self.engine = engine
        self.random = rand
        self.others = ThreadPoolExecutor(1)

    def open(self, prompt: str | None = None) -> TokenStream:
        rand = self.random
        ids = [rand.randrange(VOCAB_SIZE) for _ in range(rand.randint(1, 12))]
        shared = [7] * rand.choice((0, 0, 4, 9))
        params = SamplingParams(max_tokens=rand.randint(1, 40), n=rand.choice((1, 1, 1, 3)), temperature=0.0)
        return self.engine.stream(prompt or shared + ids, params, priority=rand.choice((0, 0, -1, 1)))

    async def read_some(self, stream: TokenStream) -> None:
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 5))):
            await anext(stream, None)


Way = Callable[[Reader], Awaitable[None]]
Settle = Callable[[Engine], Awaitable[None]]


class Deliberate(Exception):
    """Raised in a loop body."""


async def leave_async_with(reader: Reader) -> None:
    async with reader.open() as stream:
        await reader.read_some(stream)


async def abort(reader: Reader) -> None:
    stream = reader.open()
    await reader.read_some(stream)
    stream.abort()
    reasons = [chunk.finish_reason async for chunk in stream]
    assert not reasons or reasons[-1] in ("abort", "length")
    stream.abort()


async def abort_by_id(reader: Reader) -> None:
    stream = reader.open()
    await reader.read_some(stream)
    await reader.engine.abort(stream.request_id)
    reasons = [chunk.finish_reason async for chunk in stream]
    assert not reasons or reasons[-1] in ("abort", "length")


async def raise_in_async_with(reader: Reader) -> None:
    try:
        async with reader.open() as stream:
            await reader.read_some(stream)
            raise Deliberate
    except Deliberate:
        pass


async def raise_in_bare_loop(reader: Reader) -> None:
    try:
        async for _ in reader.open():
            raise Deliberate
    except Deliberate:
        pass


async def break_out(reader: Reader) -> None:
    async for _ in reader.open():
        break


async def cancel_while_reading(reader: Reader) -> None:
    async def read() -> None:
        async for _ in reader.open():
            pass

    await _cancel_soon(reader, read())


async def cancel_in_the_body(reader: Reader) -> None:
    async def read() -> None:
        async for _ in reader.open():
            await asyncio.Event().wait()

    await _cancel_soon(reader, read())


async def _cancel_soon(reader: Reader, read: Awaitable[None]) -> None:
    task = asyncio.ensure_future(read)
    await asyncio.sleep(reader.random.choice((0, 0.001, 0.01, 0.03)))
    task.cancel()
    await asyncio.wait([task])


async def time_out_then_drop(reader: Reader) -> None:
    stream = reader.open()
    try:
        while True:
            await asyncio.wait_for(anext(stream), reader.random.choice((0.0, 0.001, 0.003)))
    except (TimeoutError, StopAsyncIteration):
        pass


async def drop_unread(reader: Reader) -> None:
    reader.open()


async def drop_in_a_cycle(reader: Reader) -> None:
    """It goes when the collector runs: at the end of the wave, or before."""
    stream = reader.open()
    cycle: list[object] = [stream]
    cycle.append(cycle)
    await reader.read_some(stream)


async def drop_in_another_thread(reader: Reader) -> None:
    stream = reader.open()
    await reader.read_some(stream)
    box = [stream]
    del stream
    await asyncio.get_running_loop().run_in_executor(reader.others, box.clear)


async def abort_while_encoding(reader: Reader) -> None:
    """Text of this length is encoded in a thread."""
    stream = reader.open("word " * 250)
    if reader.random.random() < 0.5:
        await asyncio.sleep(0)
    stream.abort()
    reasons = [chunk.finish_reason async for chunk in stream]
    assert reasons[-1] in ("abort", "length")


async def drop_while_encoding(reader: Reader) -> None:
    reader.open("word " * 250)


WAYS: list[Way] = [
    leave_async_with,
    abort,
    abort_by_id,
    raise_in_async_with,
    raise_in_bare_loop,
    break_out,
    cancel_while_reading,
    cancel_in_the_body,
    time_out_then_drop,
    drop_unread,
    drop_in_a_cycle,
    drop_in_another_thread,
]
RARE_WAYS = [abort_while_encoding, drop_while_encoding]


def settings(word_model: str) -> dict[str, Any]:
    fake: dict[str, Any] = {"fake_step_s": 0.001, "fake_vocab_size": VOCAB_SIZE}
    return fake | {"tokenizer": word_model, "block_size": 4, "num_blocks": 600, "max_num_seqs": 64}


@pytest.fixture
async def engine(word_model: str) -> AsyncIterator[Engine]:
    async with Engine("fake", **settings(word_model)) as engine:
        yield engine


def living() -> Counter[str]:
    """Objects of requests that the collector still finds."""
    gc.collect()
    kinds = (Request, Sequence, Mailbox, TokenStream)
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds)


async def run_wave(reader: Reader, ways: Counter[str]) -> None:
    """Many readers at once, more than there are slots: some are queued when they end."""
    rand = reader.random
    chosen = [rand.choice(RARE_WAYS if rand.random() < 0.05 else WAYS) for _ in range(WAVE)]
    ways.update(way.__name__ for way in chosen)
    async with asyncio.TaskGroup() as group:
        for way in chosen:
            group.create_task(_run_one(way, reader))
    gc.collect()


async def _run_one(way: Way, reader: Reader) -> None:
    await asyncio.sleep(reader.random.choice((0, 0, 0.002, 0.02)))
    await way(reader)


async def test_five_thousand_early_exits_on_each_loop_leave_nothing_behind(engine: Engine, settle: Settle) -> None:
    await exit_early(engine, NUM_WAVES, settle)


async def test_early_exits_from_an_engine_with_its_own_thread_leave_nothing_behind(
    word_model: str, settle: Settle
) -> None:
    async with Engine("fake", own_thread=True, **settings(word_model)) as engine:
        await exit_early(engine, NUM_WAVES // 4, settle)


async def exit_early(engine: Engine, num_waves: int, settle: Settle) -> None:
    before = living()
    tasks = asyncio.all_tasks()
    reader = Reader(engine, random.Random(20251))
    ways: Counter[str] = Counter()
    for _ in range(num_waves):
        await run_wave(reader, ways)
        await settle(engine)
        await engine._home.run(check_nothing_held(engine))
    reader.others.shutdown()
    assert ways.total() == num_waves * WAVE and len(ways) == len(WAYS + RARE_WAYS), ways
    assert asyncio.all_tasks() == tasks
    assert living() == before
    await check_answers(engine)


async def check_nothing_held(engine: Engine) -> None:
    """On the core's loop."""
    engine.check_integrity()
    scheduler, stats = engine._core.scheduler, engine.stats().scheduler
    assert (stats.num_waiting, stats.num_running, stats.num_queued_tokens) == (0, 0, 0)
    assert stats.num_blocks_used == 0
    assert not scheduler.requests
    assert not scheduler._queue.num_entries and not len(scheduler._deadlines)
    assert all(rank.num_free_slots == rank.shape.num_slots and not rank.held for rank in scheduler.ranks)


async def check_answers(engine: Engine) -> None:
    prompts = [[7] * 9 + [index] for index in range(20)]
    params = SamplingParams(max_tokens=30, temperature=0.0)
    for done, prompt in zip(await engine.generate_many(prompts, params, progress=False), prompts, strict=True):
        wanted = completion(prompt, SlotSampling(), len(prompt) + 30, frozenset(), VOCAB_SIZE)
        assert (done.token_ids, done.finish_reason) == wanted


@pytest.mark.parametrize("way", [*WAYS, *RARE_WAYS], ids=lambda way: str(way.__name__))
async def test_this_way_out_ends_the_request(engine: Engine, settle: Settle, way: Way) -> None:
    reader = Reader(engine, random.Random(way.__name__))
    for _ in range(5):
        await way(reader)
    reader.others.shutdown()
    gc.collect()
    await settle(engine)
    await check_nothing_held(engine)
