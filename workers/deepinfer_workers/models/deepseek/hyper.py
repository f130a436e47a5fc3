"""Hyper-connections: several residual streams, mixed by every block. Knows nothing of what a block computes.

Legend: `T` positions, `n` streams, `C` channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_kernels import mix_numbers
from deepinfer_workers.models.deepseek.weights import DeepseekWeights, Linear


class Mixes(NamedTuple):
    """How one sublayer reads and writes the streams of each position."""

    collapse: Tensor
    """[T, n]: the share of each stream in the input."""
    post: Tensor
    """[T, n]: the share of the output that each stream gets."""
    comb: Tensor
    """[T, n, n]: what stream j (first) passes on to stream k (second)."""


class HyperConnection:
    """The mixes of one sublayer, from the streams themselves."""

    def __init__(self, weights: DeepseekWeights, name: str) -> None:
        """`name`: what its three tensors begin with."""
        config, n = weights.config, weights.config.hc_mult
        self._ops = weights.ops
        self._settings = config.hc_iters, config.hc_eps, config.rms_eps
        self._fn, self._base = weights.plain_linear(f"{name}_fn"), weights.plain(f"{name}_base")
        sizes = torch.tensor((n, n, n * n), device=weights.device)
        self._scale = torch.repeat_interleave(weights.plain(f"{name}_scale"), sizes)  # [2n + n * n]

    def mixes(self, streams: Tensor) -> Mixes:
        """Of `streams` [T, n, C]."""
        raw = self._fn(streams.flatten(1))
        return Mixes(*self._ops.stream_mixes(raw, streams, self._scale, self._base, *self._settings))


class HeadCollapse:
    """V4: the streams to one, at the end."""

    def __init__(self, weights: DeepseekWeights, name: str) -> None:
        self._ops, self._eps, self._rms_eps = weights.ops, weights.config.hc_eps, weights.config.rms_eps
        self._fn: Linear = weights.plain_linear(f"{name}_fn")
        self._base, self._scale = weights.plain(f"{name}_base"), weights.plain(f"{name}_scale")

    def __call__(self, streams: Tensor) -> Tensor:
        """[T, n, C] to [T, C]."""
        flat = streams.flatten(1)
        numbers = mix_numbers(self._fn(flat), flat, self._scale, self._base, self._rms_eps)
        return collapse(self._ops.sigmoid(numbers) + self._eps, streams)


def collapse(shares: Tensor, streams: Tensor) -> Tensor:
    """The streams [T, n, C] by their `shares` [T, n]: [T, C]."""
    return (shares[..., None] * streams).sum(1)
