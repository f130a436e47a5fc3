"""Logits to tokens. Every row by itself: its token is a function of its logits, parameters, seed and position.

Greedy rows take the largest logit, the lowest id among equals. Others take the largest of logit / temperature + Gumbel
noise, which samples from the softmax, over the tokens that top-k and top-p keep. A batch pays only for the features
that some row of it asks for. Knows nothing of slots and plans.

Legend: `R` rows, `V` vocabulary, `k` logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_protocol import SlotSampling
from deepinfer_workers.noise import gumbel_noise

NUM_CANDIDATES: Final = 1024
"""Most probable tokens that top-p looks at first; a flat distribution is sorted whole."""


@dataclass(frozen=True)
class RowSampling:
    """What sampling a row takes."""

    sampling: SlotSampling
    stop_ids: npt.NDArray[np.int64]
    position: int
    """Where the token will be stored: the length after the step."""


def sample(logits: Tensor, rows: Sequence[RowSampling], allowed: Tensor | None = None) -> Tensor:
    """One token for each row of `logits` [R, V]: [R] int64. `allowed` [R, V] bool masks tokens out."""
    logits = _restrict(logits, rows, allowed)
    warm = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if not warm:
        return logits.argmax(-1)  # the first of equals
    if len(warm) == len(rows):
        return _sample_warm(logits, rows)
    tokens = logits.argmax(-1)
    index = torch.tensor(warm, device=logits.device)
    tokens[index] = _sample_warm(logits.index_select(0, index), [rows[row] for row in warm])
    return tokens


def unpack_masks(bits: bytes, num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Bits of a `MaskBatch` as [rows, V] bool; bits past the vocabulary are ignored."""
    words = np.frombuffer(bits, np.uint8).reshape(num_rows, -1)
    flags = np.unpackbits(words, axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(flags.view(np.bool_)).to(device)


def best_logprobs(logits: Tensor, tokens: Tensor, num_best: int) -> tuple[Tensor, Tensor]:
    """For each row: `tokens` [R] and the `num_best` best, by the logits [R, V] as the model gave them.

    Ids [R, 1 + k] int64 and log probabilities [R, 1 + k] float32.
    """
    values = torch.log_softmax(logits, -1)  # [R, V]
    num_best = min(num_best, logits.shape[1])
    ids = tokens[:, None]  # [R, 1]
    if num_best:
        ids = torch.cat((ids, _best(values, num_best)), 1)  # [R, 1 + k]
    return ids, values.gather(1, ids)


def _restrict(logits: Tensor, rows: Sequence[RowSampling], allowed: Tensor | None) -> Tensor:
    """Masked tokens, and the stop tokens of rows that may not end yet, at minus infinity; `logits` stay as they are."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    banned = [index for index, row in enumerate(rows) if row.position + 1 <= row.sampling.min_length]
    if not banned:
        return logits
    restricted = logits.clone()
    for index in banned:
        stop_ids = torch.from_numpy(rows[index].stop_ids).to(logits.device)
        restricted[index, stop_ids] = -torch.inf
    # Where a mask leaves nothing but stop tokens, the mask wins.
    is_empty = restricted.amax(-1, keepdim=True) == -torch.inf  # [R, 1]
    return torch.where(is_empty, logits, restricted)


def _sample_warm(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    temperature = column([row.sampling.temperature for row in rows], torch.float64)
    # From the largest down, so that no temperature overflows: a tiny one sends all but the best to minus infinity.
    scores = logits.double()  # [R, V]
    scores = (scores - scores.amax(-1, keepdim=True)).div_(temperature[:, None])
    picky = [index for index, row in enumerate(rows) if row.sampling.top_k > 0 or row.sampling.top_p < 1]
    if picky:
        index = torch.tensor(picky, device=logits.device)
        top_k = column([rows[row].sampling.top_k for row in picky], torch.int64)
        top_p = column([rows[row].sampling.top_p for row in picky], torch.float64)
        scores[index] = _keep_top(scores[index], top_k, top_p)
    seeds = column([row.sampling.seed for row in rows], torch.int64)
    positions = column([row.position for row in rows], torch.int64)
    return scores.add_(gumbel_noise(seeds, positions, logits.shape[1])).argmax(-1)


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`scores` [R, V] with all but the kept tokens at minus infinity; `top_k` (0: all), `top_p` [R]."""
    num_tokens = scores.shape[1]
    top_k = torch.where(top_k == 0, num_tokens, top_k.clamp(max=num_tokens))
    probs = torch.softmax(scores, -1)
    num_kept = _count_kept(scores, probs, top_k, top_p, min(NUM_CANDIDATES, num_tokens))
    if num_kept is None:
        num_kept = _count_kept(scores, probs, top_k, top_p, num_tokens)
    assert num_kept is not None
    return scores.masked_fill(~_is_best(scores, num_kept), -torch.inf)


def _count_kept(scores: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, size: int) -> Tensor | None:
    """How many of the best tokens each row keeps, [R]; `None` when `size` candidates do not tell.

    Sums run from the best token on, so that a row's count is the same for every `size` that tells.
    """
    num_tokens = scores.shape[1]
    best = probs.gather(1, scores.topk(size, -1).indices)  # [R, size], falling
    sums = best.cumsum(-1)
    is_cut = top_k < num_tokens
    cut_mass = sums.gather(1, top_k.clamp(max=size)[:, None] - 1)[:, 0]
    target = top_p * torch.where(is_cut, cut_mass, 1.0)  # top-p is of what top-k keeps
    is_told = (top_k <= size) | (~is_cut & (top_p < 1) & (sums[:, -1] >= target))
    if not bool(is_told.all()):
        return None
    # A token stays while those before it do not reach the target.
    num_wanted = (torch.nn.functional.pad(sums[:, :-1], (1, 0)) < target[:, None]).sum(-1)
    return torch.minimum(torch.where(top_p < 1, num_wanted, top_k), top_k).clamp(min=1)


def _is_best(values: Tensor, num_kept: Tensor) -> Tensor:
    """[R, V] bool: the `num_kept` [R] largest of `values` [R, V]; among equals the lower ids."""
    largest = values.topk(int(num_kept.max()), -1).values
    threshold = largest.gather(1, num_kept[:, None] - 1)  # [R, 1]
    is_above, is_equal = values > threshold, values == threshold
    room = num_kept[:, None] - is_above.sum(-1, keepdim=True)
    return is_above | (is_equal & (is_equal.cumsum(-1) <= room))


def _best(values: Tensor, num_best: int) -> Tensor:
    """Ids of the `num_best` largest of `values` [R, V], falling, the lower id first among equals: [R, k]."""
    num_rows = values.shape[0]
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    is_best = _is_best(values, torch.full((num_rows,), num_best, device=values.device))
    ids = is_best.nonzero()[:, 1].view(num_rows, num_best)  # rising
    order = values.gather(1, ids).sort(stable=True, dim=-1, descending=True).indices
    return ids.gather(1, order)
