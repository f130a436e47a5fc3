"""The training model of the V4.1 family: batches of packed rows to losses. Has no caches, and generates nothing.

Its logits are those of the inference model with the same weights (a test compares them).

Legend: `B` rows, `T` places, `n` streams, `C` channels, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from examples.train_nano.attention import Carried, LayerKind, attention
from examples.train_nano.engram_rows import EngramRows
from examples.train_nano.figures import Figures
from examples.train_nano.layers import Mixes, Switches, add_ngrams, collapse, expand, experts, mixes, norm, product
from examples.train_nano.packed import IGNORED, Packed
from examples.train_nano.parameters import Weights, of_layer


class Passed(NamedTuple):
    """What a forward pass leaves."""

    hidden: Tensor
    """[B, T, C], normed."""
    index_loss: Tensor
    """How far the indexers' scores are from what attention looks at: the mean over index sources and places."""
    loads: Tensor
    """[layers, E]: tokens that each expert got."""
    taps: Tensor | None
    """[B, T, layers * C]: what draft stages read, the mean of the streams into each of their target layers."""


class Losses(NamedTuple):
    text: Tensor
    """Nats per token of answers."""
    indexers: Tensor
    loads: Tensor


class Model:
    """Figures and functions; the weights come with each call."""

    def __init__(self, figures: Figures, compressed: Tensor, dtype: torch.dtype, *, compiles: bool = False) -> None:
        """`compressed` [V]: what each token counts as, for Engram. Products are computed in `dtype`."""
        self.figures, self._dtype = figures, dtype
        self._kinds = [LayerKind.of(figures, layer) for layer in range(figures.num_layers)]
        layers = () if figures.engram is None else figures.engram.layers
        assert not layers or figures.engram is not None
        self._ngrams = {layer: EngramRows(figures.engram, layer, compressed) for layer in layers if figures.engram}

        def ready(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False, fullgraph=True) if compiles else function

        # In parts, so that most layers share most of what is compiled.
        self._mixes, self._attend, self._think = ready(mixes), ready(_attend), ready(think)
        self._add_ngrams = ready(add_ngrams)
        self._index_loss, self._text_loss = ready(_index_loss), ready(_text_loss)

    def __call__(self, weights: Weights, packed: Packed, switches: Switches, tapped: tuple[int, ...] = ()) -> Passed:
        """`tapped`: layers whose inputs are wanted."""
        figures, dtype = self.figures, self._dtype
        streams = weights["embed.weight"][packed.tokens][:, :, None].repeat(1, 1, figures.hc_mult, 1)
        shares = torch.zeros(streams.shape[:3], device=streams.device)
        shares[..., 0] = 1.0
        carried, loads, index_losses, taps = Carried(), [], [], []
        for layer, kind in enumerate(self._kinds):
            if layer in tapped:
                taps.append(streams.mean(2))
            if layer in self._ngrams:
                own = of_layer(weights, layer, "engram")
                rows = self._ngrams[layer](packed.tokens, packed.positions)
                found = own.pop("engram.embed.weight")[rows].flatten(2)
                streams = self._add_ngrams(figures, own, streams, found, switches, dtype)
            if kind.chooses and carried.scores is not None:
                index_losses.append(self._index_loss(carried, packed.is_real))
            carried = Carried() if kind.makes_rows else carried
            own = of_layer(weights, layer, "attn")
            mixed = self._mix(weights, f"layers.{layer}.hc_attn", streams)
            streams, kept = self._attend(figures, kind, own, streams, shares, mixed, packed, carried, switches, dtype)
            carried = Carried(*kept)
            # Each sublayer reads by the shares that the one before it made.
            shares, own = mixed.read, of_layer(weights, layer, "ffn")
            mixed = self._mix(weights, f"layers.{layer}.hc_ffn", streams)
            streams, load = self._think(figures, own, streams, shares, mixed, packed.is_real, switches, dtype)
            shares = mixed.read
            loads.append(load)
        if carried.scores is not None:
            index_losses.append(self._index_loss(carried, packed.is_real))
        hidden = norm(collapse(shares, streams), weights["norm.weight"], figures.rms_eps)
        index_loss = torch.stack(index_losses).mean() if index_losses else hidden.new_zeros(())
        return Passed(hidden, index_loss, torch.stack(loads), torch.cat(taps, -1) if taps else None)

    def _mix(self, weights: Weights, name: str, streams: Tensor) -> Mixes:
        fn, base, scale = (weights[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        mixed: Mixes = self._mixes(self.figures, fn, base, scale, streams)
        return mixed

    def logits(self, weights: Weights, packed: Packed, switches: Switches) -> Tensor:
        """[B, T, V] float32."""
        return linear(self(weights, packed, switches).hidden, weights["head.weight"])

    def losses(self, weights: Weights, packed: Packed, switches: Switches) -> Losses:
        passed = self(weights, packed, switches)
        text = self._text_loss(passed.hidden, weights["head.weight"], packed.targets, self._dtype)
        return Losses(text, passed.index_loss, passed.loads)


def _attend(
    figures: Figures,
    kind: LayerKind,
    weights: Weights,
    streams: Tensor,
    shares: Tensor,
    mixed: Mixes,
    packed: Packed,
    carried: Carried,
    switches: Switches,
    dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The streams behind a layer's attention, and what is carried on (a plain tuple: the compiler wants no other)."""
    x = norm(collapse(shares, streams), weights["attn_norm.weight"], figures.rms_eps)
    out, carried = attention(figures, kind, weights, x, packed, carried, switches, dtype)
    kept = (carried.main, carried.index_keys, carried.chosen, carried.candidates, carried.scores, carried.mass)
    return expand(out, streams, mixed), kept


def think(
    figures: Figures,
    weights: Weights,
    streams: Tensor,
    shares: Tensor,
    mixed: Mixes,
    is_real: Tensor,
    switches: Switches,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The streams behind a layer's experts, and the experts' loads."""
    x = norm(collapse(shares, streams), weights["ffn_norm.weight"], figures.rms_eps)
    out, loads = experts(figures, weights, x, is_real, switches, dtype)
    return expand(out, streams, mixed), loads


def _index_loss(carried: Carried, is_real: Tensor) -> Tensor:
    """KL from the attention over the chosen rows to the softmax of their index scores, the mean over places."""
    assert carried.scores is not None and carried.chosen is not None and carried.mass is not None
    target = carried.mass / (carried.mass.sum(-1, keepdim=True) + 1e-9)  # [B, T, R], zero where nothing is chosen
    guess = carried.scores.masked_fill(~carried.chosen, -1e9).log_softmax(-1)
    terms = torch.where(target > 0, target * (target.clamp(min=1e-12).log() - guess), 0.0)
    counts = is_real & carried.chosen.any(-1)
    return (terms.sum(-1) * counts).sum() / counts.sum().clamp(min=1)


def _text_loss(hidden: Tensor, head: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    logits = product(hidden, head, dtype).float().flatten(0, 1)
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
