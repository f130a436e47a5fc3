"""How often a prompt's next token is the same when the decoder half reads its end alone: greedy, by the engine.

The exact side reads each conversation once, which tells the best token at every place; the other side reads every
prompt for itself, without prefix hits, as an engine's default does it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer import Completion, Engine, SamplingParams

Ids = list[int]
SHORTEST, LONGEST = 300, 2_000
"""Of prompts."""
KEEP_TOKENS = 140
_SEED = 1
_GREEDY = SamplingParams(temperature=0, max_tokens=1)


class Place(NamedTuple):
    """A prompt: the first `length` tokens of a conversation."""

    conversation: int
    length: int


def prompts(conversations: Sequence[Ids], end_of_prompt: int, most: int) -> list[Place]:
    """Some that ask for an answer: they end in `end_of_prompt`."""
    return _some([place for place in _places(conversations) if _last(conversations, place) == end_of_prompt], most)


def cuts(conversations: Sequence[Ids], end_of_prompt: int, most: int) -> list[Place]:
    """Some others, cut anywhere."""
    return _some([place for place in _places(conversations) if _last(conversations, place) != end_of_prompt], most)


def _places(conversations: Sequence[Ids]) -> Iterator[Place]:
    """Behind each there is a token, and so the exact side's choice."""
    for index, ids in enumerate(conversations):
        yield from (Place(index, length) for length in range(SHORTEST, min(len(ids), LONGEST)))


def _last(conversations: Sequence[Ids], place: Place) -> int:
    return conversations[place.conversation][place.length - 1]


def _some(places: list[Place], most: int) -> list[Place]:
    return sorted(random.Random(_SEED).sample(places, min(most, len(places))))


async def measure(
    model: str | Path,
    conversations: Sequence[Ids],
    kinds: Mapping[str, Sequence[Place]],
    keep_tokens: int = KEEP_TOKENS,
) -> dict[str, dict[str, Any]]:
    """By kind: the share of places with the same next token, and how sure the exact side was where it was another."""
    common: dict[str, Any] = {"prefix_cache": False, "num_drafts": 0}
    asked = sorted({place.conversation for places in kinds.values() for place in places})
    async with Engine(model, prefill_truncation="off", **common) as engine:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        whole = [conversations[index][:LONGEST] for index in asked]
        exact = dict(zip(asked, await engine.generate_many(whole, params, progress=False), strict=True))
    async with Engine(model, prefill_truncation="compact", prefill_keep_tokens=keep_tokens, **common) as engine:
        found = {}
        for kind, places in kinds.items():
            texts = [conversations[place.conversation][: place.length] for place in places]
            cut = await engine.generate_many(texts, _GREEDY, progress=False)
            found[kind] = _compare(places, exact, cut) | {"keep_tokens": keep_tokens}
    return found


def _compare(places: Sequence[Place], exact: Mapping[int, Completion], cut: Sequence[Completion]) -> dict[str, Any]:
    best = [_best(exact[place.conversation], place.length) for place in places]
    others = [
        round(logprob, 3)
        for (token, logprob), completion in zip(best, cut, strict=True)
        if completion.token_ids != [token]
    ]
    return {
        "conversations": len({place.conversation for place in places}),
        "places": len(places),
        "mean_prompt_tokens": round(sum(place.length for place in places) / max(len(places), 1)),
        "same": len(places) - len(others),
        "share": (len(places) - len(others)) / max(len(places), 1),
        "logprobs_where_another": sorted(others),
    }


def _best(completion: Completion, length: int) -> tuple[int, float]:
    """The most likely token behind so many, and its log probability."""
    entries = completion.prompt_token_logprobs
    assert entries is not None
    entry = entries[length]
    assert entry is not None
    best = max(entry.top, key=lambda one: one.logprob)
    return best.token_id, best.logprob
