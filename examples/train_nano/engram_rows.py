"""Which rows of the n-gram tables a token reads, for whole batches on a device. Knows nothing of what is in them.

The formulas are those of `deepinfer_workers.models.deepseek.engram_hash`; this form needs only torch and numpy.
"""

from __future__ import annotations

from itertools import count, islice
from math import isqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from examples.train_nano.figures import EngramFigures

_LAYER_SEED = 10007


class EngramRows:
    """Of one layer."""

    def __init__(self, figures: EngramFigures, layer: int, compressed: Tensor) -> None:
        """`compressed` [V]: what each token counts as."""
        device = compressed.device
        sizes = table_sizes(figures)[figures.layers.index(layer)]  # [N - 1, H]
        offsets = np.cumsum(sizes).reshape(sizes.shape) - sizes
        bound = max(1, np.iinfo(np.int64).max // figures.compressed_vocab_size // 2)
        drawn = np.random.default_rng(_LAYER_SEED * layer).integers(0, bound, size=figures.max_ngram, dtype=np.int64)
        self._sizes, self._offsets = (torch.from_numpy(array).to(device) for array in (sizes, offsets))
        self._multipliers: list[int] = (drawn * 2 + 1).tolist()
        self._compressed, self._pad = compressed, compressed[figures.pad]

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`tokens`, `positions` [B, T], several documents a row: [B, T, (N - 1) * H]."""
        ids = self._compressed[tokens]
        mixed = ids * self._multipliers[0]
        rows: list[Tensor] = []
        for distance, multiplier in enumerate(self._multipliers[1:], start=1):
            before = torch.where(positions >= distance, ids.roll(distance, 1), self._pad)
            mixed = mixed ^ (before * multiplier)
            rows.append(mixed[..., None] % self._sizes[distance - 1] + self._offsets[distance - 1])
        return torch.cat(rows, -1)


def table_sizes(figures: EngramFigures) -> npt.NDArray[np.int64]:
    """[layers, N - 1, H]: primes above `vocab_size`, none used twice."""
    shape = (len(figures.layers), figures.max_ngram - 1, figures.num_heads)
    primes = (number for number in count(max(figures.vocab_size, 2)) if _is_prime(number))
    return np.fromiter(islice(primes, int(np.prod(shape))), np.int64).reshape(shape)


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, isqrt(number) + 1))
