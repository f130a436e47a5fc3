"""The attention of one layer: a window of its own, and compressed rows that it makes, chooses or takes over.

Knows nothing of residual streams. What the layers of a step hand on to each other is in `StepState`.

Legend: `T` positions, `C` channels, `H` heads, `D` head dim, `W` window, `G` groups that are complete, `K` rows chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.caches import PagedRows, Rings
from deepinfer_workers.models.deepseek.compressor import Compressor
from deepinfer_workers.models.deepseek.flat_positions import FlatPositions, Positions
from deepinfer_workers.models.deepseek.formats import CacheFormats
from deepinfer_workers.models.deepseek.indexer import Choice, Indexer
from deepinfer_workers.models.deepseek.layer_caches import SourceRows
from deepinfer_workers.models.deepseek.projections import Projections
from deepinfer_workers.models.deepseek.rope import RopeTable, Turns
from deepinfer_workers.models.deepseek.selection import all_visible
from deepinfer_workers.models.deepseek.sparse_attention import attend, pad_keys, piece_size
from deepinfer_workers.models.deepseek.weights import DeepseekWeights


@dataclass
class StepState:
    """What the layers of a step hand on."""

    source: SourceRows | None = None
    choice: Choice | None = None


class RowSource:
    """The part of a source layer that every token goes through: it makes compressed rows and index keys."""

    def __init__(self, weights: DeepseekWeights, name: str, layer: int, table: RopeTable) -> None:
        config = weights.config
        ratio = config.ratios[layer]
        self._ops, self._table = weights.ops, table
        self.compressor = Compressor(weights, f"{name}.compressor", config.head_dim, ratio)
        self.index_compressor: Compressor | None = None
        self._makes_keys = layer in config.index_sources
        if self._makes_keys and config.family == "v4":
            self.index_compressor = Compressor(weights, f"{name}.indexer.compressor", config.index_dim, ratio)
        elif self._makes_keys:
            self._wk = weights.plain_linear(f"{name}.indexer.wk.weight")
            self._key_norm = weights.norm(f"{name}.indexer.k_norm")

    def write(self, x: Tensor, positions: Positions, rows: SourceRows) -> None:
        """Of `x` [T, C], all tokens of the step."""
        latent = self._complete(self.compressor, x, positions, rows.pending, rows.main)
        if rows.index is None:
            return
        if self.index_compressor is not None:
            self._complete(self.index_compressor, x, positions, rows.pending_index, rows.index)
        elif len(latent):  # else no group is complete
            keys = self._key_norm(self._wk(latent))
            self._store(keys, self.compressor, positions, rows.pending, rows.index)

    def _complete(
        self, compressor: Compressor, x: Tensor, positions: Positions, pending: Rings | None, paged: PagedRows
    ) -> Tensor:
        """Rows of the groups that end among the positions, [G, D]; stored in `paged`, turned."""
        groups = positions.groups(compressor.shape, pending)
        states = compressor.states(x, positions.positions % compressor.shape.ratio)
        known = states if pending is None else groups.around.exchange(pending, states, states)
        rows = compressor.rows(known[groups.index], groups.is_missing)
        self._store(rows, compressor, positions, pending, paged)
        return rows

    def _store(
        self, rows: Tensor, compressor: Compressor, positions: Positions, pending: Rings | None, paged: PagedRows
    ) -> None:
        groups = positions.groups(compressor.shape, pending)
        turns = self._table.at(groups.token_positions)
        paged.write(groups.indices, self._ops.turn_pairs(rows[:, None], *turns)[:, 0])


class Attention:
    """Queries, window, choice of rows, and the way back to the channels."""

    def __init__(
        self, weights: DeepseekWeights, name: str, layer: int, table: RopeTable, formats: CacheFormats
    ) -> None:
        config = weights.config
        self._config = config
        self._table = table
        self._window_format = formats.window
        self._projections = Projections(weights, name)
        self._sinks = weights.plain(f"{name}.attn_sink")  # [H]
        self._ratio = config.ratios[layer]
        self.source = RowSource(weights, name, layer, table) if layer in config.kv_sources else None
        self._indexer: Indexer | None = None
        if layer in config.index_sources:
            self._indexer = Indexer(weights, f"{name}.indexer", layer, formats.round_index_query)
        self._piece = piece_size(weights.device, (config.window + config.index_topk) * config.head_dim)
        self._sees_all = bool(self._ratio) and config.index_source_of(layer) is None

    def __call__(self, x: Tensor, positions: Positions, window: Rings, state: StepState) -> Tensor:
        """`x` [T, C]: [T, C]. The step's compressed rows have been written."""
        projections = self._projections
        turns = self._table.at(positions.positions)
        latent = projections.latent(x)
        keys = projections.keys(x, turns)
        if self._indexer is not None:
            state.choice = self._choose(self._indexer, latent, x, turns, positions, state)
        elif self._sees_all:
            ratio = self._ratio
            state.choice = Choice(all_visible(positions.num_visible(ratio), positions.most_visible(ratio)))
        out = self._attend(projections.queries(latent, turns), keys, positions, window, state)
        return projections.output(out, turns)

    def _choose(
        self, indexer: Indexer, latent: Tensor, x: Tensor, turns: Turns, positions: Positions, state: StepState
    ) -> Choice:
        source = state.source
        assert source is not None and source.index is not None
        index, ratio = source.index, source.ratio
        # A kv source begins anew: what an earlier source published is of other rows.
        blocks = state.choice.blocks if self.source is None and state.choice is not None else None
        num_visible, most_visible = positions.num_visible(ratio), positions.most_visible(ratio)
        if isinstance(positions, FlatPositions):
            rows = all_visible(num_visible, most_visible)
            keys = index.read(positions.row_indices(slice(None), rows, ratio, index.null_row))
            return indexer.choose_flat(latent, x, turns, num_visible, keys, blocks)

        def read(part: slice, rows: Tensor) -> Tensor:
            first = slice(part.start, part.start + 1)
            return index.read(positions.row_indices(first, rows[None], ratio, index.null_row))[0]

        return indexer.choose(latent, x, turns, num_visible, most_visible, positions.pieces.parts, read, blocks)

    def _attend(self, queries: Tensor, own: Tensor, positions: Positions, window: Rings, state: StepState) -> Tensor:
        """`queries` [T, H, D] and the positions' `own` keys [T, D], turned: [T, H, D]. Keeps the keys in the window."""
        found = positions.window(self._config.window, window.capacity)
        known = found.around.exchange(window, own, self._window_format.round(own))
        outs: list[Tensor] = []
        for piece in torch.arange(len(own), device=own.device).split(self._piece):
            keys, is_hidden = known[found.index[piece]], found.is_hidden[piece]  # [t, W, D], [t, W]
            if self._ratio:
                rows, is_padding = self._chosen(piece, positions, state)
                keys, is_hidden = torch.cat((keys, rows), 1), torch.cat((is_hidden, is_padding), 1)
            outs.append(attend(queries[piece], keys, is_hidden, self._sinks))
        return torch.cat(outs)

    def _chosen(self, piece: Tensor, positions: Positions, state: StepState) -> tuple[Tensor, Tensor]:
        """The compressed rows that the positions `piece` [t] attend to, [t, K in whole tiles, D], and what is none."""
        assert state.source is not None and state.choice is not None
        main, numbers = state.source.main, state.choice.rows[piece]
        if not numbers.shape[1]:  # none is visible yet
            return self._sinks.new_empty(len(piece), 0, self._config.head_dim), numbers.bool()
        numbers, is_padding = pad_keys(numbers, numbers < 0)
        numbers = numbers.masked_fill(is_padding, -1)
        return main.read(positions.row_indices(piece, numbers, state.source.ratio, main.null_row)), is_padding
