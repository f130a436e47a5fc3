"""Trains the model on what `prepare` wrote, for a number of seconds, and goes on where it was stopped.

    python -m examples.train_nano.train DATA STATE OUT --seconds 1500 [--call-seconds 560]

Needs torch and numpy alone. STATE keeps all that training needs to go on, on a disk that is near; OUT gets the weights
every few minutes, model.NN.safetensors of at most 16 MiB each, and log.jsonl. The learning rate warms up and falls to
zero over `--seconds` of training, summed over calls: along a line, which leaves the last tenth more to adapt with than
a cosine does. A call ends by itself after `--call-seconds`.

A third of the way, attention begins to see only the rows that the indexers choose; in the last tenth, weights,
activations and cached rows go through the formats of the released checkpoint, and gradients straight through those.
Half of the rows see their decoder half begin anew at random places, as it does in an engine that computes no more of it
than the end of a prompt: the model learns not to lean on what such a replay leaves out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.train_nano.figures import Figures
from examples.train_nano.layers import Switches
from examples.train_nano.model import Losses, Model
from examples.train_nano.optimizer import Optimizer
from examples.train_nano.packed import Packer
from examples.train_nano.parameters import Storage, initial, parameters, stored
from examples.train_nano.rows import Mixture
from examples.train_nano.tensor_parts import read_parts, write_parts

SEED = 3
PEAK_RATE = 4e-3
WARMUP_STEPS = 100
SELECT_FROM, ROUND_FROM = 0.3, 0.9
"""Shares of the training."""
REPLAYED_ROWS, REPLAY_GAP = 0.5, 400
"""The share of rows whose decoder half begins anew now and then, and the places between, on average."""
BIAS_RATE = 1e-3
"""By how much a step moves the gates' biases towards equal loads."""
LONGEST_STEP_S = 10.0
"""What is more was spent compiling, and does not count as training."""
_LOG_EVERY = 20
_SAVE_EVERY_S = 150.0
_STATE_PART_BYTES = 1 << 30


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
    steps: int | None = None
    peak: float = PEAK_RATE

    def share(self, progress: Progress) -> float:
        """Of the way."""
        return progress.seconds / self.seconds if self.steps is None else progress.step / self.steps

    def rate(self, progress: Progress) -> float:
        warm = min((progress.step + 1) / WARMUP_STEPS, 1.0)
        return self.peak * warm * max(1.0 - self.share(progress), 0.0)


