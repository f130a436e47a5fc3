"""What `Draw` and `Verify` say, in torch: by the definitions of the workers, which a CPU goes by."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels import DraftedRows, Kept
from deepinfer_workers.acceptance import reject
from deepinfer_workers.noise import gumbel_noise, uniform_noise
from deepinfer_workers.sampler import choose, warm_scores


def draw(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, moments: Tensor, kept: Kept | None = None
) -> tuple[Tensor, Tensor | None]:
    """A `Draw`."""
    tokens = logits.argmax(-1)
    log_sums = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    [warm] = temperatures.nonzero(as_tuple=True)
    if len(warm):
        scores = warm_scores(logits[warm], temperatures[warm])
        if kept is not None:
            scores = scores.float()
            kept.scores[kept.rows[warm]] = scores
            scores = scores.double()
            log_sums[warm] = scores.logsumexp(-1)
        tokens[warm] = choose(scores, seeds[warm], moments[warm])
    return tokens, None if kept is None else log_sums


def verify(logits: Tensor, rows: DraftedRows) -> tuple[Tensor, Tensor]:
    """A `Verify`."""
    most = max(int(rows.counts.max()), 1)
    places = torch.arange(most + 1, device=logits.device)
    at = rows.firsts[:, None] + torch.minimum(places, rows.counts[:, None])  # [R, K + 1]
    scores = warm_scores(logits[at.flatten()], rows.temperatures.repeat_interleave(most + 1))
    p = scores.softmax(-1).view(*at.shape, -1)
    log_q = rows.drafts.scores[rows.slots, :most].double() - rows.drafts.log_sums[rows.slots, :most, None]
    moments = (rows.anchors * rows.num_moments)[:, None] + places[:-1]
    uniform = uniform_noise(rows.accept_seeds.repeat_interleave(most), moments.flatten()).view(len(rows.slots), most)
    gumbel = gumbel_noise(rows.follow_seeds, rows.anchors, logits.shape[1])
    return reject(p, log_q.exp(), rows.drafts.tokens[rows.slots, :most], rows.counts, uniform, gumbel)
