"""What a fake worker must say, computed without an engine: from the prompt alone, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_protocol import SlotSampling

MASK64 = (1 << 64) - 1


def next_token(tokens: Sequence[int], sampling: SlotSampling, vocab_size: int) -> int:
    state = 0xCBF29CE484222325
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x100000001B3) & MASK64
    if sampling.temperature > 0:
        state ^= sampling.seed
    mixed = ((state ^ (state >> 29)) * 0xBF58476D1CE4E5B9) & MASK64
    return (mixed >> 24) % vocab_size


def completion(
    prompt: Sequence[int], sampling: SlotSampling, max_length: int, stop_ids: frozenset[int], vocab_size: int
) -> tuple[list[int], str]:
    """The tokens after `prompt`, and why they end."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens, sampling, vocab_size)
        tokens.append(token)
        if token in stop_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= max_length:
            return tokens[len(prompt) :], "length"
