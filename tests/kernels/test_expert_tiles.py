"""Tiles of pairs against pairs counted one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kernels import expert_tiles
from deepinfer_kernels.expert_tiles import TILE_PAIRS


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 20), st.integers(0, 1 << 32))
def test_every_pair_is_in_one_tile_of_its_expert(num_positions: int, k: int, num_experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(-2, num_experts + 2, (num_positions, k), generator=generator)
    tiles = expert_tiles(experts, num_experts)
    assert tiles.num_pairs == experts.numel() and tiles.pairs.shape == (len(tiles.experts), TILE_PAIRS)
    found: dict[int, int] = {}
    for pairs, expert in zip(tiles.pairs.tolist(), tiles.experts.tolist(), strict=True):
        real = [pair for pair in pairs if pair >= 0]
        assert bool(real) == (expert < num_experts), "empty tiles are nobody's"
        assert real == sorted(real) and pairs[: len(real)] == real
        assert not found.keys() & set(real)
        found.update(dict.fromkeys(real, expert))
    wanted = {pair: expert for pair, expert in enumerate(experts.flatten().tolist()) if 0 <= expert < num_experts}
    assert found == wanted


def test_how_many_tiles_there_are_follows_from_shapes_alone() -> None:
    same, spread = torch.zeros(40, 2, dtype=torch.int64), torch.arange(80).view(40, 2) % 8
    assert len(expert_tiles(same, 8).experts) == len(expert_tiles(spread, 8).experts)
