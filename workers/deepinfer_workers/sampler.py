"""Logits to tokens: the math, on tensors that are on the device already. Every row by itself.

A row's logits are restricted (masks, bans), biased, penalised, and then sampled: greedy rows take the largest logit,
the lowest id among equals; others the largest of logit / temperature + Gumbel noise, which samples from the softmax,
over the tokens that min-p, top-k and top-p keep. Nothing here waits for the device, unless that is a CPU. Knows nothing
of slots, plans, or of which row asks for what.

Legend: `R` rows, `V` vocabulary, `W` tokens of a history, `k` logprobs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_workers.noise import gumbel_noise
from deepinfer_workers.upload import to_device

NUM_CANDIDATES: Final = 1024
"""Most probable tokens that top-p looks at first on a CPU; a flat distribution is sorted whole."""
ROWS_AT_ONCE: Final = 64
"""Rows whose temporaries are there together: several times [rows, V] float64, however many rows a step has."""


class TopRows(NamedTuple):
    """Rows of a batch that keep their most probable tokens only."""

    rows: Tensor
    """[P] int64: which of the batch."""
    top_k: Tensor
    """[P] int64; 0 keeps all."""
    top_p: Tensor
    """[P] float64"""
    max_kept: int | None
    """No row keeps more tokens; `None`: that is not known."""


def unpack_masks(bits: bytes, num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Bits of a `MaskBatch` as [rows, V] bool; bits past the vocabulary are ignored."""
    words = np.frombuffer(bits, np.uint8).reshape(num_rows, -1)
    flags = np.unpackbits(words, axis=1, count=vocab_size, bitorder="little")
    return to_device(flags.view(np.bool_), device)


# ---- what may be sampled, and how it is weighed. These work in place, on [R, V] float32.


def ban(logits: Tensor, rows: Tensor, tokens: Tensor, is_banned: Tensor) -> None:
    """Minus infinity at (`rows`, `tokens`) [E] where `is_banned` [E]; a pair may come more than once."""
    at = rows * logits.shape[1] + tokens
    bounds = torch.where(is_banned, -torch.inf, torch.inf).to(logits.dtype)
    logits.view(-1).scatter_reduce_(0, at, bounds, "amin")


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """`values` [E] onto the logits of (`rows`, `tokens`) [E], each pair once. Minus infinity bans."""
    at = rows * logits.shape[1] + tokens
    flat = logits.view(-1)
    flat.scatter_(0, at, torch.where(values == -torch.inf, values, flat.gather(0, at) + values))


def penalise(
    logits: Tensor,
    history: Tensor,
    positions: Tensor,
    num_prompt: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalties [R] float32 by `history` [R, W]: `positions` [R] tokens, of which `num_prompt` [R] are the prompt."""
    places = torch.arange(history.shape[1], device=history.device)
    is_known = places < positions[:, None]  # [R, W]
    is_output = is_known & (places >= num_prompt[:, None])
    tokens = torch.where(is_known, history, 0).long()
    is_seen = _count(tokens, is_known, logits.shape[1]) > 0  # [R, V]
    scale = torch.where(is_seen, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / scale, logits * scale))
    counts = _count(tokens, is_output, logits.shape[1])
    logits.sub_(frequency[:, None] * counts).sub_(presence[:, None] * (counts > 0))


def _count(tokens: Tensor, is_counted: Tensor, num_tokens: int) -> Tensor:
    """How often each token is in `tokens` [R, W] where `is_counted`: [R, V] int32."""
    counts = torch.zeros(tokens.shape[0], num_tokens, dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(1, tokens, is_counted.to(torch.int32))


def or_else(logits: Tensor, fallback: Tensor) -> Tensor:
    """Rows of `logits` [R, V]; those of `fallback` where no token is left."""
    return torch.where(logits.amax(-1, keepdim=True) == -torch.inf, fallback, logits)


# ---- sampling


def warm_scores(
    logits: Tensor,
    temperature: Tensor,
    *,
    log_min_p: Tensor | None = None,
    top_rows: tuple[TopRows, ...] = (),
) -> Tensor:
    """Scores [R, V] float64 whose softmax is what the rows of `logits` [R, V] are sampled from.

    `temperature` [R] float64 is above 0. `log_min_p` [R] float64: the logarithm of min-p, minus infinity where there is
    none.
    """
    # From the largest down, so that no temperature overflows: a tiny one sends all but the best to minus infinity.
    scores = logits.double()  # [R, V]
    scores = (scores - scores.amax(-1, keepdim=True)).div_(temperature[:, None])
    if log_min_p is not None:
        scores.masked_fill_(scores < log_min_p[:, None], -torch.inf)
    for top in top_rows:
        kept = _keep_top(scores.index_select(0, top.rows), top.top_k, top.top_p, top.max_kept)
        scores.index_copy_(0, top.rows, kept)
    return scores


def choose(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token for each row of `scores` [R, V] float64, by the noise of `seeds` and `positions` [R]: [R] int64."""
    return (scores + gumbel_noise(seeds, positions, scores.shape[1])).argmax(-1)


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor, max_kept: int | None) -> Tensor:
    """`scores` [R, V] with all but the kept tokens at minus infinity; `top_k` (0: all), `top_p` [R]."""
    num_tokens = scores.shape[1]
    top_k = torch.where(top_k == 0, num_tokens, top_k.clamp(max=num_tokens))
    probs = torch.softmax(scores, -1)
    size = num_tokens if max_kept is None else min(max_kept, num_tokens)
    if max_kept is None and scores.is_cpu and num_tokens > NUM_CANDIDATES:
        largest = _largest(scores, NUM_CANDIDATES)
        num_kept, is_told = _count_kept(probs.gather(1, largest.indices), top_k, top_p, num_tokens)
        if bool(is_told.all()):
            return scores.masked_fill(~_is_best(scores, largest.values, num_kept), -torch.inf)
    largest = _largest(scores, size)
    num_kept, _ = _count_kept(probs.gather(1, largest.indices), top_k, top_p, num_tokens)
    return scores.masked_fill(~_is_best(scores, largest.values, num_kept), -torch.inf)


