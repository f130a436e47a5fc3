"""The seam between the worker's shell and what computes a step. Knows nothing of sockets, processes or torch.

The shell calls `build` on its host thread while the device thread is inside `launch` of the step before: what `build`
keeps in mind must be its own; the state on the device belongs to `launch`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from deepinfer_protocol import MaskBatch, Ready, StepPlan, split_columns

BatchT = TypeVar("BatchT")


class StepTimes(NamedTuple):
    """As `StepResult` has them."""

    device_us: int
    idle_us: int


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
    num_verified: bytes = b""
    survivals: bytes = b""
    predicted: bytes = b""
    draft_us: int = 0
    draft_ids: bytes = b""

    @property
    def lengths(self) -> array[int]:
        """Of the rows' slots, after the step."""
        return split_columns(self.rows, 4)[2]


class PendingStep(Protocol):
    """A step that the device has been given."""

    def wait(self) -> tuple[StepOutput, StepTimes | None]:
        """What came out, once the device is done; called once, from any thread.

        The times are the device's own; `None`: it had no clock, and was busy while `launch` ran.
        """


class WorkerFault(Exception):
    """The worker cannot go on. `code` is one of `Fault.code`; the text is for the engine's user.

    The text of `model_file` begins with the file, that of `setting` with the field of the engine's settings, and `: `.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Runner(Protocol, Generic[BatchT]):
    """Loads a model and computes steps. One instance a process."""

    def load(self, report: Callable[[int, int], None]) -> Ready:
        """Device thread: load the weights, size the caches; `report(done_bytes, total_bytes)` now and then.

        Raises `WorkerFault`.
        """

    @property
    def is_queued(self) -> bool:
        """`launch` returns before the device is done, and takes the next step meanwhile. Known after `load`."""

    def build(self, plan: StepPlan) -> BatchT:
        """Host thread, in the order of the plans: all of the step that needs no device. Raises `ProtocolError`."""

    def launch(self, batch: BatchT, wait_for_masks: Callable[[], MaskBatch]) -> PendingStep:
        """Device thread: retire, admit, append, forward, sample, in the order of the steps.

        Rows marked `WAITS_FOR_MASK` are sampled in a second launch, after `wait_for_masks()` has returned.
        """

    def close(self) -> None:
        """Host thread, the last call, also after a `load` that failed: end what `load` started."""


class DoneStep(NamedTuple):
    """A `PendingStep` of a device that finishes within `launch`."""

    output: StepOutput

    def wait(self) -> tuple[StepOutput, StepTimes | None]:
        return self.output, None
