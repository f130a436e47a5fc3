"""What the host knows of every slot without asking the device, and what each plan changes there.

Belongs to the host thread: plans arrive in the order in which the device runs them, so the books run ahead of it. Every
contradiction between a plan and the books is a `ProtocolError`. Knows nothing of tensors.

Legend: `N` slots, `S` rows, `T` packed positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from deepinfer_protocol import ProtocolError
from deepinfer_workers.batch import Admission, DeviceBatch, Ints, Limits

EMPTY: Final = -1
"""Generation of a slot that holds no sequence."""


@dataclass(frozen=True)
class SlotChanges:
    """What a plan writes into the slots before its rows run: columns that belong together."""

    tokens: tuple[Ints, Ints, Ints]
    """Slots, positions, token ids."""
    blocks: tuple[Ints, Ints, Ints]
    """Slots, columns of the block table, block ids."""
    lengths: tuple[Ints, Ints]
    """Slots, lengths."""
    starts: Ints
    """[S]: the first position of every row."""


class SlotLedger:
    """Generations, lengths, known tokens and blocks by slot."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lengths = np.zeros(limits.num_slots, np.int64)
        self._num_known = np.zeros(limits.num_slots, np.int64)
        self._num_blocks = np.zeros(limits.num_slots, np.int64)
        self._generations = np.full(limits.num_slots, EMPTY, np.int64)

    def apply(self, batch: DeviceBatch) -> SlotChanges:
        """Retire, admit, append, check the rows and advance them: in this order."""
        self._generations[batch.retired] = EMPTY
        for admission in batch.admissions:
            self._admit(admission)
        changes = self._changes(batch)
        self._check_rows(batch)
        self._lengths[batch.slots] += batch.counts
        sampled = batch.slots[batch.sampled]
        self._num_known[sampled] = self._lengths[sampled] + 1
        return changes

    def _admit(self, admission: Admission) -> None:
        slot = admission.slot
        if self._generations[slot] != EMPTY:
            text = f"it holds generation {self._generations[slot]} and was not retired"
            raise ProtocolError(f"slot {slot} admitted with generation {admission.generation}: {text}")
        self._lengths[slot] = admission.length
        self._num_known[slot] = len(admission.tokens)
        self._num_blocks[slot] = len(admission.block_ids)
        self._generations[slot] = admission.generation

    def _changes(self, batch: DeviceBatch) -> SlotChanges:
        admitted = [admission.slot for admission in batch.admissions]
        token_columns = [(admission.slot, admission.tokens) for admission in batch.admissions]
        block_columns = [(admission.slot, admission.block_ids) for admission in batch.admissions]
        slots, columns, blocks = _spread(block_columns)
        return SlotChanges(
            tokens=_spread(token_columns),
            blocks=(
                np.concatenate((slots, batch.append_slots)),
                np.concatenate((columns, self._append(batch.append_slots, batch.append_blocks))),
                np.concatenate((blocks, batch.append_blocks)),
            ),
            lengths=(np.array(admitted, np.int64), np.array([a.length for a in batch.admissions], np.int64)),
            starts=self._lengths[batch.slots],
        )

    def _append(self, slots: Ints, blocks: Ints) -> Ints:
        """The columns that the blocks take in their slots' tables."""
        columns = np.empty_like(slots)
        for index, slot in enumerate(slots.tolist()):
            if self._generations[slot] == EMPTY:
                raise ProtocolError(f"block {blocks[index]} appended to slot {slot}, which is empty")
            if self._num_blocks[slot] == self._limits.max_blocks:
                raise ProtocolError(f"block {blocks[index]} appended to slot {slot}, whose table is full")
            columns[index] = self._num_blocks[slot]
            self._num_blocks[slot] += 1
        return columns

    def _check_rows(self, batch: DeviceBatch) -> None:
        slots = batch.slots
        ends = self._lengths[slots] + batch.counts
        self._refuse(
            batch, self._generations[slots] != batch.generations, self._generations[slots], "generation of slot"
        )
        num_known = self._num_known[slots]
        self._refuse(batch, ends > num_known, num_known, "known tokens")
        capacity = np.minimum(self._num_blocks[slots] * self._limits.block_size, self._limits.max_len)
        self._refuse(batch, ends > capacity, capacity, "positions in its blocks")
        is_early = np.zeros(len(slots), np.bool_)
        is_early[batch.sampled] = ends[batch.sampled] < num_known[batch.sampled]
        self._refuse(batch, is_early, num_known, "sampled before its last known token; known tokens")

    def _refuse(self, batch: DeviceBatch, is_wrong: npt.NDArray[np.bool_], facts: Ints, what: str) -> None:
        if not is_wrong.any():
            return
        row = int(np.flatnonzero(is_wrong)[0])
        slot, generation, count = int(batch.slots[row]), int(batch.generations[row]), int(batch.counts[row])
        start = int(self._lengths[slot])
        text = f"slot {slot}, generation {generation}, positions {start} to {start + count - 1}"
        raise ProtocolError(f"step {batch.step_id}, row {row} ({text}): {what}: {facts[row]}")


def _spread(columns: list[tuple[int, Ints]]) -> tuple[Ints, Ints, Ints]:
    """Of every slot's values: slot, index and value of each, one after another."""
    if not columns:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    sizes = [len(values) for _, values in columns]
    slots = np.repeat(np.array([slot for slot, _ in columns], np.int64), sizes)
    indices = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
    return slots, indices, np.concatenate([values for _, values in columns])
