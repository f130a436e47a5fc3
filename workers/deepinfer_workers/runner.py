"""The seam between the worker's shell and what computes a step. Knows nothing of sockets, processes or torch.

The shell calls `build` on its host thread while the device thread is inside `run` of the step before: `build` may
touch only the plan and buffers of its own; the state of the slots belongs to `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from deepinfer_protocol import MaskBatch, Ready, StepPlan

BatchT = TypeVar("BatchT")


class StepOutput(NamedTuple):
    """The columns of a `StepResult` (see there)."""

    rows: bytes
    tokens: bytes
    logprob_ids: bytes = b""
    logprobs: bytes = b""
    logprob_ranks: bytes = b""
    prompt_logprob_ids: bytes = b""
    prompt_logprobs: bytes = b""
    prompt_logprob_ranks: bytes = b""


class WorkerFault(Exception):
    """The worker cannot go on. `code` is one of `Fault.code`; the text is for the engine's user."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Runner(Protocol, Generic[BatchT]):
    """Loads a model and computes steps. One instance a process."""

    def load(self, report: Callable[[int, int], None]) -> Ready:
        """Load the weights, size the caches; `report(done_bytes, total_bytes)` now and then. Raises `WorkerFault`."""

    def build(self, plan: StepPlan) -> BatchT:
        """Host thread: everything of the step that needs no state of the device. Raises `ProtocolError`."""

    def run(self, batch: BatchT, wait_for_masks: Callable[[], MaskBatch]) -> StepOutput:
        """Device thread: retire, admit, append, forward, sample, in the order of the steps.

        Rows marked `WAITS_FOR_MASK` are sampled in a second launch, after `wait_for_masks()` has returned.
        """
