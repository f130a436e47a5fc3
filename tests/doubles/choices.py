"""How close a choice of the best was. Knows nothing of models."""

from __future__ import annotations

import torch


def margin(scores: torch.Tensor, count: int) -> float:
    """Between the last that `count` takes of the last dim and the first that it leaves; inf where it takes all."""
    if scores.shape[-1] <= count:
        return float("inf")
    best = scores.topk(count + 1, dim=-1).values
    gaps = best[..., -2] - best[..., -1]  # of nothing to choose from, -inf: not finite
    gaps = gaps[gaps.isfinite()]
    return float(gaps.min()) if gaps.numel() else float("inf")
