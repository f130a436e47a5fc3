"""What the host knows of every slot without asking the device, and what each plan changes there.

Belongs to the host thread: plans arrive in the order in which the device runs them, so the books run ahead of it. How
many drafts a step accepts is known after it: until then the books have bounds of a slot's length. Every contradiction
between a plan and the books is a `ProtocolError`. Knows nothing of tensors.

Legend: `N` slots, `S` rows, `T` packed positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

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


class Growth(NamedTuple):
    """How long the slots of a step's rows have become since their admission, [S] each."""

    least: Ints
    most: Ints


@dataclass(frozen=True)
class LedgerEntry:
    """A plan as the books have it."""

    changes: SlotChanges
    starts: Ints
    """[S]: the first position of every row, at least; exact for rows of a prompt."""
    ends: Ints
    """[S]: the lengths after the step, at most."""
    most_drafts: Ints | None
    """[S]: how many drafts the row has and may verify; `None`: no row has any."""
    growth: Growth | None
    """`None`: the lengths after the step are known already."""


class SlotLedger:
    """Generations, lengths, known tokens, drafts and blocks by slot."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        num_slots = limits.num_slots
        self._lengths = np.zeros(num_slots, np.int64)
        """As last known."""
        self._grown = Growth(np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64))
        """Since the admission."""
        self._grown_when_known = Growth(np.zeros(num_slots, np.int64), np.zeros(num_slots, np.int64))
        """When the length was that of `_lengths`."""
        self._num_ahead = np.zeros(num_slots, np.int64)
        """Tokens known behind the length."""
        self._num_drafts = np.zeros(num_slots, np.int64)
        """Made by the step before."""
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._generations = np.full(num_slots, EMPTY, np.int64)
        self._learned: SimpleQueue[tuple[DeviceBatch, Growth, Ints]] = SimpleQueue()

    def apply(self, batch: DeviceBatch) -> LedgerEntry:
        """Retire, admit, append, check the rows and advance them: in this order."""
        self._take_in()
        self._generations[batch.retired] = EMPTY
        for admission in batch.admissions:
            self._admit(admission)
        changes = self._changes(batch)
        slots, counts = batch.slots, batch.counts
        lows, highs = self._bounds(slots)
        most_drafts = self._most_drafts(batch)
        ends = highs + counts if most_drafts is None else highs + counts + np.minimum(most_drafts, batch.verify_budget)
        self._check_rows(batch, highs, ends)
        self._grown.least[slots] += counts
        self._grown.most[slots] += ends - highs
        self._num_ahead[slots] -= counts
        self._num_drafts[slots] = 0
        sampled = slots[batch.sampled]
        self._num_ahead[sampled] = 1
        self._num_drafts[sampled] = batch.num_drafts
        is_exact = most_drafts is None and np.array_equal(lows, highs)
        growth = None if is_exact else Growth(self._grown.least[slots], self._grown.most[slots])
        return LedgerEntry(changes, lows, ends, most_drafts, growth)

    def learn(self, batch: DeviceBatch, growth: Growth, lengths: Ints) -> None:
        """Any thread: after the step of `batch` its slots had `lengths` [S]; `growth` is its entry's."""
        self._learned.put((batch, growth, lengths))

    def _take_in(self) -> None:
        while True:
            try:
                batch, growth, lengths = self._learned.get_nowait()
            except Empty:
                return
            is_current = self._generations[batch.slots] == batch.generations
            slots = batch.slots[is_current]
            self._lengths[slots] = lengths[is_current]
            self._grown_when_known.least[slots] = growth.least[is_current]
            self._grown_when_known.most[slots] = growth.most[is_current]

    def _bounds(self, slots: Ints) -> tuple[Ints, Ints]:
        """The lengths of `slots`, at least and at most."""
        known, then, now = self._lengths[slots], self._grown_when_known, self._grown
        return known + now.least[slots] - then.least[slots], known + now.most[slots] - then.most[slots]

    def _most_drafts(self, batch: DeviceBatch) -> Ints | None:
        if batch.most_drafts is None:
            return None
        most = np.minimum(batch.most_drafts, self._num_drafts[batch.slots])
        return most if most.any() else None

    def _admit(self, admission: Admission) -> None:
        slot = admission.slot
        if self._generations[slot] != EMPTY:
            text = f"it holds generation {self._generations[slot]} and was not retired"
            raise ProtocolError(f"slot {slot} admitted with generation {admission.generation}: {text}")
        self._lengths[slot] = admission.length
        for grown in (*self._grown, *self._grown_when_known):
            grown[slot] = 0
        self._num_ahead[slot] = len(admission.tokens) - admission.length
        self._num_drafts[slot] = 0
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

    def _check_rows(self, batch: DeviceBatch, starts: Ints, ends: Ints) -> None:
        """`starts` and `ends` [S] are the farthest that the rows may begin, and end with their drafts."""
        slots, ahead = batch.slots, self._num_ahead[batch.slots]
        refusal = _Refusal(batch, starts)
        generations = self._generations[slots]
        refusal.of(generations != batch.generations, generations, "generation of slot")
        num_known = starts + ahead
        refusal.of(batch.counts > ahead, num_known, "known tokens")
        capacity = np.minimum(self._num_blocks[slots] * self._limits.block_size, self._limits.max_len)
        refusal.of(ends > capacity, capacity, "positions in its blocks")
        is_early = np.zeros(len(slots), np.bool_)
        is_early[batch.sampled] = (batch.counts < ahead)[batch.sampled]
        refusal.of(is_early, num_known, "sampled before its last known token; known tokens")


class _Refusal(NamedTuple):
    """Of rows of `batch` that begin at `starts` [S]."""

    batch: DeviceBatch
    starts: Ints

    def of(self, is_wrong: npt.NDArray[np.bool_], facts: Ints, what: str) -> None:
        """Raises `ProtocolError` where `is_wrong` [S], for the first such row."""
        if not is_wrong.any():
            return
        batch = self.batch
        row = int(np.flatnonzero(is_wrong)[0])
        slot, generation, count = int(batch.slots[row]), int(batch.generations[row]), int(batch.counts[row])
        start = int(self.starts[row])
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
