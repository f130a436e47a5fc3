"""Causal attention over a paged cache: prefill chunks and single decode positions in one call, grouped heads.

Legend: `T` packed positions of the step, `S` rows (sequences), `H` query heads, `K` kv heads, `G = H / K`, `D` head
dim, `P` positions a block; `t` query tiles, `p` pairs of a query tile and a key tile, `w` positions a query tile,
`M` rows of a query tile = w * G rounded up, `L` keys a key tile. Knows nothing of slots or models.

The bits of a position depend on its own sequence only, whatever chunk it came in: every product has the same shape
[M, D] x [D, L] or [M, L] x [L, D], or one that was seen to give the same bits; keys are cut at multiples of `L` counted
from the start of the sequence, the maximum over all keys is exact in any order, and the sums of the key tiles are added
up in the order of the keys. A key tile that a position may not see adds an exact zero. Keys past the end are replaced
by the sequence's own first key, so that what an earlier owner left in a block (even an infinity) has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

KEY_TILE: Final = 64
QUERY_ROWS: Final = 16
"""Rows of a product: the fewest that every GEMM library treats alike (see linear.py)."""
FEW_QUERY_ROWS: Final = (4, 8)
"""For single positions, where they were seen to give the same bits as `QUERY_ROWS`."""
MAX_GROUP_PAIRS: Final = 256
"""Pairs at a time: bounds the temporaries, and keeps them in the cache. Has no influence on bits."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TileGroup:
    """Query tiles that are attended together; those with most keys first."""

    pair_queries: Tensor
    """[K * p * M]: rows of the queries seen as [T * H]. Pairs are ordered by key tile, then by query tile."""
    pair_keys: Tensor
    """[p * L]: cache positions."""
    pair_tiles: Tensor
    """[p]: query tile of the pair."""
    hidden: Tensor
    """[p, M, L] bool: the row may not see the key."""
    round_sizes: list[int]
    """For each key tile: how many query tiles reach it. They are the first ones."""


