"""The worker's shell over a device with a queue of its own: the next step is launched while the last one runs."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import zmq

from deepinfer_protocol import Fault, MaskBatch, Ready, Shutdown, StepPlan, StepResult, decode, encode
from deepinfer_workers.fake import FakeRunner
from deepinfer_workers.runner import StepOutput, StepTimes
from deepinfer_workers.worker import Worker
from doubles.config import worker_config
from doubles.driver import plan

PATIENCE_MS = 20_000


class HeldStep:
    """Is over when the test says so."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.finish: SimpleQueue[Exception | None] = SimpleQueue()

    def wait(self) -> tuple[StepOutput, StepTimes | None]:
        error = self.finish.get(timeout=PATIENCE_MS / 1000)
        if error is not None:
            raise error
        return StepOutput(b"", b""), StepTimes(device_us=100 + self.step_id, idle_us=self.step_id)


class QueuedRunner:
    """A `Runner` whose launches return at once."""

    is_queued = True

    def __init__(self) -> None:
        self.launched: SimpleQueue[HeldStep] = SimpleQueue()
        self.error: Exception | None = None
        """What the next launch raises."""
        self.is_closed = False
        self._fake = FakeRunner(worker_config())

    def load(self, report: Callable[[int, int], None]) -> Ready:
        return self._fake.load(report)

    def build(self, plan: StepPlan) -> StepPlan:
        return plan

    def launch(self, batch: StepPlan, wait_for_masks: Callable[[], MaskBatch]) -> HeldStep:
        if self.error is not None:
            raise self.error
        step = HeldStep(batch.step_id)
        self.launched.put(step)
        return step

    def close(self) -> None:
        self.is_closed = True


class Shell:
    """A `Worker` in a thread, and the engine's end of its wire."""

    def __init__(self, folder: str) -> None:
        self.runner = QueuedRunner()
        self.error: BaseException | None = None
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        endpoint = f"ipc://{folder}/w.sock"
        self._router.bind(endpoint)
        self._worker = Worker(worker_config(endpoint=endpoint))
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        for _ in range(3):  # hello, progress, ready
            self.receive()

    def _serve(self) -> None:
        try:
            self._worker.serve(self.runner)
        except RuntimeError as error:
            self.error = error
        finally:
            self._worker.close()

    def send(self, step_id: int) -> None:
        frame = encode(plan_of(step_id))
        self._router.send_multipart((b"0:0", frame))

    def receive(self, patience_ms: int = PATIENCE_MS) -> StepResult | Fault | None:
        if not self._router.poll(patience_ms):
            return None
        message = decode(self._router.recv_multipart()[1])
        return message if isinstance(message, StepResult | Fault) else None

    def launched(self) -> HeldStep:
        return self.runner.launched.get(timeout=PATIENCE_MS / 1000)

    def stop(self) -> None:
        self._router.send_multipart((b"0:0", encode(Shutdown(epoch=0))))

    def close(self) -> None:
        self.thread.join(PATIENCE_MS / 1000)
        assert self.runner.is_closed  # whatever ended it
        self._router.close()
        self._context.term()


def plan_of(step_id: int) -> StepPlan:
    empty = plan()
    return StepPlan(0, step_id, 0, 0, empty.retired, empty.admits, empty.appends, empty.rows)


@pytest.fixture
def shell() -> Iterator[Shell]:
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(folder)
        yield shell
        shell.close()


def test_a_step_is_launched_while_the_one_before_runs_and_results_keep_their_order(shell: Shell) -> None:
    shell.send(1)
    shell.send(2)
    first, second = shell.launched(), shell.launched()  # neither is over
    second.finish.put(None)
    first.finish.put(None)
    results = [shell.receive(), shell.receive()]
    assert [(r.step_id, r.device_us, r.idle_us) for r in results if isinstance(r, StepResult)] == [
        (1, 101, 1),
        (2, 102, 2),
    ]
    shell.stop()


def test_what_is_queued_is_answered_before_the_end(shell: Shell) -> None:
    shell.send(1)
    shell.send(2)
    shell.stop()
    for _ in range(2):
        shell.launched().finish.put(None)
    results = [shell.receive(), shell.receive()]
    assert [result.step_id for result in results if isinstance(result, StepResult)] == [1, 2]
    shell.thread.join(PATIENCE_MS / 1000)
    assert not shell.thread.is_alive()


def test_an_error_of_the_device_ends_the_worker(shell: Shell) -> None:
    shell.send(1)
    shell.launched().finish.put(RuntimeError("the device fell off the bus"))
    shell.thread.join(PATIENCE_MS / 1000)
    assert not shell.thread.is_alive()
    assert "fell off" in str(shell.error)


def test_an_error_of_a_launch_ends_the_worker_while_the_step_before_runs(shell: Shell) -> None:
    shell.send(1)
    running = shell.launched()
    shell.runner.error = RuntimeError("no such kernel")
    shell.send(2)
    shell.thread.join(PATIENCE_MS / 1000)
    assert not shell.thread.is_alive()
    assert "no such kernel" in str(shell.error)
    running.finish.put(None)  # its result is for nobody, and disturbs nobody
