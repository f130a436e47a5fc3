"""Drafts of all rows of a step in a few launches, or in one CUDA graph: those of rows whose sampling is plain.

Plain is what the device draws in one launch: greedy, or by a temperature alone. Of other rows what is drafted here
means nothing, but for the hidden states behind it. Belongs to the device thread. Knows nothing of plans and verdicts.

Legend: `N` slots, `R` rows, `K` drafts, `V` vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import torch
from torch import Tensor

from deepinfer_kernels import Drafts, Draw, Kept
from deepinfer_protocol.limits import MAX_DRAFTS
from deepinfer_workers.batch import Ints
from deepinfer_workers.graphs import GraphLadder, Shape, ladder, shapes
from deepinfer_workers.models.model import Drafter, HiddenFlat
from deepinfer_workers.sampling_state import SamplingState
from deepinfer_workers.upload import to_device

DRAWS: Final = 0x2545F4914F6CDD1D
"""What noise is for, where it draws drafts that are accepted by rejection sampling. Mixed into seeds of 63 bits."""
PLACES: Final = MAX_DRAFTS
"""Places of a block that noise tells apart."""


class PlainDrafts:
    """Writes into `drafts` and `survivals`, by slot."""

    def __init__(self, drafts: Drafts, survivals: Tensor, sampling: SamplingState, draw: Draw) -> None:
        """`survivals` [N, K] float32."""
        self._drafts, self._survivals = drafts, survivals
        self._sampling, self._draw = sampling, draw
        self._null_slot = len(survivals) - 1
        self._graphs: GraphLadder | None = None

    def capture(self, drafter: Drafter, hidden_flat: HiddenFlat) -> None:
        """The drafter's stages and all draws in graphs, for up to as many rows as slots come before the null slot."""
        longest = self._drafts.tokens.shape[1]

        def forward(columns: Tensor, _: int) -> Tensor:
            slots, anchors, tokens = columns.unbind(0)
            hidden = hidden_flat(slots, anchors, tokens)
            self._propose(drafter, hidden, slots, anchors, tokens, longest)
            return hidden

        device = self._survivals.device
        self._sizes = ladder(self._null_slot)
        self._graphs = GraphLadder(shapes(self._sizes, (1,)), forward, self._null_slot, device, num_columns=3)

    def propose(self, drafter: Drafter, slots: Ints, anchors: Tensor, tokens: Tensor, num_drafts: int) -> Tensor:
        """Drafts behind `tokens` [R] at `anchors` [R], `num_drafts` at least: the hidden states that they come from.

        These stay as they are until the next call.
        """
        at = to_device(slots, anchors.device)
        if self._graphs is None:
            hidden = drafter.hidden(slots, anchors, tokens)
            self._propose(drafter, hidden, at, anchors, tokens, num_drafts)
            return hidden
        num_rows = len(slots)
        columns = torch.stack((at, anchors.long(), tokens))
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        if size > num_rows:  # what is behind the rows that were asked for belongs to the null slot
            padding = columns.new_zeros(3, size - num_rows)
            padding[0] = self._null_slot
            columns = torch.cat((columns, padding), 1)
        return self._graphs.replay(Shape(size, 1), columns)[:num_rows]

    def _propose(
        self, drafter: Drafter, hidden: Tensor, slots: Tensor, anchors: Tensor, tokens: Tensor, num_drafts: int
    ) -> None:
        """Nothing depends on what the host knows."""
        temperatures, seeds, rejects = self._sampling.plain_columns(slots)
        seeds = seeds ^ (rejects * DRAWS)
        survival = torch.ones(len(slots), device=anchors.device)
        previous = tokens
        for place in range(num_drafts):
            some = hidden[:, place]
            logits = drafter.logits(some, previous)
            survival = survival * drafter.confidences(some, previous)
            moments = torch.where(rejects > 0, anchors * PLACES + place, anchors + 1 + place)
            kept = Kept(self._drafts.scores[:, place], slots)
            previous, log_sums = self._draw(logits, temperatures, seeds, moments, kept)
            assert log_sums is not None, "kept scores have sums"
            self._drafts.tokens[slots, place] = previous
            self._drafts.log_sums[slots, place] = log_sums
            self._survivals[slots, place] = survival
