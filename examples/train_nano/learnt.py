"""Weights that learn: with their optimizer, as a checkpoint would keep them, and on disk. Computes no loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from examples.train_nano.optimizer import Optimizer
from examples.train_nano.parameters import Parameter, Storage, Weights, stored
from examples.train_nano.tensor_parts import read_parts, write_parts

_STATE_PART_BYTES = 1 << 30


class Learnt:
    def __init__(self, weights: Weights, parameters: dict[str, Parameter]) -> None:
        self.weights, self._parameters = weights, parameters
        for name, weight in weights.items():
            weight.requires_grad_(not name.endswith("ffn.gate.bias"))
        self._optimizer = Optimizer(weights, parameters)

    def step(self, rate: float) -> None:
        self._optimizer.step(rate)

    def balance(self, gates: list[str], loads: Tensor, rate: float) -> None:
        """Experts with more than their share of `loads` [gates, E] are chosen less: no loss is needed for that."""
        moves = (loads.float().mean(1, keepdim=True) - loads).sign() * rate
        for name, move in zip(gates, moves, strict=True):
            self.weights[name] += move

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

    def save_state(self, folder: Path) -> None:
        weights = {f"weight.{name}": weight.detach() for name, weight in self.weights.items()}
        write_parts(folder, "state", weights | self._optimizer.state(), _STATE_PART_BYTES)

    def load_state(self, folder: Path) -> None:
        state = read_parts(folder, "state")
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[f"weight.{name}"])
        self._optimizer.load(state)

    def save_weights(self, folder: Path, stem: str, *, rounds: bool) -> None:
        """In BF16, which loses nothing of what has been rounded to fewer bits."""
        with self.as_stored(rounds):
            write_parts(folder, stem, {name: self._kept(name) for name in self.weights})

    def _kept(self, name: str) -> Tensor:
        weight = self.weights[name].detach()
        return weight.clone() if self._parameters[name].storage is Storage.F32 else weight.to(torch.bfloat16)
