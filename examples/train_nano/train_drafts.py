"""Trains DSpark stages on a frozen model, for a number of seconds, and goes on where it was stopped.

    python -m examples.train_nano.train_drafts DATA BASE STATE OUT --seconds 250 [--call-seconds 560]
    python -m examples.train_nano.train_drafts DATA BASE STATE OUT2 --steps 200 --start OUT --own OWN --rate 1e-3

DATA holds what `prepare` wrote, BASE the weights that `train` wrote. STATE keeps all that training needs to go on; OUT
gets drafts.NN.safetensors of at most 16 MiB each, and log.jsonl, whose last line is about held-out rows: acceptance by
place, greedy and at temperature 1, if all drafts before were accepted; the confidence in it; and the tokens that a step
commits. In the second half of the training, the stages are trained in the formats of the released checkpoint.

The second form goes on from the stages of an earlier training, with a STATE of its own, on the rows that
`continue_text` wrote: the model's own words instead of those it was taught. It is in the released formats all along.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.train_nano.blocks import choose_blocks
from examples.train_nano.calls import Plan, Progress, run
from examples.train_nano.drafts import DraftLosses, DraftModel, Target
from examples.train_nano.figures import Figures
from examples.train_nano.layers import Switches
from examples.train_nano.learnt import Learnt
from examples.train_nano.model import Model
from examples.train_nano.packed import Packer
from examples.train_nano.parameters import Weights, draft_parameters, initial
from examples.train_nano.rows import Mixture
from examples.train_nano.tensor_parts import read_parts
from examples.train_nano.train import BIAS_RATE, replays

SEED = 5
PEAK_RATE = 4e-3
ROUND_FROM = 0.5
"""The share of the training."""


class DraftTrainer:
    """Stages, their optimizer, the frozen model and data on one device."""

    def __init__(
        self,
        data: Path,
        base: Path,
        device: torch.device,
        tokens_per_step: int,
        *,
        compiles: bool,
        start: Path | None = None,
        own: Path | None = None,
    ) -> None:
        """`start`: a folder of stages to go on from, `own`: one of rows to train on instead of those in `data`."""
        self.figures = figures = Figures.of_file(data / "config.json")
        found = draft_parameters(figures)
        weights = initial(figures, SEED, device, found)
        if start is not None:
            weights |= {name: weight.to(device).float() for name, weight in read_parts(start, "drafts").items()}
        self._learnt = Learnt(weights, found)
        self._round_from = ROUND_FROM if start is None else 0.0
        self._base = {name: weight.to(device).float() for name, weight in read_parts(base, "model").items()}
        self._rows = Mixture(data if own is None else own, "train" if own is None else "own", tokens_per_step, device)
        self._held_out = Mixture(data, "test", tokens_per_step, device)
        self._packer = Packer(figures, max(*self._rows.lengths, *self._held_out.lengths), device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        compressed = torch.from_numpy(np.load(data / "compressed.npy", allow_pickle=False)).to(device)
        self._model = Model(figures, compressed, dtype, compiles=compiles)
        self._drafts = DraftModel(figures, dtype, compiles=compiles)
        self._on, self._off = (torch.tensor(flag, device=device) for flag in (True, False))

    @property
    def weights(self) -> Weights:
        return self._learnt.weights

    def step(self, progress: Progress, plan: Plan) -> tuple[DraftLosses, int]:
        """What the step saw, and the number of its tokens."""
        rows, rate = self._rows.batch(progress.step), plan.rate(progress)
        is_rounded = plan.share(progress) >= self._round_from
        with self._learnt.as_stored(is_rounded):
            losses = self._losses(rows, progress.step, is_rounded=is_rounded)
            losses.total.backward()
        self._learnt.step(rate)
        gates = [f"mtp.{stage}.ffn.gate.bias" for stage in range(len(losses.loads))]
        self._learnt.balance(gates, losses.loads, BIAS_RATE * rate / plan.peak)
        return losses, rows.numel()

    def told(self, losses: DraftLosses) -> dict[str, Any]:
        return {"loss": round(losses.total.item(), 4), **acceptance(losses.sums)}

    @torch.no_grad()
    def held_out(self) -> dict[str, Any]:
        """Of all held-out rows, as served."""
        with self._learnt.as_stored(True), torch.compiler.set_stance("force_eager"):  # many shapes, each seen once
            parts = [rows for rows in self._held_out.in_order() if len(rows)]
            seen = [self._losses(rows, index, is_rounded=True) for index, rows in enumerate(parts)]
        total, sums = (torch.stack(part) for part in zip(*((each.total, each.sums) for each in seen), strict=True))
        return {"loss": round(total.mean().item(), 4), **acceptance(sums.sum(0))}

    def save(self, state: Path, out: Path, *, rounds: bool) -> None:
        self._learnt.save_state(state)
        self._learnt.save_weights(out, "drafts", rounds=rounds or not self._round_from)

    def load(self, state: Path) -> None:
        self._learnt.load_state(state)

    def _losses(self, rows: Tensor, seed: int, *, is_rounded: bool) -> DraftLosses:
        figures = self.figures
        assert figures.drafts is not None
        packed = self._packer(rows, replays(rows, seed))
        with torch.no_grad():  # the target is as it is served
            passed = self._model(self._base, packed, Switches(self._on, self._on), figures.drafts.target_layers)
        assert passed.taps is not None
        target = Target(passed.taps, passed.hidden, self._base["embed.weight"], self._base["head.weight"])
        blocks = choose_blocks(figures, packed, self._packer, seed)
        switches = Switches(self._on if is_rounded else self._off, self._on)
        return self._drafts.losses(self.weights, target, packed, blocks, switches)


def acceptance(sums: Tensor) -> dict[str, Any]:
    """By place, if all before were accepted; of `DraftLosses.sums`."""
    asked, overlap, guessed, on_path, same, guessed_on_path = sums.double().cpu()
    greedy = same / on_path.clamp(min=1)
    sampled = overlap / asked.clamp(min=1)
    return {
        "committed_greedy": round(1 + greedy.cumprod(0).sum().item(), 3),
        "committed_sampled": round(1 + sampled.cumprod(0).sum().item(), 3),
        "greedy": _rounded(greedy),
        "greedy_confidence": _rounded(guessed_on_path / on_path.clamp(min=1)),
        "sampled": _rounded(sampled),
        "confidence": _rounded(guessed / asked.clamp(min=1)),
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "base", "state", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=250.0, help="of training, over all calls")
    parser.add_argument("--steps", type=int, help="of training, instead of seconds")
    parser.add_argument("--call-seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--tokens-per-step", type=int, default=65_536)
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the highest learning rate")
    parser.add_argument("--start", type=Path, help="a folder of stages to go on from")
    parser.add_argument("--own", type=Path, help="a folder of the model's own continuations")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # kinds of layers times lengths of rows
    device = torch.device(arguments.device)
    trainer = DraftTrainer(
        arguments.data,
        arguments.base,
        device,
        arguments.tokens_per_step,
        compiles=arguments.compile,
        start=arguments.start,
        own=arguments.own,
    )
    plan = Plan(arguments.seconds, arguments.steps, arguments.rate)
    progress = run(trainer, plan, arguments.state, arguments.out, arguments.call_seconds, round_from=ROUND_FROM)
    if plan.share(progress) >= 1.0:
        line = json.dumps({"step": progress.step, "held_out": True, **trainer.held_out()})
        print(line, flush=True)
        with (arguments.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")


if __name__ == "__main__":
    main()
