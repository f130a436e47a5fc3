"""What a fake worker must say, computed without an engine: from the prompt alone, a token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from deepinfer_protocol import LogitShaping, SlotSampling, split_words, unpack_float32, unpack_int32

MASK64 = (1 << 64) - 1
OFFSET = 0xCBF29CE484222325
NUM_LAYERS = 3


def mixed(values: Iterable[int], state: int = OFFSET) -> int:
    for value in values:
        state = ((state ^ value) * 0x100000001B3) & MASK64
    return state


class Prefix:
    """The hash after each token; where slots have windows of `width`, of what three layers of them make of it."""

    def __init__(self, tokens: Iterable[int], width: int = 0) -> None:
        self.hashes: list[int] = []
        self._width = width
        self._layers: list[list[int]] = [[] for _ in range(NUM_LAYERS)]
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        value = token + 1
        for values in self._layers if self._width else []:
            values.append(value)
            value = mixed(values[-self._width :])
        self.hashes.append(mixed([value], self.hashes[-1] if self.hashes else OFFSET))


def next_token(tokens: Sequence[int], sampling: SlotSampling, vocab_size: int, width: int = 0) -> int:
    return token_after(Prefix(tokens, width), tokens, sampling, vocab_size)


def token_after(prefix: Prefix, tokens: Sequence[int], sampling: SlotSampling, vocab_size: int) -> int:
    """`prefix` is that of `tokens`."""
    state = prefix.hashes[-1]
    if sampling.temperature > 0:
        state ^= sampling.seed
    shaping = sampling.shaping or LogitShaping()
    output = list(tokens[sampling.num_prompt :])
    if shaping.presence_penalty:
        state ^= len(output) * 0x100000001B3
    stirred = ((state ^ (state >> 29)) * 0xBF58476D1CE4E5B9) & MASK64
    wanted = (stirred >> 24) % vocab_size
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
    prompt: Sequence[int],
    sampling: SlotSampling,
    max_length: int,
    stop_ids: frozenset[int],
    vocab_size: int,
    width: int = 0,
) -> tuple[list[int], str]:
    """The tokens after `prompt`, and why they end."""
    tokens, prefix = list(prompt), Prefix(prompt, width)
    while True:
        token = token_after(prefix, tokens, sampling, vocab_size)
        tokens.append(token)
        prefix.push(token)
        if token in stop_ids and len(tokens) > sampling.min_length:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= max_length:
            return tokens[len(prompt) :], "length"
