"""Which drafts the target accepts, and what it says behind them. Pure, on tensors. Knows nothing of slots or models.

*match*: the target's own token is taken at every place, and a draft is accepted while it equals that. Nothing changes
but the number of tokens a step.

*reject* (Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et
al.: "Accelerating Large Language Model Decoding with Speculative Sampling", 2023): with p the target's distribution at
a place and q the one that the draft d was drawn from, d is accepted with probability min(1, p(d) / q(d)). The first
rejection is followed by a token of max(p - q, 0), normalised; if all are accepted, one of p follows. Each token is
then distributed as p, whatever q is, as long as the noise is used once.

Legend: `R` rows, `K` most drafts of a row, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def match(targets: Tensor, drafts: Tensor, counts: Tensor) -> Tensor:
    """How many of the first `counts` [R] `drafts` [R, K] equal `targets` [R, K], up to the first that does not: [R]."""
    return _leading((targets == drafts) & _is_there(drafts, counts))


def reject(
    p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, uniform: Tensor, gumbel: Tensor
) -> tuple[Tensor, Tensor]:
    """How many drafts are accepted, [R], and the token behind them, [R].

    `p` [R, K + 1, V] and `q` [R, K, V] float64 are probabilities, the first `counts` [R] of `drafts` [R, K] were drawn
    from `q`; `uniform` [R, K] and `gumbel` [R, V] are noise that nothing else has used.
    """
    chosen = drafts[..., None]
    is_accepted = uniform * q.gather(2, chosen)[..., 0] < p[:, :-1].gather(2, chosen)[..., 0]
    num_accepted = _leading(is_accepted & _is_there(drafts, counts))
    at = num_accepted[:, None, None].expand(-1, 1, p.shape[2])
    behind = p.gather(1, at)[:, 0]  # [R, V]
    proposed = torch.cat((q, torch.zeros_like(q[:, :1])), 1).gather(1, at)[:, 0]
    rest = (behind - proposed).clamp_(min=0.0)
    # Rounding may leave nothing of a rest that was hardly there.
    takes_rest = (num_accepted < counts) & (rest.sum(-1) > 0.0)
    behind = torch.where(takes_rest[:, None], rest, behind)
    return num_accepted, (behind.log() + gumbel).argmax(-1)


def _leading(is_accepted: Tensor) -> Tensor:
    return is_accepted.to(torch.int64).cumprod(-1).sum(-1)


def _is_there(drafts: Tensor, counts: Tensor) -> Tensor:
    return torch.arange(drafts.shape[1], device=drafts.device) < counts[:, None]
