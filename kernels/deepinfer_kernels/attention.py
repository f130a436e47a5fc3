"""Causal attention over a paged cache: prefill chunks and single decode positions in one call, grouped heads.

Legend: `T` packed positions of the step, `S` rows (sequences), `H` query heads, `K` kv heads, `G = H / K`, `D` head
dim, `P` positions a block; `t` query tiles, `p` pairs of a query tile and a key tile, `w` positions a query tile,
`M` rows of a query tile = w * G rounded up, `L` keys a key tile. Knows nothing of slots or models.

The bits of a position depend on its own sequence only, whatever chunk it came in: every product has the same shape
[M, D] x [D, L] or [M, L] x [L, D], keys are cut at multiples of `L` counted from the start of the sequence, the maximum
over all keys is exact in any order, and the sums of the key tiles are added up in the order of the keys. A key tile
that a position may not see adds an exact zero. Keys past the end are replaced by the sequence's own first key, so that
what an earlier owner left in a block (even an infinity) stays without effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KEY_TILE: Final = 64
QUERY_ROWS: Final = 16
"""Rows of a product: the fewest that every GEMM library treats alike (see linear.py)."""
MAX_GROUP_PAIRS: Final = 256
"""Pairs at a time: bounds the temporaries, and keeps them in the cache. Has no influence on bits."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TileGroup:
    """Query tiles that are attended together; those with most keys first."""

    pair_queries: Tensor
    """[p * M]: rows of the queries seen as [T * G]. Pairs are ordered by key tile, then by query tile."""
    pair_keys: Tensor
    """[p * L]: cache positions."""
    pair_tiles: Tensor
    """[p]: query tile of the pair."""
    hidden: Tensor
    """[1, p, w, 1, L] bool: the position may not see the key."""
    num_real: int
    """w * G: the rows of a query tile that are not padding."""
    round_sizes: list[int]
    """For each key tile: how many query tiles reach it. They are the first ones."""


@dataclass(frozen=True)
class AttentionPlan:
    """The tiling of one step, the same for all layers."""

    groups: list[TileGroup]
    sources: Tensor
    """[T * G]: where the groups' outputs [t * w * G] hold each row."""


