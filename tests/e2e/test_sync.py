"""The engine for scripts without a loop: plain loops and calls, Ctrl-C, and a close that leaves nothing."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepinfer import (
    Engine,
    EngineClosed,
    InvalidRequest,
    LogprobView,
    SamplingParams,
    SyncEngine,
    SyncStream,
    UnknownModel,
    WrongLoop,
)
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


def test_use_after_the_close_is_refused() -> None:
    with SyncEngine("fake", **FAKE) as engine:
        open_stream = engine.stream(PROMPT, greedy(5000))
        next(open_stream)
    engine.close()
    with pytest.raises(EngineClosed, match="not open"):
        next(open_stream)
    open_stream.abort()
    with pytest.raises(EngineClosed, match="not open"):
        engine.stream(PROMPT)
    with pytest.raises(EngineClosed, match="not open"), engine:
        pass


def test_what_asyncio_users_have_is_here_too() -> None:
    with SyncEngine("fake", **FAKE) as engine:
        stream = engine.stream(PROMPT, greedy(5000), request_id="mine")
        next(stream)
        engine.abort("mine")
        assert list(stream)[-1].finish_reason == "abort"
        assert (stream.num_prompt_tokens, stream.num_cached_tokens, stream.num_preemptions) == (3, 0, 0)
        assert engine.stats().scheduler.num_running == 0
        assert engine.generate([]) == engine.chat([]) == []


def test_what_only_an_open_engine_knows_is_refused_before_it_is_open() -> None:
    engine = SyncEngine("fake", **FAKE)
    for ask in (engine.metrics, engine.stats, lambda: engine.limits, lambda: engine.has_chat_template):
        with pytest.raises(EngineClosed, match="not opened"):
            ask()


def test_a_call_from_the_engines_own_thread_is_refused() -> None:
    """It would wait for itself: while the engine opens, and when it is open."""
    refusals: list[str] = []

    def use(line: str = "") -> None:
        for call in (lambda: engine.generate(PROMPT, greedy(1)), engine.close):
            try:
                call()
            except WrongLoop as error:
                refusals.append(str(error))

    class Telling(Engine):
        async def open(self, on_progress: object = None) -> None:
            use()
            await super().open()

    engine = SyncEngine("fake", **FAKE)
    engine._session.engine.__class__ = Telling
    with engine:
        engine._session.call(_run, use)
        assert len(refusals) == 4 and "own thread" in refusals[0]
        assert engine.generate(PROMPT, greedy(3)).token_ids == wanted(3)


def test_ctrl_c_during_the_start_is_quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left that asyncio would complain of."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(self: Engine, tell: object) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)

    monkeypatch.setattr(Engine, "_find_model", interrupt)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            SyncEngine("fake", **FAKE).generate(PROMPT)
        gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


# ---- without `with`


def test_an_engine_opens_at_its_first_use_and_closes_when_it_is_forgotten() -> None:
    engine = SyncEngine("fake", **FAKE)
    assert engine._engine.worker_pids == []
    assert engine.generate(PROMPT, greedy(5)).token_ids == wanted(5)
    with engine:  # it is open already, and ends here
        assert tokens_of(engine.stream(PROMPT, greedy(5))) == wanted(5)
    engine = SyncEngine("fake", **FAKE)
    stream = engine.stream(PROMPT, greedy(5000))
    next(stream)
    del stream, engine


def test_an_engine_that_cannot_open_says_why_each_time() -> None:
    engine = SyncEngine("no-such-model", **FAKE)
    with pytest.raises(UnknownModel):
        engine.generate(PROMPT)
    with pytest.raises(EngineClosed):
        engine.generate(PROMPT)


def test_an_engine_forgotten_in_its_own_thread_closes_in_another() -> None:
    """A collector may run anywhere."""
    engine = SyncEngine("fake", **FAKE)
    engine.generate(PROMPT, greedy(1))
    session, finalizer = engine._session, engine._finalizer
    session.call(_run, finalizer)
    for closing in [thread for thread in threading.enumerate() if thread.name == "deepinfer-close"]:
        closing.join()
    assert session._is_closed and engine._engine.worker_pids == []


async def _run(callback: Callable[[], object]) -> None:
    callback()


AT_EXIT = """
import sys, warnings
warnings.simplefilter("error")
from deepinfer import SamplingParams, SyncEngine
engine = SyncEngine("fake", fake_vocab_size=97)
print(engine.generate([5, 3, 8], SamplingParams(max_tokens=3, temperature=0)).token_ids, engine._engine.worker_pids[0])
if sys.argv[1] == "fork":
    import os
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_a_program_that_forgets_its_engine_ends_and_leaves_nothing(runtime_home: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT, how], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    tokens, _, pid = done.stdout.splitlines()[0].rpartition(" ")
    assert tokens == str(wanted(3)) and not Path(f"/proc/{pid}").exists()
    assert list(runtime_home.iterdir()) == []


