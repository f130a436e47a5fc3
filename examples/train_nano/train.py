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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.train_nano.calls import Plan, Progress, run
from examples.train_nano.figures import Figures
from examples.train_nano.layers import Switches
from examples.train_nano.learnt import Learnt
from examples.train_nano.model import Losses, Model
from examples.train_nano.packed import Packer
from examples.train_nano.parameters import Weights, initial, parameters
from examples.train_nano.rows import Mixture

SEED = 3
PEAK_RATE = 4e-3
SELECT_FROM, ROUND_FROM = 0.3, 0.9
"""Shares of the training."""
REPLAYED_ROWS, REPLAY_GAP = 0.5, 400
"""The share of rows whose decoder half begins anew now and then, and the places between, on average."""
BIAS_RATE = 1e-3
"""By how much a step moves the gates' biases towards equal loads."""


class Trainer:
    """Weights, optimizer and data on one device."""

    def __init__(self, data: Path, device: torch.device, tokens_per_step: int, *, compiles: bool) -> None:
        self.figures = Figures.of_file(data / "config.json")
        self._device = device
        self._learnt = Learnt(initial(self.figures, SEED, device), parameters(self.figures))
        self._rows = Mixture(data, "train", tokens_per_step, device)
        self._packer = Packer(self.figures, max(self._rows.lengths), device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        compressed = torch.from_numpy(np.load(data / "compressed.npy", allow_pickle=False)).to(device)
        self.model = Model(self.figures, compressed, dtype, compiles=compiles)

    @property
    def weights(self) -> Weights:
        return self._learnt.weights

    def step(self, progress: Progress, plan: Plan) -> tuple[Losses, int]:
        """What the step saw, and the number of its tokens."""
        share, rate = plan.share(progress), plan.rate(progress)
        rows = self._rows.batch(progress.step)
        switches = self._switches(rounds=share >= ROUND_FROM, selects=share >= SELECT_FROM)
        with self.as_stored(share >= ROUND_FROM):
            packed = self._packer(rows, replays(rows, progress.step))
            losses = self.model.losses(self.weights, packed, switches)
            (losses.text + losses.indexers).backward()
        self._learnt.step(rate)
        gates = [f"layers.{layer}.ffn.gate.bias" for layer in range(self.figures.num_layers)]
        self._learnt.balance(gates, losses.loads, BIAS_RATE * rate / plan.peak)
        return losses, rows.numel()

    def told(self, losses: Losses) -> dict[str, Any]:
        loads = losses.loads.float()
        return {
            "loss": round(losses.text.item(), 4),
            "index_loss": round(losses.indexers.item(), 4),
            "most_load": round((loads.amax(1) / loads.mean(1)).mean().item(), 3),
        }

    def as_stored(self, is_on: bool) -> AbstractContextManager[None]:
        """Inside, the weights are what a checkpoint would keep of them."""
        return self._learnt.as_stored(is_on)

    def save(self, state: Path, out: Path, *, rounds: bool) -> None:
        self._learnt.save_state(state)
        self._learnt.save_weights(out, "model", rounds=rounds)

    def load(self, state: Path) -> None:
        self._learnt.load_state(state)

    def _switches(self, *, rounds: bool, selects: bool) -> Switches:
        return Switches(*(torch.tensor(flag, device=self._device) for flag in (rounds, selects)))


def replays(rows: Tensor, step: int) -> Tensor:
    """[B, T] bool: where the decoder half of some rows begins anew. The same for the same step."""
    generator = torch.Generator().manual_seed(step)
    is_replayed = torch.rand(rows.shape, generator=generator) < 1 / REPLAY_GAP
    is_replayed &= torch.rand(len(rows), 1, generator=generator) < REPLAYED_ROWS
    return is_replayed.to(rows.device)


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
    run(trainer, plan, arguments.state, arguments.out, arguments.call_seconds, round_from=ROUND_FROM)


if __name__ == "__main__":
    main()
