"""Scores of compressed rows by small keys, and the choice of the best. Knows nothing of the rows themselves.

Legend: `T` positions, `h` index heads, `d` index dim, `n` rows, `C` channels, `Q` query rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.rope import Turns, turn
from deepinfer_workers.models.deepseek.selection import all_visible, best_rows, candidate_mask
from deepinfer_workers.models.deepseek.sparse_attention import KEY_TILE, PIECE, score_tiles
from deepinfer_workers.models.deepseek.weights import DeepseekWeights

ReadKeys = Callable[[Tensor, Tensor], Tensor]
"""Index keys of positions [t] and row numbers [t, L]: [t, L, d]."""


class Choice(NamedTuple):
    """What an index source hands on to the layers above it."""

    rows: Tensor
    """[T, K] row numbers, rising; -1 behind the last."""
    candidates: Tensor | None = None
    """[T, n] bool: what later index sources may choose from."""


class Indexer:
    """Queries, weights and choice of one layer."""

    def __init__(
        self, weights: DeepseekWeights, name: str, layer: int, round_query: Callable[[Tensor], Tensor]
    ) -> None:
        config = weights.config
        self._config, self._layer = config, layer
        self._round = round_query
        self._wq = weights.linear(f"{name}.wq_b")  # [h * d, Q]
        self._weights = weights.plain_linear(f"{name}.weights_proj.weight")  # [h, C]
        self._scale = config.index_dim**-0.5 * config.index_heads**-0.5

    def choose(
        self, latent: Tensor, x: Tensor, turns: Turns, num_visible: Tensor, read: ReadKeys, candidates: Tensor | None
    ) -> Choice:
        """For positions with query latents [T, Q] and inputs `x` [T, C]; rows below `num_visible` [T] are seen."""
        config = self._config
        publishes = self._layer == config.candidate_source
        most_visible = int(num_visible.max())
        takes_all = most_visible <= config.index_topk and candidates is None
        if takes_all and not (publishes and self._limits_candidates(most_visible)):
            return Choice(all_visible(num_visible))
        scores = self._scores(latent, x, turns, num_visible, read)  # [T, n]
        allowed = scores if candidates is None else scores.masked_fill(~candidates, -torch.inf)
        mask = candidate_mask(scores, num_visible, config) if publishes else None
        return Choice(best_rows(allowed, config.index_topk), mask)

    def _limits_candidates(self, num_rows: int) -> bool:
        return -(-num_rows // self._config.candidate_block_size) > self._config.candidate_blocks

    def _scores(self, latent: Tensor, x: Tensor, turns: Turns, num_visible: Tensor, read: ReadKeys) -> Tensor:
        """[T, n], n the most rows that any position sees; minus infinity where a position sees none."""
        config = self._config
        num_rows = int(num_visible.max())
        queries = self._wq(latent).unflatten(1, (config.index_heads, config.index_dim))
        queries = self._round(turn(queries, turns))  # [T, h, d]
        weights = self._weights(x) * self._scale  # [T, h]
        rows = torch.arange(-(-num_rows // KEY_TILE) * KEY_TILE, device=x.device)
        scores = torch.empty(len(x), len(rows), device=x.device)
        for piece in torch.arange(len(x), device=x.device).split(PIECE):
            for tile in rows.split(KEY_TILE):
                is_seen = tile < num_visible[piece, None]  # [t, L]
                keys = read(piece, torch.where(is_seen, tile, -1))
                products = score_tiles(queries[piece], keys)[0].relu()  # [t, h, L]
                part = (products * weights[piece, :, None]).sum(1)  # [t, L]
                scores[piece[:, None], tile] = part.masked_fill(~is_seen, -torch.inf)
        return scores[:, :num_rows]
