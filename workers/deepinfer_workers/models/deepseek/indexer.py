"""Scores of compressed rows by small keys, and the choice of the best. Knows nothing of the rows themselves.

Positions choose a few at a time, so that what is there at once does not grow with the step; those of one sequence read
the same keys. How many has no influence on bits.

Legend: `T` positions, `t` of one sequence; `h` index heads, `d` index dim; `n` rows, `L` of some; `C` channels,
`Q` query rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.rope import Turns
from deepinfer_workers.models.deepseek.selection import all_visible, best_blocks, best_rows, keep_blocks, stacked
from deepinfer_workers.models.deepseek.sparse_attention import KEY_TILE, PIECE
from deepinfer_workers.models.deepseek.weights import DeepseekWeights

ReadKeys = Callable[[slice, Tensor], Tensor]
"""Index keys of the sequence whose positions are a slice of the step, by row numbers [L]; zeros for -1: [L, d]."""
KEYS_AT_ONCE: Final = 64 * KEY_TILE
SCORES_AT_ONCE: Final = 1 << 22


class Choice(NamedTuple):
    """What an index source hands on to the layers above it."""

    rows: Tensor
    """[T, K] row numbers, rising; -1 behind the last."""
    blocks: Tensor | None = None
    """[T, K] numbers of the blocks of rows that later index sources may choose from, in the same way."""


class Indexer:
    """Queries, weights and choice of one layer."""

    def __init__(
        self, weights: DeepseekWeights, name: str, layer: int, round_query: Callable[[Tensor], Tensor]
    ) -> None:
        config = weights.config
        self._config = config
        self._publishes = layer == config.candidate_source
        self._round = round_query
        self._ops = weights.ops
        self._wq = weights.linear(f"{name}.wq_b")  # [h * d, Q]
        self._weights = weights.plain_linear(f"{name}.weights_proj.weight")  # [h, C]
        self._scale = config.index_dim**-0.5 * config.index_heads**-0.5

    def choose(
        self,
        latent: Tensor,
        x: Tensor,
        turns: Turns,
        num_visible: Tensor,
        most_visible: int,
        parts: Callable[[slice], Iterable[slice]],
        read: ReadKeys,
        blocks: Tensor | None,
    ) -> Choice:
        """For positions with query latents [T, Q] and inputs `x` [T, C]; rows below `num_visible` [T], at most
        `most_visible`, are seen.

        `parts` cuts neighbours among the positions by sequences; `blocks` is what an earlier source published of the
        same rows.
        """
        config, is_bounded = self._config, self._publishes or blocks is not None
        if self._takes_all(most_visible, is_bounded):
            return Choice(all_visible(num_visible, most_visible), blocks)
        queries, weights = self._queries(latent, x, turns)
        rows: list[Tensor] = []
        published: list[Tensor] = []
        step = min(max(SCORES_AT_ONCE // most_visible, 1), PIECE)
        for start in range(0, len(x), step):
            some = slice(start, min(start + step, len(x)))
            visible = num_visible[some]
            if self._takes_all(most := int(visible.max()), is_bounded):
                rows.append(all_visible(visible, most))
                if self._publishes:
                    size = config.candidate_block_size
                    published.append(all_visible(-(-visible // size), -(-most // size)))
                continue
            found = [row_scores(queries[at], weights[at], num_visible[at], partial(read, at)) for at in parts(some)]
            scores = stacked(found, -torch.inf)  # [t, n]
            if self._publishes:
                published.append(best_blocks(scores, visible, config.candidate_block_size, config.candidate_blocks))
            elif blocks is not None:
                scores = keep_blocks(scores, blocks[some], config.candidate_block_size)
            rows.append(best_rows(scores, config.index_topk))
        return Choice(stacked(rows), stacked(published) if self._publishes else blocks)

    def choose_flat(
        self, latent: Tensor, x: Tensor, turns: Turns, num_visible: Tensor, keys: Tensor, blocks: Tensor | None
    ) -> Choice:
        """As `choose`, for positions that bring the index keys of all rows that they may see, `keys` [T, n, d].

        What is computed depends on shapes alone.
        """
        config, num_rows = self._config, keys.shape[1]
        if self._takes_all(num_rows, self._publishes or blocks is not None):
            return Choice(all_visible(num_visible, num_rows), blocks)
        queries, weights = self._queries(latent, x, turns)
        scores = torch.bmm(queries, keys.transpose(1, 2)).relu_().mul_(weights[..., None]).sum(1)  # [T, n]
        scores.masked_fill_(torch.arange(num_rows, device=x.device) >= num_visible[:, None], -torch.inf)
        if self._publishes:
            blocks = best_blocks(scores, num_visible, config.candidate_block_size, config.candidate_blocks)
        elif blocks is not None:
            scores = keep_blocks(scores, blocks, config.candidate_block_size)
        return Choice(best_rows(scores, config.index_topk), blocks)

    def _queries(self, latent: Tensor, x: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Turned and rounded, [T, h, d], and how much each head counts, [T, h]."""
        queries = self._wq(latent).unflatten(1, (self._config.index_heads, self._config.index_dim))
        return self._round(self._ops.turn_pairs(queries, *turns)), self._weights(x) * self._scale

    def _takes_all(self, num_rows: int, is_bounded: bool) -> bool:
        """Without scores it is known what positions choose that see `num_rows` at most."""
        config = self._config
        if is_bounded and num_rows > config.candidate_blocks * config.candidate_block_size:
            return False
        return num_rows <= config.index_topk


def row_scores(queries: Tensor, weights: Tensor, num_visible: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Of `queries` [t, h, d] and `weights` [t, h] of one sequence, which see `num_visible` [t], rising: [t, n].

    `n` is the last of them; minus infinity where a position does not see a row. Products have one fixed shape.
    """
    num_rows = int(num_visible[-1])
    rows = torch.arange(-(-num_rows // KEY_TILE) * KEY_TILE, device=queries.device)
    scores = torch.empty(len(queries), len(rows), device=queries.device)
    for some, out in zip(rows.split(KEYS_AT_ONCE), scores.split(KEYS_AT_ONCE, 1), strict=True):
        keys = read(torch.where(some < num_rows, some, -1)).unflatten(0, (-1, KEY_TILE)).transpose(1, 2)
        for place, (query, weight) in enumerate(zip(queries, weights, strict=True)):
            products = torch.bmm(query.expand(len(keys), -1, -1), keys).relu_()  # [tiles, h, L]
            out[place] = products.mul_(weight[:, None]).sum(1).flatten()
    return scores.masked_fill_(rows >= num_visible[:, None], -torch.inf)[:, :num_rows]
