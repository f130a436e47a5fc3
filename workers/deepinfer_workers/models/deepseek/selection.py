"""Which compressed rows a position attends to. Knows scores, and nothing of how they come about.

A choice is [T, K] numbers, rising, with -1 behind the last. Ties go to the older one, so that a choice does not depend
on what else is scored.

Legend: `T` positions, `K` rows or blocks chosen at most, `n` rows scored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def all_visible(num_visible: Tensor, most: int) -> Tensor:
    """The first `num_visible` [T] rows, of which none is above `most`: [T, most]."""
    rows = torch.arange(most, device=num_visible.device)
    return torch.where(rows < num_visible[:, None], rows, -1)


def best_rows(scores: Tensor, most: int) -> Tensor:
    """The `most` best of `scores` [T, n]; minus infinity is never chosen: [T, K]."""
    num_rows = scores.shape[1]
    most = min(most, num_rows)
    least = scores.topk(most, sorted=False).values.amin(-1, keepdim=True)  # [T, 1]
    is_above, is_least = scores > least, (scores == least) & (scores > -torch.inf)
    room = most - is_above.sum(-1, keepdim=True)
    is_best = is_above | (is_least & (is_least.cumsum(-1, dtype=torch.int32) <= room))
    wanted = torch.arange(1, most + 1, dtype=torch.int32, device=scores.device).expand(len(scores), -1)
    rows = torch.searchsorted(is_best.cumsum(-1, dtype=torch.int32), wanted.contiguous())  # n behind the last
    return torch.where(rows < num_rows, rows, -1)


def best_blocks(scores: Tensor, num_visible: Tensor, size: int, most: int) -> Tensor:
    """The `most` best blocks of `size` neighbours in `scores` [T, n], the newest visible always among them: [T, K]."""
    padded = pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
    peaks = padded.unflatten(1, (-1, size)).amax(-1)  # [T, blocks]
    newest = torch.div(num_visible - 1, size, rounding_mode="floor")  # -1: nothing is visible
    blocks = torch.arange(peaks.shape[1], device=scores.device)
    return best_rows(peaks.masked_fill_(blocks == newest[:, None], torch.inf), most)


def keep_blocks(scores: Tensor, blocks: Tensor, size: int) -> Tensor:
    """`scores` [T, n] where `blocks` [T, K] of `size` rows were chosen, minus infinity elsewhere: [T, n]."""
    num_rows = scores.shape[1]
    num_blocks = -(-num_rows // size)
    is_kept = torch.zeros(len(scores), num_blocks + 1, dtype=torch.bool, device=scores.device)
    is_kept.scatter_(1, torch.where(blocks < 0, num_blocks, blocks), True)
    return scores.masked_fill(~is_kept[:, :num_blocks].repeat_interleave(size, 1)[:, :num_rows], -torch.inf)


def stacked(parts: Sequence[Tensor], nothing: float = -1) -> Tensor:
    """Choices, or scores, of some positions each, as one of all: [T, the largest width]."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=nothing) for part in parts])
