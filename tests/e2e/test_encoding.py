"""Requests whose text is still being encoded are requests like any other: they end, they wait, they are refused."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from deepinfer import (
    Engine,
    EngineClosed,
    EngineError,
    InternalError,
    InvalidRequest,
    Overloaded,
    SamplingParams,
    WorkerLost,
)
from doubles.reading import FAKE, greedy, tokens_of, wanted

Settle = Callable[[Engine], Awaitable[None]]
LONG = "word " * 300
"""More characters than are encoded on the loop."""

pytestmark = pytest.mark.usefixtures("no_tasks_left")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The encoder's thread stands still until this is set."""
    from deepinfer.text import TextPipeline

    event, encode = threading.Event(), TextPipeline.encode

    def held(self: TextPipeline, text: str, *, add_special_tokens: bool) -> list[int]:
        assert event.wait(20)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextPipeline, "encode", held)
    return event


async def test_long_text_becomes_the_same_request_as_its_tokens(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        assert (await engine.generate(LONG, greedy(5))).token_ids == wanted(5, [96] * 300)


async def test_an_id_ends_a_request_that_is_being_encoded(
    word_model: str, gate: threading.Event, settle: Settle
) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        stream = engine.stream(LONG, greedy(5), request_id="mine")
        await engine.abort("mine")
        chunk = await anext(stream)
        assert (chunk.token_ids, chunk.finish_reason) == ((), "abort")
        gate.set()
        await settle(engine)
        assert engine.stats().core.num_tokens == 0


async def test_deadlines_run_while_text_is_encoded(word_model: str, gate: threading.Event, settle: Settle) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        queue = await anext(engine.stream(LONG, greedy(5), queue_timeout_s=0.01))
        total = await anext(engine.stream(LONG, greedy(5), timeout_s=0.01))
        assert (queue.finish_reason, total.finish_reason) == ("queue_timeout", "timeout")
        gate.set()
        await settle(engine)


async def test_text_that_waits_for_its_encoding_counts_as_load(word_model: str, gate: threading.Event) -> None:
    async with Engine("fake", tokenizer=word_model, max_queued_requests=3, **FAKE) as engine:
        streams = [engine.stream(LONG, greedy(5)) for _ in range(5)]
        for stream in streams[3:]:
            with pytest.raises(Overloaded):
                await anext(stream)
        gate.set()
        for stream in streams[:3]:
            assert await tokens_of(stream) == wanted(5, [96] * 300)


async def test_a_close_ends_text_that_is_being_encoded_at_once(word_model: str, gate: threading.Event) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        streams = [engine.stream(LONG, greedy(5)) for _ in range(8)]
        reads = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        await asyncio.sleep(0)
        await engine.aclose()
        for outcome in await asyncio.gather(*reads, return_exceptions=True):
            assert isinstance(outcome, EngineClosed)
        gate.set()


async def test_a_lost_worker_ends_text_that_is_being_encoded_too(word_model: str, gate: threading.Event) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        streams = [engine.stream(LONG, greedy(5)) for _ in range(8)]
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(WorkerLost):
                await anext(stream)
        gate.set()


MESSAGES = [
    [{"role": "x" * 2_000_000, "content": "hello"}],
    [{"role": "user", "content": "x"}] * 10_000,
    [{"role": "user", "content": [{"type": "text", "text": "word " * 400_000}]}],
    [{"role": "user", "content": "hello", "name": "x" * 2_000_000}],
]


@pytest.mark.parametrize("messages", MESSAGES, ids=["role", "many", "parts", "name"])
async def test_long_messages_do_not_keep_the_loop(word_model: str, messages: list[dict[str, object]]) -> None:
    """The call itself does nothing that grows with the text: the least of several tries tells."""
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        taken_s = []
        for _ in range(5):
            started_s = time.perf_counter()
            stream = engine.stream(messages=messages, params=greedy(1))
            taken_s.append(time.perf_counter() - started_s)
            stream.abort()
        assert min(taken_s) < 0.005


async def test_what_the_caller_changes_after_the_call_changes_nothing(word_model: str, gate: threading.Event) -> None:
    bias: dict[int, float] = {}
    history = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        params = SamplingParams(temperature=0, max_tokens=5, logit_bias=bias)
        streams = [engine.stream(LONG, params), engine.stream(messages=history, params=params)]
        bias[5] = float("nan")
        history[0]["content"][0]["text"] = "w5"  # type: ignore[index]
        history.append({"role": "robot"})
        gate.set()
        assert await tokens_of(streams[0]) == wanted(5, [96] * 300)
        with pytest.raises(InvalidRequest, match="no chat template"):
            await anext(streams[1])


# ---- errors of our own


async def test_a_failed_action_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine("fake", **FAKE) as engine:
        good = engine.stream([5, 3, 8], greedy(40))
        first = await anext(good)

        def fail(request: object) -> None:
            raise ArithmeticError("a bug in an action")

        with monkeypatch.context() as patch:
            patch.setattr(engine._core, "submit", fail)
            bad = engine.stream([5, 3, 8], greedy(40))
        with pytest.raises(EngineError, match="ArithmeticError: a bug in an action"):
            await tokens_of(bad)
        for never in ([1], None, "a b"):
            with pytest.raises(InvalidRequest, match="request_id"):
                await engine.abort(never)  # type: ignore[arg-type]
        assert len([*first.token_ids, *await tokens_of(good)]) == 40


async def test_a_panic_of_the_encoder_ends_its_own_request_only(
    word_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As a library in Rust raises it."""

    def panic(*_: object, **options: object) -> list[int]:
        raise Panic("index out of bounds")

    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._text, "encode", panic)
            with pytest.raises(InternalError, match="Panic: index out of bounds") as caught:
                await engine.generate(LONG, greedy(1), timeout_s=5)
        assert caught.value.code == "internal"
        assert (await engine.generate(LONG, greedy(5))).token_ids == wanted(5, [96] * 300)


async def test_text_that_cannot_be_made_ends_its_own_request_only(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        good, bad = engine.stream("w5 w3 w8", greedy(40)), engine.stream("w5 w3 w8", greedy(40), request_id="bad")
        await anext(bad)

        def fail(token_id: int) -> str:
            raise ArithmeticError("a bug in the detokenizer")

        engine._core.scheduler.requests["bad"].samples[0].user.push = fail
        with pytest.raises(EngineError, match="ArithmeticError: a bug in the detokenizer"):
            await tokens_of(bad)
        assert await tokens_of(good) == wanted(40)
        engine.check_integrity()


async def test_a_bug_in_the_core_ends_every_stream_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine("fake", **FAKE) as engine:
        streams = [engine.stream([5, 3, 8], greedy(500)) for _ in range(3)]
        await anext(streams[0])

        def fail(results: object) -> None:
            raise ArithmeticError("a bug in the core")

        monkeypatch.setattr(engine._core, "_count", fail)
        for stream in streams:
            with pytest.raises(EngineError, match="the core failed: ArithmeticError: a bug in the core"):
                await tokens_of(stream)
        with pytest.raises(EngineError, match="the core failed"):
            await engine.generate([1], SamplingParams(max_tokens=1))


async def test_a_failure_that_many_meet_does_not_grow() -> None:
    """Each reader gets an error of its own: a shared one would gather all their frames."""
    async with Engine("fake", **FAKE) as engine:
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        errors = []
        for _ in range(50):
            with pytest.raises(WorkerLost) as caught:
                await engine.generate([1], greedy(1000))
            errors.append(caught.value)
        assert len({id(error) for error in errors}) == 50
        assert len({str(error) for error in errors}) == 1
        assert max(_depth(error) for error in errors) < 12


def _depth(error: BaseException) -> int:
    depth, frame = 0, error.__traceback__
    while frame is not None:
        depth, frame = depth + 1, frame.tb_next
    return depth
