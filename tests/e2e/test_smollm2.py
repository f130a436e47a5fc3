"""A real model through the whole engine: known answers, and the same tokens whatever the schedule."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deepinfer import Engine, SamplingParams
from doubles.smollm2 import model_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GOLDEN = [
    ("What is the capital of France?", 37, "The capital of France is Paris."),
    (
        "Explain in two sentences what a CPU cache is.",
        40,
        """A CPU cache is a type of data storage device that caches frequently used data, such as CPU instructions, \
to reduce the load on the CPU's main memory.""",
    ),
    ("What is 17 + 25?", 40, "17 + 25 = 32."),
]
"""Greedy answers in fp32 that another runtime gave: prompt, prompt tokens, answer."""

SUBJECTS = (
    "the sea", "a library", "old maps", "bread", "the moon", "a violin", "rivers", "glass",
    "winter", "a bicycle", "bees", "mountains", "a lighthouse", "salt", "paper", "clocks",
)  # fmt: skip
NUM_TOKENS = 8
NUM_ALONE = 5
"""Of the subjects, where each is asked by itself: that takes longest."""


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def params(index: int, *, seeded: bool) -> SamplingParams:
    if seeded:
        return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seq_seed=1000 + index)
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


async def answers(engine: Engine, *, alone: bool, seeded: bool, num_alone: int = NUM_ALONE) -> list[list[int]]:
    """The tokens of every subject, one request after another or all at once."""

    async def answer(index: int) -> list[int]:
        question = f"Write a short text about {SUBJECTS[index]}, and say why people care about it."
        return (await engine.generate(messages=chat(question), params=params(index, seeded=seeded))).token_ids

    if alone:
        return [await answer(index) for index in range(num_alone)]
    return list(await asyncio.gather(*[answer(index) for index in range(len(SUBJECTS))]))


async def run(settings: dict[str, Any], *, alone: bool, seeded: bool, preempted: bool) -> list[list[int]]:
    async with Engine(str(model_path()), **settings) as engine:
        tokens = await answers(engine, alone=alone, seeded=seeded)
        assert (engine.stats().scheduler.num_preempted > 0) == preempted
        engine.check_integrity()
        return tokens


@pytest.fixture(scope="module")
def plain_answers() -> dict[bool, list[list[int]]]:
    """Each subject alone, one step at a time, the prompt whole, nothing cached: greedy (False) and seeded (True)."""

    async def both() -> dict[bool, list[list[int]]]:
        async with Engine(str(model_path()), overlap=False, prefix_cache=False) as engine:
            return {
                seeded: await answers(engine, alone=True, seeded=seeded, num_alone=len(SUBJECTS))
                for seeded in (False, True)
            }

    return asyncio.run(both())


# overlap, chunk, prefix cache, alone, preempted, seeded, ranks
CASES = [
    (True, 256, True, False, False, False, 1),
    (True, 64, True, False, False, True, 1),
    (True, 7, False, False, False, False, 1),
    (False, 7, True, False, False, True, 1),
    (True, 1, True, False, False, False, 2),
    (False, 64, False, False, True, False, 1),
    (True, 64, True, False, True, True, 1),
    (True, 256, False, False, True, False, 2),
    (True, 7, True, False, True, False, 1),
    (False, 256, True, False, False, True, 2),
    (True, 64, True, True, False, False, 1),
    (True, 7, True, True, False, True, 1),
]


@pytest.mark.parametrize(("overlap", "chunk", "prefix_cache", "alone", "preempted", "seeded", "num_workers"), CASES)
def test_the_tokens_do_not_depend_on_the_schedule(
    plain_answers: dict[bool, list[list[int]]],
    overlap: bool,
    chunk: int,
    prefix_cache: bool,
    alone: bool,
    preempted: bool,
    seeded: bool,
    num_workers: int,
) -> None:
    settings = {"overlap": overlap, "prefill_chunk": chunk, "prefix_cache": prefix_cache, "num_workers": num_workers}
    if preempted:
        settings["num_blocks"] = 56 // num_workers  # every prompt fits at once, what follows does not
    got = asyncio.run(run(settings, alone=alone, seeded=seeded, preempted=preempted))
    assert got == plain_answers[seeded][: len(got)]
    assert len(got) == (NUM_ALONE if alone else len(SUBJECTS))


