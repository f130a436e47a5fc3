"""What an Engram layer adds to the streams. Knows nothing of tables, hashes or tokens.

Source of the formulas: the published reference of DeepSeek-V4.1.

Legend: `T` positions, `S` streams, `C` hidden size, `E` width of what the table gives for a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from deepinfer_kernels import sigmoid

_LEAST_DOT: Final = 1e-6


@dataclass(frozen=True)
class Engram:
    """One layer's gate over one value for all streams.

    On the CPU a position's bits do not depend on its neighbours, if those of `project` do not.
    """

    project: Callable[[Tensor], Tensor]
    """[T, E] to a key for every stream and a value, [T, (S + 1) * C]."""
    query_key_weight: Tensor
    """[S, C] float32: the product of the weights of query and key."""
    eps: float
    """Of the mean squares."""

    def apply(self, streams: Tensor, embedding: Tensor, is_image: Tensor | None) -> Tensor:
        """`streams` [T, S, C] float32 with what `embedding` [T, E] says added: [T, S, C] float32.

        Nothing is added where `is_image` [T] is true.
        """
        num_streams, width = self.query_key_weight.shape
        key_value = self.project(embedding).float()  # [T, (S + 1) * C]
        key, value = key_value.split((num_streams * width, width), dim=-1)
        gate = self._gate(streams, key.unflatten(-1, (num_streams, width)))  # [T, S]
        if is_image is not None:
            gate = gate.masked_fill(is_image[:, None], 0.0)
        added: Tensor = gate[:, :, None] * value[:, None]  # [T, S, C]
        return streams + added

    def _gate(self, streams: Tensor, key: Tensor) -> Tensor:
        """How alike stream and key are, between 0 and 1: `streams`, `key` [T, S, C] to [T, S]."""
        norm = _root_mean_square(streams, self.eps) * _root_mean_square(key, self.eps)  # [T, S]
        dot = (streams * self.query_key_weight * key).sum(-1) / norm * streams.shape[-1] ** -0.5  # [T, S]
        root = dot.sign() * dot.abs().clamp_min(_LEAST_DOT).sqrt()
        return sigmoid(root)


def _root_mean_square(x: Tensor, eps: float) -> Tensor:
    return ((x * x).mean(-1) + eps).sqrt()
