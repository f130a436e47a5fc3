"""Which rows are multiplied by which expert's weight, in tiles of one expert each. Knows nothing of products.

What is made depends on the shapes alone, so that nothing waits for the device to say how many rows an expert has.

Legend: `T` positions, `k` experts a position, `P` = T * k pairs of a position and an expert, `E` experts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

TILE_PAIRS: Final = 16
"""The fewest rows of a tensor core product: most experts have few."""


class ExpertTiles(NamedTuple):
    """Tiles of up to `TILE_PAIRS` pairs; those behind the last are empty."""

    pairs: Tensor
    """[tiles, TILE_PAIRS] int64: indices among the `P`, -1 for none."""
    experts: Tensor
    """[tiles] int64: whose weight; `E` for an empty tile."""
    num_pairs: int
    """`P`."""


def expert_tiles(experts: Tensor, num_experts: int) -> ExpertTiles:
    """Of `experts` [T, k]; pairs with one outside of 0 to `num_experts` are in no tile."""
    flat, num_pairs = experts.flatten(), experts.numel()
    is_ours = (flat >= 0) & (flat < num_experts)
    ranked, order = torch.where(is_ours, flat, num_experts).sort(stable=True)
    numbers = torch.arange(num_experts + 1, device=flat.device)
    starts = torch.searchsorted(ranked, numbers)  # [E + 1]: where the pairs of each begin among the ranked
    num_tiles = (starts[1:] - starts[:-1] + TILE_PAIRS - 1) // TILE_PAIRS  # [E]
    ends = num_tiles.cumsum(0)
    tiles = torch.arange(num_pairs // TILE_PAIRS + min(num_experts, num_pairs), device=flat.device)
    tile_experts = torch.searchsorted(ends, tiles, right=True)
    known = tile_experts.clamp(max=num_experts - 1)
    first = starts[known] + (tiles - (ends - num_tiles)[known]) * TILE_PAIRS
    places = first[:, None] + torch.arange(TILE_PAIRS, device=flat.device)  # [tiles, TILE_PAIRS]
    is_pair = (places < starts[known + 1][:, None]) & (tile_experts < num_experts)[:, None]
    pairs = torch.where(is_pair, order[places.clamp(max=num_pairs - 1)], -1)
    return ExpertTiles(pairs, tile_experts, num_pairs)
