"""Speculation: tokens a second and committed tokens, by batch, with no drafts, fixed drafts and scheduled ones.

    python benchmarks/speculation.py --json                                  # a CPU: measured costs, simulated batches
    python benchmarks/speculation.py --json --accelerator nvidia --device    # a GPU: timed runs

On a device every way of drafting has an engine of its own; all are asked in turn, `--runs` times, with the same
prompts, and a figure is the median of its runs. Timed are the steps in which all sequences of the batch decode.
`ratio` is that of scheduled drafts to the best of all other ways in the same run, again the median: what scheduling
costs or gains.

Without `--device` nothing is timed but steps by themselves: the worker's cost table, and blocks recorded from one run
that verifies everything; a simulator puts both together with the engine's own policies. `match` are requests with a
seed of their own, whose tokens are those of a run without drafts; `reject` those without, by rejection sampling.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.draft_simulator import Block, simulate
from deepinfer import Engine, SamplingParams
from deepinfer.budget import DraftPolicy, FixedDrafts, NoDrafts, ScheduledDrafts
from deepinfer.costs import CostTable
from deepinfer.observer import StepReport
from deepinfer.request import Request
from deepinfer_protocol import split_columns, unpack_int32

LONGEST: Final = 5
FORMS: Final = ("match", "reject")
TEMPERATURE: Final = 0.7
WARM_UP_TOKENS: Final = 24
TOPICS: Final = (
    "the sea",
    "a lost dog",
    "bread",
    "the moon",
    "old books",
    "a garden",
    "music",
    "winter",
    "a train",
    "tea",
)
ASKED: Final = (
    "Tell me a short story about {}.", "Explain {} to a child.", "Write a letter about {}.",
    "Give me three tips about {}.", "What do you think of {}?", "Describe {} in a few sentences.",
)  # fmt: skip


class Way(NamedTuple):
    """One way of drafting."""

    name: str
    num_drafts: int
    is_scheduled: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"num_drafts": self.num_drafts, "scheduled_drafts": self.is_scheduled}


WAYS: Final = (
    Way("none", 0),
    *(Way(f"fixed {number}", number) for number in range(1, LONGEST + 1)),
    Way("scheduled", LONGEST, is_scheduled=True),
)


def prompts(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Chats; the same for the same numbers."""
    drawn = random.Random(1000 * seed + count)
    pairs = [(asked, topic) for asked in ASKED for topic in TOPICS]
    drawn.shuffle(pairs)
    texts = [pairs[index % len(pairs)][0].format(pairs[index % len(pairs)][1]) for index in range(count)]
    return [[{"role": "user", "content": text}] for text in texts]


def params(form: str, index: int, max_tokens: int) -> SamplingParams:
    """Of one length for all: a batch stays what it is until its end."""
    seed = index if form == "match" else None
    return SamplingParams(temperature=TEMPERATURE, seq_seed=seed, max_tokens=max_tokens, ignore_eos=True)


# ---- timed runs


class Timed(NamedTuple):
    tokens_per_s: float
    tokens_per_step: float


