"""DraftCounts: what became of drafts, and how well that was foreseen.

Plain numbers, which add up and encode as they are. Knows nothing of steps or requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, Self, TypeVar

from msgspec import Struct, field

Number = TypeVar("Number", int, float)


class Calibration(NamedTuple):
    """Of one place of a block: shares of the drafts verified there."""

    predicted: float
    """Expected to be accepted, and all before them with them."""
    accepted: float
    num_verified: int

    @property
    def error(self) -> float:
        return abs(self.predicted - self.accepted)


class DraftCounts(Struct):
    """Counts over the steps of decoding rows, those without drafts, too."""

    outcomes: list[list[int]] = field(default_factory=list)
    """By the number of drafts that a row verified, then by the number accepted: how often."""
    predicted: list[float] = field(default_factory=list)
    """By place: the probabilities of reaching and accepting it, summed over the drafts verified there."""
    num_predicted: list[int] = field(default_factory=list)
    """By place: how many those were."""
    num_reached: list[int] = field(default_factory=list)
    """By place: how many of those were accepted, and all before them."""

    def add(self, num_verified: int, num_accepted: int) -> None:
        """One row of one step."""
        if num_verified >= len(self.outcomes):
            self._widen(num_verified)
        self.outcomes[num_verified][num_accepted] += 1

    def _widen(self, num_verified: int) -> None:
        while len(self.outcomes) <= num_verified:
            self.outcomes.append([0] * (len(self.outcomes) + 1))

    def add_predicted(self, predicted: Sequence[float], tried: Sequence[int], reached: Sequence[int]) -> None:
        """What a step foresaw of the drafts that it verified, by place, how many it verified, and how many came."""
        self.predicted = _sums(self.predicted, predicted)
        self.num_predicted = _sums(self.num_predicted, tried)
        self.num_reached = _sums(self.num_reached, reached)

    def merge(self, other: DraftCounts) -> None:
        """Add what `other` has counted."""
        self._widen(len(other.outcomes) - 1)
        for ours, theirs in zip(self.outcomes, other.outcomes, strict=False):
            ours[:] = _sums(ours, theirs)
        self.predicted = _sums(self.predicted, other.predicted)
        self.num_predicted = _sums(self.num_predicted, other.num_predicted)
        self.num_reached = _sums(self.num_reached, other.num_reached)

    def copy(self) -> Self:
        """As it stands now."""
        taken = type(self)()
        taken.merge(self)
        return taken

    def since(self, before: DraftCounts) -> Self:
        """What has come since `before` was copied from this."""
        earlier: list[list[int]] = [*before.outcomes, *[[] for _ in self.outcomes]]
        outcomes = [_differences(row, old) for row, old in zip(self.outcomes, earlier, strict=False)]
        return type(self)(
            outcomes,
            _differences(self.predicted, before.predicted),
            _differences(self.num_predicted, before.num_predicted),
            _differences(self.num_reached, before.num_reached),
        )

    # ---- reading

    @property
    def num_steps(self) -> int:
        """Steps of rows: a step with 8 rows counts 8 times."""
        return sum(map(sum, self.outcomes))

    @property
    def num_verified(self) -> int:
        return sum(num_verified * sum(row) for num_verified, row in enumerate(self.outcomes))

    @property
    def num_accepted(self) -> int:
        return sum(accepted * times for row in self.outcomes for accepted, times in enumerate(row))

    @property
    def num_tokens(self) -> int:
        """Committed: the accepted drafts, and one of the target's own a step."""
        return self.num_steps + self.num_accepted

    @property
    def tokens_per_step(self) -> float:
        """Committed by one forward of a row; 0 of none."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def verify_lengths(self) -> list[int]:
        """By the number of drafts that a row verified in a step, from 0 on: how often."""
        return [sum(row) for row in self.outcomes]

    @property
    def verified_by_place(self) -> list[int]:
        """How many drafts were verified at each place of the block."""
        return [sum(map(sum, self.outcomes[place:])) for place in range(1, len(self.outcomes))]

    @property
    def accepted_by_place(self) -> list[int]:
        """How many of them were accepted, and so all before them."""
        return [sum(sum(row[place:]) for row in self.outcomes) for place in range(1, len(self.outcomes))]

    @property
    def acceptance(self) -> list[float]:
        """By place: of the drafts verified there and with all before them accepted, the share that was accepted."""
        able = [
            sum(sum(row[place:]) for row in self.outcomes[place + 1 :]) for place in range(len(self.accepted_by_place))
        ]
        return [_share(*each) for each in zip(self.accepted_by_place, able, strict=True)]

    @property
    def cumulative_acceptance(self) -> list[float]:
        """By place: of all drafts verified there, the share that was accepted, and so all before them."""
        return [_share(*each) for each in zip(self.accepted_by_place, self.verified_by_place, strict=True)]

    @property
    def calibration(self) -> list[Calibration]:
        """By place: what was foreseen, against what came."""
        columns = zip(self.predicted, self.num_reached, self.num_predicted, strict=True)
        return [Calibration(_share(sums, tried), _share(reached, tried), tried) for sums, reached, tried in columns]

    def lines(self) -> Iterator[str]:
        """For people; nothing of nothing."""
        if not self.num_steps:
            return
        yield f"{self.tokens_per_step:.2f} tokens a forward ({self.num_tokens} in {self.num_steps})"
        if not self.num_verified:
            return
        yield f"drafts: {self.num_accepted} of {self.num_verified} accepted; by place {_listed(self.acceptance)}"
        lengths = ", ".join(f"{length}: {times}" for length, times in enumerate(self.verify_lengths) if times)
        yield f"verified at once: {lengths}"
        if self.calibration:
            predicted = _listed([place.predicted for place in self.calibration])
            accepted = _listed([place.accepted for place in self.calibration])
            yield f"reached, by place: predicted {predicted}; accepted {accepted}"


def by_place(rows: Iterable[tuple[int, int]], longest: int) -> tuple[list[int], list[int]]:
    """By place of a block: how many drafts were verified, and how many accepted with all before them.

    A row is how many it verified and how many were accepted.
    """
    tried, reached = [0] * longest, [0] * longest
    for (num_verified, num_accepted), times in Counter(rows).items():
        for place in range(min(num_verified, longest)):
            tried[place] += times
            reached[place] += times if place < num_accepted else 0
    return tried, reached


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0


def _listed(shares: Iterable[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def _sums(one: Iterable[Number], other: Iterable[Number]) -> list[Number]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _differences(one: Iterable[Number], other: Iterable[Number]) -> list[Number]:
    return [a - b for a, b in zip_longest(one, other, fillvalue=0)]
