"""What a step leaves on the device, and its way into the columns of a `StepResult`. Computes nothing.

Legend: `S` rows, `R` sampled rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer_workers.batch import DeviceBatch
from deepinfer_workers.download import Download
from deepinfer_workers.runner import StepOutput, WorkerFault
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
    is_nan: Tensor
    """[R] bool: the logits were not numbers, and the token means nothing."""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @classmethod
    def empty(cls) -> StepResults:
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(None, nothing, nothing, nothing.bool())

    def download(self, computed: torch.cuda.Event, copy_stream: torch.cuda.Stream) -> Callable[[], StepOutput]:
        """Starts the way to the host, from the event `computed` on; what comes back waits for its end."""
        if self.batch is None:
            return self.to_output
        tensors = [self.lengths, self.tokens, self.is_nan]
        for logprobs in (self.logprobs, self.prompt_logprobs):
            if logprobs is not None:
                tensors += [logprobs.ids, logprobs.values, logprobs.ranks]
        return partial(self._after, Download(tensors, computed, copy_stream))

    def to_output(self) -> StepOutput:
        """The columns; the tensors are on the host. Raises `WorkerFault` for logits that are not numbers."""
        batch = self.batch
        if batch is None:
            return StepOutput(b"", b"")
        if bool(self.is_nan.any()):
            slot = batch.slots[batch.sampled][int(self.is_nan.int().argmax())]
            raise WorkerFault(
                "internal", f"step {batch.step_id}: the logits of slot {slot} are NaN, as of broken weights"
            )
        num_tokens = np.zeros_like(batch.slots)
        num_tokens[batch.sampled] = 1
        columns = np.concatenate((batch.slots, batch.generations, self.lengths.numpy(), num_tokens))
        return StepOutput(
            columns.astype(_INT32).tobytes(),
            self.tokens.numpy().astype(_INT32).tobytes(),
            *_columns(self.logprobs),
            *_columns(self.prompt_logprobs),
        )

    def _after(self, download: Download) -> StepOutput:
        lengths, tokens, is_nan, *rest = download.wait()
        parts = iter(rest)
        return replace(
            self,
            lengths=lengths,
            tokens=tokens,
            is_nan=is_nan,
            logprobs=_on_host(self.logprobs, parts),
            prompt_logprobs=_on_host(self.prompt_logprobs, parts),
        ).to_output()


def _on_host(logprobs: Logprobs | None, parts: Iterator[Tensor]) -> Logprobs | None:
    if logprobs is None:
        return None
    return replace(logprobs, ids=next(parts), values=next(parts), ranks=next(parts))


def _columns(logprobs: Logprobs | None) -> tuple[bytes, bytes, bytes]:
    return (b"", b"", b"") if logprobs is None else logprobs.to_bytes()
