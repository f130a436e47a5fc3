"""A plan as checked arrays. Knows the bounds of what a plan may name, and no state of slots.

Legend: `S` rows of the step, `T` packed positions, padded.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
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
    longest_draft: int = 0
    """Tokens that a slot may draft; 0: nothing drafts."""

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
    """A checked plan as arrays: everything that does not depend on the state of the slots.

    How many drafts are verified does: until `with_drafts`, rows have the positions that the plan gives them.
    """

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
    """[S]: positions of the row, with the drafts that it verifies."""
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
    most_drafts: Ints | None = None
    """[S]: how many drafts the row verifies at most; `None`: no row verifies any."""
    verify_budget: int = 0
    """How many drafts all rows verify together at most."""
    num_drafts: int = 0
    """How many tokens each sampled row drafts."""
    num_verified: Ints | None = None
    """[S]: how many drafts the row verifies; `None`: none, or it is not settled yet."""

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
        most_drafts = _most_drafts(plan, counts, flags, limits)
        row_of, offset_of = _spread(counts)
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
            offset_of=offset_of,
            num_positions=limits.padded(num_real),
            most_drafts=most_drafts,
            verify_budget=plan.verify_budget,
            num_drafts=plan.num_drafts,
        )

    def with_drafts(self, num_verified: Ints, limits: Limits) -> DeviceBatch:
        """The batch whose rows verify `num_verified` [S] drafts behind the positions that they have here."""
        counts = self.counts + num_verified
        row_of, offset_of = _spread(counts)
        return replace(
            self,
            counts=counts,
            row_of=row_of,
            offset_of=offset_of,
            num_positions=limits.padded(len(row_of)),
            num_verified=num_verified,
        )


def _most_drafts(plan: StepPlan, counts: Ints, flags: Ints, limits: Limits) -> Ints | None:
    """[S]; `None` where nothing is verified. Raises `ProtocolError`."""
    if plan.num_drafts > limits.longest_draft:
        raise ProtocolError(f"num_drafts {plan.num_drafts} came, the longest draft has {limits.longest_draft} tokens")
    (most,) = _columns(plan.most_drafts, 1)
    if not most.size:
        return None
    if len(most) != len(counts):
        raise ProtocolError(f"most_drafts of {len(most)} rows came, the step has {len(counts)}")
    _check_range("most_drafts", most, limits.longest_draft + 1)
    is_single = (counts == 1) & ((flags & RowFlag.SAMPLE) != 0)
    if (most[~is_single] > 0).any():
        row = int(np.flatnonzero(~is_single & (most > 0))[0])
        raise ProtocolError(f"row {row} verifies drafts behind {counts[row]} positions, not behind a sampled one")
    num_real = int(counts.sum()) + min(int(most.sum()), plan.verify_budget)
    if num_real > limits.max_batch_positions:
        text = f"{num_real} positions with drafts in a step, at most {limits.max_batch_positions} are allowed"
        raise ProtocolError(text)
    return most if most.any() and plan.verify_budget else None


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """Of rows with `counts` positions: the row of every position, and its index in the row."""
    row_of = np.repeat(np.arange(len(counts)), counts)
    return row_of, np.arange(len(row_of)) - (np.cumsum(counts) - counts)[row_of]


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
