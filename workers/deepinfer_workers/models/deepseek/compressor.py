"""Tokens to compressed rows: a gated mean over each group of tokens. Knows nothing of keys, queries or caches.

Legend: `T` positions, `G` groups that are complete, `r` tokens a group, `L` tokens that a row looks back on, `D` dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.weights import DeepseekWeights


class GroupShape(NamedTuple):
    """What a compressor of `dim` keeps of tokens."""

    ratio: int
    """Tokens a row."""
    lookback: int
    """Tokens that a row is made of. V4, ratio 4: those of the group before as well."""
    state_dim: int
    """Numbers kept of a token until its group is complete: values beside gates."""

    @classmethod
    def of(cls, config: DeepseekConfig, ratio: int, dim: int) -> GroupShape:
        num_series = 2 if config.family == "v4" and ratio == 4 else 1
        return cls(ratio, num_series * ratio, 2 * num_series * dim)


class Compressor:
    """Values and gates of every token, and rows of every group."""

    def __init__(self, weights: DeepseekWeights, name: str, dim: int, ratio: int) -> None:
        """`dim` D. V4.1: groups do not overlap, and of one token need no gate."""
        self.shape = GroupShape.of(weights.config, ratio, dim)
        self._dim = dim
        self._has_position_bias = weights.config.family == "v4"
        self._wkv = weights.plain_linear(f"{name}.wkv.weight")
        self._norm = weights.norm(f"{name}.norm")
        if ratio > 1:
            self._wgate = weights.plain_linear(f"{name}.wgate.weight")
        if self._has_position_bias:
            self._position_bias = weights.plain(f"{name}.ape")  # [r, D] or, where groups overlap, [r, 2D]

    def states(self, x: Tensor, places: Tensor) -> Tensor:
        """Values beside gates of `x` [T, C] at `places` [T] in their groups: [T, state dim]. Ratio 1: values alone."""
        values = self._wkv(x)
        if self.shape.ratio == 1:
            return values
        gates = self._wgate(x)
        if self._has_position_bias:
            gates = gates + self._position_bias.index_select(0, places)
        return torch.cat((values, gates), -1)

    def rows(self, states: Tensor, is_missing: Tensor) -> Tensor:
        """Of the `states` [G, L, state dim] that each group looks back on: [G, D], normed, not turned."""
        if self.shape.ratio == 1:
            pooled = states[:, 0]
        else:
            values, gates = (self._of_groups(part) for part in states.chunk(2, -1))
            gates = gates.masked_fill(is_missing[..., None], -torch.inf)
            weights = (gates - gates.amax(1, keepdim=True)).exp()
            pooled = _add_up(weights / _add_up(weights)[:, None] * values)
        return self._norm(pooled)

    def _of_groups(self, parts: Tensor) -> Tensor:
        """[G, L, D]: where groups overlap, the first series of the group before and the second of the group itself."""
        if self.shape.lookback == self.shape.ratio:
            return parts
        before, own = parts.split(self.shape.ratio, 1)
        return torch.cat((before[..., : self._dim], own[..., self._dim :]), 1)


def _add_up(terms: Tensor) -> Tensor:
    """[G, L, D] over L, one after another: [G, D]."""
    total = terms[:, 0]
    for index in range(1, terms.shape[1]):
        total = total + terms[:, index]
    return total