class FullSteps:
    """An `Observer` that times the steps which say something for every sequence of a batch, until one has ended.

    So neither prompts are in the time nor what is left of a batch when its first answers have ended.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, batch: int) -> None:
        """Of so many sequences. What was counted before is forgotten."""
        self._batch = batch
        self._num_steps = self._num_tokens = 0
        self._took_s = 0.0
        self.begin_batch()

    def begin_batch(self) -> None:
        """The next one of the same size."""
        self._last_s: float | None = None
        self._has_ended = False

    def step_done(self, report: StepReport) -> None:
        counts = [count for result in report.results for count in split_columns(result.rows, 4)[3]]
        if self._has_ended or len(counts) != self._batch or not all(counts):
            self._last_s = None
            return
        if self._last_s is not None:
            self._num_steps += 1
            self._num_tokens += sum(counts)
            self._took_s += report.received_s - self._last_s
        self._last_s = report.received_s

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        self._has_ended = True

    def request_refused(self, code: str) -> None:
        """`generate_many` raises it."""

    def timed(self) -> Timed:
        return Timed(self._num_tokens / self._took_s, self._num_tokens / self._num_steps / self._batch)


class Timing(NamedTuple):
    """An engine that drafts in one way, and what watches it."""

    engine: Engine
    steps: FullSteps

    @classmethod
    def of(cls, arguments: argparse.Namespace, way: Way) -> Timing:
        steps = FullSteps()
        return cls(Engine(arguments.model, observers=[steps], **settings(arguments), **way.settings), steps)

    async def run(self, form: str, batch: int, max_tokens: int, num_rows: int = 1) -> Timed:
        """Batches, one after another, until `num_rows` are answered."""
        self.steps.begin(batch)
        for first in range(0, num_rows, batch):
            self.steps.begin_batch()
            asked = [params(form, first + index, max_tokens) for index in range(batch)]
            await self.engine.generate_many(prompts(batch, first), asked, progress=False, thinking=False)
        return self.steps.timed()


async def time_all(arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        timings = [Timing.of(arguments, way) for way in WAYS]
        await asyncio.gather(*(stack.enter_async_context(timing.engine) for timing in timings[:-1]))
        await stack.enter_async_context(timings[-1].engine)  # which measures what steps cost: alone
        for batch in arguments.batches:
            for form in FORMS:
                for timing in timings:  # what only a first step of a size costs
                    await timing.run(form, batch, WARM_UP_TOKENS)
                runs: dict[str, list[Timed]] = {way.name: [] for way in WAYS}
                for _ in range(arguments.runs):
                    for way, timing in zip(WAYS, timings, strict=True):
                        runs[way.name].append(await timing.run(form, batch, arguments.tokens, arguments.rows))
                for line in _lines(batch, form, runs):
                    tell(arguments, line)


def _lines(batch: int, form: str, runs: dict[str, list[Timed]]) -> Iterator[dict[str, Any]]:
    others = [name for name in runs if name != "scheduled"]
    for name, timed in runs.items():
        yield {
            "batch": batch,
            "form": form,
            "drafts": name,
            "tokens_per_s": round(median(one.tokens_per_s for one in timed), 1),
            "tokens_per_step": round(median(one.tokens_per_step for one in timed), 3),
        }
    best = max(others, key=lambda name: median(one.tokens_per_s for one in runs[name]))
    ratios = [ours.tokens_per_s / its.tokens_per_s for ours, its in zip(runs["scheduled"], runs[best], strict=True)]
    yield {"batch": batch, "form": form, "best": best, "ratio": round(median(ratios), 4), "ratios": ratios}


# ---- simulated runs


class Recorder:
    """An `Observer` that keeps the blocks which were verified whole, by the row that they were made for."""

    def __init__(self, longest: int) -> None:
        self.walks: dict[tuple[int, int], list[Block]] = {}
        self._longest = longest
        self._made: dict[tuple[int, int], bytes] = {}

    def step_done(self, report: StepReport) -> None:
        for result in report.results:
            slots, generations, _, counts = split_columns(result.rows, 4)
            verified = unpack_int32(result.num_verified) if result.num_verified else [0] * len(slots)
            sampled = iter(range(0, len(result.survivals), self._longest))
            for slot, generation, count, length in zip(slots, generations, counts, verified, strict=True):
                row = slot, generation
                survivals = self._made.pop(row, b"")
                if length == self._longest:
                    self.walks.setdefault(row, []).append(Block(survivals, count - 1))
                if count and result.survivals:
                    start = next(sampled)
                    self._made[row] = result.survivals[start : start + self._longest]

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        """Nothing of it is kept."""

    def request_refused(self, code: str) -> None:
        """`generate_many` raises it."""


async def record(arguments: argparse.Namespace, form: str) -> tuple[list[list[Block]], CostTable]:
    """Blocks of one run that verifies everything, by row, and what steps take."""
    recorder = Recorder(LONGEST)
    chosen = settings(arguments) | {"num_drafts": LONGEST, "scheduled_drafts": True, "cost_table": arguments.costs}
    async with Engine(arguments.model, **chosen) as engine:
        costs = engine.costs
    async with Engine(arguments.model, observers=[recorder], **settings(arguments), num_drafts=LONGEST) as engine:
        asked = [params(form, index, arguments.tokens) for index in range(arguments.prompts)]
        await engine.generate_many(prompts(arguments.prompts), asked, progress=False, thinking=False)
    assert costs is not None, "scheduled drafts have a table"
    return [walk for walk in recorder.walks.values() if walk], costs


async def simulate_all(arguments: argparse.Namespace) -> None:
    for form in FORMS:
        walks, costs = await record(arguments, form)
        for batch in arguments.batches:
            found = {way.name: simulate(policy_of(way, costs), costs, walks, batch, arguments.steps) for way in WAYS}
            for name, simulated in found.items():
                tell(
                    arguments,
                    {
                        "batch": batch,
                        "form": form,
                        "drafts": name,
                        "simulated": True,
                        "tokens_per_s": round(simulated.tokens_per_s, 1),
                        "tokens_per_step": round(simulated.tokens_per_step, 3),
                        "verified_per_step": round(simulated.num_verified / simulated.num_steps, 2),
                    },
                )
            scheduled = found.pop("scheduled").tokens_per_s
            best = max(found, key=lambda name: found[name].tokens_per_s)
            ratio = scheduled / found[best].tokens_per_s
            tell(arguments, {"batch": batch, "form": form, "simulated": True, "best": best, "ratio": round(ratio, 4)})


def policy_of(way: Way, costs: CostTable) -> DraftPolicy:
    if way.is_scheduled:
        return ScheduledDrafts(way.num_drafts, costs)
    return FixedDrafts(way.num_drafts) if way.num_drafts else NoDrafts()


# ---- both


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    most = max(arguments.batches) if arguments.device else arguments.prompts
    return {
        "accelerator": arguments.accelerator,
        "max_num_seqs": most,
        "max_batch_tokens": most * (1 + LONGEST) + 256,
        "max_model_len": 1024,
        "kv_cache_bytes": 256 << 20,
        "prefix_cache": False,
        "seed": 1,
    }


def tell(arguments: argparse.Namespace, line: dict[str, Any]) -> None:
    if arguments.json:
        print(json.dumps({"model": arguments.model, "machine": machine(arguments)} | line), flush=True)
        return
    where = f"batch {line['batch']:>3}, {line['form']:<6} "
    if "ratio" in line:
        print(f"{where} scheduled is {line['ratio']:.3f} of {line['best']}", flush=True)
    else:
        rates = f"{line['tokens_per_s']:>9.1f} tokens/s {line['tokens_per_step']:>6.2f} committed"
        print(f"{where} {line['drafts']:<10} {rates}", flush=True)


def machine(arguments: argparse.Namespace) -> str:
    return f"{arguments.accelerator}, {platform.machine()}, Python {platform.python_version()}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="v41-nano")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--device", action="store_true", help="time whole runs, instead of simulating them")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--runs", type=int, default=5, help="of which the median counts")
    parser.add_argument("--rows", type=int, default=8, help="answered in a run at least, batch after batch")
    parser.add_argument("--prompts", type=int, default=16, help="recorded for the simulator")
    parser.add_argument("--steps", type=int, default=2000, help="simulated")
    parser.add_argument("--costs", default="", help="a file with a cost table; measured if there is none")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    asyncio.run((time_all if arguments.device else simulate_all)(arguments))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
