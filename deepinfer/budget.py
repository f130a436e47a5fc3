"""How many drafts a step verifies, and whether it makes new ones: none, all, or as many as pay off.

A scheduled budget follows from survivals that are older than the drafts it is for. That is what keeps it lossless: were
it chosen by the very drafts that it admits, whether one is verified would depend on what was drafted behind it, and
the tokens would no longer follow the target's distribution (DSpark's counterexample). As it does not, all budgets are
compared, also behind the first that is no better: what steps cost has jags.

Survivals are a model's guess, and it may guess too high: one trained on greedy text does where a temperature is high.
What became of the drafts of earlier steps corrects it. Pure and synchronous. Knows nothing of requests or of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import truediv
from typing import Final, NamedTuple, Protocol

from deepinfer.costs import CostTable

CERTAIN: Final = 255
"""A survival of 1, and that of a draft of which nothing is known."""
ENOUGH_ROWS: Final = 32
"""Fewer rows say little of those to come: steps before them count, too."""
FIRST_PROBE: Final = 128
"""Steps without drafts, after which some are made again to see what they would bring."""
LAST_PROBE: Final = 1024
"""The most: each time in vain doubles them."""
MAX_UNKNOWN: Final = 4
"""Steps of drafts of which nothing is known yet; after as many, what is remembered decides."""
MARGIN: Final = 0.01
"""By how much the other way must be faster for a change."""
TRUSTED: Final = 8.0
"""Drafts of a place that must have been foreseen to come, for what came of them to count as much as the guess."""
REMEMBERED: Final = 512.0
"""Of those at the first place, how many are remembered: what is asked for changes."""


_GRAIN: Final = 256
"""Parts of one that factors are rounded to: finer than survivals are."""


class DraftPlan(NamedTuple):
    """What one rank does with drafts in one step."""

    verify_budget: int
    """Drafts that are verified, over all rows."""
    num_drafts: int
    """That each sampled row makes."""


class DraftPolicy(Protocol):
    """Chooses for one rank, step after step."""

    longest: int
    """Drafts that a row has at most."""

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        """For a step in which `num_rows` rows decode one position each, beside `num_other` positions of prompts.

        `survivals` has for the rows that have drafts one byte a draft, 255 times the probability that it and those
        before it are accepted, as far as it may be known: never that of the drafts to be verified now. `room` is how
        many positions are left for drafts.
        """
        ...

    def learn(self, predicted: Sequence[float], reached: Sequence[int]) -> None:
        """What became of the drafts that a step verified, by place: how many were foreseen to be accepted with all
        before them, and how many were."""
        ...


class NoDrafts:
    """Implements `DraftPolicy`."""

    longest = 0

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        return DraftPlan(0, 0)

    def learn(self, predicted: Sequence[float], reached: Sequence[int]) -> None:
        """There are none."""


class FixedDrafts:
    """Implements `DraftPolicy`: all there are, as far as there is room."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        return DraftPlan(min(sum(map(len, survivals)), room), self.longest)

    def learn(self, predicted: Sequence[float], reached: Sequence[int]) -> None:
        """Nothing is chosen by it."""


class ScheduledDrafts:
    """Implements `DraftPolicy`: the budget with the most expected tokens in the time of its step.

    Where no budget makes up for making drafts, none are made. Then nothing is heard of how likely they would be, so
    that now and then a few steps try.
    """

    def __init__(self, longest: int, costs: CostTable) -> None:
        self.longest = longest
        self._costs = costs
        self._memory = _Memory(longest)
        self._correction = _Correction(longest)
        self._drafts = True
        self._num_plain = 0  # steps without drafts, one after another
        self._next_probe = FIRST_PROBE
        self._num_unknown = 0  # steps with drafts of which nothing is known, one after another

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        if not num_rows:
            return DraftPlan(0, self.longest if self._drafts else 0)
        drafts = b"".join(survivals)
        is_known = min(drafts, default=CERTAIN) < CERTAIN
        ranked = sorted(self._correction.correct(survivals) if is_known else drafts, reverse=True)
        expected = self._memory.learn(ranked, num_rows) if is_known else self._memory.recall(num_rows)
        draft_us = self._costs.draft_us(num_rows)
        best = _best(expected, draft_us, num_rows + num_other, self._costs, room)
        plain = CERTAIN * num_rows / self._costs.forward_us(num_rows + num_other)
        self._drafts = self._choose(best.rate / plain, is_known=is_known)
        if not self._drafts and ranked:  # the last ones there are: they cost no more than their verification
            best = _best(expected, 0.0, num_rows + num_other, self._costs, min(room, len(ranked)))
        return DraftPlan(min(best.budget, len(ranked)), self.longest if self._drafts else 0)

    def learn(self, predicted: Sequence[float], reached: Sequence[int]) -> None:
        """Implements `DraftPolicy`."""
        self._correction.learn(predicted, reached)

    def _choose(self, gain: float, *, is_known: bool) -> bool:
        """Make drafts? `gain` is how many times as fast a step is with them."""
        if not self._drafts:
            self._num_plain += 1
            if gain > 1 + MARGIN:
                self._next_probe = FIRST_PROBE
            elif self._num_plain < self._next_probe:
                return False
            else:
                self._next_probe = min(2 * self._next_probe, LAST_PROBE)
            self._num_plain = self._num_unknown = 0
            return True
        self._num_unknown = 0 if is_known else self._num_unknown + 1
        return gain > 1 - MARGIN or (not is_known and self._num_unknown <= MAX_UNKNOWN)


