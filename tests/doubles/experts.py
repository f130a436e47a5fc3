"""Products with a weight of every expert, pair by pair. Knows nothing of tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels import ExpertTiles


def by_expert(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """`x` [P or a divisor of it, C] by the transposed `weight` [E, F, C] of `experts` [P]; zeros for others: [P, F]."""
    per_input = len(experts) // len(x)
    out = torch.zeros(len(experts), weight.shape[1])
    for pair, expert in enumerate(experts.tolist()):
        if 0 <= expert < len(weight):
            out[pair] = weight[expert] @ x[pair // per_input]
    return out


def by_tiles(x: Tensor, weight: Tensor, tiles: ExpertTiles) -> Tensor:
    """What `ops.expert_linear` means, on a CPU."""
    experts = torch.full((tiles.num_pairs,), -1)
    for pairs, expert in zip(tiles.pairs, tiles.experts, strict=True):
        experts[pairs[pairs >= 0]] = expert
    return by_expert(x, weight, experts)
