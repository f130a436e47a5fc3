"""How every slot is sampled: parameters come with an admission, tokens and log probabilities come out.

Belongs to the device thread. Knows nothing of plans and forwards; the math is in `sampler`.

Legend: `N` slots, `R` rows, `V` vocabulary, `k` logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepinfer_protocol import SlotSampling
from deepinfer_workers.batch import Admission, Ints
from deepinfer_workers.sampler import RowSampling, best_logprobs, sample
from deepinfer_workers.upload import to_device


@dataclass(frozen=True)
class SlotParams:
    """How a slot is sampled."""

    sampling: SlotSampling
    stop_ids: Ints


@dataclass(frozen=True)
class Logprobs:
    """Of `R` tokens: each token's id and then the best ids, with their log probabilities. Still on the device."""

    ids: Tensor
    """[R, 1 + k] int64"""
    values: Tensor
    """[R, 1 + k] float32"""
    counts: list[int]
    """[R]: how many of the best each row asked for."""

    def to_bytes(self) -> tuple[bytes, bytes]:
        """The columns `logprob_ids` and `logprobs` of a `StepResult`. Waits for the device."""
        ids, values = self.ids.cpu().numpy(), self.values.cpu().numpy()
        widths = [1 + count for count in self.counts]
        flat_ids = np.concatenate([ids[row, :width] for row, width in enumerate(widths)])
        flat_values = np.concatenate([values[row, :width] for row, width in enumerate(widths)])
        return flat_ids.astype("<i4").tobytes(), flat_values.astype("<f4").tobytes()


class SamplingState:
    """Parameters by slot. Nothing here waits for the device."""

    def __init__(self, tokens: Tensor) -> None:
        """`tokens` [N + 1, positions] int32: what every slot holds, on the device; only read."""
        self._tokens = tokens
        self._params: dict[int, SlotParams] = {}

    def retire(self, slots: Ints) -> None:
        for slot in slots.tolist():
            self._params.pop(slot, None)

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._params[admission.slot] = SlotParams(admission.sampling, admission.stop_ids)

    def sample(self, logits: Tensor, slots: Ints, positions: Tensor, allowed: Tensor | None) -> Tensor:
        """A token for each row of `logits` [R, V] of the slot `slots` [R], to be stored at `positions` [R]: [R] int64.

        `allowed` [R, V] bool masks tokens out.
        """
        params = [self._params[slot] for slot in slots.tolist()]
        places = positions.tolist()
        rows = [RowSampling(p.sampling, p.stop_ids, place) for p, place in zip(params, places, strict=True)]
        return sample(logits, rows, allowed)

    def logprobs(self, logits: Tensor, tokens: Tensor, slots: Ints) -> Logprobs | None:
        """Of `tokens` [R] under `logits` [R, V] as the model gave them, for the rows that asked; `None` if none did."""
        counts = [self._params[slot].sampling.num_logprobs for slot in slots.tolist()]
        wanted = [row for row, count in enumerate(counts) if count >= 0]
        if not wanted:
            return None
        counts = [counts[row] for row in wanted]
        index = to_device(np.array(wanted), logits.device)
        ids, values = best_logprobs(logits[index], tokens[index], max(counts))
        return Logprobs(ids, values, counts)
