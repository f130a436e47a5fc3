"""Training in calls that each go on where the one before stopped. Knows no model: only when to end, log and save."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch

WARMUP_STEPS = 100
LONGEST_STEP_S = 10.0
"""What is more was spent compiling, and does not count as training."""
_LOG_EVERY = 20
_SAVE_EVERY_S = 150.0


@dataclass(frozen=True)
class Progress:
    """How far training has come, over all calls."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """When training ends: after `seconds`, or after `steps` where those are given."""

    seconds: float
    steps: int | None
    peak: float
    """The highest learning rate."""

    def share(self, progress: Progress) -> float:
        """Of the way."""
        return progress.seconds / self.seconds if self.steps is None else progress.step / self.steps

    def rate(self, progress: Progress) -> float:
        warm = min((progress.step + 1) / WARMUP_STEPS, 1.0)
        return self.peak * warm * max(1.0 - self.share(progress), 0.0)


class Trainer(Protocol):
    """What is trained."""

    def step(self, progress: Progress, plan: Plan) -> tuple[Any, int]:
        """What the step saw, and the number of its tokens."""

    def told(self, seen: Any) -> dict[str, Any]:
        """Of what a step saw: `loss` and other figures for the log."""

    def save(self, state: Path, out: Path, *, rounds: bool) -> None:
        """All that a later call needs, and the weights."""

    def load(self, state: Path) -> None:
        """What `save` wrote."""


def run(
    trainer: Trainer, plan: Plan, state: Path, out: Path, call_seconds: float, *, round_from: float = 1.0
) -> Progress:
    """One call's share of training, at least a step. Weights are saved rounded from that share of the way on.

    Raises `FloatingPointError` when the loss is no number.
    """
    out.mkdir(parents=True, exist_ok=True)
    progress = _read_progress(state)
    if progress.step:
        trainer.load(state)

    def save() -> None:
        trainer.save(state, out, rounds=plan.share(progress) >= round_from)
        for folder in (state, out):  # last: what it says has been saved
            (folder / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")

    saved, logged = time.monotonic(), progress
    start = before = time.monotonic()
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        while plan.share(progress) < 1.0:
            seen, num_tokens = trainer.step(progress, plan)
            is_telling = progress.step % _LOG_EVERY == 0
            told = trainer.told(seen) if is_telling else {}  # waits for the device: not at every step
            now = time.monotonic()
            seconds = progress.seconds + min(now - before, LONGEST_STEP_S)
            progress, before = Progress(progress.step + 1, seconds, progress.tokens + num_tokens), now
            if is_telling:
                line = json.dumps(_line(progress, logged, plan, told))
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
                logged = progress
                if not isfinite(told["loss"]):
                    raise FloatingPointError(f"step {progress.step}: the loss is {told['loss']}")
            if time.monotonic() - saved > _SAVE_EVERY_S:
                save()
                saved = time.monotonic()
            if now - start >= call_seconds:
                break
    save()
    return progress


def _read_progress(state: Path) -> Progress:
    """The start, where nothing has been saved."""
    path = state / "progress.json"
    return Progress(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Progress()


def _line(progress: Progress, logged: Progress, plan: Plan, told: dict[str, Any]) -> dict[str, Any]:
    seconds = max(progress.seconds - logged.seconds, 1e-9)
    return {
        "step": progress.step,
        "seconds": round(progress.seconds, 1),
        "tokens": progress.tokens,
        "share": round(plan.share(progress), 4),
        **told,
        "rate": round(plan.rate(progress), 6),
        "tokens_per_s": round((progress.tokens - logged.tokens) / seconds),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if torch.cuda.is_available() else 0.0,
    }
