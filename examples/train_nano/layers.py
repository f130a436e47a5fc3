"""Streams, experts and n-grams, as the training model computes them. Knows nothing of attention or of other layers.

The formulas are those of the inference model (`deepinfer_workers.models.deepseek`), for batches of rows. Products take
their inputs in `dtype`; norms, gates and streams stay float32.

Legend: `B` rows, `T` places, `C` channels, `n` streams, `E` experts, `F` expert width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from examples.train_nano.figures import Figures
from examples.train_nano.parameters import Weights
from examples.train_nano.rounding import fp8_rows


class Switches(NamedTuple):
    """What changes while training goes on: 0-dim bool tensors, so that nothing is compiled anew."""

    rounds: Tensor
    """Activations and cached rows go through the small formats of inference."""
    selects: Tensor
    """Attention sees the rows that the indexer chose, not all."""


class Mixes(NamedTuple):
    """How a sublayer writes the streams, and how the next one reads them."""

    read: Tensor
    """[B, T, n]"""
    post: Tensor
    """[B, T, n]"""
    comb: Tensor
    """[B, T, n, n]"""


def product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., in] by [out, in]: [..., out] in `dtype`."""
    return linear(x.to(dtype), weight.to(dtype))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the root of the mean square: float32."""
    x = x.float()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mixes(figures: Figures, fn: Tensor, base: Tensor, scale: Tensor, streams: Tensor) -> Mixes:
    """Of `streams` [B, T, n, C]; `fn` [2n + n * n, n * C], `base` [2n + n * n] and `scale` [3] are a sublayer's."""
    n, eps = figures.hc_mult, figures.hc_eps
    sizes = (n, n, n * n)
    flat = streams.flatten(2)
    scales = torch.cat([one.expand(size) for one, size in zip(scale.split(1), sizes, strict=True)])
    length = (flat.square().mean(-1, keepdim=True) + figures.rms_eps).sqrt()
    read, post, comb = (linear(flat, fn) / length * scales + base).split(sizes, -1)
    balanced = balance(comb.unflatten(-1, (n, n)), figures.hc_iters, eps)
    return Mixes(read.sigmoid() + eps, 2.0 * post.sigmoid(), balanced)


def balance(logits: Tensor, num_iters: int, eps: float) -> Tensor:
    """Sinkhorn's iteration on [..., n, n]."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(shares: Tensor, streams: Tensor) -> Tensor:
    """[B, T, n, C] by [B, T, n]: [B, T, C]."""
    return (shares[..., None] * streams).sum(2)


def expand(output: Tensor, streams: Tensor, mixes: Mixes) -> Tensor:
    """The streams behind a sublayer whose output is [B, T, C]."""
    total = mixes.post[..., None] * output.float()[:, :, None]
    for source in range(streams.shape[2]):
        total = total + mixes.comb[:, :, source, :, None] * streams[:, :, source, None]
    return total


def experts(
    figures: Figures, weights: Weights, x: Tensor, is_real: Tensor, switches: Switches, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of `x` [B, T, C]: the output [B, T, C], and the tokens that each expert got, [E].

    Every expert computes every token, side by side as one wide layer, and what it was not chosen for counts nothing:
    for experts this small that is faster than to sort tokens, and all shapes are fixed.
    """
    shares, is_chosen = _route(figures, weights, x)
    loads = (is_chosen & is_real[..., None]).sum((0, 1))
    x = fp8_rows(x, switches.rounds)
    gate = product(x, _wide(weights, "w1"), dtype).float().clamp(max=figures.swiglu_limit)
    up = product(x, _wide(weights, "w3"), dtype).float().clamp(-figures.swiglu_limit, figures.swiglu_limit)
    shares = torch.cat((shares, torch.ones_like(shares[..., :1])), -1)  # the shared one is last
    inner = (silu(gate) * up).unflatten(-1, (-1, figures.expert_width)) * shares[..., None]
    inner = fp8_rows(inner, switches.rounds).flatten(-2)
    down = torch.cat((*weights["ffn.experts.w2"].unbind(0), weights["ffn.shared_experts.w2.weight"]), 1)
    return product(inner, down, dtype), loads


def _wide(weights: Weights, name: str) -> Tensor:
    """All experts' rows, [(E + 1) * F, C]."""
    return torch.cat((weights[f"ffn.experts.{name}"].flatten(0, 1), weights[f"ffn.shared_experts.{name}.weight"]))


def _route(figures: Figures, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Shares and choices, [B, T, E] each."""
    scores = softplus(linear(x, weights["ffn.gate.weight"])).sqrt()
    biased = scores.detach() + weights["ffn.gate.bias"]
    ranks = (biased[..., None, :] > biased[..., :, None]).sum(-1)  # of 16 experts, cheaper than to sort
    is_chosen = ranks < figures.experts_per_token
    chosen = scores * is_chosen
    if figures.experts_per_token > 1:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * figures.route_scale, is_chosen


def add_ngrams(
    figures: Figures, weights: Weights, streams: Tensor, found: Tensor, switches: Switches, dtype: torch.dtype
) -> Tensor:
    """`streams` [B, T, n, C] with what the tables say, `found` [B, T, E]."""
    both = product(fp8_rows(found, switches.rounds), weights["engram.wkv.weight"], dtype).float()
    key, value = both.split((figures.hc_mult * figures.hidden_size, figures.hidden_size), -1)
    key = key.unflatten(-1, (figures.hc_mult, figures.hidden_size))
    lengths = _length(streams, figures.rms_eps) * _length(key, figures.rms_eps)
    alike = (streams * (weights["engram.q_weight"] * weights["engram.k_weight"]) * key).sum(-1) / lengths
    alike = alike * figures.hidden_size**-0.5
    gate = (alike.sign() * alike.abs().clamp(min=1e-6).sqrt()).sigmoid()
    added: Tensor = gate[..., None] * value[:, :, None]
    return streams + added


def _length(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1) + eps).sqrt()
