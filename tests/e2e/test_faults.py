"""Workers that die, hang, drift or cannot start, and engines that are killed: typed errors in time, nothing left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from deepinfer import ConfigError, Engine, WorkerLost, WorkerStartError
from deepinfer.link import LinkListener
from deepinfer.supervisor import WorkerProcess
from deepinfer_protocol import AnyMessage, RowFlag, StepPlan, StepResult, pack_int32, unpack_int32
from doubles.driver import DEFAULTS
from doubles.reading import FAKE, PROMPT, greedy, tokens_of

both_homes = pytest.mark.parametrize("own_thread", [False, True], ids=["on the caller's loop", "in its own thread"])

pytestmark = pytest.mark.usefixtures("no_tasks_left")


# ---- a worker that is lost


@both_homes
async def test_a_killed_worker_ends_every_stream_within_a_second(own_thread: bool) -> None:
    async with Engine("fake", own_thread=own_thread, max_num_seqs=32, **FAKE) as engine:
        streams = [engine.stream([index], greedy(1000)) for index in range(64)]
        await anext(streams[0])
        reads = [asyncio.ensure_future(tokens_of(stream)) for stream in streams]
        killed_s = time.monotonic()
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert time.monotonic() - killed_s < 1.0
        assert [type(result) for result in results] == [WorkerLost] * 64
        assert "worker 0 was killed by SIGKILL" in str(results[0])
        with pytest.raises(WorkerLost):
            await engine.generate(PROMPT)


async def test_a_worker_that_dies_idle_is_noticed() -> None:
    async with Engine("fake", **FAKE) as engine:
        failed = asyncio.Event()
        engine._core.on_failure = failed.set
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        async with asyncio.timeout(1.0):
            await failed.wait()
        assert engine.worker_pids == []
        with pytest.raises(WorkerLost):
            await engine.generate(PROMPT)


async def test_a_stopped_worker_is_lost_when_its_step_takes_too_long() -> None:
    async with Engine("fake", step_timeout_s=0.5, **FAKE) as engine:
        stream = engine.stream(PROMPT, greedy(1000))
        await anext(stream)
        os.kill(engine.worker_pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"step \d+ took more than 0.5 s on ranks \[0\]"):
            await tokens_of(stream)


async def test_steps_within_their_time_lose_no_worker() -> None:
    """Two are in flight: the second waits for the first, and its time starts only then."""
    async with Engine("fake", fake_step_s=0.2, step_timeout_s=0.35) as engine:
        assert len(await tokens_of(engine.stream(PROMPT, greedy(4)))) == 4


async def test_one_lost_rank_is_a_lost_group() -> None:
    async with Engine("fake", num_workers=2, **FAKE) as engine:
        streams = [engine.stream([index], greedy(1000)) for index in range(8)]
        await anext(streams[0])
        first, second = engine.worker_pids
        other = os.pidfd_open(first)
        os.kill(second, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(WorkerLost, match="worker 1 was killed"):
                await tokens_of(stream)
        assert select.select([other], [], [], 2.0)[0], "the other rank lives on"
        os.close(other)


async def test_a_worker_that_ends_without_a_word_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its end to the news: a worker's last message gets its time, and no more. The best of a few tries."""
    monkeypatch.setattr("deepinfer.supervisor.encode_config", lambda config: bytes(64))  # it ends with exit code 1
    loop = asyncio.get_running_loop()

    async def notice_s() -> float:
        ended: asyncio.Future[float] = loop.create_future()
        noticed: asyncio.Future[tuple[float, str]] = loop.create_future()
        worker = WorkerProcess(DEFAULTS, lambda rank, words: noticed.set_result((time.monotonic(), words)))
        pidfd = os.pidfd_open(worker.pid)

        def end() -> None:
            loop.remove_reader(pidfd)
            ended.set_result(time.monotonic())

        loop.add_reader(pidfd, end)
        noticed_s, words = await noticed
        os.close(pidfd)
        assert words == "ended with exit code 1"
        return noticed_s - ended.result()

    assert min([await notice_s() for _ in range(3)]) < 0.05


async def test_the_last_words_of_a_worker_are_the_error_s() -> None:
    async with Engine("fake", **FAKE) as engine:
        stream = engine.stream(PROMPT, greedy(1000))
        await anext(stream)
        rows = pack_int32([77, 1, 1, int(RowFlag.SAMPLE)])
        epoch = engine._group.epoch
        engine._group.link.send(0, StepPlan(epoch, 10**6, 0, 1, b"", [], b"", rows))
        with pytest.raises(WorkerLost, match="slot 77 does not hold generation 1"):
            await tokens_of(stream)


# ---- a worker whose answers are wrong


class Meddler:
    """Stands between the link and the core, and changes what passes."""

    def __init__(self, core: LinkListener, meddle: Callable[[StepResult], list[StepResult]]) -> None:
        self.on_lost = core.on_lost
        self._core = core
        self._meddle = meddle

    def on_message(self, rank: int, message: AnyMessage) -> None:
        assert isinstance(message, StepResult)
        for result in self._meddle(message):
            self._core.on_message(rank, result)


