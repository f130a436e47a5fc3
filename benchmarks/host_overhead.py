"""What the engine itself costs: 256 streams over one fake worker, whose steps take a given time.

    python benchmarks/host_overhead.py --json

CPU time is of this process, all threads, from the moment when all streams run until the first of them ends, so it
holds scheduling, both directions of the wire, delivery to `async for`, and in the second run the text of a real
tokenizer. `device_idle_share` is the time that the fake device's queue was empty, over the same span.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
import timeit
from array import array
from collections.abc import Sequence
from typing import Any

from deepinfer import Engine, SamplingParams
from deepinfer.metrics import EngineMetrics
from deepinfer.observer import StepReport
from deepinfer.rank import RankStep
from deepinfer.request import Request
from deepinfer.scheduler import Emission, Step
from deepinfer_protocol import SlotSampling, StepPlan, StepResult, encode, pack_int32

NUM_STREAMS = 256
NUM_TOKENS = 400
STEP_S = 0.005


class Span:
    """CPU, wall and worker figures between two moments."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.mark()

    def mark(self) -> None:
        core = self._engine.stats().core
        self.cpu_s, self.wall_s = time.process_time(), time.perf_counter()
        self.steps, self.tokens, self.idle_us = core.num_steps, core.num_tokens, core.idle_us

    def figures(self) -> dict[str, float]:
        core = self._engine.stats().core
        cpu_s, wall_s = time.process_time() - self.cpu_s, time.perf_counter() - self.wall_s
        steps, tokens = core.num_steps - self.steps, core.num_tokens - self.tokens
        return {
            "host_us_per_token": 1e6 * cpu_s / tokens,
            "step_ms": 1e3 * wall_s / steps,
            "device_idle_share": 1e-6 * (core.idle_us - self.idle_us) / wall_s,
            "tokens_per_s": tokens / wall_s,
        }


async def measure(tokenizer: str, step_s: float, num_streams: int, num_tokens: int) -> dict[str, float]:
    settings: dict[str, Any] = {"tokenizer": tokenizer, "fake_vocab_size": 49_152} if tokenizer else {}
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=bool(tokenizer))
    async with Engine(
        "fake", fake_step_s=step_s, max_num_seqs=num_streams, fake_check_stamps=False, **settings
    ) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=2, detokenize=False))
        running = 0
        span: Span | None = None
        figures: dict[str, float] = {}

        async def read(index: int) -> None:
            nonlocal running, span
            is_first = True
            async for chunk in engine.stream([3, 5, 7, index], params):
                if is_first:
                    is_first = False
                    running += 1
                    if running == num_streams:
                        span = Span(engine)
                if chunk.finish_reason is not None and not figures and span is not None:
                    figures.update(span.figures())

        await asyncio.gather(*[read(index) for index in range(num_streams)])
        return figures


def plan_cost(num_streams: int) -> dict[str, float]:
    rows = pack_int32([*range(num_streams), *[1] * num_streams, *[1] * num_streams, *[1] * num_streams])
    plan = StepPlan(1, 1, 0, num_streams, b"", [], b"", rows)
    number = 20_000
    return {
        "plan_bytes": len(encode(plan)),
        "plan_encode_us": 1e6 * min(timeit.repeat(lambda: encode(plan), number=number, repeat=3)) / number,
    }


def metrics_cost(num_streams: int) -> dict[str, float]:
    """What counting a step takes, while the same samples decode and when another comes with each step."""
    requests = [
        Request(f"r{index}", array("i", [1]), [SlotSampling()], max_length=9, stop_ids=frozenset())
        for index in range(num_streams + 1)
    ]
    emissions: list[Emission] = [(request.samples[0], 5, None, None) for request in requests]
    plan = StepPlan(1, 1, 0, num_streams, b"", [], b"", bytes(16 * num_streams))
    step = Step(1, [RankStep(plan, b"", [], [])])
    result = StepResult(1, 1, 0, 20, 5000, 0, b"", b"")
    one, other = (StepReport(step, [result], part, *[0.0] * 6) for part in (emissions[1:], emissions[:-1]))
    metrics = EngineMetrics()

    def count(*reports: StepReport) -> float:
        def step() -> None:
            for report in reports:
                metrics.step_done(report)

        number = 1000
        return 1e6 * min(timeit.repeat(step, number=number, repeat=5)) / number / len(reports)

    return {"metrics_us_per_step": count(one, one), "metrics_us_per_changing_step": count(one, other)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    new_loop = loop_factory(arguments.loop)
    result: dict[str, Any] = {
        "benchmark": "host_overhead",
        "streams": arguments.streams,
        "tokens_per_stream": arguments.tokens,
        "step_ms_asked": arguments.step_ms,
        "loop": arguments.loop,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    for name, tokenizer in (("ids", ""), ("text", arguments.tokenizer)):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            work = measure(tokenizer, arguments.step_ms / 1e3, arguments.streams, arguments.tokens)
            figures = runner.run(work)
        result[f"host_us_per_token_{name}"] = round(figures.pop("host_us_per_token"), 3)
        if name == "ids":
            result |= {key: round(value, 4) for key, value in figures.items()}
    parts = plan_cost(arguments.streams) | metrics_cost(arguments.streams)
    return result | {key: round(value, 3) for key, value in parts.items()}


def loop_factory(name: str) -> Any:
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--step-ms", type=float, default=1e3 * STEP_S)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--tokenizer", default="smollm2-135m")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
