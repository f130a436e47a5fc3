"""What a step leaves on the device, and its way into the columns of a `StepResult`. Computes nothing.

Legend: `S` rows, `R` sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer_workers.batch import DeviceBatch
from deepinfer_workers.download import Download
from deepinfer_workers.runner import StepOutput
from deepinfer_workers.sampling_state import Logprobs

_INT32: Final = np.dtype("<i4")


@dataclass(frozen=True)
class StepResults:
    """Tensors that the step's work will have filled."""

    batch: DeviceBatch | None
    """`None`: a step without rows."""
    lengths: Tensor
    """[S]: after the step."""
    tokens: Tensor
    """[R]"""
    logprobs: Logprobs | None = None

    @classmethod
    def empty(cls) -> StepResults:
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(None, nothing, nothing)

    def download(self, computed: torch.cuda.Event, copy_stream: torch.cuda.Stream) -> Callable[[], StepOutput]:
        """Starts the way to the host, from the event `computed` on; what comes back waits for its end."""
        if self.batch is None:
            return self.to_output
        tensors = [self.lengths, self.tokens]
        if self.logprobs is not None:
            tensors += [self.logprobs.ids, self.logprobs.values]
        return partial(self._after, Download(tensors, computed, copy_stream))

    def to_output(self) -> StepOutput:
        """The columns; the tensors are on the host."""
        batch = self.batch
        if batch is None:
            return StepOutput(b"", b"")
        num_tokens = np.zeros_like(batch.slots)
        num_tokens[batch.sampled] = 1
        columns = np.concatenate((batch.slots, batch.generations, self.lengths.numpy(), num_tokens))
        logprobs = (b"", b"") if self.logprobs is None else self.logprobs.to_bytes()
        return StepOutput(columns.astype(_INT32).tobytes(), self.tokens.numpy().astype(_INT32).tobytes(), *logprobs)

    def _after(self, download: Download) -> StepOutput:
        lengths, tokens, *logprobs = download.wait()
        on_host = replace(self, lengths=lengths, tokens=tokens)
        if self.logprobs is not None:
            on_host = replace(on_host, logprobs=replace(self.logprobs, ids=logprobs[0], values=logprobs[1]))
        return on_host.to_output()