def longer(result: StepResult) -> list[StepResult]:
    rows = unpack_int32(result.rows)
    rows[2 * len(rows) // 4] += 1
    return [msgspec.structs.replace(result, rows=pack_int32(rows))]


def fewer(result: StepResult) -> list[StepResult]:
    return [msgspec.structs.replace(result, rows=b"", tokens=b"")]


def of_an_unknown_step(result: StepResult) -> list[StepResult]:
    return [msgspec.structs.replace(result, step_id=result.step_id + 1000)]


def twice(result: StepResult) -> list[StepResult]:
    return [result, result]


@pytest.mark.parametrize(
    ("meddle", "words"),
    [
        (longer, r"rank 0, row 0: the worker's state has drifted: length \d+ expected, \d+ came"),
        (fewer, r"rank 0: 1 rows were planned, 0 came back"),
        (of_an_unknown_step, r"step \d+ of rank 0 was due, step 1\d{3} of rank 0 came"),
        (twice, r"step \d+ of rank 0 was due, step \d+ of rank 0 came|which was not asked"),
    ],
)
async def test_a_wrong_answer_is_a_lost_worker(meddle: Callable[[StepResult], list[StepResult]], words: str) -> None:
    async with Engine("fake", **FAKE) as engine:
        stream = engine.stream(PROMPT, greedy(1000))
        await anext(stream)
        engine._group.link.listen(Meddler(engine._core, meddle))
        with pytest.raises(WorkerLost, match=words):
            await tokens_of(stream)


# ---- a worker that cannot start


async def test_a_python_that_is_not_there_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerStartError, match="/no/such/python cannot be started"):
        await Engine.start("fake", num_workers=2)


@both_homes
async def test_a_worker_that_ends_at_once_is_a_start_error(monkeypatch: pytest.MonkeyPatch, own_thread: bool) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerStartError, match="worker 0 ended with exit code 1 before it was ready"):
        await Engine.start("fake", own_thread=own_thread)


async def test_a_worker_that_takes_too_long_to_start_is_a_start_error() -> None:
    with pytest.raises(WorkerStartError, match=r"not ready within 0.001 s"):
        await Engine.start("fake", start_timeout_s=0.001)


async def test_a_setting_that_the_model_cannot_have_is_named_with_its_sum() -> None:
    with pytest.raises(ConfigError, match=r"9 is below window \+ drafts \+ 1 = 9 \+ 0 \+ 1 = 10") as refused:
        await Engine.start("fake", fake_replay_tokens=9, prefill_keep_tokens=9)
    assert refused.value.field == "prefill_keep_tokens"
    for allowed in ({"prefill_keep_tokens": 10}, {"prefill_keep_tokens": 9, "prefill_truncation": "off"}):
        engine = await Engine.start("fake", fake_replay_tokens=9, **allowed)
        await engine.aclose()


# ---- an engine that is killed

HOST = """
import asyncio, sys, time
from deepinfer import Engine

async def main():
    engine = Engine("fake", num_workers=2)
    opening = asyncio.ensure_future(engine.open())
    while not hasattr(engine, "_group"):
        await asyncio.sleep(0)
    print(*engine.worker_pids, flush=True)
    if sys.argv[1] == "starting":
        time.sleep(60)
    await opening
    async with engine.stream([1, 2]) as stream:
        await anext(stream)
        print("runs", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await engine.aclose()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_host(stage: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with an engine of two workers at `stage`, and descriptors of the workers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", HOST, stage]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert host.stdout is not None
    workers = [os.pidfd_open(int(pid)) for pid in host.stdout.readline().split()]
    assert len(workers) == 2
    if stage == "running":
        assert host.stdout.readline() == "runs\n"
    return host, workers


def wait_for_end(workers: list[int]) -> None:
    """Of every worker, within two seconds."""
    for worker in workers:
        assert select.select([worker], [], [], 2.0)[0], "a worker outlives its engine"
        os.close(worker)


def folders(runtime_home: Path) -> list[Path]:
    return list(runtime_home.iterdir())


@pytest.mark.parametrize("stage", ["starting", "running"])
async def test_no_worker_outlives_a_killed_engine_and_its_folder_is_swept(stage: str, runtime_home: Path) -> None:
    host, workers = start_host(stage)
    host.kill()
    wait_for_end(workers)
    host.communicate()
    (stale,) = folders(runtime_home)
    async with Engine("fake"):
        assert stale not in folders(runtime_home)


def test_ctrl_c_reaches_the_engine_and_not_its_workers(nothing_left: None) -> None:
    host, workers = start_host("running")
    os.killpg(host.pid, signal.SIGINT)
    wait_for_end(workers)
    host.communicate(timeout=10)
    assert host.returncode == 130


async def test_a_worker_ignores_ctrl_c() -> None:
    async with Engine("fake", **FAKE) as engine:
        os.kill(engine.worker_pids[0], signal.SIGINT)
        assert len(await tokens_of(engine.stream(PROMPT, greedy(20)))) == 20
