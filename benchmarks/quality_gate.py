"""What a faster arithmetic does to a model's answers: teacher-forced against float32 on real text.

Both arithmetics read the same tokens; at every position their distributions over the next token are compared. Knows
nothing of engines, workers and speed.

Legend: `T` tokens of a piece of text, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import Ops, PackedRows, select_ops
from deepinfer_workers.batch import Limits
from deepinfer_workers.models.model import Model, ModelOptions, Step
from deepinfer_workers.models.registry import load_model, open_checkpoint

MAX_KL: Final = 0.01
MAX_DELTA_NLL: Final = 0.01
MIN_TOP1: Final = 0.95
PIECE_TOKENS: Final = 256
_BLOCK_SIZE: Final = 16
_MULTIPLE: Final = 16


@dataclass(frozen=True)
class Quality:
    """Means over the positions of a text."""

    arithmetic: str
    num_tokens: int
    """Positions whose next token is known."""
    mean_kl: float
    """Nats, of the other distribution from float32's."""
    delta_nll: float
    """Nats a token by which the text is less likely."""
    top1_agreement: float
    """Share of the positions where both have the same most likely token."""

    @property
    def passes(self) -> bool:
        return self.mean_kl <= MAX_KL and self.delta_nll <= MAX_DELTA_NLL and self.top1_agreement >= MIN_TOP1


def measure_quality(model: Path, tokens: Sequence[int], dtype: str) -> Quality:
    """`dtype` against float32 on the CPU, for a text of `tokens`, cut into pieces. Raises `WorkerFault`."""
    exact, other = (_Reader(model, name) for name in ("float32", dtype))
    columns = [_compare(exact, other, piece) for piece in _cut(tokens)]
    kl, delta, agrees = (torch.cat(column) for column in zip(*columns, strict=True))
    return Quality(other.ops.arithmetic, len(kl), kl.mean().item(), delta.mean().item(), agrees.mean().item())


def _cut(tokens: Sequence[int]) -> list[Tensor]:
    pieces = [torch.tensor(tokens[start : start + PIECE_TOKENS]) for start in range(0, len(tokens), PIECE_TOKENS)]
    return [piece for piece in pieces if len(piece) > 1]


def _compare(exact: _Reader, other: _Reader, piece: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL, loss of likelihood and agreement at every position of `piece` [T] but the last: [T - 1] each."""
    expected, found = exact.log_probs(piece), other.log_probs(piece)  # [T - 1, V] each
    following = piece[1:, None]
    kl = (expected.exp() * (expected - found)).sum(-1)
    delta = (expected - found).gather(1, following)[:, 0]
    return kl, delta, (expected.argmax(-1) == found.argmax(-1)).double()


class _Reader:
    """A model in one arithmetic, that reads texts."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.ops: Ops = select_ops("cpu", batch_invariant=True, dtype=dtype)
        with torch.inference_mode():
            self._model: Model = load_model(
                open_checkpoint(path), self.ops, ModelOptions(num_drafts=0), lambda done, total: None
            )

    @torch.inference_mode()
    def log_probs(self, tokens: Tensor) -> Tensor:
        """Of the token that follows each of `tokens` [T] but the last: [T - 1, V] float64."""
        model, num_real = self._model, len(tokens)
        num_positions = -(-num_real // _MULTIPLE) * _MULTIPLE
        num_blocks = -(-num_real // _BLOCK_SIZE)
        model.allocate(Limits(1, num_blocks, _BLOCK_SIZE, model.max_len, model.vocab_size, num_positions))
        padding = torch.arange(num_positions) >= num_real  # [positions]
        places = torch.arange(num_positions).masked_fill(padding, 0)
        tables = torch.stack((torch.arange(num_blocks), torch.full((num_blocks,), num_blocks))).int()  # [2, blocks]
        rows = PackedRows(np.array([num_real]), padding.long(), places, tables)
        cache_indices = places.masked_fill(padding, num_blocks * _BLOCK_SIZE)
        padded = torch.zeros(num_positions, dtype=torch.int64)
        padded[:num_real] = tokens
        hidden = model.forward(Step(padded, cache_indices, rows, known=padded[None].int()))
        return torch.log_softmax(model.logits(hidden[: num_real - 1]).double(), -1)