class Trainer:
    """Weights, optimizer and data on one device."""

    def __init__(self, data: Path, device: torch.device, tokens_per_step: int, *, compiles: bool) -> None:
        self.figures = Figures.of_file(data / "config.json")
        self._parameters = parameters(self.figures)
        self._device = device
        self.weights = initial(self.figures, SEED, device)
        for name, weight in self.weights.items():
            weight.requires_grad_(not name.endswith("ffn.gate.bias"))
        self._optimizer = Optimizer(self.weights, self._parameters)
        self._rows = Mixture(data, "train", tokens_per_step, device)
        self._packer = Packer(self.figures, max(self._rows.lengths), device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        compressed = torch.from_numpy(np.load(data / "compressed.npy", allow_pickle=False)).to(device)
        self.model = Model(self.figures, compressed, dtype, compiles=compiles)

    def step(self, progress: Progress, plan: Plan) -> tuple[Losses, int]:
        """What the step saw, and the number of its tokens."""
        share, rate = plan.share(progress), plan.rate(progress)
        rows = self._rows.batch(progress.step)
        switches = self._switches(rounds=share >= ROUND_FROM, selects=share >= SELECT_FROM)
        with self.as_stored(share >= ROUND_FROM):
            packed = self._packer(rows, replays(rows, progress.step))
            losses = self.model.losses(self.weights, packed, switches)
            (losses.text + losses.indexers).backward()
        self._optimizer.step(rate)
        self._balance(losses.loads, BIAS_RATE * rate / plan.peak)
        return losses, rows.numel()

    @contextmanager
    def as_stored(self, is_on: bool) -> Iterator[None]:
        """Inside, the weights are what a checkpoint would keep of them."""
        if not is_on:
            yield
            return
        with torch.no_grad():
            exact = {name: weight.detach().clone() for name, weight in self.weights.items()}
            for name, weight in self.weights.items():
                weight.copy_(stored(name, exact[name], self._parameters[name].storage))
        yield
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(exact[name])

    def save_state(self, folder: Path, progress: Progress) -> None:
        weights = {f"weight.{name}": weight.detach() for name, weight in self.weights.items()}
        write_parts(folder, "state", weights | self._optimizer.state(), _STATE_PART_BYTES)
        (folder / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")

    def load_state(self, folder: Path) -> Progress:
        """The start, where nothing has been saved."""
        if not (folder / "progress.json").exists():
            return Progress()
        state = read_parts(folder, "state")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[f"weight.{name}"])
        self._optimizer.load(state)
        return Progress(**json.loads((folder / "progress.json").read_text(encoding="utf-8")))

    def save_weights(self, folder: Path, *, rounds: bool) -> None:
        """In BF16, which loses nothing of what has been rounded to fewer bits."""
        with self.as_stored(rounds):
            write_parts(folder, "model", {name: self._kept(name) for name in self.weights})

    def _kept(self, name: str) -> Tensor:
        weight = self.weights[name].detach()
        return weight.clone() if self._parameters[name].storage is Storage.F32 else weight.to(torch.bfloat16)

    def _switches(self, *, rounds: bool, selects: bool) -> Switches:
        return Switches(*(torch.tensor(flag, device=self._device) for flag in (rounds, selects)))

    def _balance(self, loads: Tensor, rate: float) -> None:
        """Experts with more than their share are chosen less from now on: no loss is needed for that."""
        moves = (loads.float().mean(1, keepdim=True) - loads).sign() * rate
        for layer in range(self.figures.num_layers):
            self.weights[f"layers.{layer}.ffn.gate.bias"] += moves[layer]


def replays(rows: Tensor, step: int) -> Tensor:
    """[B, T] bool: where the decoder half of some rows begins anew. The same for the same step."""
    generator = torch.Generator().manual_seed(step)
    is_replayed = torch.rand(rows.shape, generator=generator) < 1 / REPLAY_GAP
    is_replayed &= torch.rand(len(rows), 1, generator=generator) < REPLAYED_ROWS
    return is_replayed.to(rows.device)


def train(trainer: Trainer, plan: Plan, state: Path, out: Path, call_seconds: float) -> Progress:
    """One call's share of training, at least a step. Raises `FloatingPointError` when the loss is no number."""
    out.mkdir(parents=True, exist_ok=True)
    progress = trainer.load_state(state)
    saved, logged = time.monotonic(), progress
    start = before = time.monotonic()
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        while plan.share(progress) < 1.0:
            losses, num_tokens = trainer.step(progress, plan)
            is_telling = progress.step % _LOG_EVERY == 0
            text = losses.text.item() if is_telling else 0.0  # waits for the device: not at every step
            now = time.monotonic()
            seconds = progress.seconds + min(now - before, LONGEST_STEP_S)
            progress, before = Progress(progress.step + 1, seconds, progress.tokens + num_tokens), now
            if is_telling:
                line = _line(progress, logged, plan, losses, text)
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
                logged = progress
                if not isfinite(text):
                    raise FloatingPointError(f"step {progress.step}: the loss is {text}")
            if time.monotonic() - saved > _SAVE_EVERY_S:
                _save(trainer, plan, progress, state, out)
                saved = time.monotonic()
            if now - start >= call_seconds:
                break
    _save(trainer, plan, progress, state, out)
    return progress


def _save(trainer: Trainer, plan: Plan, progress: Progress, state: Path, out: Path) -> None:
    trainer.save_state(state, progress)
    trainer.save_weights(out, rounds=plan.share(progress) >= ROUND_FROM)
    (out / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")


def _line(progress: Progress, logged: Progress, plan: Plan, losses: Losses, text: float) -> str:
    loads = losses.loads.float()
    seconds = max(progress.seconds - logged.seconds, 1e-9)
    return json.dumps(
        {
            "step": progress.step,
            "seconds": round(progress.seconds, 1),
            "tokens": progress.tokens,
            "share": round(plan.share(progress), 4),
            "loss": round(text, 4),
            "index_loss": round(losses.indexers.item(), 4),
            "rate": round(plan.rate(progress), 6),
            "most_load": round((loads.amax(1) / loads.mean(1)).mean().item(), 3),
            "tokens_per_s": round((progress.tokens - logged.tokens) / seconds),
            "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if torch.cuda.is_available() else 0.0,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "state", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=1500.0, help="of training, over all calls")
    parser.add_argument("--steps", type=int, help="of training, instead of seconds")
    parser.add_argument("--call-seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--tokens-per-step", type=int, default=65_536)
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the highest learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # kinds of layers times lengths of rows
    device = torch.device(arguments.device)
    trainer = Trainer(arguments.data, device, arguments.tokens_per_step, compiles=arguments.compile)
    plan = Plan(arguments.seconds, arguments.steps, arguments.rate)
    train(trainer, plan, arguments.state, arguments.out, arguments.call_seconds)


if __name__ == "__main__":
    main()
