"""Hyper-connections: several residual streams, mixed by every block. Knows nothing of what a block computes.

Legend: `T` positions, `n` streams, `C` channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_kernels import sigmoid
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
        config = weights.config
        self._num_streams, self._num_iters, self._eps = config.hc_mult, config.hc_iters, config.hc_eps
        self._mixer = StreamMixer(weights, name)
        sizes = (self._num_streams, self._num_streams, self._num_streams**2)
        self._scale = torch.repeat_interleave(
            weights.plain(f"{name}_scale"), torch.tensor(sizes, device=weights.device)
        )  # [2n + n * n]

    def mixes(self, streams: Tensor) -> Mixes:
        """Of `streams` [T, n, C]."""
        n = self._num_streams
        pre, post, comb = self._mixer.mix(streams, self._scale).split((n, n, n * n), -1)
        return Mixes(sigmoid(pre) + self._eps, 2.0 * sigmoid(post), self._balance(comb.unflatten(-1, (n, n))))

    def _balance(self, logits: Tensor) -> Tensor:
        """Sinkhorn's iteration on `logits` [T, n, n]: rows and columns that add up to about 1."""
        eps = self._eps
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        comb = (weights / weights.sum(-1, keepdim=True)).add_(eps)
        comb.div_(comb.sum(-2, keepdim=True).add_(eps))
        for _ in range(self._num_iters - 1):
            comb.div_(comb.sum(-1, keepdim=True).add_(eps))
            comb.div_(comb.sum(-2, keepdim=True).add_(eps))
        return comb


class StreamMixer:
    """Numbers of each position from all its streams together: a product, and their common norm behind it."""

    def __init__(self, weights: DeepseekWeights, name: str) -> None:
        self._fn: Linear = weights.plain_linear(f"{name}_fn")  # [numbers, n * C]
        self._base = weights.plain(f"{name}_base")
        self._rms_eps = weights.config.rms_eps

    def mix(self, streams: Tensor, scale: Tensor) -> Tensor:
        """`streams` [T, n, C], `scale` a number or one for each: [T, numbers]."""
        flat = streams.flatten(1)
        return self._fn(flat) / ((flat * flat).mean(-1, keepdim=True) + self._rms_eps).sqrt() * scale + self._base


class HeadCollapse:
    """V4: the streams to one, at the end."""

    def __init__(self, weights: DeepseekWeights, name: str) -> None:
        self._mixer = StreamMixer(weights, name)
        self._scale = weights.plain(f"{name}_scale")
        self._eps = weights.config.hc_eps

    def __call__(self, streams: Tensor) -> Tensor:
        """[T, n, C] to [T, C]."""
        return collapse(sigmoid(self._mixer.mix(streams, self._scale)) + self._eps, streams)


def collapse(shares: Tensor, streams: Tensor) -> Tensor:
    """The streams [T, n, C] by their `shares` [T, n]: [T, C]."""
    return (shares[..., None] * streams).sum(1)


def expand(output: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
    """The streams [T, n, C] behind a sublayer whose output is [T, C]."""
    total = mixes.post[..., None] * output[:, None]
    for source in range(streams.shape[1]):
        total = total + mixes.comb[:, source, :, None] * streams[:, source, None]
    return total
