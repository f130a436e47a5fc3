"""How many drafts a step verifies, and makes. Pure; knows nothing of requests, slots or devices."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from deepinfer_protocol import StepCosts, unpack_float32, unpack_int32


class DraftPlan(NamedTuple):
    """What one rank does about drafts in one step."""

    verify_budget: int
    num_drafts: int


class DraftPolicy(Protocol):
    """Chooses for one rank."""

    longest: int

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan: ...


class NoDrafts:
    """Implements `DraftPolicy`."""

    longest = 0

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        return DraftPlan(0, 0)


class FixedDrafts:
    """Implements `DraftPolicy`: everything."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        return DraftPlan(min(sum(map(len, survivals)), room), self.longest)


class ScheduledDrafts:
    """Implements `DraftPolicy`: the budget with the most expected tokens a second."""

    def __init__(self, longest: int, costs: StepCosts) -> None:
        self.longest = longest
        self._sizes, self._us = unpack_int32(costs.positions), unpack_float32(costs.forward_us)

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        best, chosen, expected = 0.0, 0, float(num_rows)
        ranked = sorted(b"".join(survivals), reverse=True)[:room]
        for budget in range(len(ranked) + 1):
            expected += ranked[budget - 1] / 255 if budget else 0.0
            rate = expected / self._forward_us(num_rows + num_other + budget)
            if rate > best:
                best, chosen = rate, budget
        return DraftPlan(chosen, self.longest)

    def _forward_us(self, num_positions: int) -> float:
        return next((us for size, us in zip(self._sizes, self._us, strict=True) if size >= num_positions), self._us[-1])
