"""A worker process with the fake runner, driven by hand over a real socket pair and a real ROUTER."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import zmq

from deepinfer_protocol import (
    AnyMessage,
    Fault,
    Hello,
    MaskBatch,
    Progress,
    Ready,
    RowFlag,
    Shutdown,
    SlotAdmit,
    SlotSampling,
    StepPlan,
    StepResult,
    WorkerConfig,
    decode,
    encode,
    encode_config,
    pack_int32,
    split_columns,
    unpack_int32,
)
from deepinfer_protocol.limits import MAX_CONFIG_BYTES
from doubles.config import worker_config
from doubles.oracle import completion, next_token

REPO: Final = Path(__file__).resolve().parents[2]
EPOCH: Final = 11
VOCAB_SIZE: Final = 97
PROMPT: Final = [5, 6, 7]
GREEDY: Final = SlotSampling()
SAMPLE, WAITS = int(RowFlag.SAMPLE), int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)
PATIENCE_S: Final = 30


def _import_path() -> list[str]:
    """What a worker needs, and nothing of the engine; then wherever this process finds its packages."""
    inherited = os.environ.get("PYTHONPATH")
    return [*(str(REPO / home) for home in ("protocol", "workers")), *([inherited] if inherited else [])]


class WorkerUnderTest:
    """The process, its socket pair, and the engine's end of its wire."""

    def __init__(self, folder: str, config: bytes | None = None, **changes: Any) -> None:
        """`config` goes down the pipe in place of a whole configuration with `changes`."""
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.RCVTIMEO, 1000 * PATIENCE_S)
        endpoint = f"ipc://{folder}/w.sock"
        self.router.bind(endpoint)
        self.pipe, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "deepinfer_workers", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(_import_path())},
            )
        self.pipe.sendall(encode_config(_config(endpoint, **changes)) if config is None else config)

    def started(self) -> WorkerUnderTest:
        assert [type(self.receive()) for _ in range(3)] == [Hello, Progress, Ready]
        return self

    def send(self, message: AnyMessage | bytes) -> None:
        frame = message if isinstance(message, bytes) else encode(message)
        self.router.send_multipart((f"{EPOCH}:0".encode(), frame))

    def receive(self) -> AnyMessage:
        identity, frame = self.router.recv_multipart()
        assert identity == f"{EPOCH}:0".encode()
        return decode(frame)

    def result(self) -> StepResult:
        message = self.receive()
        assert isinstance(message, StepResult), message
        return message

    def exit_code(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)

    def words(self) -> str:
        """What it left on standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.pipe.close()
        self.router.close()
        self.context.term()


def _config(endpoint: str, **changes: Any) -> WorkerConfig:
    return worker_config(endpoint=endpoint, epoch=EPOCH, max_batch_positions=64, **changes)


def plan(
    step_id: int,
    rows: Sequence[tuple[int, int, int]] = (),
    *,
    epoch: int = EPOCH,
    rank: int = 0,
    prompt: Sequence[int] = (),
) -> StepPlan:
    """`rows` are (slot, positions, flags), all of generation 1; `prompt` is admitted to slot 0 first, with a block."""
    columns = [[row[0] for row in rows], [1] * len(rows), [row[1] for row in rows], [row[2] for row in rows]]
    admits = [SlotAdmit(0, 1, 0, 0, pack_int32(list(prompt)), b"", GREEDY)] if prompt else []
    return StepPlan(
        epoch=epoch,
        step_id=step_id,
        rank=rank,
        padded_positions=sum(row[1] for row in rows),
        retired=b"",
        admits=admits,
        appends=pack_int32([0, 0]) if prompt else b"",
        rows=pack_int32([value for column in columns for value in column]),
    )


def prefill(step_id: int = 1, flags: int = SAMPLE) -> StepPlan:
    return plan(step_id, [(0, len(PROMPT), flags)], prompt=PROMPT)


def decode_step(step_id: int, flags: int = SAMPLE) -> StepPlan:
    return plan(step_id, [(0, 1, flags)])


def mask(step_id: int, allowed: int) -> MaskBatch:
    return MaskBatch(EPOCH, step_id, 0, pack_int32([0]), (1 << allowed).to_bytes(16, "little"))


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="di-") as path:  # short enough for a socket's path
        yield path


@pytest.fixture
def worker(folder: str) -> Iterator[WorkerUnderTest]:
    """One that is ready."""
    worker = WorkerUnderTest(folder)
    try:
        yield worker.started()
    finally:
        worker.close()


def exit_of(folder: str, config: bytes, *, then_close: bool = False) -> tuple[int, str]:
    """How a worker ends that gets `config` down its pipe."""
    worker = WorkerUnderTest(folder, config)
    try:
        if then_close:
            worker.pipe.close()
        return worker.exit_code(), worker.words()
    finally:
        worker.close()


# Steps


def test_plans_are_answered_in_order_with_the_tokens_of_their_prompt(worker: WorkerUnderTest) -> None:
    worker.send(prefill(1))
    for step_id in range(2, 6):
        worker.send(decode_step(step_id))
    results = [worker.result() for _ in range(5)]
    assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
    tokens = [token for result in results for token in unpack_int32(result.tokens)]
    assert tokens == completion(PROMPT, GREEDY, len(PROMPT) + 5, frozenset(), VOCAB_SIZE)[0]
    columns = [[column[0] for column in split_columns(result.rows, 4)] for result in results]
    assert columns == [[0, 1, length, 1] for length in range(3, 8)]


def test_an_empty_step_is_answered(worker: WorkerUnderTest) -> None:
    worker.send(plan(1))
    result = worker.result()
    assert (result.step_id, result.rows, result.tokens) == (1, b"", b"")


def test_steps_in_a_queue_take_as_long_as_they_say(folder: str) -> None:
    worker = WorkerUnderTest(folder, fake_step_s=0.02)
    try:
        worker.started()
        started_s = time.monotonic()
        worker.send(prefill(1))
        for step_id in range(2, 6):
            worker.send(decode_step(step_id))
        results = [worker.result() for _ in range(5)]
        assert time.monotonic() - started_s >= 5 * 0.02
        assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
    finally:
        worker.close()


def test_a_row_that_waits_is_sampled_only_once_its_mask_is_there(worker: WorkerUnderTest) -> None:
    worker.send(prefill(1, WAITS))
    assert worker.router.poll(50) == 0
    allowed = (next_token(PROMPT, GREEDY, VOCAB_SIZE) + 40) % VOCAB_SIZE
    worker.send(mask(1, allowed))
    assert list(unpack_int32(worker.result().tokens)) == [allowed]
    worker.send(mask(2, 3))  # before its plan is as good as after it
    worker.send(decode_step(2, WAITS))
    assert list(unpack_int32(worker.result().tokens)) == [3]


def test_host_device_and_idle_times_are_those_of_the_step(worker: WorkerUnderTest) -> None:
    sent_us = now_us()
    worker.send(prefill(1, WAITS))
    for step_id in range(2, 5):
        worker.send(decode_step(step_id))
    worker.send(mask(1, 5))  # the device has all four steps by now
    results = [worker.result() for _ in range(4)]
    answered_us = now_us()
    assert [result.idle_us for result in results[1:]] == [0, 0, 0]
    assert sum(result.device_us for result in results) <= answered_us - sent_us
    assert all(result.host_us <= answered_us - sent_us for result in results)
    assert worker.router.poll(30) == 0
    asked_us = now_us()
    worker.send(decode_step(5))
    assert asked_us - answered_us - 1 <= worker.result().idle_us <= now_us() - sent_us


def now_us() -> int:
    return time.perf_counter_ns() // 1000


# Endings


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (plan(1, epoch=EPOCH + 1), "a message for epoch 12, rank 0"),
        (plan(1, rank=1), "a message for epoch 11, rank 1"),
        (MaskBatch(EPOCH + 1, 1, 0, b"", b""), "a message for epoch 12, rank 0"),
        (Shutdown(EPOCH + 1), "a message for epoch 12, rank 0"),
        (Hello("test", EPOCH, 0, 1), "a worker is not sent Hello"),
        (decode_step(1), "slot 0 does not hold generation 1"),
        (b"\xc1 garbage", "not a message of the worker wire"),
        (b"", "not a message of the worker wire"),
        (encode(prefill())[:-3], "not a message of the worker wire"),
    ],
)
def test_what_is_no_message_for_it_is_a_fault(
    worker: WorkerUnderTest, message: AnyMessage | bytes, reason: str
) -> None:
    worker.send(message)
    fault = worker.receive()
    assert isinstance(fault, Fault)
    assert (fault.code, fault.epoch, fault.rank) == ("protocol", EPOCH, 0)
    assert reason in fault.text
    assert worker.exit_code() == 1


def test_a_message_of_two_frames_is_a_fault(worker: WorkerUnderTest) -> None:
    worker.router.send_multipart((f"{EPOCH}:0".encode(), encode(plan(1)), b""))
    fault = worker.receive()
    assert isinstance(fault, Fault)
    assert (fault.code, fault.text) == ("protocol", "a message of 2 frames")
    assert worker.exit_code() == 1


def test_a_failure_of_the_runner_is_an_internal_fault(worker: WorkerUnderTest) -> None:
    worker.send(prefill(1))
    worker.result()
    strange = SlotAdmit(1, 1, 16, 16, pack_int32([9] * 17), pack_int32([5, 6]), GREEDY)
    worker.send(msgspec.structs.replace(plan(2, [(1, 1, SAMPLE)]), admits=[strange]))
    fault = worker.receive()
    assert isinstance(fault, Fault)
    assert fault.code == "internal"
    assert fault.text.startswith("AssertionError: block 5 holds")
    assert worker.exit_code() == 1


def test_shutdown_comes_after_the_steps_at_hand(worker: WorkerUnderTest) -> None:
    worker.send(prefill(1))
    worker.send(decode_step(2))
    worker.send(decode_step(3))
    worker.send(Shutdown(EPOCH))
    assert [worker.result().step_id for _ in range(3)] == [1, 2, 3]
    assert worker.exit_code() == 0
    assert worker.words() == ""


def test_shutdown_does_not_wait_for_masks_that_never_come(worker: WorkerUnderTest) -> None:
    worker.send(prefill(1, WAITS))
    worker.send(decode_step(2))
    worker.send(Shutdown(EPOCH))
    fault = worker.receive()
    assert isinstance(fault, Fault)
    assert (fault.code, fault.text) == ("protocol", "the end came while step 1 waits for masks")
    assert worker.exit_code() == 1


def test_it_ends_with_its_parents_end_of_the_pipe(worker: WorkerUnderTest) -> None:
    worker.pipe.close()
    assert worker.process.wait(timeout=2) == 0


def test_it_ends_with_the_pipe_while_the_device_waits_for_a_mask(worker: WorkerUnderTest) -> None:
    worker.send(prefill(1, WAITS))
    worker.pipe.close()
    assert worker.process.wait(timeout=2) == 0


def test_an_interrupt_is_not_for_it(worker: WorkerUnderTest) -> None:
    worker.process.send_signal(signal.SIGINT)
    worker.send(prefill(1))
    assert worker.result().step_id == 1
    assert worker.process.poll() is None


# Configurations


def test_a_configuration_that_ends_early_ends_it(folder: str) -> None:
    whole = encode_config(_config("ipc://nowhere"))
    code, words = exit_of(folder, whole[:-1], then_close=True)
    assert code != 0
    assert "the configuration ended early" in words


def test_a_configuration_that_is_announced_too_large_ends_it_unread(folder: str) -> None:
    code, words = exit_of(folder, (MAX_CONFIG_BYTES + 1).to_bytes(4, "little"))
    assert code != 0
    assert f"at most {MAX_CONFIG_BYTES} are allowed" in words


def test_a_configuration_that_is_none_ends_it(folder: str) -> None:
    code, words = exit_of(folder, b"\4\0\0\0\x81\xa1a\x01")
    assert code != 0
    assert "not a worker configuration" in words


def test_a_parent_that_is_gone_already_is_noticed(folder: str) -> None:
    command = [sys.executable, "-P", "-m", "deepinfer_workers"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(_import_path())}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        strangers_child = [*command, str(theirs.fileno()), "1"]
        done = subprocess.run(strangers_child, pass_fds=[theirs.fileno()], env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, timeout=PATIENCE_S).returncode == 2
