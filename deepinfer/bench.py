"""Measures a running engine under a load: how long readers wait, and where the steps' time goes.

Readers' times are taken where `async for` gets the chunk. Knows nothing of terminals; `deepinfer bench` prints.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import time
from array import array
from collections.abc import Iterable, Iterator
from math import ceil
from typing import TYPE_CHECKING, Annotated, Final, Self

import msgspec
from msgspec import Meta, Struct

from deepinfer.config import EngineConfig
from deepinfer.draft_counts import DraftCounts
from deepinfer.errors import ConfigError
from deepinfer.many import run_all
from deepinfer.observer import StepReport
from deepinfer.request import Request
from deepinfer_protocol import VERSION, SamplingParams

if TYPE_CHECKING:
    from deepinfer.engine import Engine

MIN_REQUESTS: Final = 4
"""A point that is not told how many requests it has sends one a stream, and at least these."""


class Load(Struct, frozen=True, kw_only=True):
    """What is asked of the engine: random prompts, greedy answers of a fixed length."""

    num_streams: Annotated[int, Meta(ge=1, le=65_536)]
    """Requests at once."""
    num_requests: Annotated[int, Meta(ge=0)] = 0
    """In all; 0: one a stream, and at least `MIN_REQUESTS`."""
    prompt_tokens: Annotated[int, Meta(ge=1)] = 40
    max_tokens: Annotated[int, Meta(ge=1)] = 64
    rate: Annotated[float, Meta(ge=0)] = 0.0
    """Requests a second that arrive, as a Poisson process, while fewer than `num_streams` are open; 0: at once."""
    seed: int = 0

    @property
    def num_total(self) -> int:
        return self.num_requests or max(self.num_streams, MIN_REQUESTS)


def check_load(load: Load, config: EngineConfig) -> None:
    """Raises `ConfigError` for figures out of their bounds: making a struct checks nothing."""
    try:
        msgspec.convert(msgspec.structs.asdict(load), Load)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise ConfigError(place.strip("`"), reason) from None
    at_once = min(load.num_streams, load.num_total)
    if not load.rate and at_once > config.max_queued_requests:
        limit = f"max_queued_requests is {config.max_queued_requests}"
        raise ConfigError("num_streams", f"{at_once} requests come at once, {limit}")


class Percentiles(Struct, frozen=True):
    """Of a set of values, in the unit that the field's name says; all 0 of none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> Self:
        """Of `values` times `scale`."""
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        shares = [ordered[ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99)]
        return cls(*[round(scale * value, 4) for value in (sum(ordered) / len(ordered), *shares)])


class DraftReport(Struct, frozen=True, kw_only=True):
    """What became of drafts, and how well that was foreseen. Lists are by place in the block."""

    tokens_per_forward: float
    """Committed by one forward of a decoding sequence."""
    verified: int
    accepted: int
    acceptance: list[float]
    """Of the drafts that were reached, all before them being accepted."""
    cumulative_acceptance: list[float]
    """Of the drafts that were verified."""
    verify_lengths: list[int]
    """By the number of drafts that a sequence verified in a step, from 0 on: how often."""
    predicted: list[float]
    """As `cumulative_acceptance`, by the model's confidences."""
    calibration_error: list[float]
    """Between both."""

    @classmethod
    def of(cls, counts: DraftCounts) -> Self:
        """Shares of nothing are 0."""
        return cls(
            tokens_per_forward=round(counts.tokens_per_step, 4),
            verified=counts.num_verified,
            accepted=counts.num_accepted,
            acceptance=_rounded(counts.acceptance),
            cumulative_acceptance=_rounded(counts.cumulative_acceptance),
            verify_lengths=counts.verify_lengths,
            predicted=_rounded(place.predicted for place in counts.calibration),
            calibration_error=_rounded(place.error for place in counts.calibration),
        )


