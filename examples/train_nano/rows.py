"""Rows of tokens as `prepare` wrote them, in batches. The batch of a step depends on its number alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_SEED = 11
LONG_EVERY = 5
"""One step of so many has long rows: a fifth of the tokens."""


class Rows:
    """All rows of one length, in an order of their own in every epoch."""

    def __init__(self, paths: list[Path], device: torch.device) -> None:
        found = [np.load(path, allow_pickle=False) for path in paths]
        self._rows = torch.from_numpy(np.concatenate(found).astype(np.int32)).to(device)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, index: int, size: int) -> Tensor:
        """[size, length] int64; `index` counts batches over epochs."""
        size = min(size, len(self))
        epoch, place = divmod(index, len(self) // size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((_SEED, epoch)).permutation(len(self))
        chosen = torch.from_numpy(self._order[place * size : (place + 1) * size])
        return self._rows[chosen.to(self._rows.device)].long()

    def in_order(self, size: int) -> list[Tensor]:
        return [part.long() for part in self._rows.split(size)]


class Mixture:
    """Short rows and, where there are any, long ones; about as many tokens in each step."""

    def __init__(self, folder: Path, split: str, tokens_per_step: int, device: torch.device) -> None:
        self._tokens_per_step = tokens_per_step
        lengths = sorted({int(path.stem.split("_")[1]) for path in folder.glob(f"{split}_*.npy")})
        assert 1 <= len(lengths) <= 2, f"{folder}: {split} rows of one or two lengths were expected, {lengths} came"
        self.lengths = tuple(lengths)
        self._kinds = [Rows(sorted(folder.glob(f"{split}_{length}_*.npy")), device) for length in lengths]

    def batch(self, step: int) -> Tensor:
        """[B, T] int64"""
        is_long = len(self.lengths) > 1 and step % LONG_EVERY == LONG_EVERY - 1
        num_long = step // LONG_EVERY if len(self.lengths) > 1 else 0
        index = num_long if is_long else step - num_long
        return self._kinds[is_long].batch(index, self._size(self.lengths[is_long]))

    def in_order(self) -> list[Tensor]:
        """Each row once."""
        return [
            part
            for length, rows in zip(self.lengths, self._kinds, strict=True)
            for part in rows.in_order(self._size(length))
        ]

    def _size(self, length: int) -> int:
        return max(self._tokens_per_step // length, 1)