def test_known_answers_come_out_together() -> None:
    async def main() -> None:
        async with Engine(str(model_path())) as engine:
            completions = await engine.generate_many(
                [chat(question) for question, _, _ in GOLDEN], SamplingParams(temperature=0), progress=False
            )
        for completion, (_, num_prompt_tokens, text) in zip(completions, GOLDEN, strict=True):
            assert (completion.num_prompt_tokens, completion.text, completion.finish_reason) == (
                num_prompt_tokens,
                text,
                "stop",
            )
            assert completion.token_ids[-1] == 2  # <|im_end|>, which is no text

    asyncio.run(main())


EVERYTHING: dict[str, Any] = {
    "max_tokens": 8, "temperature": 0.9, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 6,
    "presence_penalty": 0.3, "frequency_penalty": 0.2, "bad_words": ["sea", "the world"], "logit_bias": {28: -1.0},
    "logprobs": 2, "prompt_logprobs": 1,
}  # fmt: skip


async def told(engine: Engine, index: int) -> tuple[Any, Any]:
    """Everything that a request with some of the parameters brings: tokens and log probabilities."""
    fields = EVERYTHING if index % 3 == 0 else dict(list(EVERYTHING.items())[: 4 + index])
    question = f"Write a short text about {SUBJECTS[index]}, and say why people care about it."
    done = await engine.generate(messages=chat(question), params=SamplingParams(**fields, seq_seed=index))
    return done.samples, done.prompt_token_logprobs


@pytest.fixture(scope="module")
def told_alone() -> list[tuple[Any, Any]]:
    async def alone() -> list[tuple[Any, Any]]:
        async with Engine(str(model_path()), overlap=False, prefix_cache=False) as engine:
            return [await told(engine, index) for index in range(2)]

    return asyncio.run(alone())


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 17},
        pytest.param({"prefill_chunk": 7}, marks=pytest.mark.full),
        pytest.param({"overlap": False}, marks=pytest.mark.full),
        pytest.param({"prefill_chunk": 64, "num_workers": 2}, marks=pytest.mark.full),
    ],
    ids=["preempted", "chunks", "plain", "ranks"],
)
def test_every_parameter_gives_the_same_on_any_schedule(
    told_alone: list[tuple[Any, Any]], settings: dict[str, Any]
) -> None:
    """Tokens, and log probabilities of prompt and answer to the bit, of requests with other parameters each."""

    async def together() -> list[tuple[Any, Any]]:
        async with Engine(str(model_path()), **settings) as engine:
            found = list(await asyncio.gather(*[told(engine, index) for index in range(5)]))
            assert (engine.stats().scheduler.num_preempted > 0) == ("num_blocks" in settings)
            return found

    assert asyncio.run(together())[: len(told_alone)] == told_alone


def test_text_parameters_on_real_text() -> None:
    """Stop strings over token borders, min_tokens, logprobs, n, special tokens: each against the plain answer."""

    async def main() -> None:
        question = chat(GOLDEN[1][0])
        async with Engine(str(model_path())) as engine:
            plain = await engine.generate(messages=question, params=SamplingParams(temperature=0, logprobs=2))
            assert plain.samples[0].logprobs is not None
            for token_id, entry in zip(plain.token_ids, plain.samples[0].logprobs, strict=True):
                assert entry.token_id == token_id == entry.top[0].token_id
                assert entry.logprob == entry.top[0].logprob >= entry.top[1].logprob

            stopped = await engine.generate(
                messages=question, params=SamplingParams(temperature=0, stop=["requently used da", "zzz"])
            )
            assert stopped.text == plain.text[: plain.text.index("requently used da")]
            assert stopped.finish_reason == "stop"
            assert plain.token_ids[: len(stopped.token_ids)] == stopped.token_ids

            long = await engine.generate(
                messages=chat(GOLDEN[2][0]), params=SamplingParams(temperature=0, min_tokens=20, max_tokens=24)
            )
            assert len(long.token_ids) >= 20 and 2 not in long.token_ids[:20]

            on = await engine.generate(
                messages=chat(GOLDEN[2][0]), params=SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)
            )
            assert len(on.token_ids) == 24 and 2 in on.token_ids

            shown = await engine.generate(
                messages=chat(GOLDEN[0][0]),
                params=SamplingParams(temperature=0, skip_special_tokens=False, ignore_eos=True, max_tokens=9),
            )
            assert "<|im_end|>" in shown.text

            both = await engine.generate(
                messages=question, params=SamplingParams(temperature=0.9, seq_seed=3, n=2, max_tokens=12)
            )
            first = await engine.generate(
                messages=question, params=SamplingParams(temperature=0.9, seq_seed=3, max_tokens=12)
            )
            assert both.samples[0].token_ids == first.token_ids != both.samples[1].token_ids

    asyncio.run(main())
