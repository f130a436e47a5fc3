"""The engine for scripts without a loop: plain loops and calls, Ctrl-C, and a close that leaves nothing."""

from __future__ import annotations

import signal
import threading

import pytest

from deepinfer import EngineClosed, InvalidRequest, SyncEngine, SyncStream
from doubles.reading import FAKE, PROMPT, VOCAB_SIZE, greedy, wanted

pytestmark = pytest.mark.usefixtures("nothing_left")


def tokens_of(stream: SyncStream) -> list[int]:
    return [token for chunk in stream for token in chunk.token_ids]


def test_a_plain_loop_reads_a_stream() -> None:
    with SyncEngine("fake", **FAKE) as engine:
        assert tokens_of(engine.stream(PROMPT, greedy(30))) == wanted(30)
        assert engine.generate(PROMPT, greedy(5)).token_ids == wanted(5)


def test_streams_run_together() -> None:
    with SyncEngine("fake", **FAKE) as engine:
        streams = [engine.stream([index], greedy(30)) for index in range(8)]
        assert [tokens_of(stream) for stream in streams] == [wanted(30, [index]) for index in range(8)]


def test_many_prompts_take_parameters_of_their_own_and_options() -> None:
    with SyncEngine("fake", **FAKE) as engine:
        params = [greedy(1 + index) for index in range(20)]
        done = engine.generate_many([[index] for index in range(20)], params, progress=False, timeout_s=60.0)
        assert [each.token_ids for each in done] == [wanted(1 + index, [index]) for index in range(20)]
        with pytest.raises(InvalidRequest, match=f"token id {VOCAB_SIZE}"):
            engine.generate_many([[1], [VOCAB_SIZE]], progress=False)


def test_a_loop_that_is_left_ends_its_request() -> None:
    with SyncEngine("fake", **FAKE) as engine:
        for _ in engine.stream(PROMPT, greedy(5000)):
            break
        with engine.stream(PROMPT, greedy(5000)) as stream:
            next(stream)
        engine.generate([1], greedy(2))
        assert list(engine._engine._core.scheduler.requests) == []


@pytest.mark.parametrize("own_thread", [False, True])
def test_ctrl_c_while_reading_ends_the_loop_and_the_engine(own_thread: bool) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with pytest.raises(KeyboardInterrupt), SyncEngine("fake", own_thread=own_thread, **FAKE) as engine:
        for chunk in engine.stream(PROMPT, greedy(5000)):
            if chunk.first_index == 5:
                interrupt = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))
                interrupt.start()
    interrupt.join()


@pytest.mark.parametrize("own_thread", [False, True])
def test_ctrl_c_that_is_caught_ends_the_request_and_not_the_engine(own_thread: bool) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with SyncEngine("fake", own_thread=own_thread, **FAKE) as engine:
        with pytest.raises(KeyboardInterrupt):
            for chunk in engine.stream(PROMPT, greedy(5000)):
                if chunk.first_index == 5:
                    interrupt = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))
                    interrupt.start()
        interrupt.join()
        assert engine.generate([1], greedy(50)).token_ids == wanted(50, [1])
        assert list(engine._engine._core.scheduler.requests) == []


def test_ctrl_c_that_is_caught_ends_what_was_called() -> None:
    main = threading.main_thread().ident
    assert main is not None
    with SyncEngine("fake", **FAKE) as engine:
        for call in (engine.generate, lambda *given: engine.generate_many([given[0]], given[1], progress=False)):
            interrupt = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                call(PROMPT, greedy(5000))
            interrupt.join()
            engine.generate([1], greedy(2))
            assert list(engine._engine._core.scheduler.requests) == []


def test_use_outside_of_with_is_refused() -> None:
    engine = SyncEngine("fake", **FAKE)
    with pytest.raises(EngineClosed, match="not open"):
        engine.generate(PROMPT)
    with engine:
        open_stream = engine.stream(PROMPT, greedy(5000))
        next(open_stream)
    engine.close()
    with pytest.raises(EngineClosed, match="not open"):
        next(open_stream)
    open_stream.abort()
    with pytest.raises(EngineClosed, match="not open"):
        engine.stream(PROMPT)
