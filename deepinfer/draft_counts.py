"""What became of drafts, in numbers."""

from __future__ import annotations

from collections.abc import Iterable


class DraftCounts:
    """Sums over rows that verified drafts."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_verified = 0
        self.num_accepted = 0
        self.predicted: list[float] = []

    def add(self, num_verified: int, num_accepted: int) -> None:
        self.num_rows += 1
        self.num_verified += num_verified
        self.num_accepted += num_accepted

    def add_predicted(self, column: Iterable[float]) -> None:
        for place, value in enumerate(column):
            if place == len(self.predicted):
                self.predicted.append(0.0)
            self.predicted[place] += value
