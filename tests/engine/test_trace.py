"""A trace is whole JSON at every moment, its lanes never overlap, and it shows what was done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from deepinfer import ConfigError, Engine
from deepinfer.observer import StepReport
from deepinfer.scheduler import Step
from deepinfer.trace import MAX_LAG_S, Trace
from deepinfer_protocol import StepResult
from doubles.bench import Bench
from doubles.reading import FAKE, greedy

Events = list[dict[str, Any]]


def read(path: Path) -> Events:
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    return events


def lanes(events: Events) -> dict[tuple[int, int], Events]:
    """Spans by process and thread."""
    found: dict[tuple[int, int], Events] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return dict(found)


def check_no_overlap(spans: Events) -> None:
    end_us = 0.0
    for span in sorted(spans, key=lambda span: (span["ts"], span["dur"])):
        assert span["dur"] >= 0 and span["ts"] >= end_us - 1e-3, span  # floats of a microsecond
        end_us = span["ts"] + span["dur"]


@pytest.mark.usefixtures("no_tasks_left")
async def test_a_trace_shows_every_step_in_every_lane(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        async with Engine("fake", observers=[trace], num_workers=2, **FAKE) as engine:
            await engine.generate_many([[index] for index in range(40)], greedy(30), progress=False)
            num_steps, num_tokens = engine.stats().core.num_steps, engine.stats().core.num_tokens
    events = read(path)
    by_lane = lanes(events)
    assert sorted(by_lane) == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
    for spans in by_lane.values():
        check_no_overlap(spans)
    host = [span["name"] for span in by_lane[0, 1]]
    assert {name: host.count(name) for name in set(host)} == dict.fromkeys(
        ("schedule", "send", "apply", "emit"), num_steps
    )
    devices = by_lane[1, 2] + by_lane[2, 2]
    assert len(devices) == 2 * num_steps and sum(span["args"]["tokens"] for span in devices) == num_tokens == 1200
    assert [span["args"]["step"] for span in by_lane[1, 2]] == sorted({span["args"]["step"] for span in devices})
    assert by_lane[1, 2] == sorted(by_lane[1, 2], key=lambda span: span["ts"])
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert names == {(0, "engine"), (1, "worker 0"), (2, "worker 1")}


@pytest.mark.usefixtures("no_tasks_left")
async def test_a_request_is_a_span_of_parts_that_meet(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        async with Engine("fake", observers=[trace], **FAKE) as engine:
            await engine.generate([1, 2, 3], greedy(9), request_id="mine")
    spans = {event["name"] + event["ph"]: event for event in read(path) if event.get("id") == "mine"}
    assert len(spans) == 8
    assert spans["requestb"]["args"] == {"prompt_tokens": 3, "tokens": 9, "finish_reason": "length"}
    order = ["requestb", "queueb", "queuee", "prefillb", "prefille", "decodeb", "decodee", "requeste"]
    times = [spans[name]["ts"] for name in order]
    assert times == sorted(times) and times[-1] > times[0]
    assert list(spans) == order, "parts lie inside of the whole also where two events have one time"
    device = [event for event in read(path) if event["name"].startswith("step ")]
    assert times[0] <= device[0]["ts"] < times[-1] and times[0] < device[-1]["ts"] < times[-1]


def report(bench: Bench, received_s: float, device_us: int, idle_us: int) -> StepReport:
    """A step of one row whose answer came at `received_s`."""
    step = bench.scheduler.schedule(0.0)
    assert isinstance(step, Step)
    answer = bench._answer(0, step)
    emissions = bench.scheduler.apply(step, [answer], 0.0)
    result = StepResult(0, step.step_id, 0, 50, device_us, idle_us, answer.rows, answer.tokens)
    return StepReport(step, [result], emissions, *[received_s - 0.01] * 3, *[received_s] * 3)


def test_the_device_lane_is_chained_and_catches_up(tmp_path: Path) -> None:
    bench = Bench()
    bench.add([1], num_new=100)
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        trace.step_done(report(bench, 10.0, device_us=4000, idle_us=7_000_000))
        trace.step_done(report(bench, 10.006, device_us=4000, idle_us=1000))
        trace.step_done(report(bench, 10.005, device_us=4000, idle_us=0))  # the first one's result was slow
        trace.step_done(report(bench, 20.0, device_us=4000, idle_us=0))  # the whole process was stopped
    spans = lanes(read(path))[1, 2]
    check_no_overlap(spans)
    ends_s = [1e-6 * (span["ts"] + span["dur"]) for span in spans]
    assert ends_s == pytest.approx([10.0, 10.005, 10.009, 20.0 - MAX_LAG_S])
    assert spans[0]["ts"] == pytest.approx(1e6 * 9.996)


def test_the_file_is_whole_after_every_write(tmp_path: Path) -> None:
    bench = Bench()
    bench.add([1], num_new=600)
    path = tmp_path / "trace.json"
    trace = Trace(path)
    assert read(path) == []
    sizes = set()
    for index in range(500):
        trace.step_done(report(bench, 1.0 + index, device_us=10, idle_us=0))
        sizes.add(len(read(path)))
        assert len(trace._events) < 400
    assert len(sizes) > 5
    trace.close()
    trace.close()
    assert len(lanes(read(path))[1, 2]) == 500


KILLED = """
import asyncio, os, signal, sys
from deepinfer import Engine, SamplingParams
from deepinfer.trace import Trace
async def main():
    async with Engine("fake", fake_step_s=0.0005, observers=[Trace(sys.argv[1])]) as engine:
        async for chunk in engine.stream([1, 2, 3], SamplingParams(max_tokens=5000, temperature=0.0)):
            if chunk.first_index > 300:
                os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_a_killed_process_leaves_a_whole_trace(tmp_path: Path, runtime_home: Path) -> None:
    path = tmp_path / "trace.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    steps = lanes(read(path))[1, 2]
    check_no_overlap(steps)
    assert len(steps) > 100


def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .*nowhere.* cannot be written: No such file"):
        Trace(tmp_path / "nowhere" / "trace.json")


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add([1], num_new=50)
    trace = Trace(tmp_path / "trace.json")
    trace.step_done(report(bench, 1.0, device_us=10, idle_us=0))
    trace.flush()
    held = len(read(trace.path))

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        trace.step_done(report(bench, 2.0, device_us=10, idle_us=0))
        trace.flush()
    trace.step_done(report(bench, 3.0, device_us=10, idle_us=0))
    trace.close()
    assert trace.failure is not None and trace.failure.errno == 28
    assert held > 0 and trace.path.read_text().startswith("[\n")
