"""What the core tells those who watch it: a report a step, and a word at the end of each request.

Knows nothing of who watches. `deepinfer.metrics`, `deepinfer.trace` and `deepinfer.bench` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from deepinfer.request import Request
from deepinfer.scheduler import Emission, Step
from deepinfer_protocol import StepResult, split_columns


class StepReport(Struct):
    """One step, applied. Times are the stopwatch's, which counts seconds as `time.monotonic` does."""

    step: Step
    results: list[StepResult]
    """One a rank."""
    emissions: list[Emission]
    planning_s: float
    """Its planning began."""
    planned_s: float
    sent_s: float
    received_s: float
    """Its last answer was here, and those of the steps before it had been taken in."""
    applied_s: float
    emitted_s: float
    """Its tokens had become text. Now."""

    @property
    def num_rows(self) -> int:
        """Sequences in the batch, of all ranks."""
        return sum(len(rank.plan.rows) for rank in self.step.ranks) // 16  # four int32 columns

    @property
    def num_positions(self) -> int:
        """Positions computed, of all ranks: prompt tokens, new ones, and drafts that were verified."""
        plans = [rank.plan for rank in self.step.ranks]
        if len(plans) == 1:
            return plans[0].padded_positions
        return sum(sum(split_columns(plan.rows, 4)[2]) + plan.verify_budget for plan in plans)


class Observer(Protocol):
    """Hears of steps and requests on the core's thread. It may not raise, and the core waits for it."""

    def step_done(self, report: StepReport) -> None:
        """A step was applied."""

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        """A request that was accepted has ended: by a finish reason, or by the code of the error that ended it.

        Comes after the report of the step that brought its last token.
        """

    def request_refused(self, code: str) -> None:
        """A request was not accepted. `code` is the error's."""


class Observers:
    """Several as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def step_done(self, report: StepReport) -> None:
        for observer in self._observers:
            observer.step_done(report)

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        for observer in self._observers:
            observer.request_done(request, reason, now_s)

    def request_refused(self, code: str) -> None:
        for observer in self._observers:
            observer.request_refused(code)