# ---- in vLLM's words


def test_a_list_of_prompts_gives_a_list() -> None:
    with SyncEngine("fake", **FAKE) as engine:
        done = engine.generate([[1], [2]], greedy(3))
        assert [each.token_ids for each in done] == [wanted(3, [1]), wanted(3, [2])]
        done = engine.generate([{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}], [greedy(3), greedy(4)])
        assert [each.token_ids for each in done] == [wanted(3, [1]), wanted(4, [2])]
        one = engine.generate({"prompt_token_ids": PROMPT, "multi_modal_data": None}, sampling_params=greedy(3))
        assert one.token_ids == wanted(3)
        named: Any = engine.generate(prompts=[PROMPT], sampling_params=greedy(3), use_tqdm=False)
        assert [each.token_ids for each in named] == [wanted(3)]
        assert tokens_of(engine.stream(PROMPT, sampling_params=greedy(3), rid="mine", lora_request=None)) == wanted(3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": [{"role": "user", "content": "x"}]}, "prompt: messages came: chat"),
        ({"prompt": {"text": "x"}}, "prompt: a mapping came, with neither"),
        ({"prompt": {"prompt_token_ids": [1], "prompt_embeds": b"x"}}, "prompt_embeds: text and token ids"),
        ({"prompt": PROMPT, "lora_request": "adapter"}, "lora_request: adapters are not served"),
        ({"prompt": PROMPT, "rid": "a", "request_id": "b"}, "rid: it is request_id, which has another value"),
        ({"prompt": [[1], [2]], "params": [greedy(1)]}, "params: 1 came for 2 prompts"),
        ({"prompt": PROMPT, "params": [greedy(1)]}, "params: a list came"),
    ],
)
def test_what_is_not_served_is_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with SyncEngine("fake", **FAKE) as engine, pytest.raises(InvalidRequest, match=words):
        engine.generate(**arguments)


def test_an_argument_that_nobody_has_is_a_mistake_of_the_program() -> None:
    with SyncEngine("fake", **FAKE) as engine, pytest.raises(TypeError, match="no argument 'nonsense'"):
        engine.generate(PROMPT, nonsense=1)


def test_a_completion_has_what_vllm_users_read() -> None:
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=1, stop_token_ids=[wanted(3)[2]])
    with SyncEngine("fake", **FAKE) as engine:
        [output] = engine.generate([PROMPT], params)
        again = engine.generate(PROMPT, params)
    assert (output.prompt, output.prompt_token_ids, output.finished) == (None, PROMPT, True)
    [sample] = output.outputs
    assert (sample.index, sample.text, sample.token_ids) == (0, "", wanted(3))
    assert (sample.finish_reason, sample.stop_reason) == ("stop", wanted(3)[2])
    assert sample.cumulative_logprob == 0.0 and sample.logprobs is not None
    assert [set(entry) for entry in sample.logprobs] == [{token} for token in wanted(3)]
    assert sample.logprobs[0][wanted(1)[0]] == LogprobView(0.0, 1, None)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1:] == [{3: LogprobView(-1.0, 1, None)}, {8: LogprobView(-2.0, 2, None)}]
    assert msgspec.to_builtins(output)["samples"][0]["stop_reason"] == wanted(3)[2]
    assert output.samples == again.samples and output.prompt_logprobs == again.prompt_logprobs
