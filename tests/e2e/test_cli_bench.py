"""The bench: what its report holds, and that the figures are those of what was done."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from deepinfer import ConfigError, Engine, EngineConfig
from deepinfer.bench import Load, Percentiles, Recorder, Report, check_load, measure
from deepinfer.cli import app
from doubles.command import run_command
from doubles.reading import FAKE

pytestmark = pytest.mark.usefixtures("runtime_home")

FAST = ["bench", "fake", "--set", "fake_step_s=0.001", "--max-tokens", "8", "--prompt-tokens", "5"]


def test_json_is_one_report_a_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = run_command(*FAST, "--streams", "1,8", "--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    reports = [msgspec.json.decode(line, type=Report) for line in done.stdout.splitlines()]
    assert [(report.streams, report.requests, report.generated_tokens) for report in reports] == [
        (1, 4, 32),
        (8, 8, 64),
    ]
    for report, line in zip(reports, done.stdout.splitlines(), strict=True):
        assert set(json.loads(line)) == set(Report.__struct_fields__)
        check_plausible(report)
    tokens = [event["args"]["tokens"] for event in json.loads(trace.read_text()) if event["name"].startswith("step ")]
    assert sum(tokens) == 32 + 64 + 2 * 4, "both loads, and what warmed them up"


def check_plausible(report: Report) -> None:
    assert report.tokens_per_s == pytest.approx(report.generated_tokens / report.duration_s, rel=0.01)
    assert report.requests_per_s == pytest.approx(report.requests / report.duration_s, rel=0.01)
    assert 0 <= report.device_idle_share <= 1
    assert 0 < report.ttft_ms.p50 <= report.e2e_ms.p99 <= 1e3 * report.duration_s + 1
    assert report.duration_s >= 0.001 * report.steps, "a fake step ends a millisecond after the one before, or later"
    assert 0 < report.step_device_ms.p50 < 1000  # less than that millisecond where the step was late to begin
    assert report.batch_rows.p99 <= report.streams
    for value in msgspec.to_builtins(report).values():
        if isinstance(value, dict) and "p50" in value:
            assert 0 <= value["p50"] <= value["p90"] <= value["p99"]


def test_the_table_has_a_column_a_load() -> None:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*FAST, "--streams", "2,4"])
    assert done.exit_code == 0, done.output
    for row in ("time to first token, ms", "between tokens, ms", "device idle share", "preemptions"):
        assert row in done.stdout
    assert "2 streams:" in done.stderr and "4 streams:" in done.stderr


@pytest.mark.parametrize("streams", ["", "0", "1,,2", "many"])
def test_what_is_no_list_of_numbers_is_refused(streams: str) -> None:
    done = CliRunner().invoke(app, [*FAST, "--streams", streams])
    assert done.exit_code == 2 and "deepinfer bench: streams: " in done.stderr


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_streams": 0}, "num_streams: Expected `int` >= 1"),
        ({"num_streams": 10**6}, "num_streams: Expected `int` <= 65536"),
        ({"num_streams": 1, "num_requests": -1}, "num_requests: Expected `int` >= 0"),
        ({"num_streams": 1, "max_tokens": 0}, "max_tokens: Expected `int` >= 1"),
        ({"num_streams": 1, "rate": -1.0}, "rate: Expected `float` >= 0"),
        ({"num_streams": 5000}, "num_streams: 5000 requests come at once, max_queued_requests is 4096"),
    ],
)
def test_a_load_out_of_its_bounds_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_load(Load(**fields), EngineConfig())
    check_load(Load(num_streams=5000, num_requests=4), EngineConfig())


def test_loads_are_checked_before_anything_starts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = CliRunner().invoke(app, [*FAST, "--streams", "1,5000", "--trace", str(trace)])
    assert done.exit_code == 2 and "deepinfer bench: num_streams: 5000 requests" in done.stderr
    assert not trace.exists()


@pytest.mark.usefixtures("no_tasks_left")
async def test_requests_that_arrive_by_a_rate_wait_for_nobody_but_the_cap() -> None:
    recorder = Recorder()
    async with Engine("fake", observers=[recorder], **FAKE) as engine:
        load = Load(num_streams=50, num_requests=30, prompt_tokens=4, max_tokens=3, rate=200.0, seed=1)
        report = await measure(engine, recorder, load)
    assert report.requests == 30 and report.generated_tokens == 90
    assert 0.05 < report.duration_s < 5, "30 arrivals at 200 a second, give or take"
    assert len(recorder.queue_s) == 30 and sum(recorder.rows) >= 90


@pytest.mark.usefixtures("no_tasks_left")
async def test_prompts_of_a_load_are_no_prefix_of_each_other() -> None:
    recorder = Recorder()
    async with Engine("fake", observers=[recorder], block_size=4, fake_vocab_size=1000) as engine:
        loads = [Load(num_streams=n, prompt_tokens=20, max_tokens=2) for n in (1, 4)]
        reports = [await measure(engine, recorder, load) for load in loads]
    assert [report.cached_tokens for report in reports] == [0, 0]


def percentiles(values: list[float]) -> dict[str, Any]:
    return msgspec.to_builtins(Percentiles.of(values))  # type: ignore[no-any-return]


def test_percentiles_are_values_that_came() -> None:
    assert percentiles([float(value) for value in range(1, 101)]) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99}
    assert percentiles([7.0]) == {"mean": 7, "p50": 7, "p90": 7, "p99": 7}
    assert not any(percentiles([]).values()) and not math.isnan(Percentiles.of([]).mean)


@pytest.mark.usefixtures("no_tasks_left")
async def test_what_became_of_drafts_is_that_of_the_load_alone() -> None:
    recorder = Recorder()
    async with Engine("fake", observers=[recorder], fake_num_drafts=4, max_num_seqs=8) as engine:
        loads = [Load(num_streams=n, num_requests=8, prompt_tokens=20, max_tokens=41) for n in (1, 4)]
        first, second = [await measure(engine, recorder, load) for load in loads]
        counted = engine.stats().core.drafts
    assert first.drafts is not None and second.drafts is not None
    for drafts in (first.drafts, second.drafts):
        # The first token is the prompt's; a sample may end within the drafts of its last forward.
        num_tokens = 8 * 40
        forwards = sum(drafts.verify_lengths)
        assert num_tokens <= forwards + drafts.accepted < num_tokens + 8 * 4
        assert drafts.tokens_per_forward == pytest.approx((forwards + drafts.accepted) / forwards, abs=1e-4)
        assert 1.5 < drafts.tokens_per_forward < 5
        assert drafts.verified == sum(length * times for length, times in enumerate(drafts.verify_lengths))
        assert len(drafts.acceptance) == len(drafts.cumulative_acceptance) == len(drafts.predicted) == 4
        assert all(0 < share < 1 for share in drafts.acceptance)
        assert drafts.cumulative_acceptance == sorted(drafts.cumulative_acceptance, reverse=True)
        assert max(drafts.calibration_error) < 0.25, "a fake draft is right as often as it says itself"
    warm = counted.num_verified - first.drafts.verified - second.drafts.verified
    assert 0 <= warm <= 2 * 4 * 4, "what warms up is no part of a load"


def test_the_table_says_what_drafts_brought_where_there_are_any() -> None:
    runner = CliRunner(env={"COLUMNS": "160"})
    done = runner.invoke(app, [*FAST, "--streams", "2", "--set", "fake_num_drafts=3"])
    assert done.exit_code == 0, done.output
    rows = ("tokens a forward", "verified at once, from 0 on", "accepted by place where reached, %")
    assert all(row in done.stdout for row in (*rows, "as the confidences foresaw, %", "drafts a step, ms"))
    without = runner.invoke(app, [*FAST, "--streams", "2"])
    assert without.exit_code == 0 and not any(row in without.stdout for row in rows)


@pytest.mark.usefixtures("no_tasks_left")
async def test_a_report_without_drafts_has_none() -> None:
    recorder = Recorder()
    async with Engine("fake", observers=[recorder], **FAKE) as engine:
        report = await measure(engine, recorder, Load(num_streams=2, max_tokens=4))
    assert report.drafts is None
    split = msgspec.to_builtins(report.time_split)
    assert split.keys() == {"scheduler", "host", "forward", "drafts", "idle"} and split["drafts"] == 0
    assert all(0 <= share <= 1.05 for share in split.values())
