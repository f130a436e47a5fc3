"""How often a DeepSeek-V4.1 says the same with its bounded settings as with the exact ones: greedy tokens.

    python benchmarks/bounded_agreement.py [DIR] --json

Without DIR the model is the tests' small one, random weights in ten layers with windows of 16: then the figures say
how near the approximations are in a model that was never taught to live with them, and nothing of a released one. With
the folder of another model, give sizes to match: `--prefix-tokens` beyond layers × (window − 1), so that exact hits
spare something, and `--keep-tokens` of window + drafts + 1 or more (Flash: 140).

Prompts share prefixes, of which an opening request has filled the cache, and end in tails of their own. `exact` is
compared with: `hits` (bounded hits, nothing truncated), `truncation` (no hits), `both` (an engine's defaults), and,
as a yardstick, `unrounded`: the exact settings, activations not rounded. `first_token` is the share of prompts whose
first token is the same, `answers` that of the same answers, `until_difference` the mean share of an answer before it
differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NamedTuple

from deepinfer import Completion, Engine, SamplingParams
from deepinfer_workers.models.deepseek.generator import write_model

NUM_PREFIXES: Final = 4
VOCAB_SIZE: Final = 512
FIRST_ID: Final = 3
"""Those below are marks."""
MAX_TAIL: Final = 200


class Workload(NamedTuple):
    """What is asked of each engine."""

    openers: list[list[int]]
    """The shared prefixes, and a tail each."""
    prompts: list[list[int]]
    params: SamplingParams


class Answers(NamedTuple):
    """What an engine said to `Workload.prompts`."""

    tokens: list[list[int]]
    num_cached: list[int]
    """Positions of each prompt that a hit spared."""


def workload(num_prompts: int, prefix_tokens: int, max_tokens: int, vocab_size: int) -> Workload:
    """The same for the same sizes."""
    rand = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rand.randrange(FIRST_ID, vocab_size) for _ in range(count)]

    prefixes = [ids(prefix_tokens) for _ in range(NUM_PREFIXES)]
    return Workload(
        [prefix + ids(8) for prefix in prefixes],
        [prefixes[index % NUM_PREFIXES] + ids(rand.randint(1, MAX_TAIL)) for index in range(num_prompts)],
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
    )


def variants(keep_tokens: int, max_len: int) -> dict[str, dict[str, Any]]:
    """Settings by the name of what they are."""
    exact = {"prefix_hits": "exact", "prefill_truncation": "off"}
    compact = {"prefill_truncation": "compact", "prefill_keep_tokens": keep_tokens}
    return {
        "exact": exact,
        "hits": {"prefix_hits": "bounded", "prefill_truncation": "compact", "prefill_keep_tokens": max_len},
        "truncation": compact | {"prefix_cache": False},
        "both": compact | {"prefix_hits": "bounded"},
        "unrounded": exact | {"quantize_activations": False},
    }


async def answers(folder: str, work: Workload, settings: dict[str, Any]) -> Answers:
    """Of an engine of its own."""
    async with Engine(folder, **settings) as engine:
        for prompt in work.openers:
            await engine.generate(prompt, work.params)
        found: list[Completion] = await engine.generate_many(work.prompts, work.params, progress=False)
    return Answers([done.token_ids for done in found], [done.num_cached_tokens for done in found])


def agreement(expected: Answers, found: Answers) -> dict[str, float]:
    """Shares of prompts, and of tokens."""
    pairs = list(zip(expected.tokens, found.tokens, strict=True))
    figures: dict[str, list[float]] = {
        "first_token": [ours[0] == theirs[0] for ours, theirs in pairs],
        "answers": [ours == theirs for ours, theirs in pairs],
        "until_difference": [_num_equal(ours, theirs) / len(ours) for ours, theirs in pairs],
    }
    shares = {name: round(sum(values) / len(values), 4) for name, values in figures.items()}
    return shares | {"prompts_with_hits": sum(num > 0 for num in found.num_cached), "spared": sum(found.num_cached)}


def _num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    same = [one == other for one, other in zip(ours, theirs, strict=True)]
    return same.index(False) if False in same else len(same)


async def measure(folder: str, work: Workload, keep_tokens: int, **settings: Any) -> dict[str, Any]:
    """Figures by variant; the longest sequence is the most that is kept."""
    longest = max(map(len, work.prompts)) + (work.params.max_tokens or 0)
    settings = {"max_model_len": longest, **settings}
    every = {
        name: await answers(folder, work, settings | variant)
        for name, variant in variants(keep_tokens, longest).items()
    }
    return {name: agreement(every["exact"], found) for name, found in every.items()}


def write_small(folder: Path) -> None:
    """The tests' small V4.1."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    from doubles.tiny_deepseek import tiny_v41

    write_model(tiny_v41(vocab_size=VOCAB_SIZE), folder)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    work = workload(arguments.prompts, arguments.prefix_tokens, arguments.tokens, arguments.vocab_size)
    made = nullcontext(arguments.model) if arguments.model else tempfile.TemporaryDirectory()
    with made as folder:
        if not arguments.model:
            write_small(Path(folder))
        figures = asyncio.run(measure(folder, work, arguments.keep_tokens, num_threads=arguments.threads))
    return {
        "benchmark": "bounded_agreement",
        "model": Path(arguments.model).name if arguments.model else "random, 10 layers, windows of 16",
        "prompts": len(work.prompts),
        "prompt_tokens": sum(map(len, work.prompts)),
        "tokens_per_answer": arguments.tokens,
        "keep_tokens": arguments.keep_tokens,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        **figures,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prefix-tokens", type=int, default=208)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--keep-tokens", type=int, default=24)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
