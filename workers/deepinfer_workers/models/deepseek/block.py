"""One layer of the model: attention and experts between the residual streams. Knows nothing of other layers.

Legend: `T` positions, `n` streams, `C` channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.attention import Attention, StepState
from deepinfer_workers.models.deepseek.flat_positions import Positions
from deepinfer_workers.models.deepseek.formats import CacheFormats
from deepinfer_workers.models.deepseek.hyper import HyperConnection, Mixes, collapse
from deepinfer_workers.models.deepseek.layer_caches import LayerCaches
from deepinfer_workers.models.deepseek.moe import ExpertCache, MoE, Routing
from deepinfer_workers.models.deepseek.rope import RopeTable
from deepinfer_workers.models.deepseek.weights import DeepseekWeights


class Streams(NamedTuple):
    """The residual streams of each position, and the shares by which the next sublayer reads them."""

    values: Tensor
    """[T, n, C]"""
    shares: Tensor
    """[T, n]. V4 reads by shares of its own and leaves these alone."""

    def at(self, index: Tensor) -> Streams:
        return Streams(self.values.index_select(0, index), self.shares.index_select(0, index))


def enter(embedded: Tensor, num_streams: int) -> Streams:
    """Every stream starts as the token's embedding, [T, C]; the first sublayer reads the first one."""
    values = embedded[:, None].repeat(1, num_streams, 1)
    shares = torch.zeros(values.shape[:2], device=values.device)
    shares[:, 0] = 1.0
    return Streams(values, shares)


class AttentionInput(NamedTuple):
    """What the attention of a layer reads, for positions whose streams have not changed since."""

    x: Tensor
    """[T, C]"""
    mixes: Mixes | None
    """V4: the shares that `x` was read by are among them."""


class Sublayers:
    """All of a layer but its attention: how the streams are read and written, and the experts."""

    def __init__(self, weights: DeepseekWeights, name: str, experts: ExpertCache, routing: Routing) -> None:
        self._ops = weights.ops
        self._reads_ahead = weights.config.family == "v4.1"
        self._attention_mixes = HyperConnection(weights, f"{name}.hc_attn")
        self._ffn_mixes = HyperConnection(weights, f"{name}.hc_ffn")
        self._attention_norm = weights.norm(f"{name}.attn_norm")
        self._ffn_norm = weights.norm(f"{name}.ffn_norm")
        self._moe = MoE(weights, f"{name}.ffn", experts, routing)

    def __call__(
        self,
        streams: Streams,
        tokens: Tensor,
        attend: Callable[[Tensor], Tensor],
        known: AttentionInput | None = None,
    ) -> Streams:
        """The streams behind the layer, whose attention is `attend`, [T, C] to [T, C].

        Single pass: each sublayer reads by the shares that the one before it made. `known`: what `read` gave.
        """
        x, mixes = self.read(streams) if known is None else known
        mixes = self._attention_mixes.mixes(streams.values) if mixes is None else mixes
        values = self._ops.expand_streams(attend(x), streams.values, mixes.post, mixes.comb)
        ffn_mixes = self._ffn_mixes.mixes(values)
        shares = mixes.collapse if self._reads_ahead else ffn_mixes.collapse
        x = self._ffn_norm(collapse(shares, values))
        values = self._ops.expand_streams(self._moe(x, tokens), values, ffn_mixes.post, ffn_mixes.comb)
        return Streams(values, ffn_mixes.collapse)

    def read(self, streams: Streams) -> AttentionInput:
        mixes = None if self._reads_ahead else self._attention_mixes.mixes(streams.values)
        shares = streams.shares if mixes is None else mixes.collapse
        return AttentionInput(self._attention_norm(collapse(shares, streams.values)), mixes)


class Block:
    def __init__(
        self,
        weights: DeepseekWeights,
        layer: int,
        table: RopeTable,
        formats: CacheFormats,
        experts: ExpertCache,
    ) -> None:
        name = f"layers.{layer}"
        self._attention = Attention(weights, f"{name}.attn", layer, table, formats)
        self._sublayers = Sublayers(weights, name, experts, Routing.of_layer(weights, layer))

    def make_rows(
        self, streams: Streams, positions: Positions, caches: LayerCaches, state: StepState
    ) -> AttentionInput:
        """A source layer's compressed rows, of all positions; what they were made of."""
        source = self._attention.source
        assert source is not None and caches.source is not None
        known = self._sublayers.read(streams)
        source.write(known.x, positions, caches.source)
        state.source = caches.source
        return known

    def __call__(
        self,
        streams: Streams,
        positions: Positions,
        caches: LayerCaches,
        state: StepState,
        known: AttentionInput | None = None,
    ) -> Streams:
        """The streams behind the layer. `known`: what `make_rows` has read, where it was of the same positions."""

        def attend(x: Tensor) -> Tensor:
            return self._attention(x, positions, caches.window, state)

        return self._sublayers(streams, positions.tokens, attend, known)
