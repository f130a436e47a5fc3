"""Rotary position embedding on the last dims of a head, over adjacent pairs. Knows nothing of layers.

Legend: `T` positions, `R` turned dims.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.config import Yarn

_LEAST_RAMP: Final = 1e-3


class Turns(NamedTuple):
    """Of the positions of a step."""

    cos: Tensor
    """[T, R / 2]"""
    sin: Tensor

    def at(self, index: Tensor) -> Turns:
        return Turns(self.cos.index_select(0, index), self.sin.index_select(0, index))


class RopeTable:
    """Turns of every position, in float32 as the released model has them."""

    def __init__(self, theta: float, rope_dim: int, max_len: int, yarn: Yarn | None, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies(theta, rope_dim, yarn))
        self._turns = Turns(angles.cos().to(device), angles.sin().to(device))

    def at(self, positions: Tensor) -> Turns:
        """Of `positions` [T]."""
        return self._turns.at(positions)


def frequencies(theta: float, rope_dim: int, yarn: Yarn | None) -> Tensor:
    """[R / 2] float32: radians a position. YaRN blends to a slower turn where a full one was never seen in training."""
    pairs = torch.arange(0, rope_dim, 2, dtype=torch.float32)  # [R / 2]
    freqs = 1.0 / theta ** (pairs / rope_dim)
    if yarn is None:
        return freqs
    low = max(floor(_pair_of(yarn.beta_fast, theta, rope_dim, yarn)), 0)
    high = min(ceil(_pair_of(yarn.beta_slow, theta, rope_dim, yarn)), rope_dim - 1)
    ramp = torch.arange(rope_dim // 2, dtype=torch.float32).sub_(low).div_(max(high - low, _LEAST_RAMP)).clamp_(0, 1)
    return freqs / yarn.factor * ramp + freqs * (1.0 - ramp)


def _pair_of(num_turns: float, theta: float, rope_dim: int, yarn: Yarn) -> float:
    """The pair of dims that makes this many turns in the original context."""
    return rope_dim * log(yarn.original_len / (num_turns * 2 * pi)) / (2 * log(theta))
