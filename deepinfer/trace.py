"""What an engine and its workers did when, as a file for chrome://tracing and ui.perfetto.dev.

    with Trace("steps.json") as trace:
        async with Engine("smollm2-135m", observers=[trace]) as engine: ...

One lane for the engine's host (plan, send, apply, emit), and for every worker one for its host (build) and one for
its device (the step). Requests are spans of their own. The engine's times are measured. A worker says how long it
took and not when, so its lanes are laid out from that:

- a build begins when its plan was sent, or when the build before it ended;
- a device's first step ends when its result was here; every later one begins `idle_us` after the one before it ended.
  A worker does not count the time between two of its steps in which it handles results, so the chain falls behind: a
  step that would end more than `MAX_LAG_S` before its result was here is moved up to there. None is ever moved back,
  so no two steps overlap; a step may seem to end later than its result came, by as much as the first result took to
  arrive.

The file is written every few hundred events, and is whole after each write, however the process ends.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from deepinfer.errors import ConfigError
from deepinfer.observer import StepReport
from deepinfer.request import Request

MAX_LAG_S: Final = 0.002
_MAX_BUFFERED_EVENTS: Final = 400
_END: Final = b"\n]\n"
_ENGINE_PID: Final = 0  # in the trace, workers come after it; these are no processes of the system
_HOST, _DEVICE = 1, 2  # lanes

Event = dict[str, Any]


class Trace:
    """An `Observer` that writes a Chrome trace. Serves one engine."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Makes the file, or empties it. Raises `ConfigError` when it cannot be written."""
        self.path = Path(path)
        self.failure: OSError | None = None
        """Why the trace ends early, if it does: a full disk does not end the engine."""
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError("trace", f"{self.path} cannot be written: {error.strerror}") from None
        self._size = 0  # without the end
        self._events: list[Event] = []
        self._lanes: list[_WorkerLanes] = []
        self._write(b"[")
        self._name_lane(_ENGINE_PID, "engine", _HOST, "host")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left. Idempotent; nothing is taken in afterwards."""
        self.flush()
        self._file.close()

    # ---- Observer

    def step_done(self, report: StepReport) -> None:
        step_id = report.step.step_id
        host = (
            ("schedule", report.planning_s, report.planned_s),
            ("send", report.planned_s, report.sent_s),
            ("apply", report.received_s, report.applied_s),
            ("emit", report.applied_s, report.emitted_s),
        )
        for name, begin_s, end_s in host:
            self._span(_ENGINE_PID, _HOST, name, begin_s, end_s, {"step": step_id})
        while len(self._lanes) < len(report.results):
            self._add_worker()
        for lanes, result, rank in zip(self._lanes, report.results, report.step.ranks, strict=True):
            what = {"step": step_id, "rows": len(rank.plan.rows) // 16, "tokens": len(rank.sampled)}
            build, device = lanes.place(report, 1e-6 * result.host_us, 1e-6 * result.idle_us, 1e-6 * result.device_us)
            self._span(lanes.pid, _HOST, "build", *build, {"step": step_id})
            self._span(lanes.pid, _DEVICE, f"step {step_id}", *device, {**what, "device_us": result.device_us})
        self._flush_if_full()

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        started_s = request.arrival_s + request.queued_s(now_s)
        first_s = now_s if request.first_token_s is None else max(request.first_token_s, started_s)
        num_tokens = sum(seq.num_output for seq in request.samples)
        what: Event = {"prompt_tokens": len(request.prompt), "tokens": num_tokens, "finish_reason": reason}
        if request.traceparent is not None:
            what["traceparent"] = request.traceparent
        parts = (("queue", request.arrival_s, started_s), ("prefill", started_s, first_s), ("decode", first_s, now_s))
        common = {"cat": "request", "id": request.request_id, "pid": _ENGINE_PID, "tid": _HOST}
        events = [{**common, "name": "request", "ph": "b", "ts": 1e6 * request.arrival_s, "args": what}]
        for name, begin_s, end_s in parts:  # of events at one time, viewers take the first as the outer one
            events.append({**common, "name": name, "ph": "b", "ts": 1e6 * begin_s})
            events.append({**common, "name": name, "ph": "e", "ts": 1e6 * max(end_s, begin_s)})
        events.append({**common, "name": "request", "ph": "e", "ts": 1e6 * max(now_s, request.arrival_s)})
        self._events += events
        self._flush_if_full()

    def request_refused(self, code: str) -> None:
        """Not in the trace: it took no time."""

    # ---- events

    def _add_worker(self) -> None:
        lanes = _WorkerLanes(len(self._lanes) + 1)
        name = f"worker {len(self._lanes)}"
        self._lanes.append(lanes)
        self._name_lane(lanes.pid, name, _HOST, "host")
        self._name_lane(lanes.pid, name, _DEVICE, "device")

    def _name_lane(self, pid: int, process: str, tid: int, thread: str) -> None:
        for what, name in (("process_name", process), ("thread_name", thread)):
            self._events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})

    def _span(self, pid: int, tid: int, name: str, begin_s: float, end_s: float, what: Event) -> None:
        begin_us, duration_us = 1e6 * begin_s, 1e6 * (end_s - begin_s)
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin_us, "dur": duration_us, "args": what}
        self._events.append(event)

    # ---- the file

    def _flush_if_full(self) -> None:
        if len(self._events) >= _MAX_BUFFERED_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if self._events and not self._file.closed:
            lines = b",\n".join([msgspec.json.encode(event) for event in self._events])
            self._write((b"\n" if self._size == 1 else b",\n") + lines)
        self._events.clear()

    def _write(self, text: bytes) -> None:
        """In place of the file's end, and the end again, in one call."""
        if self.failure is not None:
            return
        try:
            os.pwrite(self._file.fileno(), text + _END, self._size)
            self._size += len(text)
        except OSError as error:
            self.failure = error
            with contextlib.suppress(OSError):  # as whole as the disk lets it be
                self._file.truncate(self._size)
                os.pwrite(self._file.fileno(), _END, self._size)


class _WorkerLanes:
    """Where one worker's lanes have got to. Times are the engine's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._built_s = 0.0
        self._computed_s: float | None = None

    def place(
        self, report: StepReport, host_s: float, idle_s: float, device_s: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """When the step was built and when it was computed, each from and to."""
        build_s = max(report.sent_s, self._built_s)
        self._built_s = build_s + host_s
        if self._computed_s is None:
            begin_s = report.received_s - device_s
        else:
            begin_s = max(self._computed_s + idle_s, report.received_s - MAX_LAG_S - device_s)
        self._computed_s = begin_s + device_s
        return (build_s, self._built_s), (begin_s, self._computed_s)
