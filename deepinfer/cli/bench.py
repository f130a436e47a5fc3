"""`deepinfer bench`: loads on one engine, as a table or as lines of JSON."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer.bench import DraftReport, Load, Percentiles, Recorder, Report, TimeSplit, check_load, measure
from deepinfer.cli.common import Model, Settings, engine_settings, in_words, run_async, say, starting
from deepinfer.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.observer import Observer
from deepinfer.trace import Trace


def bench(
    model: Model,
    streams: Annotated[str, typer.Option(help="Requests at once: one load for each of these numbers.")] = "1,16,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens of a prompt.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    requests: Annotated[int, typer.Option(min=0, help="Requests of a load; 0: one a stream, at least 4.")] = 0,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second that arrive (Poisson); 0: as many as fit.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the prompts and arrivals.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a load, a line each.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace to this file.")] = None,
    settings: Settings = None,
) -> None:
    """Tokens a second, waiting times, and where the time of a step goes."""
    with in_words("bench"), ExitStack() as stack:
        loads = [
            Load(
                num_streams=num_streams,
                num_requests=requests,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                rate=rate,
                seed=seed,
            )
            for num_streams in _numbers(streams)
        ]
        config = Engine(model, **engine_settings(settings)).config
        for load in loads:
            check_load(load, config)
        recorder = Recorder()
        observers: list[Observer] = [recorder, *([stack.enter_context(Trace(trace))] if trace is not None else [])]
        engine = Engine(model, observers=observers, **engine_settings(settings))
        reports = run_async(_measure_all(engine, recorder, loads, json))
        if not json:
            Console().print(_table(reports))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError("streams", f"{text!r}: numbers of at least 1 with commas between them are expected")
    return numbers


async def _measure_all(engine: Engine, recorder: Recorder, loads: list[Load], is_json: bool) -> list[Report]:
    with starting() as tell:
        await engine.open(tell)
    try:
        reports = []
        for load in loads:
            report = await measure(engine, recorder, load)
            reports.append(report)
            if is_json:
                print(msgspec.json.encode(report).decode(), flush=True)
            else:
                say(f"{load.num_streams} streams: {report.tokens_per_s} tokens/s")
        return reports
    finally:
        await engine.aclose()


def _table(reports: list[Report]) -> Table:
    """A column a load."""
    first = reports[0]
    arrivals = f", {first.rate} requests/s arrive" if first.rate else ""
    table = Table(
        title=f"{escape(first.model)}: prompts of {first.prompt_tokens} tokens{arrivals}",
        caption="Of times and sequences: p50 / p90 / p99.",
    )
    table.add_column("streams")
    for report in reports:
        table.add_column(str(report.streams), justify="right")
    for name, cells in _rows(reports).items():
        table.add_row(name, *cells)
    return table


def _rows(reports: list[Report]) -> dict[str, list[str]]:
    def plain(field: str) -> list[str]:
        return [f"{getattr(report, field):g}" for report in reports]

    def spread(field: str) -> list[str]:
        return [_spread(getattr(report, field)) for report in reports]

    rows = {
        "tokens/s": plain("tokens_per_s"),
        "requests/s": plain("requests_per_s"),
        "time to first token, ms": spread("ttft_ms"),
        "between tokens, ms": spread("inter_token_ms"),
        "whole request, ms": spread("e2e_ms"),
        "in the queue, ms": spread("queue_ms"),
        "steps": plain("steps"),
        "sequences in a step": spread("batch_rows"),
        "device a step, ms": spread("step_device_ms"),
        "device idle before a step, ms": spread("step_idle_ms"),
        "device idle share": plain("device_idle_share"),
        "worker host a step, ms": spread("step_host_ms"),
        "scheduler a step, ms": spread("step_scheduler_ms"),
        "prompt tokens cached": plain("cached_tokens"),
        "preemptions": plain("preemptions"),
        "scheduler / host / forward / drafts / idle, %": [_split(report.time_split) for report in reports],
    }
    return rows | _draft_rows(reports) if any(report.drafts for report in reports) else rows


def _split(split: TimeSplit) -> str:
    shares = split.scheduler, split.host, split.forward, split.drafts, split.idle
    return " / ".join(f"{100 * share:.0f}" for share in shares)


def _draft_rows(reports: list[Report]) -> dict[str, list[str]]:
    """What drafts brought, and below it how well that was foreseen."""

    def told(cell: Callable[[DraftReport], str]) -> list[str]:
        return ["" if report.drafts is None else cell(report.drafts) for report in reports]

    def places(field: str) -> list[str]:
        return told(lambda drafts: " / ".join(f"{100 * share:.0f}" for share in getattr(drafts, field)))

    return {
        "tokens a forward": told(lambda drafts: f"{drafts.tokens_per_forward:.2f}"),
        "drafts a step, ms": [_spread(report.step_draft_ms) for report in reports],
        "drafts verified": told(lambda drafts: str(drafts.verified)),
        "drafts accepted": told(lambda drafts: str(drafts.accepted)),
        "verified at once, from 0 on": told(lambda drafts: " / ".join(map(str, drafts.verify_lengths))),
        "accepted by place where reached, %": places("acceptance"),
        "accepted by place where verified, %": places("cumulative_acceptance"),
        "as the confidences foresaw, %": places("predicted"),
    }


def _spread(values: Percentiles) -> str:
    return " / ".join(f"{value:.3g}" for value in (values.p50, values.p90, values.p99))
