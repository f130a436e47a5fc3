"""CUDA graphs of a model's layers, one for each size of a ladder and bound of sequences. Knows nothing of models.

A step of a size in the ladder costs the host one launch in place of hundreds. Its inputs are copied to where the graph
reads them; its output stays in place until the next replay of any graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_FINEST: Final = 8
MOST_SCORES: Final = 1 << 19
"""Positions times the length of the sequences they may be of, where a model scores as many rows."""


def ladder(most: int) -> tuple[int, ...]:
    """Sizes up to `most`, rising: 1, 2, 4, 8, then in steps of 8, which double with every doubling from 64 on."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = _FINEST
    while size < most:
        sizes.append(size)
        size += max(_FINEST, 1 << (size.bit_length() - 3))
    return (*sizes, most)


class Shape(NamedTuple):
    """What a graph is for."""

    num_positions: int
    most_positions: int
    """Of a sequence."""


Forward = Callable[[Tensor, int], Tensor]
"""[columns, T] int64 and `Shape.most_positions`; what it does depends on T and on this alone."""


def shapes(sizes: Sequence[int], lengths: Sequence[int]) -> list[Shape]:
    """All of `sizes` for the shortest of `lengths`; for longer ones, those that do not compute too much for nothing."""
    most = max(MOST_SCORES, max(sizes, default=0) * min(lengths, default=0))
    return [Shape(size, length) for size in sizes for length in lengths if size * length <= most or len(lengths) == 1]


class GraphLadder:
    """The graphs, captured at construction."""

    def __init__(
        self, wanted: Sequence[Shape], forward: Forward, null_slot: int, device: torch.device, num_columns: int = 2
    ) -> None:
        """`forward` takes `num_columns` numbers of each position, the first of which is its slot.

        For the capture all positions belong to `null_slot`.
        """
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[Shape, Tensor] = {}
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._lengths = sorted({shape.most_positions for shape in wanted})
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)
        for shape in sorted(wanted, key=prod, reverse=True):  # the largest first: the others fit into its memory
            size = shape.num_positions
            if size not in self._inputs:
                self._inputs[size] = torch.zeros(num_columns, size, dtype=torch.int64, device=device)
                self._inputs[size][0] = null_slot
            self._capture(shape, forward, stream, pool)
        torch.cuda.synchronize(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, num_positions: int, longest: int) -> Shape | None:
        """For a step of so many positions, of sequences up to `longest`."""
        at = bisect_left(self._lengths, longest)
        if at == len(self._lengths):
            return None
        shape = Shape(num_positions, self._lengths[at])
        return shape if shape in self._graphs else None

    def replay(self, shape: Shape, inputs: Tensor) -> Tensor:
        """`forward(inputs, shape.most_positions)`, by its graph."""
        self._inputs[shape.num_positions].copy_(inputs)
        self._graphs[shape].replay()
        return self._outputs[shape]

    def _capture(self, shape: Shape, forward: Forward, stream: torch.cuda.Stream, pool: Any) -> None:
        inputs, most = self._inputs[shape.num_positions], shape.most_positions
        with torch.cuda.stream(stream):
            forward(inputs, most)  # compiles and chooses what must not be chosen within a capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._outputs[shape] = forward(inputs, most)
        self._graphs[shape] = graph