class TimeSplit(Struct, frozen=True, kw_only=True):
    """Shares of a load's duration. What one part does for a step runs beside what another does for the next."""

    scheduler: float
    """The engine plans steps and applies their results."""
    host: float
    """Workers decode plans and build tensors."""
    forward: float
    """Devices compute, but for drafts."""
    drafts: float
    """Devices make drafts."""
    idle: float
    """Devices have nothing to do."""


class Report(Struct, frozen=True, kw_only=True):
    """What one load brought. Times of steps are the slowest rank's."""

    model: str
    accelerator: str
    machine: str
    version: str
    """Of DeepInfer."""
    streams: int
    rate: float
    requests: int
    prompt_tokens: int
    """Of each request."""
    generated_tokens: int
    """Of all requests."""
    duration_s: float
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles
    """From a request's arrival to its first chunk."""
    inter_token_ms: Percentiles
    """Between two tokens of a stream; a chunk of several counts as evenly spaced."""
    e2e_ms: Percentiles
    """From a request's arrival to its last chunk."""
    queue_ms: Percentiles
    """From the submission to the first step."""
    steps: int
    step_scheduler_ms: Percentiles
    """The engine plans the step and applies its results."""
    step_host_ms: Percentiles
    """The worker decodes the plan and builds tensors."""
    step_device_ms: Percentiles
    step_draft_ms: Percentiles
    """Of that: making drafts."""
    step_idle_ms: Percentiles
    """The device's queue was empty before the step."""
    device_idle_share: float
    """Of the duration."""
    time_split: TimeSplit
    batch_rows: Percentiles
    """Sequences in a step."""
    cached_tokens: int
    """Prompt tokens that prefix hits spared."""
    preemptions: int
    drafts: DraftReport | None
    """`None`: the engine makes none."""


