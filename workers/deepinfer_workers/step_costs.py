"""How long steps of several sizes take on this device, measured with plans as an engine sends them.

What is measured stands in slots that are admitted for it and retired afterwards, so nothing of it is left. All sizes
are measured in turn, again and again, and the least of each counts: whatever else the machine does only adds to a time.
Knows nothing of tensors, of models, and of how a step is computed or timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Final

import numpy as np

from deepinfer_protocol import RowFlag, SlotAdmit, SlotSampling, StepCosts, StepPlan, pack_float32, pack_int32
from deepinfer_workers.batch import Limits

BUDGET_S: Final = 3.0
"""Seconds for the forwards, and as many for the drafts, at most; larger sizes are extrapolated."""
NUM_ROUNDS: Final = 6
"""Through all sizes, at most; in the first each size is warmed up."""

Time = Callable[[StepPlan], tuple[int, int]]
"""Runs a step: the microseconds that it took, and those of them that made drafts."""


def measure_costs(limits: Limits, time: Time) -> StepCosts:
    """`time` is called with plans for empty slots, and leaves them empty."""
    # The positions of a row see each other, as drafts do.
    rungs = _sizes(min(limits.max_batch_positions, limits.num_slots * _longest_row(limits)), limits.ladder)
    rows = _sizes(min(limits.num_slots, limits.max_batch_positions), ()) if limits.longest_draft else []
    sizes, forward_us = _stretches(rungs, _measured(rungs, lambda size: _time_forward(size, limits, time)), limits)
    draft_us = _measured(rows, lambda size: _time_drafts(size, limits, time))
    return StepCosts(pack_int32(sizes), pack_float32(forward_us), pack_int32(rows), pack_float32(draft_us))


def _longest_row(limits: Limits) -> int:
    return min(limits.max_len, limits.num_blocks * limits.block_size)


def _sizes(most: int, ladder: Sequence[int]) -> list[int]:
    """Rising, up to `most`: those of the ladder, then powers of two."""
    sizes = [size for size in ladder if size < most]
    size = 1
    while size < most:
        if not sizes or size > sizes[-1]:
            sizes.append(size)
        size *= 2
    return [*sizes, most]


def _stretches(rungs: Sequence[int], times: Sequence[float], limits: Limits) -> tuple[list[int], list[float]]:
    """With the smallest size that is padded to each rung of the ladder, which takes as long."""
    sizes, us = list[int](), list[float]()
    for below, rung, time_us in zip((0, *rungs), rungs, times, strict=False):
        if below + 1 < rung and limits.padded(below + 1) == rung:
            sizes.append(below + 1)
            us.append(time_us)
        sizes.append(rung)
        us.append(time_us)
    return sizes, us


def _measured(sizes: Sequence[int], time: Callable[[int], int]) -> list[float]:
    """Microseconds of every size, never falling; those that would take too long grow as the ones before."""
    found: list[float] = []
    for size in sizes[:1]:  # what only the first step of all costs is no matter of its size
        time(size)
    started = perf_counter()
    for size in sizes:
        if len(found) > 1 and perf_counter() + 2 * _extrapolated(sizes, found, size) / 1e6 > started + BUDGET_S / 2:
            break
        time(size)
        found.append(time(size))
    for _ in range(NUM_ROUNDS - 1):
        if perf_counter() > started + BUDGET_S:
            break
        found = [min(us, time(size)) for size, us in zip(sizes, found, strict=False)]
    found = list(accumulate((max(us, 1.0) for us in found), max))
    return found + [_extrapolated(sizes, found, size) for size in sizes[len(found) :]]


def _extrapolated(sizes: Sequence[int], found: Sequence[float], size: int) -> float:
    """For a `size` beyond those found: along the line through the last two."""
    last = len(found) - 1
    if last < 1:
        return found[last] * size / sizes[last]
    slope = max(found[last] - found[last - 1], 0.0) / (sizes[last] - sizes[last - 1])
    return found[last] + slope * (size - sizes[last])


def _time_forward(num_positions: int, limits: Limits, time: Time) -> int:
    """In rows as long as those that verify drafts, where there are slots enough. Every position has logits."""
    length = max(1 + limits.longest_draft, -(-num_positions // limits.num_slots))
    length = min(length, num_positions)
    num_rows = -(-num_positions // length)
    lengths = [length] * (num_rows - 1) + [num_positions - length * (num_rows - 1)]
    return _time_rows(lengths, 0, limits, time)[0]


def _time_drafts(num_rows: int, limits: Limits, time: Time) -> int:
    return _time_rows([1] * num_rows, limits.longest_draft, limits, time)[1]


def _time_rows(lengths: Sequence[int], num_drafts: int, limits: Limits, time: Time) -> tuple[int, int]:
    """A step of rows with so many positions. What comes before and after it is not in the time."""
    time(_plan(admits=[_admit(slot, length, limits) for slot, length in enumerate(lengths)]))
    try:
        return time(_plan(lengths=lengths, num_drafts=num_drafts))
    finally:
        time(_plan(retired=range(len(lengths))))


def _plan(
    admits: Sequence[SlotAdmit] = (), lengths: Sequence[int] = (), retired: Sequence[int] = (), num_drafts: int = 0
) -> StepPlan:
    num_rows = len(lengths)
    columns = [*range(num_rows), *[0] * num_rows, *lengths, *[int(RowFlag.SAMPLE)] * num_rows]
    return StepPlan(
        epoch=0,
        step_id=0,
        rank=0,
        padded_positions=sum(lengths),
        retired=pack_int32(list(retired)),
        admits=list(admits),
        appends=b"",
        rows=pack_int32(columns),
        num_drafts=num_drafts,
    )


def _admit(slot: int, length: int, limits: Limits) -> SlotAdmit:
    """Of any tokens. All slots write to the same blocks, which are nobody's yet."""
    tokens = np.random.default_rng(slot).integers(0, limits.vocab_size, length).tolist()
    blocks = list(range(-(-length // limits.block_size)))
    # With log probabilities of the prompt all positions go through all layers and have logits, as drafts do.
    sampling = SlotSampling(num_prompt=length, num_prompt_logprobs=0)
    return SlotAdmit(slot, 0, 0, 0, pack_int32(tokens), pack_int32(blocks), sampling)
