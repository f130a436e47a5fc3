"""CUDA graphs of a model's layers, one for each size of a ladder. Knows nothing of models.

A step of a size in the ladder costs the host one launch in place of hundreds. Its inputs are copied to where the graph
reads them; its output stays in place until the next replay of any graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

_FINEST: Final = 8


def ladder(most: int) -> tuple[int, ...]:
    """Sizes up to `most`, rising: 1, 2, 4, 8, then in steps of 8, which double with every doubling from 64 on."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = _FINEST
    while size < most:
        sizes.append(size)
        size += max(_FINEST, 1 << (size.bit_length() - 3))
    return (*sizes, most)


class GraphLadder:
    """The graphs, captured at construction. `forward` takes [2, T] int64; what it does depends on T alone."""

    def __init__(
        self, sizes: Sequence[int], forward: Callable[[Tensor], Tensor], null_slot: int, device: torch.device
    ) -> None:
        """For the capture all positions belong to `null_slot`."""
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)
        for size in sorted(sizes, reverse=True):  # the largest first: the others fit into its memory
            self._inputs[size] = torch.zeros(2, size, dtype=torch.int64, device=device)
            self._inputs[size][0] = null_slot
            self._capture(size, forward, stream, pool)
        torch.cuda.synchronize(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, size: int) -> bool:
        return size in self._graphs

    def replay(self, inputs: Tensor) -> Tensor:
        """`forward(inputs)`, by its graph."""
        size = inputs.shape[1]
        self._inputs[size].copy_(inputs)
        self._graphs[size].replay()
        return self._outputs[size]

    def _capture(self, size: int, forward: Callable[[Tensor], Tensor], stream: torch.cuda.Stream, pool: Any) -> None:
        with torch.cuda.stream(stream):
            forward(self._inputs[size])  # compiles and chooses what must not be chosen within a capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._outputs[size] = forward(self._inputs[size])
        self._graphs[size] = graph