class Recorder:
    """An `Observer` that keeps every step's figures, while it is asked to."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.scheduler_s, self.host_us, self.device_us, self.idle_us = array("d"), array("d"), array("d"), array("d")
        self.draft_us, self.rows, self.queue_s = array("d"), array("d"), array("d")
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    def step_done(self, report: StepReport) -> None:
        self.scheduler_s.append(report.planned_s - report.planning_s + report.applied_s - report.received_s)
        self.host_us.append(max(result.host_us for result in report.results))
        self.device_us.append(max(result.device_us for result in report.results))
        self.draft_us.append(max(result.draft_us for result in report.results))
        self.idle_us.append(min(result.idle_us for result in report.results))
        self.rows.append(report.num_rows)

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        self.queue_s.append(request.queued_s(now_s))
        self.num_cached_tokens += request.num_cached_tokens
        self.num_preemptions += request.num_preemptions

    def request_refused(self, code: str) -> None:
        """The bench raises it."""


class _Reader:
    """What the readers of one load saw."""

    def __init__(self) -> None:
        self.ttft_s, self.gaps_s, self.e2e_s = array("d"), array("d"), array("d")
        self.num_tokens = 0

    async def read(self, engine: Engine, prompt: list[int], params: SamplingParams, arrival_s: float) -> None:
        last_s = 0.0
        async with engine.stream(prompt, params) as stream:
            async for chunk in stream:
                now_s, count = time.perf_counter(), len(chunk.token_ids)
                if not last_s:
                    self.ttft_s.append(now_s - arrival_s)
                else:
                    self.gaps_s.extend([(now_s - last_s) / count] * count if count else ())
                last_s = now_s
                self.num_tokens += count
        self.e2e_s.append(last_s - arrival_s)


async def measure(engine: Engine, recorder: Recorder, load: Load) -> Report:
    """Put `load` on an engine that `recorder` observes and that nobody else uses.

    Raises `ConfigError` for a load out of its bounds, and what a stream raises.
    """
    check_load(load, engine.config)
    await _warm_up(engine, load)
    recorder.clear()
    before = engine.stats().core.drafts.copy()
    reader = _Reader()
    begun_s = time.perf_counter()
    await _send_all(engine, load, reader)
    duration_s = time.perf_counter() - begun_s
    drafts = engine.stats().core.drafts.since(before)
    return Report(
        model=engine.config.model,
        accelerator=engine.config.accelerator,
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        version=VERSION,
        streams=load.num_streams,
        rate=load.rate,
        requests=load.num_total,
        prompt_tokens=load.prompt_tokens,
        generated_tokens=reader.num_tokens,
        duration_s=round(duration_s, 6),  # of a short load, too, the rates follow from it
        tokens_per_s=round(reader.num_tokens / duration_s, 2),
        requests_per_s=round(load.num_total / duration_s, 3),
        ttft_ms=Percentiles.of(reader.ttft_s, 1e3),
        inter_token_ms=Percentiles.of(reader.gaps_s, 1e3),
        e2e_ms=Percentiles.of(reader.e2e_s, 1e3),
        queue_ms=Percentiles.of(recorder.queue_s, 1e3),
        steps=len(recorder.rows),
        step_scheduler_ms=Percentiles.of(recorder.scheduler_s, 1e3),
        step_host_ms=Percentiles.of(recorder.host_us, 1e-3),
        step_device_ms=Percentiles.of(recorder.device_us, 1e-3),
        step_draft_ms=Percentiles.of(recorder.draft_us, 1e-3),
        step_idle_ms=Percentiles.of(recorder.idle_us[1:], 1e-3),  # before the first there was nothing to do
        device_idle_share=round(1e-6 * sum(recorder.idle_us[1:]) / duration_s, 4),
        time_split=_split(recorder, duration_s),
        batch_rows=Percentiles.of(recorder.rows),
        cached_tokens=recorder.num_cached_tokens,
        preemptions=recorder.num_preemptions,
        drafts=DraftReport.of(drafts) if drafts.num_steps else None,
    )


def _split(recorder: Recorder, duration_s: float) -> TimeSplit:
    def share(seconds: float) -> float:
        return round(seconds / duration_s, 4)

    draft_s = 1e-6 * sum(recorder.draft_us)
    return TimeSplit(
        scheduler=share(sum(recorder.scheduler_s)),
        host=share(1e-6 * sum(recorder.host_us)),
        forward=share(1e-6 * sum(recorder.device_us) - draft_s),
        drafts=share(draft_s),
        idle=share(1e-6 * sum(recorder.idle_us[1:])),
    )


def _rounded(shares: Iterable[float]) -> list[float]:
    return [round(share, 4) for share in shares]


async def _warm_up(engine: Engine, load: Load) -> None:
    """What only a first request costs, a device's first launches for instance, is not measured."""
    prompt = _prompt(engine, load, random.Random(f"warm-up {load}"))
    await engine.generate(prompt, _params(min(load.max_tokens, 4)))


async def _send_all(engine: Engine, load: Load, reader: _Reader) -> None:
    requests = _requests(engine, load)
    params = _params(load.max_tokens)

    async def work() -> None:
        for prompt, arrival_s in requests:
            if load.rate:  # in the past, when every stream was in use
                await asyncio.sleep(max(arrival_s - time.perf_counter(), 0.0))
            await reader.read(engine, prompt, params, arrival_s if load.rate else time.perf_counter())

    await run_all([work() for _ in range(min(load.num_streams, load.num_total))])


def _requests(engine: Engine, load: Load) -> Iterator[tuple[list[int], float]]:
    """Prompts and when they arrive."""
    drawn = random.Random(f"{load}")  # loads of one run share no prompt
    arrival_s = time.perf_counter()
    for _ in range(load.num_total):
        prompt = _prompt(engine, load, drawn)
        arrival_s += drawn.expovariate(load.rate) if load.rate else 0.0
        yield prompt, arrival_s


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _prompt(engine: Engine, load: Load, drawn: random.Random) -> list[int]:
    """Random tokens: nothing of it is in the prefix cache."""
    return [drawn.randrange(engine.limits.vocab_size) for _ in range(load.prompt_tokens)]
