"""What a fake worker must say, computed without an engine: from the prompt alone, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from deepinfer_protocol import LogitShaping, SlotSampling, split_words, unpack_float32, unpack_int32

MASK64 = (1 << 64) - 1


def next_token(tokens: Sequence[int], sampling: SlotSampling, vocab_size: int) -> int:
    state = 0xCBF29CE484222325
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x100000001B3) & MASK64
    if sampling.temperature > 0:
        state ^= sampling.seed
    shaping = sampling.shaping or LogitShaping()
    output = list(tokens[sampling.num_prompt :])
    if shaping.presence_penalty:
        state ^= len(output) * 0x100000001B3
    mixed = ((state ^ (state >> 29)) * 0xBF58476D1CE4E5B9) & MASK64
    wanted = (mixed >> 24) % vocab_size
    if sampling.shaping is None and not sampling.min_length:
        return wanted
    in_turn = [(wanted + step) % vocab_size for step in range(vocab_size)]
    biases = dict(zip(unpack_int32(shaping.bias_ids), unpack_float32(shaping.bias_values), strict=True))
    bits = shaping.allowed_bits
    allowed = [token for token in in_turn if biases.get(token) != -inf]
    allowed = [token for token in allowed if not bits or bits[token // 8] >> token % 8 & 1]
    banned = set(unpack_int32(sampling.stop_ids)) if len(tokens) + 1 <= sampling.min_length else set()
    banned |= {word[-1] for word in split_words(shaping.bad_words) if _ends_with(output, list(word[:-1]))}
    return [*[token for token in allowed if token not in banned], *allowed, wanted][0]


def _ends_with(output: list[int], others: list[int]) -> bool:
    return not others or output[-len(others) :] == others


def completion(
    prompt: Sequence[int], sampling: SlotSampling, max_length: int, stop_ids: frozenset[int], vocab_size: int
) -> tuple[list[int], str]:
    """The tokens after `prompt`, and why they end."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens, sampling, vocab_size)
        tokens.append(token)
        if token in stop_ids and len(tokens) > sampling.min_length:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= max_length:
            return tokens[len(prompt) :], "length"
