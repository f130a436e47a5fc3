"""The attention of a draft stage: a block of places sees a window of context, and all of itself.

The context's keys are made of what the model's own layers held, and lie in a ring of the slot. Those of the block are
never kept. Knows nothing of streams, nor of what the places of a block stand for.

Legend: `R` blocks, `B` places of a block, `W` window, `T` = R * B, `C` channels, `H` heads, `D` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.caches import Rings
from deepinfer_workers.models.deepseek.formats import CacheFormats
from deepinfer_workers.models.deepseek.projections import Projections
from deepinfer_workers.models.deepseek.rope import Turns
from deepinfer_workers.models.deepseek.sparse_attention import KEY_TILE, attend
from deepinfer_workers.models.deepseek.weights import DeepseekWeights


@dataclass(frozen=True)
class DraftBlocks:
    """Where blocks stand: made once, and shared by all stages."""

    turns: Turns
    """Of the `T` places."""
    slots: Tensor
    """[R]"""
    context: Tensor
    """[R, W]: positions of the window that ends before each block."""
    is_hidden: Tensor
    """[R, W] bool: nothing is known of them."""


class DraftAttention:
    def __init__(self, weights: DeepseekWeights, name: str, formats: CacheFormats) -> None:
        self._projections = Projections(weights, name)
        self._sinks = weights.plain(f"{name}.attn_sink")  # [H]
        self._format = formats.window

    def context_keys(self, context: Tensor, turns: Turns) -> Tensor:
        """Of `context` [G, C], what a ring keeps: [G, D]."""
        return self._projections.keys(context, turns)

    def __call__(self, x: Tensor, blocks: DraftBlocks, ring: Rings) -> Tensor:
        """`x` [T, C]: [T, C]. All queries of a block see the same keys: they are its heads, B * H of them."""
        projections, num_blocks = self._projections, len(blocks.slots)
        queries = projections.queries(projections.latent(x), blocks.turns)  # [T, H, D]
        keys, is_hidden = self._keys(projections.keys(x, blocks.turns), blocks, ring)
        num_places = len(x) // num_blocks
        by_block = queries.view(num_blocks, -1, queries.shape[-1])  # [R, B * H, D]
        out = attend(by_block, keys, is_hidden, self._sinks.repeat(num_places))
        return projections.output(out.view_as(queries), blocks.turns)

    def _keys(self, own: Tensor, blocks: DraftBlocks, ring: Rings) -> tuple[Tensor, Tensor]:
        """Context, then the blocks' `own` keys [T, D], in whole tiles: [R, K, D], and which of them are none."""
        (num_blocks, window), dim = blocks.context.shape, own.shape[-1]
        places = (blocks.context % ring.capacity).flatten()
        context = ring.read(blocks.slots.repeat_interleave(window), places).view(num_blocks, window, dim)
        keys = torch.cat((context, self._format.round(own).view(num_blocks, -1, dim)), 1)
        num_own, num_pad = keys.shape[1] - window, -keys.shape[1] % KEY_TILE
        keys = torch.nn.functional.pad(keys, (0, 0, 0, num_pad))
        is_hidden = torch.nn.functional.pad(blocks.is_hidden, (0, num_own), value=False)
        return keys, torch.nn.functional.pad(is_hidden, (0, num_pad), value=True)
