"""Masks for the rows of a step that wait for one: filled elsewhere, while the workers run the forward.

Knows nothing of threads: who runs `fill_masks`, and where, is the engine's.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from time import perf_counter
from typing import Final, NamedTuple

from deepinfer.errors import DeepInferError, GrammarError, InternalError
from deepinfer.matcher import Matcher
from deepinfer.request import Sequence
from deepinfer_protocol import MaskBatch, pack_int32
from deepinfer_protocol.limits import MAX_MESSAGE_BYTES

MAX_BATCH_BYTES: Final = MAX_MESSAGE_BYTES // 4
"""What masks behind drafts may bring a batch to: where it is large already, some drafts wait for a later step."""
DRAFTS_S: Final = 0.05
"""After this time a job makes no more masks behind drafts: a whole step waits for those that it cannot do without."""

logger = logging.getLogger(__name__)


class MaskRow(NamedTuple):
    """A row that waits for a mask."""

    seq: Sequence
    matcher: Matcher
    slot: int
    tokens: array[int]
    """Those that its matcher has not seen."""
    drafts: array[int]
    """Those that the row may verify."""


class MaskJob(NamedTuple):
    """All of them that one rank has in one step."""

    epoch: int
    step_id: int
    rank: int
    rows: list[MaskRow]


class FilledMasks(NamedTuple):
    """What a job comes to."""

    batch: MaskBatch
    failures: list[tuple[Sequence, DeepInferError]]
    """Samples that cannot go on. Their masks allow everything: what they sample is not looked at."""


FillMasks = Callable[[MaskJob, Callable[[FilledMasks], None]], None]
"""Fills the masks of a job and hands them on, now or later; those of one job after those of another."""


def fill_masks(job: MaskJob) -> FilledMasks:
    """Each row by itself: what goes wrong is that row's. Raises nothing."""
    masks: list[bytes] = []
    num_masks: list[int] = []
    failures: list[tuple[Sequence, DeepInferError]] = []
    started_s = perf_counter()
    for row in job.rows:
        is_late = perf_counter() - started_s >= DRAFTS_S
        room = MAX_BATCH_BYTES // len(row.matcher.any_token) - len(masks) - len(job.rows) + len(num_masks)
        try:
            found = row.matcher.next_masks(row.tokens, row.drafts[: 0 if is_late else max(room, 0)])
        except GrammarError as error:
            failures.append((row.seq, error))
            found = [row.matcher.any_token]
        except BaseException as error:  # a panic of the library is no Exception
            logger.error("the mask of %s failed", row.seq.request.request_id, exc_info=error)
            failures.append((row.seq, InternalError(f"a mask could not be made: {type(error).__name__}: {error}")))
            found = [row.matcher.any_token]
        masks += found
        num_masks.append(len(found))
    slots = pack_int32([row.slot for row in job.rows])
    counts = pack_int32(num_masks) if len(masks) > len(num_masks) else b""
    return FilledMasks(MaskBatch(job.epoch, job.step_id, job.rank, slots, b"".join(masks), counts), failures)


def fill_now(job: MaskJob, hand_on: Callable[[FilledMasks], None]) -> None:
    """For cores that have no thread to spare."""
    hand_on(fill_masks(job))
