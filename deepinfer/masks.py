"""Masks for the rows of a step that wait for one: filled elsewhere, while the workers run the forward.

Knows nothing of threads: who runs `fill_masks`, and where, is the engine's.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import NamedTuple

from deepinfer.errors import DeepInferError, GrammarError, InternalError
from deepinfer.matcher import Matcher
from deepinfer.request import Sequence
from deepinfer_protocol import MaskBatch, pack_int32

logger = logging.getLogger(__name__)


class MaskRow(NamedTuple):
    """A row that waits for a mask."""

    seq: Sequence
    matcher: Matcher
    slot: int
    tokens: array[int]
    """Those that its matcher has not seen."""


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
    failures: list[tuple[Sequence, DeepInferError]] = []
    for row in job.rows:
        try:
            masks.append(row.matcher.next_mask(row.tokens))
        except GrammarError as error:
            failures.append((row.seq, error))
            masks.append(row.matcher.any_token)
        except BaseException as error:  # a panic of the library is no Exception
            logger.error("the mask of %s failed", row.seq.request.request_id, exc_info=error)
            failures.append((row.seq, InternalError(f"a mask could not be made: {type(error).__name__}: {error}")))
            masks.append(row.matcher.any_token)
    slots = pack_int32([row.slot for row in job.rows])
    return FilledMasks(MaskBatch(job.epoch, job.step_id, job.rank, slots, b"".join(masks)), failures)


def fill_now(job: MaskJob, hand_on: Callable[[FilledMasks], None]) -> None:
    """For cores that have no thread to spare."""
    hand_on(fill_masks(job))
