"""Requests to a small DeepSeek model that share prefixes, ways to send them, and what each says alone.

Knows nothing of how an engine is set up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from deepinfer import Completion, Engine, SamplingParams
from deepinfer.admission import _sample_seeds
from deepinfer.observer import StepReport
from deepinfer.request import Request
from doubles.deepseek_sequences import random_tokens

VOCAB = 512
GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=1, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seq_seed=7, max_tokens=10, logprobs=1, ignore_eos=True)

Said = tuple[list[Any], Any]
"""Samples, and log probabilities of the prompt: to the bit, or they are not the same."""


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    is_early: bool = False
    """Sent before the others."""


def own(count: int, seed: int) -> list[int]:
    return random_tokens(count, seed, VOCAB)


class Watch:
    """An observer that hears who has begun to speak, and counts the replays."""

    def __init__(self) -> None:
        self.num_replays = 0
        self._loop = asyncio.get_running_loop()
        self._started: dict[str, asyncio.Event] = {}

    def started(self, request_id: str) -> asyncio.Event:
        """Set once the first token of this request is on its way to its reader."""
        return self._started.setdefault(request_id, asyncio.Event())

    def step_done(self, report: StepReport) -> None:
        admits = [admit for rank in report.step.ranks for admit in rank.plan.admits]
        self.num_replays += sum(admit.length < admit.floor for admit in admits)
        for seq, *_ in report.emissions:
            self._loop.call_soon_threadsafe(self.started(seq.request.request_id).set)

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        pass

    def request_refused(self, code: str) -> None:
        pass


async def say(engine: Engine, index: int, asked: Asked, **options: Any) -> Completion:
    return await engine.generate(asked.prompt, asked.params, request_id=str(index), **options)


async def one_after_another(engine: Engine, requests: Sequence[Asked]) -> list[Completion]:
    return [await say(engine, index, asked) for index, asked in enumerate(requests)]


async def together(engine: Engine, requests: Sequence[Asked], watch: Watch, *, late: int = 0) -> list[Completion]:
    """The early ones first; the others, of priority `late`, as soon as the first of all has begun to speak.

    Before those comes one like the last of them, which is given up when one of them speaks.
    """
    works: dict[int, asyncio.Task[Completion]] = {}

    def send(is_early: bool, priority: int) -> None:
        for index, asked in enumerate(requests):
            if asked.is_early == is_early:
                works[index] = asyncio.create_task(say(engine, index, asked, priority=priority))

    send(True, 0)
    await watch.started("0").wait()
    async with engine.stream(requests[-1].prompt, requests[-1].params, priority=late):
        send(False, late)
        await watch.started(str(len(requests) - 2)).wait()
    return [await works[index] for index in range(len(requests))]


async def interrupted(engine: Engine, requests: Sequence[Asked], watch: Watch) -> list[Completion]:
    """Each is more urgent than the one before, and comes when that one has begun to speak."""
    works = []
    for index, asked in enumerate(requests):
        works.append(asyncio.create_task(say(engine, index, asked, priority=-index)))
        await watch.started(str(index)).wait()
    return [await work for work in works]


def said(completion: Completion) -> Said:
    return completion.samples, completion.prompt_token_logprobs


async def said_alone(engine: Engine, asked: Asked) -> Said:
    """With a request of its own for every sample, so that they do not share their prompt's rows either."""
    samples, prompt_logprobs = [], []
    for seed in _sample_seeds(asked.params):
        params = asked.params if asked.params.n == 1 else replace(asked.params, n=1, seq_seed=seed)
        completion = await engine.generate(asked.prompt, params)
        assert not completion.num_cached_tokens
        samples += completion.samples
        prompt_logprobs.append(completion.prompt_token_logprobs)
    return samples, prompt_logprobs[0]
