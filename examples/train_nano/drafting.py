"""What drafts bring on held-out questions, and how well the model foresees it: by the engine, watched step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepinfer import Engine, SamplingParams
from deepinfer.observer import StepReport
from deepinfer.request import Request
from deepinfer_protocol import RowFlag, split_columns, unpack_int32

_NUM_BINS = 10
_ROOM = {"max_num_seqs": 64, "max_batch_tokens": 1024}
"""A step has room for every draft of every row: none is left out for being the least likely of many."""


class Judged(NamedTuple):
    """A draft whose fate was decided: all before it in its block had been accepted."""

    place: int
    confidence: float
    """That it would be, as the model foresaw."""
    is_accepted: bool


class DraftWatch:
    """An observer of an engine of one worker that has one step in flight: hears of every draft that is judged."""

    def __init__(self) -> None:
        self.judged: list[Judged] = []
        self._survivals: dict[tuple[int, int], bytes] = {}  # of the newest drafts, by slot and generation

    def step_done(self, report: StepReport) -> None:
        (rank,), (result,) = report.step.ranks, report.results
        slots, generations, _, flags = split_columns(rank.plan.rows, 4)
        num_tokens = split_columns(result.rows, 4)[3]
        num_verified = unpack_int32(result.num_verified) or [0] * len(slots)
        starts = iter(range(0, len(result.survivals), max(rank.plan.num_drafts, 1)))
        for slot, count, verified, is_sampled in zip(
            zip(slots, generations, strict=True),
            num_tokens,
            num_verified,
            (flag & RowFlag.SAMPLE for flag in flags),
            strict=True,
        ):
            self._judge(self._survivals.pop(slot, b""), verified, count - 1)
            if is_sampled and rank.plan.num_drafts:
                start = next(starts)
                self._survivals[slot] = result.survivals[start : start + rank.plan.num_drafts]

    def _judge(self, survivals: bytes, num_verified: int, num_accepted: int) -> None:
        for place, (before, now) in enumerate(pairwise((255, *survivals[:num_verified]))):
            if place > num_accepted:
                return
            if before:  # else nothing is known of it
                self.judged.append(Judged(place, min(now / before, 1.0), place < num_accepted))

    def request_done(self, request: Request, reason: str, now_s: float) -> None: ...

    def request_refused(self, code: str) -> None: ...


async def measure(
    model: str | Path,
    questions: Sequence[str],
    max_tokens: int,
    temperature: float,
    num_drafts: int = -1,
    num_answers: int = 1,
) -> dict[str, Any]:
    """Tokens that a forward commits, acceptance by place and how well it was foreseen. Drafts are of a fixed length;
    each question is answered `num_answers` times."""
    watch = DraftWatch()
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    settings: dict[str, Any] = _ROOM | {
        "num_drafts": num_drafts,
        "scheduled_drafts": False,
        "overlap": False,
        "seed": 1,
    }
    async with Engine(model, observers=[watch], **settings) as engine:
        chats = [[{"role": "user", "content": question}] for question in questions] * num_answers
        await engine.generate_many(chats, params, thinking=False, progress=False)
        counts = engine.stats().core.drafts
    return {
        "questions": len(questions),
        "answers": len(chats),
        "temperature": temperature,
        "tokens_per_forward": counts.tokens_per_step,
        "forwards": counts.num_steps,
        "acceptance": counts.acceptance,
        "cumulative_acceptance": counts.cumulative_acceptance,
        "calibration": calibration(watch.judged),
    }


def calibration(judged: Sequence[Judged]) -> list[dict[str, float]]:
    """By place: mean confidence and acceptance, the gap between them, and the expected error over ten bins (ECE)."""
    found = []
    for place in range(max((one.place for one in judged), default=-1) + 1):
        here = [one for one in judged if one.place == place]
        confidence = np.array([one.confidence for one in here])
        is_accepted = np.array([one.is_accepted for one in here], np.float64)
        bins = np.minimum((confidence * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        sums = np.bincount(bins, weights=confidence - is_accepted, minlength=_NUM_BINS)
        found.append(
            {
                "drafts": len(here),
                "confidence": float(confidence.mean()),
                "acceptance": float(is_accepted.mean()),
                "gap": float(abs(confidence.mean() - is_accepted.mean())),
                "ece": float(np.abs(sums).sum() / len(here)),
            }
        )
    return found
