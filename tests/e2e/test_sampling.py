"""Sampling parameters through a whole engine over a fake worker whose tokens are words."""

from __future__ import annotations

import asyncio

import pytest

from deepinfer import Engine, InvalidRequest, SamplingParams
from doubles.reading import FAKE, PROMPT, greedy, tokens_of, wanted

pytestmark = pytest.mark.usefixtures("no_tasks_left")

FREE = wanted(12)
"""Tokens that come when nothing is in their way."""


def spelt(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


async def test_a_stop_string_is_told_and_kept_where_asked(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        stop = f"w{FREE[3]} w{FREE[4]}"
        for keeps, text in ((False, f" {spelt(FREE[:3])} "), (True, f" {spelt(FREE[:5])}")):
            params = SamplingParams(
                temperature=0, max_tokens=12, stop=["zzz", stop], include_stop_str_in_output=keeps, prompt_logprobs=0
            )
            done = await engine.generate(PROMPT, params)
            assert (done.text, done.finish_reason) == (text, "stop")
            assert (done.samples[0].stop_reason, done.token_ids) == (stop, FREE[:5])
            assert done.prompt_logprobs is not None
            assert done.prompt_logprobs[1:] == [{3: (-1.0, 1, "w3")}, {8: (-2.0, 2, "w8")}]


async def test_a_stop_string_in_the_last_token_is_the_end_for_everybody(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        done = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4, stop=f"w{FREE[3]}"))
        assert (done.finish_reason, len(done.token_ids)) == ("stop", 4)
        assert engine.metrics()["request_success"].values == {"stop": 1}


async def test_a_stop_token_is_told_and_its_text_kept_where_asked(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        for keeps, text in ((False, f" {spelt(FREE[:4])}"), (True, f" {spelt(FREE[:5])}")):
            params = SamplingParams(
                temperature=0, max_tokens=12, stop_token_ids=[FREE[4]], include_stop_str_in_output=keeps
            )
            stream = engine.stream(PROMPT, params)
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.text for chunk in chunks) == text
            assert [chunk.stop_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), FREE[4]]
            assert stream.prompt_logprobs is None


async def test_a_length_is_no_stop_reason(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        done = await engine.generate(PROMPT, greedy(5))
        assert (done.finish_reason, done.samples[0].stop_reason) == ("length", None)
        assert done.samples[0].cumulative_logprob is None and done.prompt_logprobs is None


async def test_log_probabilities_of_a_prompt_are_there_with_the_first_token(word_model: str) -> None:
    async with Engine("fake", prefill_chunk=2, **FAKE) as engine:
        stream = engine.stream([*PROMPT, 9, 9], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, n=2))
        await anext(stream)
        told = stream.prompt_logprobs
        assert told is not None and told[0] is None
        assert [entry.logprob for entry in told[1:] if entry is not None] == [-1.0, -2.0, -3.0, -4.0]
        assert len(told) == 5 and told[-1] == told[4] is not told[4], "an entry is made when it is looked at"
        with pytest.raises(IndexError):
            _ = told[5]
        one = await engine.generate([7], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert one.prompt_logprobs == [None]


async def test_words_are_banned_as_text_and_as_tokens(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        pair = FREE[1:3]
        for words in ([spelt(pair)], [pair], ["w96", f" {spelt(pair)} "]):
            params = SamplingParams(temperature=0, max_tokens=6, bad_words=words)
            done = await engine.generate(PROMPT, params)
            assert done.token_ids[:3] == [*FREE[:2], (FREE[2] + 1) % 97]
        alone = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, bad_words=[f"w{FREE[0]}"]))
        assert alone.token_ids[0] == FREE[0] + 1  # a word of one token is banned everywhere


async def test_tokens_are_allowed_and_banned() -> None:
    async with Engine("fake", **FAKE) as engine:
        some = await engine.generate(PROMPT, SamplingParams(max_tokens=30, allowed_token_ids=[3, 50, 96]))
        assert set(some.token_ids) <= {3, 50, 96}
        rest = SamplingParams(temperature=0, max_tokens=30, banned_token_ids=range(90), logit_bias={95: -100})
        assert min((await engine.generate(PROMPT, rest)).token_ids) >= 90
        with pytest.raises(InvalidRequest, match="allowed_token_ids: every token of it is banned"):
            await engine.generate(PROMPT, SamplingParams(allowed_token_ids=[5], banned_token_ids=[5]))


async def test_what_only_the_encoding_of_words_tells_is_refused_at_the_first_read(word_model: str) -> None:
    async with Engine("fake", tokenizer=word_model, **FAKE) as engine:
        stream = engine.stream(PROMPT, SamplingParams(allowed_token_ids=[5], bad_words=["w5"]))
        with pytest.raises(InvalidRequest, match="allowed_token_ids: every token of it is banned"):
            await anext(stream)


async def test_an_engine_with_a_seed_repeats_itself_in_the_order_of_the_calls() -> None:
    async def answers(seed: int) -> list[list[int]]:
        async with Engine("fake", seed=seed, **FAKE) as engine:
            streams = [engine.stream(PROMPT, SamplingParams(max_tokens=8)) for _ in range(4)]
            return list(await asyncio.gather(*map(tokens_of, streams)))

    first, second, other, free = [await answers(seed) for seed in (7, 7, 8, -1)]
    assert first == second and len({tuple(tokens) for tokens in [*first, *other, *free]}) == 12


async def test_a_request_may_leave_the_prefix_cache_alone() -> None:
    async with Engine("fake", **FAKE) as engine:
        prompt = list(range(20))
        for skips, num_cached in ((False, 0), (False, 16), (True, 0), (False, 16)):
            params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=skips)
            assert (await engine.generate(prompt, params)).num_cached_tokens == num_cached
