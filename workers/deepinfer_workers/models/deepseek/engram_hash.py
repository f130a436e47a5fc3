"""Which rows of an Engram table a position reads: its token and the few before it, hashed. Knows no tables' contents.

Tokens that differ in case, accents or spaces alone count as one: hashes are of compressed ids. Source of the formulas:
the published reference of DeepSeek-V4.1.

Legend: `V` vocabulary, `T` positions, `N` longest n-gram, `H` heads of each length of n-gram.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from math import isqrt
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer_workers.batch import Ints
from deepinfer_workers.checkpoint import bad_file, read_bounded
from deepinfer_workers.models.deepseek.config import EngramConfig
from deepinfer_workers.runner import WorkerFault

MAX_TOKENIZER_BYTES: Final = 64 << 20
NO_TOKEN: Final = -1
"""Before the start of a sequence; as a compressed id: of a token that the tokenizer lacks."""
_LAYER_SEED: Final = 10007
_LONE_SPACE: Final = "\ue000"
_UNDECODABLE: Final = "\ufffd"


def compressed_vocabulary(tokenizer_json: Path, vocab_size: int) -> Ints:
    """The compressed id of every token, [V]; ids that the tokenizer lacks get `NO_TOKEN`.

    Raises `WorkerFault` (`model_file`) when the file is missing or no tokenizer.
    """
    compressed_of: dict[str, int] = {}
    compressed = np.full(vocab_size, NO_TOKEN, np.int64)  # [V]
    with _tokenizer_faults(tokenizer_json.name):
        backend = Tokenizer.from_str(read_bounded(tokenizer_json, MAX_TOKENIZER_BYTES).decode())
        normalizer = _normalizer()
        for token_id in range(min(vocab_size, backend.get_vocab_size(with_added_tokens=True))):
            key = _key(backend, normalizer, token_id)
            compressed[token_id] = compressed_of.setdefault(key, len(compressed_of))
    return compressed


def ngrams(tokens: Ints, first: int, num_positions: int, max_ngram: int) -> Ints:
    """Tokens of the positions from `first` on and of those before them, newest first: [num_positions, N].

    `tokens` are a sequence's from its start, `NO_TOKEN` stands for what lies before it.
    """
    places = np.arange(first, first + num_positions)[:, None] - np.arange(max_ngram)  # [T, N]
    return np.where(places < 0, NO_TOKEN, tokens[np.maximum(places, 0)])


def layer_hashes(config: EngramConfig, compressed: Ints, image_token_id: int | None) -> list[EngramHash]:
    """Of each of `config.layers`; `compressed` [V] is the `compressed_vocabulary`. Raises as `EngramHash` does."""
    primes = _primes(config)
    return [EngramHash(config, compressed, image_token_id, layer, primes) for layer in config.layers]


class EngramHash:
    """Rows in the table of one layer."""

    def __init__(
        self, config: EngramConfig, compressed: Ints, image_token_id: int | None, layer: int, primes: Ints
    ) -> None:
        """`compressed` [V] is the `compressed_vocabulary`, `layer` one of `config.layers`, `primes` those of all.

        Raises `WorkerFault` (`model_file`) when the configuration contradicts itself or the tokenizer.
        """
        index = config.layers.index(layer)
        num_compressed = int(compressed.max(initial=NO_TOKEN)) + 1
        if num_compressed != config.compressed_vocab_size:
            text = f"{config.compressed_vocab_size} compressed tokens were expected, {num_compressed} came"
            raise bad_file("tokenizer.json", f"{text}; engram_compressed_vocab_size says how many, hashes depend on it")
        if not 0 <= config.pad_id < len(compressed) or compressed[config.pad_id] == NO_TOKEN:
            raise bad_file("config.json", f"engram_pad_token_id: a token was expected, {config.pad_id} came")
        self.max_ngram: Final = config.max_ngram
        self.primes: Final = primes[index]
        """[N - 1, H]"""
        num_rows = int(self.primes.sum())
        if num_rows != config.table_rows[index]:
            text = f"the primes of layer {layer} sum up to {num_rows}, {config.table_rows[index]} came"
            raise bad_file("config.json", f"engram_num_embeddings: {text}")
        self.offsets: Final[Ints] = np.cumsum(self.primes) - self.primes.ravel()
        """[(N - 1) * H]"""
        self.multipliers: Final = _multipliers(config, layer)
        """[N]"""
        self.pad: Final = int(compressed[config.pad_id])
        self.compressed: Final = compressed.copy()
        """[V], `NO_TOKEN` for images."""
        if image_token_id is not None:
            self.compressed[image_token_id] = NO_TOKEN

    def rows(self, tokens: Ints) -> Ints:
        """`tokens` [T, N], newest first, `NO_TOKEN` before the start: row numbers [T, (N - 1) * H].

        Behind an image, the start, or an id that is no token, everything older reads as the pad token.
        """
        ids = np.where(tokens == NO_TOKEN, NO_TOKEN, self.compressed[tokens])  # [T, N]
        ids[np.logical_or.accumulate(ids == NO_TOKEN, axis=1)] = self.pad
        # The first column is of one token alone: no table is for it.
        mixed = np.bitwise_xor.accumulate(ids * self.multipliers, axis=1)[:, 1:, None]  # [T, N - 1, 1]
        buckets: Ints = mixed % self.primes  # [T, N - 1, H]
        return buckets.reshape(len(tokens), self.offsets.size) + self.offsets


@contextmanager
def _tokenizer_faults(name: str) -> Iterator[None]:
    """What the library raises on a file of nonsense is a `WorkerFault`."""
    try:
        yield
    except WorkerFault:
        raise
    except BaseException as error:  # bare Exception, or a panic, which is none and has no type to import
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise bad_file(name, f"a tokenizer was expected, Engram hashes its tokens: {error}") from None


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def _key(backend: Tokenizer, normalizer: normalizers.Normalizer, token_id: int) -> str:
    """What tokens share that count as one."""
    text: str = backend.decode([token_id], skip_special_tokens=False)
    if _UNDECODABLE in text:  # a piece of a character
        return backend.id_to_token(token_id) or text
    return normalizer.normalize_str(text) or text


def _primes(config: EngramConfig) -> Ints:
    """Sizes of the parts of the tables, [layers, N - 1, H]: one prime after another, none used twice."""
    shape = (len(config.layers), config.max_ngram - 1, config.num_heads)
    primes = islice(_primes_from(config.vocab_size), int(np.prod(shape)))
    return np.fromiter(primes, np.int64).reshape(shape)


def _primes_from(start: int) -> Iterator[int]:
    for number in count(max(start, 2)):
        if np.all(number % np.arange(2, isqrt(number) + 1)):
            yield number


def _multipliers(config: EngramConfig, layer: int) -> Ints:
    """Odd, [N]; so small that no compressed id overflows."""
    bound = max(1, np.iinfo(np.int64).max // config.compressed_vocab_size // 2)
    generator = np.random.default_rng(_LAYER_SEED * layer)
    return generator.integers(0, bound, size=config.max_ngram, dtype=np.int64) * 2 + 1
