"""Sequences that run on a DeepSeek model without a runner: any pieces in any company, logits of every position.

Knows nothing of sampling and of plans; blocks are given out by whoever asks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import PackedRows, select_ops
from deepinfer_protocol import SlotSampling
from deepinfer_workers.batch import Admission, DeviceBatch, Limits
from deepinfer_workers.models.deepseek.loading import load_deepseek
from deepinfer_workers.models.model import ModelOptions, Step
from deepinfer_workers.safetensors_folder import SafetensorsFolder

EXACT = ModelOptions(num_drafts=0)
"""Everything as released, but for truncation and drafts."""
PLAIN = EXACT._replace(quantizes_activations=False, quantizes_caches=False)
DRAFTING = EXACT._replace(num_drafts=-1)
"""With the draft stages. `tiny_v41()` and `tiny_v4()` have some."""
NO_INTS = np.empty(0, np.int64)


class Drafted(NamedTuple):
    """One block."""

    hidden: Tensor
    """[block, C]"""
    logits: Tensor
    """[block, V]"""
    confidences: Tensor
    """[block]"""
    tokens: Tensor
    """[block]"""

    def equals(self, other: Drafted) -> bool:
        """To the bit."""
        return all(torch.equal(mine, its) for mine, its in zip(self, other, strict=True))


class Sequences:
    """Up to `num_slots` sequences. A slot's tokens are all known from the start; `lengths` are computed."""

    def __init__(
        self,
        folder: Path,
        options: ModelOptions = EXACT,
        *,
        num_slots: int = 6,
        max_len: int = 256,
        batch_invariant: bool = True,
        accelerator: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        ops = select_ops(accelerator, batch_invariant=batch_invariant, dtype=dtype)
        options = options._replace(max_len=max_len)
        self.model = load_deepseek(SafetensorsFolder(folder), ops, options, lambda done, total: None)
        self.block_size = options.block_size
        per_slot = -(-max_len // self.block_size)
        num_blocks = num_slots * per_slot
        self.limits = Limits(num_slots, num_blocks, self.block_size, max_len, self.model.vocab_size, 4096)
        with torch.inference_mode():
            self.model.allocate(self.limits)
        self.lengths = [0] * num_slots
        self.tables = torch.full((num_slots + 1, per_slot), num_blocks, dtype=torch.int32, device=ops.device)
        self.known = torch.zeros(num_slots + 1, max_len + 1, dtype=torch.int32, device=ops.device)
        self._blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self._free = list(np.random.default_rng(0).permutation(num_blocks))
        self._admissions: list[Admission] = []

    def close(self) -> None:
        self.model.close()

    def start(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        length: int = 0,
        floor: int = 0,
        blocks: Sequence[int] = (),
        num_prompt: int = 0,
    ) -> None:
        """`tokens` in `slot`; `blocks` hold the rows below `floor`, the first position computed is `length`."""
        self._free = [block for block in self._blocks[slot] if block not in blocks] + self._free
        self._blocks[slot] = list(blocks)
        num_needed = -(-len(tokens) // self.block_size)
        while len(self._blocks[slot]) < num_needed:
            self._blocks[slot].append(self._free.pop(0))
        self.tables[slot, :num_needed] = torch.tensor(self._blocks[slot], dtype=torch.int32)
        self.known[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.lengths[slot] = length
        admission = Admission(
            slot=slot,
            generation=1,
            length=length,
            floor=floor,
            tokens=np.array(tokens, np.int64),
            block_ids=np.array(self._blocks[slot], np.int64),
            sampling=SlotSampling(num_prompt=num_prompt),
            stop_ids=NO_INTS,
        )
        self._admissions.append(admission)

    def blocks(self, slot: int, num_tokens: int) -> list[int]:
        """Those that hold the first `num_tokens` of a slot."""
        return self._blocks[slot][: num_tokens // self.block_size]

    def take_back(self, slot: int, count: int) -> None:
        """The last `count` positions were not meant: as when drafts are rejected."""
        self.lengths[slot] -= count

    def say(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Other tokens from position `first` on."""
        self.known[slot, first : first + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)

    @torch.inference_mode()
    def run(self, *pieces: tuple[int, int], most_positions: int = 0) -> list[Tensor]:
        """One step of the next `count` positions of each (slot, count): logits [count, V] of each.

        With `most_positions` as a CUDA graph holds it, for sequences up to as many.
        """
        slots, counts = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
        starts = np.array([self.lengths[slot] for slot in slots.tolist()], np.int64)
        row_of = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]
        num_padded = -(-len(row_of) // 16) * 16
        batch = DeviceBatch(
            step_id=0, retired=NO_INTS, admissions=self._admissions, append_slots=NO_INTS, append_blocks=NO_INTS,
            slots=slots, generations=np.ones_like(slots), counts=counts, sampled=NO_INTS,
            is_waiting=np.empty(0, np.bool_), row_of=row_of, offset_of=offsets, num_positions=num_padded,
        )  # fmt: skip
        prefetched = self.model.prefetch(batch, starts)
        self.model.admit(self._admissions)
        self._admissions = []
        where, positions = np.full(num_padded, len(self.lengths)), np.zeros(num_padded, np.int64)
        where[: len(row_of)], positions[: len(row_of)] = slots[row_of], (starts[row_of] + offsets)
        at, places = (torch.from_numpy(index).to(self.known.device) for index in (where, positions))
        blocks = self.tables[at, places // self.block_size].long()
        step = Step(
            self.known[at, places].long(),
            blocks * self.block_size + places % self.block_size,
            PackedRows(counts, at, places, self.tables),
            self.known,
            prefetched,
        )
        if most_positions:
            self.model.stage(step)
            hidden = self.model.forward_flat(step, most_positions)[: len(row_of)]
        else:
            hidden = self.model.forward(step)[: len(row_of)]
        for slot, count in pieces:
            self.lengths[slot] += count
        return list(self.model.logits(hidden).cpu().split(counts.tolist()))

    @torch.inference_mode()
    def draft(self, *anchors: tuple[int, int]) -> list[Drafted]:
        """What is drafted behind each (slot, newest token), whose positions before are computed.

        Every draft is the likeliest.
        """
        drafter = self.model.drafter
        assert drafter is not None
        slots = np.array([slot for slot, _ in anchors], np.int64)
        device = self.known.device
        positions = torch.tensor([self.lengths[slot] for slot in slots.tolist()], device=device)
        previous = torch.tensor([token for _, token in anchors], device=device)
        hidden = drafter.hidden(slots, positions, previous)
        logits, confidences, tokens = [], [], []
        for place in range(drafter.block_size):
            logits.append(drafter.logits(hidden[:, place], previous))
            confidences.append(drafter.confidences(hidden[:, place], previous))
            previous = logits[-1].argmax(-1)
            tokens.append(previous)
        columns = (hidden, *(torch.stack(parts, 1) for parts in (logits, confidences, tokens)))
        return [Drafted(*(column[row].cpu() for column in columns)) for row in range(len(slots))]

    def full(self, slot: int, tokens: Sequence[int]) -> Tensor:
        """Logits [tokens, V] of one forward over the whole sequence, alone."""
        self.start(slot, tokens)
        return self.run((slot, len(tokens)))[0]


def random_tokens(count: int, seed: int, vocab_size: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, vocab_size, count).tolist()
    return tokens
