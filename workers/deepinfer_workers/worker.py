"""The shell of a worker process: plans in, results out, one thread for the host and one for the device.

    host thread     receive, decode, build batch N+1      send result N
    device thread              launch batch N  ───────────────┘

A device with a queue of its own is given step N+1 while it computes step N: then a third thread waits for the results.

Knows nothing of models: a `Runner` computes the steps.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import zmq

from deepinfer_protocol import (
    AnyMessage,
    Fault,
    Hello,
    MaskBatch,
    Progress,
    ProtocolError,
    Ready,
    Shutdown,
    StepPlan,
    StepResult,
    WorkerConfig,
    decode,
    encode,
    wire_version,
)
from deepinfer_protocol.limits import INT32_MAX, MAX_MESSAGE_BYTES, MAX_TEXT_CHARACTERS
from deepinfer_workers.runner import PendingStep, Runner, StepOutput, StepTimes, WorkerFault

_SEND_TIMEOUT_MS = 2000


class Worker:
    """One rank. `serve` returns when the engine says so; a fault is told to the engine and raised."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{config.epoch}:{config.rank}".encode())
        self._socket.setsockopt(zmq.LINGER, _SEND_TIMEOUT_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(config.endpoint)
        self._send(Hello(version=wire_version(), epoch=config.epoch, rank=config.rank, pid=os.getpid()))

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def fault(self, code: str, text: str) -> None:
        """The last word before the process ends."""
        config = self._config
        text = text[:MAX_TEXT_CHARACTERS].encode(errors="replace").decode()  # file names can hold what UTF-8 cannot
        self._send(Fault(epoch=config.epoch, rank=config.rank, code=code, text=text))

    def serve(self, runner: Runner[Any]) -> None:
        """Load, then answer plans. Raises `WorkerFault`, `ProtocolError`, or what the runner raises."""
        device = _Device(runner, self._config)
        try:
            self._send(device.load(self._report))
            self._serve_plans(runner, device)
        finally:
            device.close()
            runner.close()

    def _serve_plans(self, runner: Runner[Any], device: _Device) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(device.wakeup.fileno(), zmq.POLLIN)
        while True:
            poller.poll()
            for frame in device.take_frames():
                self._socket.send(frame)
            if not self._receive(runner, device):
                device.stop()
                for frame in device.take_frames():
                    self._socket.send(frame)
                return

    def _receive(self, runner: Runner[Any], device: _Device) -> bool:
        """Take in what has arrived. False after `Shutdown`."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            arrived = time.perf_counter_ns()
            if len(frames) != 1:
                raise ProtocolError(f"a message of {len(frames)} frames")
            message = decode(frames[0])
            if isinstance(message, Shutdown):
                self._check(message.epoch, self._config.rank)
                return False
            if isinstance(message, StepPlan):
                self._check(message.epoch, message.rank)
                batch = runner.build(message)
                device.put(_Job(message.step_id, batch, (time.perf_counter_ns() - arrived) // 1000))
            elif isinstance(message, MaskBatch):
                self._check(message.epoch, message.rank)
                device.masks.put(message)
            else:
                raise ProtocolError(f"a worker is not sent {type(message).__name__}")

    def _check(self, epoch: int, rank: int) -> None:
        if (epoch, rank) != (self._config.epoch, self._config.rank):
            raise ProtocolError(f"a message for epoch {epoch}, rank {rank}")

    def _report(self, done: int, total: int) -> None:
        self._send(Progress(epoch=self._config.epoch, rank=self._config.rank, done=done, total=total))

    def _send(self, message: AnyMessage) -> None:
        self._socket.send(encode(message))


class _Job:
    """A batch on its way to the device."""

    __slots__ = ("arrived_ns", "batch", "host_us", "step_id")

    def __init__(self, step_id: int, batch: Any, host_us: int) -> None:
        self.step_id = step_id
        self.batch = batch
        self.host_us = host_us
        self.arrived_ns = time.perf_counter_ns()


class _Device:
    """The device's queue and the thread that empties it. Results come back as frames, announced by `wakeup`."""

    def __init__(self, runner: Runner[Any], config: WorkerConfig) -> None:
        self.masks: SimpleQueue[MaskBatch | None] = SimpleQueue()
        """`None`: no more will come."""
        self.wakeup, self._bell = socket.socketpair()
        self.wakeup.setblocking(False)
        self._bell.setblocking(False)
        self._runner = runner
        self._config = config
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._launched: SimpleQueue[tuple[_Job, PendingStep] | None] = SimpleQueue()
        self._frames: deque[bytes] = deque()
        self._error: BaseException | None = None
        self._loaded: SimpleQueue[Ready | BaseException] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def load(self, report: Callable[[int, int], None]) -> Ready:
        """Load on the thread that will compute, and leave it waiting for steps. Raises what the runner raises.

        Libraries keep what they need by thread: a second one that computes would share the cores with the first one's
        team of helpers (OpenMP then lets both sleep after every loop), and have CUDA handles of its own. The host
        thread waits, so `report` may use what is the host's.
        """
        self._start(partial(self._load_and_run, report))
        loaded = self._loaded.get()
        if isinstance(loaded, BaseException):
            raise loaded
        return loaded

    def put(self, job: _Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Finish what is queued; a step whose masks have not come cannot be."""
        self._jobs.put(None)
        self.masks.put(None)
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """The end, also after an error; a step that hangs in the device is left to the end of the process."""
        self._jobs.put(None)
        self.masks.put(None)
        self._launched.put(None)
        self.wakeup.close()
        self._bell.close()

    def take_frames(self) -> list[bytes]:
        """Results that are ready. Raises what the runner raised."""
        try:
            self.wakeup.recv(4096)
        except BlockingIOError:
            pass
        if self._error is not None:
            raise self._error
        frames: list[bytes] = []
        while self._frames:
            frames.append(self._frames.popleft())
        return frames

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guard, args=(target,), name="device", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _load_and_run(self, report: Callable[[int, int], None]) -> None:
        try:
            ready = self._runner.load(report)
        except BaseException as error:
            self._loaded.put(error)
            return
        if self._runner.is_queued:
            self._start(self._collect_all)
        self._loaded.put(ready)
        if self._runner.is_queued:
            self._launch_all()
        else:
            self._compute_all()

    def _guard(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # told to the engine by the host thread
            self._error = error
            self._launched.put(None)
            self._ring()

    def _compute_all(self) -> None:
        """A device that computes within `launch`: its times are taken here."""
        ended_ns = time.perf_counter_ns()
        while (job := self._jobs.get()) is not None:
            idle_ns = max(job.arrived_ns - ended_ns, 0)
            started_ns = time.perf_counter_ns()
            output, times = self._launch(job).wait()
            ended_ns = time.perf_counter_ns()
            self._finish(job, output, times or StepTimes((ended_ns - started_ns) // 1000, idle_ns // 1000))

    def _launch_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._launched.put((job, self._launch(job)))
        self._launched.put(None)

    def _collect_all(self) -> None:
        while (launched := self._launched.get()) is not None:
            job, pending = launched
            output, times = pending.wait()
            assert times is not None  # a device with a queue has a clock
            self._finish(job, output, times)

    def _launch(self, job: _Job) -> PendingStep:
        return self._runner.launch(job.batch, partial(self._masks_for, job.step_id))

    def _finish(self, job: _Job, output: StepOutput, times: StepTimes) -> None:
        result = StepResult(
            epoch=self._config.epoch,
            step_id=job.step_id,
            rank=self._config.rank,
            host_us=job.host_us,
            device_us=min(times.device_us, INT32_MAX),
            idle_us=min(times.idle_us, INT32_MAX),
            rows=output.rows,
            tokens=output.tokens,
            logprob_ids=output.logprob_ids,
            logprobs=output.logprobs,
            logprob_ranks=output.logprob_ranks,
            prompt_logprob_ids=output.prompt_logprob_ids,
            prompt_logprobs=output.prompt_logprobs,
            prompt_logprob_ranks=output.prompt_logprob_ranks,
            num_verified=output.num_verified,
            survivals=output.survivals,
            predicted=output.predicted,
            draft_us=min(output.draft_us, INT32_MAX),
            draft_ids=output.draft_ids,
        )
        self._frames.append(encode(result))
        self._ring()

    def _masks_for(self, step_id: int) -> MaskBatch:
        masks = self.masks.get()
        if masks is None:
            raise ProtocolError(f"the end came while step {step_id} waits for masks")
        if masks.step_id != step_id:
            raise ProtocolError(f"step {step_id} waits for masks, those of step {masks.step_id} came")
        return masks

    def _ring(self) -> None:
        try:
            self._bell.send(b"\0")
        except OSError:
            pass  # it rings already, or nobody listens any more


__all__ = ["Worker", "WorkerFault"]