class Combine(Protocol):
    def __call__(self, input: Tensor, other: Tensor, *, out: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PackedRows:
    """Where the positions of a step are: rows (pieces of sequences) one after another, then padding."""

    counts: Ints
    """[S], on the host: positions of each row."""
    slots: Tensor
    """[T]: the slot of each position; padding has one of its own."""
    positions: Tensor
    """[T]: index in its sequence."""
    tables: Tensor
    """[slots, blocks] int32: block ids of every slot."""


def plan_attention(rows: PackedRows, *, block_size: int, group_size: int, num_kv: int) -> AttentionPlan:
    """Tile a step. What comes out for its padding means nothing."""
    counts, num_positions = rows.counts, rows.positions.shape[0]
    firsts = torch.from_numpy(np.cumsum(counts) - counts)
    starts = rows.positions.index_select(0, firsts).numpy()
    tables = rows.tables.index_select(0, rows.slots.index_select(0, firsts))
    width = 1 if int(counts.max()) == 1 else max(1, QUERY_ROWS // group_size)
    tiles = _QueryTiles.cut(starts, counts, width)
    groups = [_plan_group(tiles.take(part), tables, block_size, group_size) for part in tiles.group_slices()]
    sources = np.zeros((num_positions, group_size), np.int64)  # [T, G]
    places = np.arange(tiles.packed.size).reshape(tiles.packed.shape)  # [t, w]
    sources[tiles.packed] = (places * group_size)[..., None] + np.arange(group_size)
    return AttentionPlan(groups, torch.from_numpy(sources.ravel()))


def paged_attention(queries: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """`queries` [T, H, D] on the caches `keys`, `values` [K, positions, D] of a layer: [T, H * D]."""
    num_positions, num_heads, dim = queries.shape
    num_kv = keys.shape[0]
    scaled = (queries * dim**-0.5).view(num_positions, num_kv, -1, dim).transpose(0, 1)  # [K, T, G, D]
    rows = scaled.reshape(num_kv, -1, dim)  # [K, T * G, D]
    outs = [_attend(rows, keys, values, group) for group in plan.groups]
    out = (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).index_select(1, plan.sources)  # [K, T * G, D]
    return out.view(num_kv, num_positions, -1, dim).transpose(0, 1).reshape(num_positions, num_heads * dim)


def _attend(rows: Tensor, keys: Tensor, values: Tensor, group: TileGroup) -> Tensor:
    """One group's outputs, [K, t * w * G, D]. `rows` [K, T * G, D] are the scaled queries."""
    num_kv, _, dim = rows.shape
    _, num_pairs, width, _, _ = group.hidden.shape
    num_real = group.num_real
    query_tiles = rows.index_select(1, group.pair_queries).view(num_kv * num_pairs, -1, dim)  # [K * p, M, D]
    key_tiles = keys.index_select(1, group.pair_keys).view(num_kv * num_pairs, KEY_TILE, dim)  # [K * p, L, D]
    value_tiles = values.index_select(1, group.pair_keys).view(num_kv * num_pairs, KEY_TILE, dim)  # [K * p, L, D]

    scores = torch.bmm(query_tiles, key_tiles.transpose(1, 2))[:, :num_real].contiguous()  # [K * p, w * G, L]
    scores.view(num_kv, num_pairs, width, -1, KEY_TILE).masked_fill_(group.hidden, -torch.inf)
    scores = scores.view(num_kv, num_pairs, num_real, KEY_TILE)
    peaks = _fold(torch.maximum, scores.amax(-1), group.round_sizes)  # [K, t, w * G]
    weights = scores.sub_(peaks.index_select(1, group.pair_tiles)[..., None]).exp_()  # [K, p, w * G, L]
    totals = _fold(torch.add, weights.sum(-1), group.round_sizes)  # [K, t, w * G]

    padded = _pad_rows(weights.view(-1, num_real, KEY_TILE), query_tiles.shape[1])  # [K * p, M, L]
    sums = torch.bmm(padded, value_tiles)[:, :num_real].reshape(num_kv, num_pairs, num_real, dim)
    out = _fold(torch.add, sums, group.round_sizes).div_(totals[..., None])  # [K, t, w * G, D]
    return out.view(num_kv, -1, dim)


def _fold(combine: Combine, pairs: Tensor, round_sizes: list[int]) -> Tensor:
    """Combine `pairs` [K, p, ...] over the key tiles of each query tile, in the order of the keys: [K, t, ...]."""
    offset = round_sizes[0]
    # A sum that is -0.0 becomes 0.0 here, as it would by adding a hidden tile.
    total = pairs[:, :offset] + 0.0
    for size in round_sizes[1:]:
        reached = total[:, :size]
        combine(reached, pairs[:, offset : offset + size], out=reached)
        offset += size
    return total


def _pad_rows(tiles: Tensor, num_rows: int) -> Tensor:
    """`tiles` [n, rows, L] with zero rows appended: [n, num_rows, L]."""
    if tiles.shape[1] == num_rows:
        return tiles
    padded = tiles.new_zeros(tiles.shape[0], num_rows, tiles.shape[2])
    padded[:, : tiles.shape[1]] = tiles
    return padded


@dataclass(frozen=True)
class _QueryTiles:
    """Query tiles of a step, those with most key tiles first."""

    rows: Ints
    """[t]: which row of the step."""
    positions: Ints
    """[t, w]: positions in the sequence; past the end of the row its last one is repeated."""
    packed: Ints
    """[t, w]: the same as positions of the step."""
    num_keys: Ints
    """[t]: key tiles."""

    @classmethod
    def cut(cls, starts: Ints, counts: Ints, width: int) -> _QueryTiles:
        tiles_per_row = -(-counts // width)  # [S]
        rows = np.repeat(np.arange(len(counts)), tiles_per_row)  # [t]
        index_in_row = np.arange(len(rows)) - (np.cumsum(tiles_per_row) - tiles_per_row)[rows]  # [t]
        offsets = index_in_row[:, None] * width + np.arange(width)  # [t, w]
        offsets = np.minimum(offsets, counts[rows][:, None] - 1)
        positions = starts[rows][:, None] + offsets
        packed = (np.cumsum(counts) - counts)[rows][:, None] + offsets
        tiles = cls(rows, positions, packed, positions[:, -1] // KEY_TILE + 1)
        return tiles.take(np.argsort(-tiles.num_keys, kind="stable"))

    def take(self, index: Ints | slice) -> _QueryTiles:
        return _QueryTiles(self.rows[index], self.positions[index], self.packed[index], self.num_keys[index])

    def group_slices(self) -> list[slice]:
        """Consecutive tiles of at most `MAX_GROUP_PAIRS` pairs, or single ones."""
        slices: list[slice] = []
        first = num_pairs = 0
        for tile, num_keys in enumerate(self.num_keys.tolist()):
            if tile > first and num_pairs + num_keys > MAX_GROUP_PAIRS:
                slices.append(slice(first, tile))
                first, num_pairs = tile, 0
            num_pairs += num_keys
        return [*slices, slice(first, len(self.num_keys))]


def _plan_group(tiles: _QueryTiles, tables: Tensor, block_size: int, group_size: int) -> TileGroup:
    num_rounds = int(tiles.num_keys[0])
    reached = tiles.num_keys > np.arange(num_rounds)[:, None]  # [rounds, t]
    pair_rounds, pair_tiles = np.nonzero(reached)  # [p] each, by round and then by tile
    key_positions = pair_rounds[:, None] * KEY_TILE + np.arange(KEY_TILE)  # [p, L]
    positions = tiles.positions[pair_tiles]  # [p, w]
    hidden = key_positions[:, None, :] > positions[:, :, None]  # [p, w, L]
    key_positions[key_positions > positions[:, -1:]] = 0
    device = tables.device
    at = torch.from_numpy(key_positions).to(device)
    rows = torch.from_numpy(tiles.rows[pair_tiles]).to(device)
    blocks = tables[rows[:, None], at // block_size].long()  # [p, L]
    num_real = tiles.packed.shape[1] * group_size
    queries = np.zeros((len(pair_tiles), -(-num_real // QUERY_ROWS) * QUERY_ROWS), np.int64)  # [p, M]
    heads = tiles.packed[pair_tiles][..., None] * group_size + np.arange(group_size)  # [p, w, G]
    queries[:, :num_real] = heads.reshape(len(pair_tiles), num_real)
    return TileGroup(
        pair_queries=torch.from_numpy(queries.ravel()).to(device),
        pair_keys=(blocks * block_size + at % block_size).flatten(),
        pair_tiles=torch.from_numpy(pair_tiles).to(device),
        hidden=torch.from_numpy(hidden[None, :, :, None]).to(device),
        num_real=num_real,
        round_sizes=reached.sum(1).tolist(),
    )
