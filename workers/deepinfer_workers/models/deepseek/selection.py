"""Which compressed rows a position attends to. Knows scores, and nothing of how they come about.

A choice is [T, K] row numbers, rising, with -1 behind the last. Ties go to the older row, so that a choice does not
depend on what else is scored.

Legend: `T` positions, `K` rows chosen at most, `n` rows scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.config import DeepseekConfig


def all_visible(num_visible: Tensor) -> Tensor:
    """The first `num_visible` [T] rows: [T, K]."""
    rows = torch.arange(int(num_visible.max()), device=num_visible.device)
    return torch.where(rows < num_visible[:, None], rows, -1)


def best_rows(scores: Tensor, most: int) -> Tensor:
    """The `most` best of `scores` [T, n]; minus infinity is never chosen: [T, K]."""
    num_rows = scores.shape[1]
    values, rows = scores.sort(dim=-1, descending=True, stable=True)
    rows = torch.where(values[:, :most] > -torch.inf, rows[:, :most], num_rows).sort(-1).values
    return torch.where(rows < num_rows, rows, -1)


def candidate_mask(scores: Tensor, num_visible: Tensor, config: DeepseekConfig) -> Tensor:
    """[T, n] bool: the rows of the best blocks of `scores` [T, n], the newest block always among them."""
    size, num_rows = config.candidate_block_size, scores.shape[1]
    padded = torch.nn.functional.pad(scores, (0, -num_rows % size), value=-torch.inf)
    peaks = padded.unflatten(1, (-1, size)).amax(-1)  # [T, blocks]
    newest = torch.div(num_visible - 1, size, rounding_mode="floor")  # -1: nothing is visible
    blocks = torch.arange(peaks.shape[1], device=scores.device)
    peaks = peaks.masked_fill(blocks == newest[:, None], torch.inf)
    values, order = peaks.sort(dim=-1, descending=True, stable=True)
    is_kept = (values > -torch.inf) & (blocks < config.candidate_blocks)  # [T, blocks], by rank
    kept = torch.zeros_like(is_kept).scatter(1, order, is_kept)
    return kept.repeat_interleave(size, 1)[:, :num_rows]
