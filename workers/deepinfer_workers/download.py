"""Results on their way back to the host, beside the device's work. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Download:
    """Copies of device tensors that a second stream makes while the first goes on with the next step."""

    def __init__(self, tensors: Sequence[Tensor], computed: torch.cuda.Event, copy_stream: torch.cuda.Stream) -> None:
        """`tensors` hold what they shall from the event `computed` on."""
        # Whoever else lets go of them: the allocator knows nothing of the other stream, and would give their memory to
        # the next step while the copy still reads it.
        self._sources = tensors
        self._done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(copy_stream):
            computed.wait()
            self._copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._done.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        self._done.synchronize()
        self._sources = ()
        return self._copies