def best_budget(survivals: bytes, num_rows: int, num_other: int, costs: CostTable, most: int) -> int:
    """The budget B, at most `most`, that maximises E(B) / T(B); the smallest of equals.

    E(B) = num_rows + the sum of the B best of `survivals` (of all rows, in any order, 255 is certain), the tokens that
    a step commits. T(B) = draft_us(num_rows) + forward_us(num_rows + num_other + B), what it takes.
    """
    expected = list(accumulate(sorted(survivals, reverse=True), initial=CERTAIN * num_rows))
    return _best(expected, costs.draft_us(num_rows), num_rows + num_other, costs, most).budget


class _Best(NamedTuple):
    budget: int
    rate: float
    """Expected tokens, times 255, a microsecond."""


def _best(expected: Sequence[float], draft_us: float, num_positions: int, costs: CostTable, most: int) -> _Best:
    """`expected` has for each budget, from 0 on, the tokens of a step, times 255."""
    forward_us = costs.forward_range(num_positions, min(len(expected), most + 1))
    rates = list(map(truediv, expected, [draft_us + us for us in forward_us] if draft_us else forward_us))
    rate = max(rates)
    return _Best(rates.index(rate), rate)


class _Correction:
    """By place, how many times as many drafts come as were foreseen.

    A place of which little is known is believed to err as the one before it does, the first not at all.
    """

    def __init__(self, longest: int) -> None:
        self._predicted = [0.0] * longest
        self._reached = [0.0] * longest

    def learn(self, predicted: Sequence[float], reached: Sequence[int]) -> None:
        keep = 1 - min(predicted[0] / REMEMBERED, 1.0) if predicted else 1.0
        for place in range(len(self._predicted)):  # also those that no row has verified: they may have changed
            self._predicted[place] *= keep
            self._reached[place] *= keep
        for place, foreseen, came in zip(range(len(self._predicted)), predicted, reached, strict=False):
            self._predicted[place] += foreseen
            self._reached[place] += came

    def correct(self, survivals: list[bytes]) -> bytes:
        """All of them, as they are worth, place by place."""
        longest = len(self._predicted)
        tables = [_table(round(_GRAIN * factor)) for factor in self._factors()]
        whole = b"".join([block for block in survivals if len(block) == longest])
        parts = [whole[place::longest].translate(table) for place, table in enumerate(tables)]
        for block in survivals:
            if len(block) < longest:
                parts += [bytes((table[value],)) for value, table in zip(block, tables, strict=False)]
        return b"".join(parts)

    def _factors(self) -> Iterator[float]:
        factor = 1.0
        for foreseen, came in zip(self._predicted, self._reached, strict=True):
            factor = (came + TRUSTED * factor) / (foreseen + TRUSTED)
            yield factor


@lru_cache(maxsize=1024)
def _table(grains: int) -> bytes:
    """Of a survival, what it is worth; one of which nothing is known stays so. A pure memo: factors change by the step,
    and to write a table takes longer than all else that a step asks of its budget."""
    return bytes([min(round(grains / _GRAIN * value), CERTAIN) for value in range(CERTAIN)] + [CERTAIN])


class _Memory:
    """What steps were expected to commit, by their budget, times 255: of the latest, or, where rows are few, of more.

    A row alone says what became of itself: that its last draft was hopeless tells little of the next. So the budgets of
    few rows follow a mean over as many steps as have `ENOUGH_ROWS` rows together.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._num_rows = 1
        self._expected: list[float] = [CERTAIN * (1.0 + budget) for budget in range(longest + 1)]  # all are certain
        self._num_learned = 0  # rows

    def learn(self, ranked: list[int], num_rows: int) -> list[float]:
        """Take in a step's survivals, falling. What is to be expected of such a step, by budgets."""
        latest: list[float] = list(accumulate(ranked, initial=CERTAIN * num_rows))
        is_whole = len(ranked) == num_rows * self._longest
        if num_rows < ENOUGH_ROWS and not is_whole:
            return self.recall(num_rows)[: len(latest)]
        self._num_learned += num_rows
        share = num_rows / min(self._num_learned, ENOUGH_ROWS)
        if share < 1:
            earlier = self.recall(num_rows)
            latest = [old + share * (new - old) for old, new in zip(earlier, latest, strict=False)]
        self._num_rows, self._expected = num_rows, latest
        return latest

    def recall(self, num_rows: int) -> list[float]:
        """As if so many rows were like those remembered."""
        if num_rows == self._num_rows:
            return self._expected
        scale, last = num_rows / self._num_rows, len(self._expected) - 1
        places = [min(budget / scale, last) for budget in range(num_rows * self._longest + 1)]
        return [scale * self._between(place) for place in places]

    def _between(self, place: float) -> float:
        low = int(place)
        value = self._expected[low]
        return value if low == place else value + (place - low) * (self._expected[low + 1] - value)
