"""Speculation without a device: recorded draft blocks, a table of what steps take, and the engine's own policy.

A row walks through blocks that were recorded with everything verified, so that of each it is known how many of its
drafts the target accepts. What a step commits follows from how many it verifies, and its time from the table. Knows
nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from deepinfer.budget import DraftPolicy
from deepinfer.costs import CostTable


class Block(NamedTuple):
    """A draft block that was verified whole."""

    survivals: bytes
    """Of each draft, 255 is certain."""
    num_accepted: int


class Simulated(NamedTuple):
    """What a number of steps brought."""

    num_rows: int
    num_steps: int
    num_tokens: int
    num_verified: int
    time_us: float

    @property
    def tokens_per_s(self) -> float:
        return 1e6 * self.num_tokens / self.time_us

    @property
    def tokens_per_step(self) -> float:
        """Committed by a row in a step."""
        return self.num_tokens / (self.num_steps * self.num_rows)


def simulate(
    policy: DraftPolicy, costs: CostTable, walks: Sequence[Sequence[Block]], num_rows: int, num_steps: int
) -> Simulated:
    """`num_steps` steps of `num_rows` rows that decode for ever, along all `walks`, each from another one on.

    A policy chooses by the blocks before those that it has verified, as in the engine.
    """
    paths = [_path(walks, row % len(walks)) for row in range(num_rows)]
    now: list[Block | None] = [None] * num_rows
    older: list[bytes] = [b""] * num_rows
    num_tokens = num_verified = 0
    time_us = 0.0
    longest = policy.longest
    for _ in range(num_steps):
        able = [row for row, block in enumerate(now) if block is not None]
        plan = policy.plan(
            [(older[row] or b"\xff" * longest)[:longest] for row in able], num_rows, 0, num_rows * longest
        )
        lengths = verify_lengths(
            [None if block is None else block.survivals[:longest] for block in now], plan.verify_budget
        )
        reached, predicted = [0] * longest, [0.0] * longest
        for block, length in zip(now, lengths, strict=True):
            num_tokens += 1
            if block is None:
                continue
            num_tokens += min(block.num_accepted, length)
            for place, survival in enumerate(block.survivals[:length]):
                predicted[place] += survival / 255
                reached[place] += place < block.num_accepted
        policy.learn(predicted, reached)
        num_verified += sum(lengths)
        time_us += costs.forward_us(num_rows + sum(lengths))
        older = [b"" if block is None else block.survivals for block in now]
        if plan.num_drafts:
            time_us += costs.draft_us(num_rows)
            now = [next(path) for path in paths]
        else:
            now = [None] * num_rows
    return Simulated(num_rows, num_steps, num_tokens, num_verified, time_us)


def _path(walks: Sequence[Sequence[Block]], first: int) -> Iterator[Block]:
    return cycle([block for walk in (*walks[first:], *walks[:first]) for block in walk])


def verify_lengths(survivals: Sequence[bytes | None], budget: int) -> list[int]:
    """How many drafts of each row are among the `budget` best; equals: the earlier place, then the earlier row."""
    ranked = sorted(
        (-value, place, row)
        for row, block in enumerate(survivals)
        if block is not None
        for place, value in enumerate(block)
    )
    lengths = [0] * len(survivals)
    for _, _, row in ranked[:budget]:
        lengths[row] += 1
    return lengths
