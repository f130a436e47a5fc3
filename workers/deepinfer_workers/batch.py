"""A plan as checked arrays. Knows the bounds of what a plan may name, and no state of slots.

Legend: `S` rows of the step, `T` packed positions, padded.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer_protocol import ProtocolError, RowFlag, SlotAdmit, SlotSampling, StepPlan

_INT32: Final = np.dtype("<i4")

Ints = npt.NDArray[np.int64]


class Limits(NamedTuple):
    """What a plan may name."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_len: int
    vocab_size: int
    max_batch_positions: int
    ladder: tuple[int, ...] = ()
    """Sizes that steps are padded to, rising; larger ones go to a multiple of `row_multiple`."""
    row_multiple: int = 16

    def padded(self, num_positions: int) -> int:
        """T for this many positions."""
        at = bisect_left(self.ladder, num_positions)
        if at < len(self.ladder):
            return self.ladder[at]
        return -(-num_positions // self.row_multiple) * self.row_multiple

    @property
    def max_blocks(self) -> int:
        """Blocks of a sequence."""
        return -(-self.max_len // self.block_size)


class Admission(NamedTuple):
    """A checked `SlotAdmit`."""

    slot: int
    generation: int
    length: int
    """The first position that is computed."""
    floor: int
    """Paged rows below it are written already, and not to be written again; at least `length`."""
    tokens: Ints
    block_ids: Ints
    sampling: SlotSampling
    stop_ids: Ints


@dataclass(frozen=True)
class DeviceBatch:
    """A checked plan as arrays: everything that does not depend on the state of the slots."""

    step_id: int
    retired: Ints
    admissions: list[Admission]
    append_slots: Ints
    append_blocks: Ints
    slots: Ints
    """[S]"""
    generations: Ints
    """[S]"""
    counts: Ints
    """[S]: positions of the row."""
    sampled: Ints
    """Rows that yield a token, in their order."""
    is_waiting: npt.NDArray[np.bool_]
    """For each of `sampled`: it waits for a mask."""
    row_of: Ints
    """[positions of the rows]: the row of each."""
    offset_of: Ints
    """[positions of the rows]: index in the row."""
    num_positions: int
    """T"""

    @classmethod
    def from_plan(cls, plan: StepPlan, limits: Limits) -> DeviceBatch:
        """Raises `ProtocolError`."""
        slots, generations, counts, flags = _columns(plan.rows, 4)
        append_slots, append_blocks = _columns(plan.appends, 2)
        (retired,) = _columns(plan.retired, 1)
        for name, column in (("row slot", slots), ("append slot", append_slots), ("retired slot", retired)):
            _check_range(name, column, limits.num_slots)
        _check_range("append block", append_blocks, limits.num_blocks)
        num_real = int(counts.sum())
        # No rank of a Llama group waits for another inside a step: the plan's padded_positions do not matter here.
        if num_real > limits.max_batch_positions:
            raise ProtocolError(f"{num_real} positions in a step, at most {limits.max_batch_positions} are allowed")
        sampled = np.flatnonzero(flags & RowFlag.SAMPLE)
        if np.any((flags & RowFlag.WAITS_FOR_MASK) > (flags & RowFlag.SAMPLE) * RowFlag.WAITS_FOR_MASK):
            raise ProtocolError("a row waits for a mask and is not sampled")
        row_of = np.repeat(np.arange(len(counts)), counts)
        return cls(
            step_id=plan.step_id,
            retired=retired,
            admissions=[_admission(admit, limits) for admit in plan.admits],
            append_slots=append_slots,
            append_blocks=append_blocks,
            slots=slots,
            generations=generations,
            counts=counts,
            sampled=sampled,
            is_waiting=(flags[sampled] & RowFlag.WAITS_FOR_MASK) != 0,
            row_of=row_of,
            offset_of=np.arange(num_real) - (np.cumsum(counts) - counts)[row_of],
            num_positions=limits.padded(num_real),
        )


def _admission(admit: SlotAdmit, limits: Limits) -> Admission:
    (tokens,), (block_ids,), (stop_ids,) = (
        _columns(data, 1) for data in (admit.tokens, admit.block_ids, admit.sampling.stop_ids)
    )
    where = f"admission to slot {admit.slot}"
    if admit.slot >= limits.num_slots:
        raise ProtocolError(f"{where}: there are {limits.num_slots} slots")
    _check_range(f"{where}: token", tokens, limits.vocab_size)
    _check_range(f"{where}: block", block_ids, limits.num_blocks)
    # One more token than positions: the last one sampled is known, and has no row of its own.
    if not admit.floor < len(tokens) <= limits.max_len + 1:
        text = f"{len(tokens)} tokens at floor {admit.floor}, the model takes {limits.max_len} positions"
        raise ProtocolError(f"{where}: {text}")
    if not admit.length <= admit.floor <= len(block_ids) * limits.block_size or len(block_ids) > limits.max_blocks:
        bounds = f"length {admit.length}, floor {admit.floor}"
        text = f"{len(block_ids)} blocks of {limits.block_size} for {bounds}, at most {limits.max_blocks}"
        raise ProtocolError(f"{where}: {text}")
    # An id that is no token can never be sampled: nothing to ban.
    stop_ids = stop_ids[stop_ids < limits.vocab_size]
    return Admission(
        admit.slot, admit.generation, admit.length, admit.floor, tokens, block_ids, admit.sampling, stop_ids
    )


def _columns(data: bytes, num_columns: int) -> Ints:
    """[columns, rows]"""
    return np.frombuffer(data, _INT32).reshape(num_columns, -1).astype(np.int64)


def _check_range(name: str, column: Ints, high: int) -> None:
    wrong = column[(column < 0) | (column >= high)]
    if wrong.size:
        raise ProtocolError(f"{name} {wrong[0]} came, 0 to {high - 1} is allowed")
