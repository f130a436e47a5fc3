"""Losslessness of speculation: with the reference path, greedy and seeded answers are those of a run without drafts.

The whole matrix is 200 prompts by every longest draft, fixed and scheduled, overlap on and off, alone and together. It
takes most of an hour; a share of it, drawn with a seed, is in every run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

import pytest

from deepinfer import Completion, Engine, SamplingParams

LONGEST: Final = 5
NUM_PROMPTS: Final = 200
SHARE: Final = 0.02
TOGETHER: Final = 64
"""Prompts that run at once, at most."""
MAX_TOKENS: Final = 24
_WHO: Final = ("a fisherman", "my sister", "the old king", "a small robot", "our teacher", "a lazy cat", "the baker")
_WHAT: Final = ("a story", "a short letter", "three tips", "a poem", "an explanation", "a list", "one sentence")
_WHERE: Final = ("at sea", "in winter", "about bread", "on the moon", "for a friend", "about music", "in the city")


class Case(NamedTuple):
    """One way of drafting. `num_drafts` 0 is none."""

    num_drafts: int
    is_scheduled: bool
    overlap: bool
    is_alone: bool

    def __str__(self) -> str:
        how = "scheduled" if self.is_scheduled else "fixed"
        return (
            f"{how}{self.num_drafts}-{'overlap' if self.overlap else 'one'}-{'alone' if self.is_alone else 'together'}"
        )

    @property
    def settings(self) -> dict[str, Any]:
        return {"num_drafts": self.num_drafts, "scheduled_drafts": self.is_scheduled, "overlap": self.overlap}


EVERY: Final = [
    Case(longest, *flags) for longest in range(LONGEST + 1) for flags in itertools.product((False, True), repeat=3)
]
EXACT: Final[dict[str, Any]] = {
    "num_threads": 1,
    "max_num_seqs": TOGETHER,
    "max_model_len": 512,
    "prefix_hits": "exact",
}


class Asked(NamedTuple):
    messages: list[dict[str, str]]
    params: SamplingParams


def asked(index: int) -> Asked:
    """A chat and how it is answered; the same for the same number."""
    drawn = random.Random(index)
    text = f"Give me {drawn.choice(_WHAT)} with {drawn.choice(_WHO)} {drawn.choice(_WHERE)}, number {index}."
    if index % 7 == 0:  # longer than a window
        text += " Think of this: " + " ".join(drawn.choice(_WHO + _WHERE) for _ in range(60))
    seed = None if index % 2 else index
    params: dict[str, Any] = {"max_tokens": drawn.randint(MAX_TOKENS // 2, MAX_TOKENS), "temperature": 0.0}
    if seed is not None:
        params |= {"temperature": drawn.choice((0.3, 0.7, 1.0)), "seq_seed": seed}
        params |= drawn.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
    params |= drawn.choice(
        (
            {},
            {},
            {"repetition_penalty": 1.2},
            {"frequency_penalty": 0.5, "presence_penalty": 0.5},
            {"min_tokens": 10},
            {"logit_bias": {17: 3.0, 40: -100.0}},
            {"stop": [" the", ".\n"]},
            {"logprobs": 2},
            {"bad_words": ["and", "of the"]},
            {"ignore_eos": True},
            {"n": 2} if seed is not None else {},
        )
    )
    return Asked([{"role": "user", "content": text}], SamplingParams(**params))


class Said(NamedTuple):
    """All of a completion that may not depend on how it was made."""

    samples: list[tuple[list[int], str, str | None, object, object]]

    @classmethod
    def of(cls, completion: Completion) -> Said:
        return cls(
            [
                (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason, sample.logprobs)
                for sample in completion.samples
            ]
        )


async def say(settings: dict[str, Any], numbers: list[int], *, is_alone: bool) -> tuple[dict[int, Said], float]:
    """What the prompts `numbers` are answered, and the committed tokens of a row in a step."""
    requests = [asked(number) for number in numbers]
    async with Engine("v41-nano", **EXACT | settings) as engine:
        if is_alone:
            found = [
                await engine.generate(messages=request.messages, params=request.params, thinking=False)
                for request in requests
            ]
        else:
            chats, params = [request.messages for request in requests], [request.params for request in requests]
            found = await engine.generate_many(chats, params, progress=False, thinking=False)
        drafts = engine.stats().core.drafts
    return {number: Said.of(one) for number, one in zip(numbers, found, strict=True)}, drafts.tokens_per_step


def drawn() -> list[tuple[Case, list[int]]]:
    """A share of the matrix, the same each time: two cases of each longest draft, with as many prompts out of a few.

    Starting engines is most of what it takes, and so is what each prompt is answered without drafts.
    """
    rand = random.Random(5)
    chosen = [case for longest in range(LONGEST + 1) for case in rand.sample(EVERY[8 * longest : 8 * longest + 8], 2)]
    num_prompts = round(SHARE * NUM_PROMPTS * len(EVERY) / len(chosen))
    pool = rand.sample(range(NUM_PROMPTS), 2 * num_prompts)
    return [(case, sorted(rand.sample(pool, num_prompts))) for case in chosen]


_plain: dict[int, Said] = {}


async def without_drafts(numbers: list[int]) -> dict[int, Said]:
    """Alone, one step at a time."""
    missing = [number for number in numbers if number not in _plain]
    if missing:
        said, _ = await say({"num_drafts": 0, "overlap": False}, missing, is_alone=True)
        _plain.update(said)
    return {number: _plain[number] for number in numbers}


async def check(case: Case, numbers: list[int]) -> None:
    wanted = await without_drafts(numbers)
    said, committed = await say(case.settings, numbers, is_alone=case.is_alone)
    for number in numbers:
        assert said[number] == wanted[number], f"prompt {number}: {asked(number)}"
    if case.num_drafts and not case.is_scheduled:
        assert committed > 1.2, "hardly a draft was accepted: nothing was tested"
    if not case.num_drafts:
        assert committed == 0.0, "nothing was drafted, and nothing is counted"


async def in_lanes(works: list[Coroutine[Any, Any, Any]]) -> None:
    """Two at a time: each computes on one thread."""
    lanes = asyncio.Semaphore(2)

    async def run(work: Coroutine[Any, Any, Any]) -> None:
        async with lanes:
            await work

    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(run(work))


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.timeout(900)
async def test_a_share_of_all_answers_are_those_without_drafts() -> None:
    cells = drawn()
    every = sorted({number for _, numbers in cells for number in numbers})
    await in_lanes([without_drafts(every[::2]), without_drafts(every[1::2])])
    await in_lanes([check(case, numbers) for case, numbers in cells])


@pytest.mark.full
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", EVERY, ids=str)
async def test_all_answers_are_those_without_drafts(case: Case) -> None:
    await check(case, list(range(NUM_PROMPTS)))