def _largest(values: Tensor, size: int) -> torch.return_types.topk | torch.return_types.sort:
    """The `size` largest of each row, falling."""
    return values.sort(-1, descending=True) if size == values.shape[1] else values.topk(size, -1)


def _count_kept(best: Tensor, top_k: Tensor, top_p: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """How many of the best tokens each row keeps, and whether the `best` probabilities [R, size] tell it: [R] each.

    Sums run from the best token on, so that a row's count is the same for every size that tells.
    """
    size = best.shape[1]
    sums = best.cumsum(-1)
    is_cut = top_k < num_tokens
    cut_mass = sums.gather(1, top_k.clamp(max=size)[:, None] - 1)[:, 0]
    target = top_p * torch.where(is_cut, cut_mass, 1.0)  # top-p is of what top-k keeps
    is_told = (top_k <= size) | (~is_cut & (top_p < 1) & (sums[:, -1] >= target))
    # A token stays while those before it do not reach the target.
    num_wanted = (torch.nn.functional.pad(sums[:, :-1], (1, 0)) < target[:, None]).sum(-1)
    return torch.minimum(torch.where(top_p < 1, num_wanted, top_k), top_k).clamp(min=1), is_told


def _is_best(values: Tensor, largest: Tensor, num_kept: Tensor) -> Tensor:
    """[R, V] bool: the `num_kept` [R] largest of `values` [R, V]; among equals the lower ids.

    `largest` [R, size], falling, holds at least that many.
    """
    threshold = largest.gather(1, num_kept[:, None] - 1)  # [R, 1]
    is_above, is_equal = values > threshold, values == threshold
    room = num_kept[:, None] - is_above.sum(-1, keepdim=True)
    return is_above | (is_equal & (is_equal.cumsum(-1) <= room))


# ---- log probabilities


class BestLogprobs(NamedTuple):
    """Of `R` tokens, each with the k best beside it."""

    ids: Tensor
    """[R, 1 + k] int64: the token's, then the best, falling; the lower id first among equals."""
    values: Tensor
    """[R, 1 + k] float32"""
    ranks: Tensor
    """[R] int64: the token's own; 1 is the best."""


def best_logprobs(logits: Tensor, tokens: Tensor, num_best: int) -> BestLogprobs:
    """Of `tokens` [R] and the `num_best` best, by the logits [R, V] as the model gave them."""
    num_best = min(num_best, logits.shape[1])
    values = torch.log_softmax(logits.float(), -1)  # [R, V]
    chosen = tokens[:, None]  # [R, 1]
    own = values.gather(1, chosen)
    equals_before = (values == own) & (torch.arange(values.shape[1], device=values.device) < chosen)
    ranks = 1 + (values > own).sum(-1) + equals_before.sum(-1)
    ids = torch.cat((chosen, _best(values, num_best)), 1) if num_best else chosen
    return BestLogprobs(ids, values.gather(1, ids), ranks)


def _best(values: Tensor, num_best: int) -> Tensor:
    """Ids of the `num_best` largest of `values` [R, V], falling, the lower id first among equals: [R, k]."""
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num_kept = torch.full((values.shape[0],), num_best, device=values.device)
    is_best = _is_best(values, values.topk(num_best, -1).values, num_kept)
    wanted = torch.arange(1, num_best + 1, device=values.device).expand(values.shape[0], -1).contiguous()
    ids = torch.searchsorted(is_best.cumsum(-1), wanted)  # [R, k], rising
    order = values.gather(1, ids).sort(stable=True, dim=-1, descending=True).indices
    return ids.gather(1, order)
