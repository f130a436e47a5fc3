"""What a step leaves on the device, and its way into the columns of a `StepResult`. Computes nothing.

Legend: `S` rows, `R` sampled rows, `P` places with logits: of every sampled row one, and one for each draft verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_workers.batch import DeviceBatch, Ints
from deepinfer_workers.download import Download
from deepinfer_workers.runner import StepOutput, WorkerFault
from deepinfer_workers.sampling_state import Logprobs

_INT32: Final = np.dtype("<i4")


class Drafted(NamedTuple):
    """What a step has drafted."""

    survivals: Tensor
    """[R, drafts] float32"""
    host_us: int
    """How long the host was at it."""
    ids: Tensor | None = None
    """[drafts of the rows that waited for masks]; `None`: no row did."""


@dataclass(frozen=True)
class StepResults:
    """Tensors that the step's work will have filled."""

    batch: DeviceBatch | None
    """`None`: a step without rows."""
    lengths: Tensor
    """[S]: after the step."""
    tokens: Tensor
    """[P]"""
    is_nan: Tensor
    """[P] bool: the logits were not numbers, and the token means nothing."""
    logprobs: Logprobs | None = None
    """Of all that asked among the [P], taken or not."""
    prompt_logprobs: Logprobs | None = None
    num_tokens: Tensor | None = None
    """[R]: how many of its tokens each sampled row takes; `None`: no drafts were verified, and it has one."""
    num_verified: Tensor | None = None
    """[S]: how many drafts each row verified, where the host does not know; else the batch says it."""
    predicted: Tensor | None = None
    """[longest draft]: survivals of the verified drafts by place, summed over rows."""
    drafted: Drafted | None = None

    @classmethod
    def empty(cls) -> StepResults:
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(None, nothing, nothing, nothing.bool())

    def download(self, computed: torch.cuda.Event, copy_stream: torch.cuda.Stream) -> Callable[[], StepOutput]:
        """Starts the way to the host, from the event `computed` on; what comes back waits for its end."""
        if self.batch is None:
            return self.to_output
        return partial(self._after, Download(self._tensors(), computed, copy_stream))

    def to_output(self) -> StepOutput:
        """The columns; the tensors are on the host. Raises `WorkerFault` for logits that are not numbers."""
        if self.num_verified is not None:
            return self._told().to_output()
        batch = self.batch
        if batch is None:
            return StepOutput(b"", b"")
        if bool(self.is_nan.any()):
            slot = batch.slots[batch.sampled][self._owners()[int(self.is_nan.int().argmax())]]
            raise WorkerFault(
                "internal", f"step {batch.step_id}: the logits of slot {slot} are NaN, as of broken weights"
            )
        tokens, logprobs = self.tokens.numpy(), self.logprobs
        num_tokens = np.zeros_like(batch.slots)
        num_tokens[batch.sampled] = 1
        if self.num_tokens is not None:
            num_tokens[batch.sampled] = self.num_tokens.numpy()
            is_taken = self._is_taken(self.num_tokens.numpy())
            tokens, logprobs = tokens[is_taken], None if logprobs is None else logprobs.only(is_taken)
        ids = None if self.drafted is None else self.drafted.ids
        columns = np.concatenate((batch.slots, batch.generations, self.lengths.numpy(), num_tokens))
        return StepOutput(
            columns.astype(_INT32).tobytes(),
            tokens.astype(_INT32).tobytes(),
            *_columns(logprobs),
            *_columns(self.prompt_logprobs),
            *self._draft_columns(),
            draft_us=0 if self.drafted is None else self.drafted.host_us,
            draft_ids=b"" if ids is None else ids.numpy().astype(_INT32).tobytes(),
        )

    def _told(self) -> StepResults:
        """What the device alone knew is in the batch."""
        assert self.batch is not None and self.num_verified is not None
        return replace(self, batch=replace(self.batch, num_verified=self.num_verified.numpy()), num_verified=None)

    def _draft_columns(self) -> tuple[bytes, bytes, bytes]:
        """`num_verified`, `survivals` and `predicted`."""
        batch, drafted = self.batch, self.drafted
        assert batch is not None
        num_verified = b""
        if batch.verify_budget:
            counts = np.zeros_like(batch.slots) if batch.num_verified is None else batch.num_verified
            num_verified = counts.astype(_INT32).tobytes()
        survivals = b"" if drafted is None else (255 * drafted.survivals.numpy()).round().astype(np.uint8).tobytes()
        return (
            num_verified,
            survivals,
            b"" if self.predicted is None else self.predicted.numpy().astype("<f4").tobytes(),
        )

    def _owners(self) -> Ints:
        """[P]: the sampled row of each."""
        batch = self.batch
        assert batch is not None
        every = np.arange(len(batch.sampled))
        return every if batch.num_verified is None else np.repeat(every, batch.num_verified[batch.sampled] + 1)

    def _is_taken(self, num_tokens: Ints) -> npt.NDArray[np.bool_]:
        """[P]"""
        owners = self._owners()
        firsts = np.searchsorted(owners, owners)
        return np.asarray(np.arange(len(owners)) - firsts < num_tokens[owners])

    def _tensors(self) -> list[Tensor]:
        """All that go to the host, in the order of `_after`."""
        tensors = [self.lengths, self.tokens, self.is_nan]
        for logprobs in (self.logprobs, self.prompt_logprobs):
            if logprobs is not None:
                tensors += [logprobs.ids, logprobs.values, logprobs.ranks]
        tensors += [tensor for tensor in (self.num_tokens, self.num_verified, self.predicted) if tensor is not None]
        if self.drafted is not None:
            tensors += [tensor for tensor in (self.drafted.survivals, self.drafted.ids) if tensor is not None]
        return tensors

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
            num_tokens=None if self.num_tokens is None else next(parts),
            num_verified=None if self.num_verified is None else next(parts),
            predicted=None if self.predicted is None else next(parts),
            drafted=None if self.drafted is None else _drafted_on_host(self.drafted, parts),
        ).to_output()


def _on_host(logprobs: Logprobs | None, parts: Iterator[Tensor]) -> Logprobs | None:
    if logprobs is None:
        return None
    return replace(logprobs, ids=next(parts), values=next(parts), ranks=next(parts))


def _drafted_on_host(drafted: Drafted, parts: Iterator[Tensor]) -> Drafted:
    return drafted._replace(survivals=next(parts), ids=None if drafted.ids is None else next(parts))


def _columns(logprobs: Logprobs | None) -> tuple[bytes, bytes, bytes]:
    return (b"", b"", b"") if logprobs is None else logprobs.to_bytes()
