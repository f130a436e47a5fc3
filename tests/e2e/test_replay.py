"""Prefix hits through a whole engine whose fake slots keep a window of 9 positions, in three layers."""

from __future__ import annotations

from typing import Any, Final

import pytest

from deepinfer import Engine, SamplingParams

PROMPT: Final = [7 * index % 97 for index in range(60)]
GREEDY: Final = SamplingParams(max_tokens=12, temperature=0.0)
COLD: Final = SamplingParams(max_tokens=12, temperature=0.0, skip_reading_prefix_cache=True)
FAKE: Final[dict[str, Any]] = {"fake_vocab_size": 97, "fake_replay_tokens": 9}

pytestmark = pytest.mark.usefixtures("no_tasks_left")


@pytest.mark.parametrize(
    ("settings", "num_cached"),
    [
        ({}, 48 - 9),
        ({"prefix_hits": "exact"}, 48 - 24),
        ({"prefill_truncation": "off"}, 48 - 24),
        ({"prefix_cache": False}, 0),
        ({"fake_replay_tokens": 0}, 48),
    ],
    ids=["bounded", "exact", "no truncation", "no prefix cache", "slots without a state"],
)
async def test_the_settings_say_how_much_of_a_hit_is_computed_again(settings: dict[str, Any], num_cached: int) -> None:
    prompt = [*PROMPT[:50], 1, 2, 3]
    async with Engine("fake", **{**FAKE, **settings}) as engine:
        cold = await engine.generate(prompt, COLD)
        await engine.generate(PROMPT, GREEDY)
        hit = await engine.generate(prompt, GREEDY)
        assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, num_cached)
        is_bounded = not settings
        assert (hit.samples[0].token_ids == cold.samples[0].token_ids) == (not is_bounded)
        engine.check_integrity()


async def test_samples_of_a_long_prompt_replay_its_end_and_say_what_each_says_alone() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seq_seed=3, n=3)
    async with Engine("fake", prefix_hits="exact", max_num_seqs=2, **FAKE) as engine:
        together = await engine.generate(PROMPT, params)
    async with Engine("fake", prefix_cache=False, prefix_hits="exact", **FAKE) as engine:
        again = await engine.generate(PROMPT, params)
        assert engine.stats().cache.global_bytes_per_token == 0.0
    assert [sample.token_ids for sample in together.samples] == [sample.token_ids for sample in again.samples]
