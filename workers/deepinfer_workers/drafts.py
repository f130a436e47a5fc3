"""The drafts of every slot: made by a model's draft stages, kept on the device, judged against the model's own tokens.

A draft is accepted while it equals the token that is taken at its place anyway, so tokens are those of a run without
drafts. Belongs to the device thread. Knows nothing of plans and forwards.

Legend: `R` rows, `V` vocabulary, `P` logits of the rows: of each those of its newest token, then those of its drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_workers.batch import Ints
from deepinfer_workers.models.model import Drafter
from deepinfer_workers.sampling_state import SamplingState
from deepinfer_workers.upload import to_device


class VerifyRows(NamedTuple):
    """All sampled rows of a step."""

    slots: Ints
    """[R]"""
    counts: Ints
    """[R]: how many drafts each verifies."""
    places: Tensor
    """[P]: where the token of each of the logits is to be stored."""
    num_known: Ints
    """[P]: bounds, known on the host, of `places`."""


class Verdict(NamedTuple):
    """What the target takes."""

    num_tokens: Tensor
    """[R] int64: from 1 to one more than the drafts."""
    tokens: Tensor
    """[P] int64: of each row the accepted drafts, then the token behind them; what follows means nothing."""


def draft_slot_bytes(longest: int, vocab_size: int) -> int:
    """On the device, for one slot."""
    return longest * (8 + 4)


class DraftState:
    """Drafts and their survivals by slot."""

    def __init__(
        self, num_slots_with_null: int, longest: int, vocab_size: int, sampling: SamplingState, device: torch.device
    ) -> None:
        self.longest = longest
        self._sampling = sampling
        self._tokens = torch.zeros(num_slots_with_null, longest, dtype=torch.int64, device=device)
        self._survivals = torch.zeros(num_slots_with_null, longest, device=device)

    def propose(self, drafter: Drafter, slots: Ints, anchors: Tensor, tokens: Tensor, num_drafts: int) -> Tensor:
        """Draft behind `tokens` [R], which stand at `anchors` [R]: survivals [R, num_drafts] float32."""
        at = to_device(slots, anchors.device)
        hidden = drafter.hidden(slots, anchors, tokens)
        survival = torch.ones(len(slots), device=anchors.device)
        previous = tokens
        for place in range(num_drafts):
            some = hidden[:, place]
            logits = drafter.logits(some, previous)
            survival = survival * drafter.confidences(some, previous)
            previous = logits.argmax(-1)
            self._tokens[at, place] = previous
            self._survivals[at, place] = survival
        return self._survivals[at, :num_drafts]

    def lengths(self, slots: Ints, most: Ints, budget: int) -> Ints:
        """How many drafts each verifies, at most `most` [R] and `budget` together: those of the best survivals."""
        survivals = self._survivals[to_device(slots, self._survivals.device)].cpu().numpy()
        is_there = np.arange(self.longest) < most[:, None]
        keys = np.where(is_there, survivals, -1.0).T.ravel()  # earlier places first, then earlier rows
        best = np.argsort(-keys, kind="stable")[: min(budget, int(most.sum()))]
        return np.bincount(best % len(slots), minlength=len(slots)).astype(np.int64)

    def tokens(self, slots: Ints, counts: Ints) -> Tensor:
        """The first `counts` [R] drafts of `slots` [R], one after another."""
        at, places = self._entries(slots, counts)
        return self._tokens[at, places]

    def predicted(self, slots: Ints, counts: Ints) -> Tensor:
        """[longest] float32: by place, the survivals of these drafts, summed over rows."""
        at, places = self._entries(slots, counts)
        sums = torch.zeros(self.longest, device=self._survivals.device)
        return sums.index_add_(0, places, self._survivals[at, places])

    def judge(self, logits: Tensor, rows: VerifyRows) -> Verdict:
        """Which drafts are accepted, and the tokens that are taken. `logits` [P, V]."""
        counts = rows.counts
        sizes = counts + 1
        owners = np.repeat(np.arange(len(counts)), sizes)
        tokens = self._sampling.sample(logits, rows.slots[owners], rows.places, None, rows.num_known)
        firsts = np.cumsum(sizes) - sizes
        columns = np.arange(int(sizes.max()))
        index = to_device(np.minimum(firsts[:, None] + columns, len(owners) - 1), logits.device)
        is_draft = to_device(columns < counts[:, None], logits.device)
        drafts = self._tokens[to_device(rows.slots, logits.device)]
        drafts = torch.nn.functional.pad(drafts, (0, max(len(columns) - self.longest, 0)))[:, : len(columns)]
        is_accepted = (tokens[index] == drafts) & is_draft
        return Verdict(1 + is_accepted.to(torch.int64).cumprod(-1).sum(-1), tokens)

    def _entries(self, slots: Ints, counts: Ints) -> tuple[Tensor, Tensor]:
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return to_device(np.repeat(slots, counts), self._tokens.device), to_device(places, self._tokens.device)
