"""A drafter whose stages are captured in CUDA graphs. Knows nothing of what they compute."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from deepinfer_workers.batch import Ints
from deepinfer_workers.graphs import GraphLadder, Shape, ladder, shapes
from deepinfer_workers.models.model import Drafter, HiddenFlat
from deepinfer_workers.upload import to_device


class GraphedDrafter:
    """A `Drafter` whose stages are captured, for up to as many blocks as there are slots."""

    hidden_flat = None

    def __init__(self, drafter: Drafter, hidden_flat: HiddenFlat, null_slot: int, device: torch.device) -> None:
        """The slots are those before `null_slot`."""
        self.block_size = drafter.block_size
        self.logits, self.confidences = drafter.logits, drafter.confidences
        self._null_slot = null_slot
        self._sizes = ladder(null_slot)

        def forward(columns: Tensor, _: int) -> Tensor:
            slots, positions, tokens = columns.unbind(0)
            return hidden_flat(slots, positions, tokens)

        self._graphs = GraphLadder(shapes(self._sizes, (1,)), forward, null_slot, device, num_columns=3)

    def hidden(self, slots: Ints, positions: Tensor, tokens: Tensor) -> Tensor:
        """As the drafter's. What is behind the blocks that were asked for belongs to the null slot."""
        num_blocks = len(slots)
        columns = torch.stack((to_device(slots, positions.device), positions.long(), tokens))
        size = self._sizes[bisect_left(self._sizes, num_blocks)]
        if size > num_blocks:
            padding = columns.new_zeros(3, size - num_blocks)
            padding[0] = self._null_slot
            columns = torch.cat((columns, padding), 1)
        return self._graphs.replay(Shape(size, 1), columns)[:num_blocks]