@dataclass(frozen=True)
class AttentionPlan:
    """The tiling of one step, the same for all layers."""

    groups: list[TileGroup]
    sources: Tensor
    """[T * H]: where the groups' outputs [K * t * M] hold each row."""


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
    is_single = int(counts.max()) == 1
    width = 1 if is_single else max(1, QUERY_ROWS // group_size)
    height = few_rows(group_size, torch.get_num_threads()) if is_single else _round_up(width * group_size)
    tiles = _QueryTiles.cut(starts, counts, width)
    heads = np.arange(num_kv)[:, None] * group_size + np.arange(group_size)  # [K, G]
    groups = [_plan_group(tiles.take(part), tables, block_size, heads, height) for part in tiles.group_slices()]
    sources = np.zeros((num_positions, *heads.shape), np.int64)  # [T, K, G]
    places = np.arange(len(tiles.rows))[:, None] * height + np.arange(width) * group_size  # [t, w]
    of_head = np.arange(num_kv)[:, None] * (len(tiles.rows) * height) + np.arange(group_size)  # [K, G]
    sources[tiles.packed] = places[..., None, None] + of_head
    return AttentionPlan(groups, torch.from_numpy(sources.ravel()))


def paged_attention(queries: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """`queries` [T, H, D] on the caches `keys`, `values` [K, positions, D] of a layer: [T, H * D]."""
    num_positions, num_heads, dim = queries.shape
    rows = queries.reshape(-1, dim)  # [T * H, D]
    outs = [_attend(rows, keys, values, group) for group in plan.groups]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)  # [K, t * M, D]
    return out.view(-1, dim).index_select(0, plan.sources).view(num_positions, num_heads * dim)


@lru_cache(maxsize=64)
def few_rows(num_rows: int, num_threads: int) -> int:
    """The smallest height of a query tile for `num_rows` rows. A pure memo of what gives the same bits, measured."""
    for height in FEW_QUERY_ROWS:
        if num_rows <= height and _gives_the_same_bits(height, num_threads):
            return height
    return _round_up(num_rows)


def _gives_the_same_bits(height: int, seed: int) -> bool:
    generator = torch.Generator().manual_seed(seed)
    for dim in (8, 16, 64, 80, 128, 256):
        rows, keys = (torch.randn(40, num, dim, generator=generator) for num in (QUERY_ROWS, KEY_TILE))
        for count in (1, 2, 3, 5, 8, 40):
            few, whole = ((rows[:count, :num].contiguous(), keys[:count]) for num in (height, QUERY_ROWS))
            scores, expected = _scores(*few), _scores(*whole)
            if not torch.equal(scores, expected[:, :height]):
                return False
            if not torch.equal(torch.bmm(scores, few[1]), torch.bmm(expected, whole[1])[:, :height]):
                return False
    return True


def _round_up(num_rows: int) -> int:
    return -(-num_rows // QUERY_ROWS) * QUERY_ROWS


def _scores(query_tiles: Tensor, key_tiles: Tensor) -> Tensor:
    """Scaled products of [n, M, D] and [n, L, D]: [n, M, L]."""
    nothing = query_tiles.new_zeros(())
    return torch.baddbmm(nothing, query_tiles, key_tiles.transpose(1, 2), beta=0, alpha=query_tiles.shape[-1] ** -0.5)


def _attend(rows: Tensor, keys: Tensor, values: Tensor, group: TileGroup) -> Tensor:
    """One group's outputs, [K, t * M, D], of the queries `rows` [T * H, D]."""
    num_kv, _, dim = keys.shape
    num_pairs, height, _ = group.hidden.shape
    query_tiles = rows.index_select(0, group.pair_queries).view(num_kv * num_pairs, height, dim)  # [K * p, M, D]
    scores = _scores(query_tiles, _tiles(keys, group.pair_keys)).view(num_kv, num_pairs, height, KEY_TILE)
    scores.masked_fill_(group.hidden, -torch.inf)
    peaks = _fold(torch.maximum, scores.amax(-1), group.round_sizes)  # [K, t, M]
    weights = scores.sub_(peaks.index_select(1, group.pair_tiles)[..., None]).exp_()  # [K, p, M, L]
    totals = _fold(torch.add, weights.sum(-1), group.round_sizes)  # [K, t, M]
    # The keys' tiles are free by now: the values' take their memory, which is warm and mapped.
    sums = torch.bmm(weights.view(-1, height, KEY_TILE), _tiles(values, group.pair_keys))  # [K * p, M, D]
    sums = sums.view(num_kv, num_pairs, height, dim)
    # A sum that is -0.0 becomes 0.0, as it would by adding a hidden tile.
    out = _fold(torch.add, sums, group.round_sizes).add_(0.0)
    return out.div_(totals[..., None]).view(num_kv, -1, dim)


def _tiles(cached: Tensor, pair_keys: Tensor) -> Tensor:
    """Keys or values `cached` [K, positions, D] of every pair: [K * p, L, D]."""
    return cached.index_select(1, pair_keys).view(-1, KEY_TILE, cached.shape[2])


def _fold(combine: Combine, pairs: Tensor, round_sizes: list[int]) -> Tensor:
    """Combine `pairs` [K, p, ...] over the key tiles of each query tile, in the order of the keys: [K, t, ...]."""
    offset = round_sizes[0]
    total = pairs[:, :offset]
    if len(round_sizes) > 1:
        total = total.clone()
    for size in round_sizes[1:]:
        reached = total[:, :size]
        combine(reached, pairs[:, offset : offset + size], out=reached)
        offset += size
    return total


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


def _plan_group(tiles: _QueryTiles, tables: Tensor, block_size: int, heads: Ints, height: int) -> TileGroup:
    """`heads` [K, G] are the query heads of each kv head, `height` is M."""
    num_rounds = int(tiles.num_keys[0])
    reached = tiles.num_keys > np.arange(num_rounds)[:, None]  # [rounds, t]
    pair_rounds, pair_tiles = np.nonzero(reached)  # [p] each, by round and then by tile
    key_positions = pair_rounds[:, None] * KEY_TILE + np.arange(KEY_TILE)  # [p, L]
    positions = tiles.positions[pair_tiles]  # [p, w]
    num_kv, group_size = heads.shape
    row_positions = np.repeat(positions, group_size, axis=1)  # [p, w * G]
    num_real = row_positions.shape[1]
    # What pads a tile sees all keys that its last row sees: no sum is ever empty.
    row_positions = np.pad(row_positions, ((0, 0), (0, height - num_real)), mode="edge")  # [p, M]
    hidden = key_positions[:, None, :] > row_positions[:, :, None]  # [p, M, L]
    key_positions[key_positions > positions[:, -1:]] = 0
    at = torch.from_numpy(key_positions)
    rows = torch.from_numpy(tiles.rows[pair_tiles])
    blocks = tables[rows[:, None], at // block_size].long()  # [p, L]
    queries = np.zeros((num_kv, len(pair_tiles), height), np.int64)  # [K, p, M]
    packed = tiles.packed[pair_tiles][None, :, :, None] * heads.size + heads[:, None, None, :]  # [K, p, w, G]
    queries[:, :, :num_real] = packed.reshape(num_kv, -1, num_real)
    return TileGroup(
        pair_queries=torch.from_numpy(queries.ravel()),
        pair_keys=(blocks * block_size + at % block_size).flatten(),
        pair_tiles=torch.from_numpy(pair_tiles),
        hidden=torch.from_numpy(hidden),
        round_sizes=reached.sum(1).tolist(),
    )
