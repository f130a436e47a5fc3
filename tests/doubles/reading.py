"""What tests of an engine over a fake worker say again and again: its settings, what it is asked, what must come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from deepinfer import Completion, SamplingParams, TokenStream
from deepinfer_protocol import SlotSampling
from doubles.oracle import completion

VOCAB_SIZE: Final = 97
PROMPT: Final = [5, 3, 8]
FAKE: Final[dict[str, Any]] = {"fake_step_s": 0.001, "fake_vocab_size": VOCAB_SIZE, "block_size": 4}


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n)


def wanted(num_tokens: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The tokens that greedy sampling must give after `prompt`."""
    return completion(prompt, SlotSampling(), len(prompt) + num_tokens, frozenset(), VOCAB_SIZE)[0]


async def tokens_of(stream: TokenStream) -> list[int]:
    """Everything that a stream of one sample brings."""
    return [token async for chunk in stream for token in chunk.token_ids]


def plain(completion: Completion) -> tuple[object, ...]:
    """What does not depend on the way that it came."""
    return completion.samples, completion.num_prompt_tokens, completion.num_preemptions
