"""Attention of one layer for whole batches: a window, and compressed rows chosen by an indexer, as dense masks.

The formulas are those of the inference model. Knows nothing of streams, experts or other layers' weights; what layers
hand on to each other is in `Carried`.

Legend: `B` rows, `T` places, `C` channels, `H` heads, `D` head dim, `W` window, `R` compressed rows, `h` index heads,
`d` index dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from examples.train_nano.figures import Figures
from examples.train_nano.layers import Switches, norm, product
from examples.train_nano.packed import Packed, Turns, turn
from examples.train_nano.parameters import Weights
from examples.train_nano.rounding import fp8_rows, index_rows, main_rows


class LayerKind(NamedTuple):
    """What a layer does. Layers of a kind share compiled code."""

    ratio: int
    makes_rows: bool
    chooses: bool
    bounds: bool
    """It says which rows later index sources may choose."""
    is_bounded: bool
    is_decoder: bool

    @classmethod
    def of(cls, figures: Figures, layer: int) -> LayerKind:
        source, chooses = figures.candidate_source, layer in figures.index_sources
        return cls(
            figures.ratios[layer],
            layer in figures.kv_sources,
            chooses,
            layer == source,
            chooses and source >= 0 and layer > source,
            layer >= figures.kv_sources[-1],
        )


class Carried(NamedTuple):
    """From layer to layer. Empty at first."""

    main: Tensor | None = None
    """[B, R, D]: compressed keys."""
    index_keys: Tensor | None = None
    """[B, R, d]: index keys."""
    chosen: Tensor | None = None
    """[B, T, R] bool"""
    candidates: Tensor | None = None
    """[B, T, R] bool"""
    scores: Tensor | None = None
    """[B, T, R]: of the last indexer, before its choice. The only thing here with a gradient of its loss."""
    mass: Tensor | None = None
    """[B, T, R]: what the attention of all heads gave each row, since the last choice."""


def attention(
    figures: Figures,
    kind: LayerKind,
    weights: Weights,
    x: Tensor,
    packed: Packed,
    carried: Carried,
    switches: Switches,
    dtype: torch.dtype,
) -> tuple[Tensor, Carried]:
    """`x` [B, T, C] float32: [B, T, C]."""
    turns = packed.stretched if kind.ratio else packed.plain
    rounds = switches.rounds
    inputs = fp8_rows(x, rounds)
    latent = norm(product(inputs, weights["attn.wq_a.weight"], dtype), weights["attn.q_norm.weight"], figures.rms_eps)
    latent = fp8_rows(latent, rounds)
    queries = product(latent, weights["attn.wq_b.weight"], dtype).unflatten(-1, (figures.num_heads, figures.head_dim))
    keys = norm(product(inputs, weights["attn.wkv.weight"], dtype), weights["attn.kv_norm.weight"], figures.rms_eps)
    keys = fp8_rows(turn(keys[:, :, None], turns)[:, :, 0], rounds).to(dtype)
    if kind.makes_rows:
        carried = _make_rows(figures, kind, weights, x, turns, switches, dtype)._replace(candidates=None)
    if kind.chooses:
        carried = _choose(figures, kind, weights, latent.detach(), x.detach(), packed, carried, switches, dtype)
    sinks, window = weights["attn.attn_sink"], packed.decoder_window if kind.is_decoder else packed.window
    out, mass = _attend(figures, turn(queries, turns), keys, window, sinks, carried if kind.ratio else Carried())
    if mass is not None:
        carried = carried._replace(mass=mass if carried.mass is None else carried.mass + mass)
    out = turn(out, turns, back=True)
    groups = out.flatten(2).unflatten(-1, (figures.o_groups, -1))  # [B, T, groups, H * D / groups]
    first = weights["attn.wo_a.weight"].to(dtype).unflatten(0, (figures.o_groups, figures.o_lora_rank))
    middle = torch.einsum("btgi,goi->btgo", groups, first).flatten(2)
    return product(fp8_rows(middle, rounds), weights["attn.wo_b.weight"], dtype), carried


def _make_rows(
    figures: Figures,
    kind: LayerKind,
    weights: Weights,
    x: Tensor,
    turns: Turns,
    switches: Switches,
    dtype: torch.dtype,
) -> Carried:
    values = product(x, weights["attn.compressor.wkv.weight"], dtype).float()
    if kind.ratio > 1:
        gates = product(x, weights["attn.compressor.wgate.weight"], dtype).float()
        values, gates = (part.unflatten(1, (-1, kind.ratio)) for part in (values, gates))
        values = (gates.softmax(2) * values).sum(2)
    latent = norm(values, weights["attn.compressor.norm.weight"], figures.rms_eps)  # [B, R, D]
    first = Turns(*(part[:, :: kind.ratio] for part in turns))
    main = main_rows(turn(latent[:, :, None], first)[:, :, 0], switches.rounds)
    index = product(latent.detach(), weights["attn.indexer.wk.weight"], dtype)
    index = norm(index, weights["attn.indexer.k_norm.weight"], figures.rms_eps)
    index = index_rows(turn(index[:, :, None], first)[:, :, 0], switches.rounds)
    return Carried(main=main.to(dtype), index_keys=index.to(dtype))


def _choose(
    figures: Figures,
    kind: LayerKind,
    weights: Weights,
    latent: Tensor,
    x: Tensor,
    packed: Packed,
    carried: Carried,
    switches: Switches,
    dtype: torch.dtype,
) -> Carried:
    """`latent` and `x` have no gradient: the indexer learns from its own loss, and the model knows nothing of it."""
    assert carried.index_keys is not None
    visible = packed.visible[kind.ratio]
    heads, dim = figures.index_heads, figures.index_dim
    queries = product(latent, weights["attn.indexer.wq_b.weight"], dtype).unflatten(-1, (heads, dim))
    queries = index_rows(turn(queries, packed.stretched), switches.rounds).to(dtype)
    shares = product(x, weights["attn.indexer.weights_proj.weight"], dtype).float() * (dim**-0.5 * heads**-0.5)
    products = torch.bmm(queries.flatten(1, 2), carried.index_keys.transpose(1, 2)).unflatten(1, (-1, heads))
    scores = (products.relu().float() * shares[..., None]).sum(2)  # [B, T, R]
    known = scores.detach().masked_fill(~visible, -torch.inf)
    candidates = carried.candidates
    if kind.bounds:
        candidates = _candidates(figures, kind.ratio, known, packed)
    allowed = known
    if kind.is_bounded:
        assert candidates is not None
        allowed = known.masked_fill(~candidates, -torch.inf)
    chosen = torch.where(switches.selects, _best(allowed, figures.index_topk), visible)
    return carried._replace(chosen=chosen, candidates=candidates, scores=scores, mass=None)


def _best(scores: Tensor, most: int) -> Tensor:
    """Where the `most` best of the last dim are, minus infinity never."""
    is_there = scores > -torch.inf
    if scores.shape[-1] <= most:
        return is_there
    best = scores.topk(most, sorted=False).indices
    return torch.zeros_like(is_there).scatter(-1, best, True) & is_there


def _candidates(figures: Figures, ratio: int, known: Tensor, packed: Packed) -> Tensor:
    """The rows of the best blocks, the newest visible one always among them.

    A document begins at a multiple of the block, so that its blocks are blocks of the row.
    """
    size, num_rows = figures.candidate_block_size, known.shape[-1]
    peaks = known.unflatten(-1, (-1, size)).amax(-1)  # [B, T, blocks]
    last = torch.div(torch.arange(known.shape[1], device=known.device) + 1, ratio, rounding_mode="floor") - 1
    newest = (
        torch.arange(num_rows // size, device=known.device) == torch.div(last, size, rounding_mode="floor")[:, None]
    )
    has_any = packed.visible[ratio].any(-1, keepdim=True)
    peaks = torch.where(newest & has_any, torch.inf, peaks)
    return _best(peaks, figures.candidate_blocks).repeat_interleave(size, -1)


def _attend(
    figures: Figures, queries: Tensor, keys: Tensor, window: Tensor, sinks: Tensor, carried: Carried
) -> tuple[Tensor, Tensor | None]:
    """`queries` [B, T, H, D], own `keys` [B, T, D]: [B, T, H, D], and what each compressed row got."""
    num_rows, num_places, num_heads, dim = queries.shape
    size, scale = figures.window, dim**-0.5
    blocks = keys.view(num_rows, -1, size, dim)  # [B, T / W, W, D]
    both = torch.cat((torch.cat((torch.zeros_like(blocks[:, :1]), blocks[:, :-1]), 1), blocks), 2).flatten(0, 1)
    near = torch.bmm(queries.reshape(-1, size * num_heads, dim), both.transpose(1, 2))  # [B * T / W, W * H, 2W]
    near = near.view(num_rows, num_places, num_heads, 2 * size).float() * scale
    near = near.masked_fill(~window[:, :, None], -torch.inf)
    sinks = sinks[:, None]  # [H, 1]
    peaks = torch.maximum(near.amax(-1, keepdim=True), sinks)
    if carried.main is None or carried.chosen is None:
        peaks = peaks.detach()
        near = (near - peaks).exp()
        total = near.sum(-1, keepdim=True) + (sinks - peaks).exp()
        out = torch.bmm(near.to(keys.dtype).view(-1, size * num_heads, 2 * size), both)
        return (out.view(queries.shape) / total).to(keys.dtype), None
    far = torch.bmm(queries.flatten(1, 2), carried.main.transpose(1, 2)).unflatten(1, (-1, num_heads)).float() * scale
    far = far.masked_fill(~carried.chosen[:, :, None], -torch.inf)  # [B, T, H, R]
    peaks = torch.maximum(peaks, far.amax(-1, keepdim=True)).detach()
    near, far = (near - peaks).exp(), (far - peaks).exp()
    total = near.sum(-1, keepdim=True) + far.sum(-1, keepdim=True) + (sinks - peaks).exp()
    out = torch.bmm(near.to(keys.dtype).view(-1, size * num_heads, 2 * size), both).view(queries.shape)
    out = out + torch.bmm(far.to(keys.dtype).flatten(1, 2), carried.main).view(queries.shape)
    mass = (far.detach() / total.detach()).sum(2)
    return (out / total).to(keys.dtype), mass
