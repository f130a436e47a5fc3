"""One layer of the model: attention and experts between the residual streams. Knows nothing of other layers.

Legend: `T` positions, `n` streams, `C` channels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deepinfer_workers.models.deepseek.attention import Attention, StepState
from deepinfer_workers.models.deepseek.formats import CacheFormats
from deepinfer_workers.models.deepseek.hyper import HyperConnection, collapse, expand
from deepinfer_workers.models.deepseek.layer_caches import LayerCaches
from deepinfer_workers.models.deepseek.moe import ExpertCache, MoE
from deepinfer_workers.models.deepseek.positions import StepPositions
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
        self._reads_ahead = weights.config.family == "v4.1"
        self._attention_mixes = HyperConnection(weights, f"{name}.hc_attn")
        self._ffn_mixes = HyperConnection(weights, f"{name}.hc_ffn")
        self._attention_norm = weights.norm(f"{name}.attn_norm")
        self._ffn_norm = weights.norm(f"{name}.ffn_norm")
        self._attention = Attention(weights, f"{name}.attn", layer, table, formats)
        self._moe = MoE(weights, f"{name}.ffn", layer, experts)

    def make_rows(self, streams: Streams, positions: StepPositions, caches: LayerCaches, state: StepState) -> None:
        """A source layer's compressed rows, of all positions."""
        source = self._attention.source
        if source is None:
            return
        assert caches.source is not None
        shares = streams.shares if self._reads_ahead else self._attention_mixes.mixes(streams.values).collapse
        source.write(self._attention_input(shares, streams), positions, caches.source)
        state.source = caches.source

    def __call__(self, streams: Streams, positions: StepPositions, caches: LayerCaches, state: StepState) -> Streams:
        """The streams behind the layer. Single pass: each sublayer reads by the shares that the one before it made."""
        mixes = self._attention_mixes.mixes(streams.values)
        shares = streams.shares if self._reads_ahead else mixes.collapse
        out = self._attention(self._attention_input(shares, streams), positions, caches.window, state)
        values = expand(out, streams.values, mixes)
        ffn_mixes = self._ffn_mixes.mixes(values)
        shares = mixes.collapse if self._reads_ahead else ffn_mixes.collapse
        x = self._ffn_norm(collapse(shares, values))
        return Streams(expand(self._moe(x, positions.tokens), values, ffn_mixes), ffn_mixes.collapse)

    def _attention_input(self, shares: Tensor, streams: Streams) -> Tensor:
        return self._attention_norm(collapse(shares, streams.values))
