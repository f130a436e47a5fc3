"""What bounds a Llama step on a CPU: its matrix products alone, and the reading of its weights.

Knows shapes, not models: the weights are random.

Legend: `T` rows, `C` inputs, `F` outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from deepinfer_kernels import LinearWeight, select_ops

NUM_TRIALS: Final = 8
MAX_TRIALS_S: Final = 5.0
READ_BYTES: Final = 1 << 29


class Shape(NamedTuple):
    """A weight [F, C]."""

    num_out: int
    num_in: int


@dataclass(frozen=True)
class Shapes:
    """The products of a model."""

    num_layers: int
    layer: tuple[Shape, ...]
    head: Shape

    @property
    def num_weights(self) -> int:
        return self.num_layers * sum(out * in_ for out, in_ in self.layer) + self.head.num_out * self.head.num_in


class Products:
    """A model's products in one arithmetic, without anything between them."""

    def __init__(self, shapes: Shapes, dtype: str) -> None:
        self.ops = select_ops("cpu", batch_invariant=True, dtype=dtype)
        generator = torch.Generator().manual_seed(0)

        def random(shape: Shape) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).mul_(shape.num_in**-0.5)

        with torch.inference_mode():
            self._layers = [
                [self.ops.pack_linear(random(shape)) for shape in shapes.layer] for _ in range(shapes.num_layers)
            ]
            self._head = self.ops.pack_project(random(shapes.head))
        self._shapes = shapes

    @property
    def weight_bytes(self) -> int:
        """Read by a step of few rows."""
        return self._shapes.num_weights * (4 if self.ops.arithmetic.startswith("float32") else 2)

    @torch.inference_mode()
    def step_s(self, num_rows: int, num_logits: int) -> float:
        """Seconds of a step of `num_rows` positions, of which `num_logits` go through the head."""
        inputs = {shape.num_in: torch.randn(num_rows, shape.num_in) for shape in self._shapes.layer}
        sampled = torch.randn(num_logits, self._shapes.head.num_in)

        def run() -> None:
            for layer in self._layers:
                for shape, weight in zip(self._shapes.layer, layer, strict=True):
                    self._multiply(inputs[shape.num_in], weight)
            if num_logits:
                self.ops.project(sampled, self._head)

        return _best_s(run)

    def _multiply(self, x: torch.Tensor, weight: LinearWeight) -> None:
        self.ops.linear(x, weight)


@torch.inference_mode()
def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory."""
    data = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best_s(lambda: data.sum())


def _best_s(run: Callable[[], object]) -> float:
    """The fastest of some runs: a bound is what the machine can do, not what others leave of it."""
    run()
    times: list[float] = []
    while len(times) < NUM_TRIALS and sum(times) < MAX_TRIALS_S:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
