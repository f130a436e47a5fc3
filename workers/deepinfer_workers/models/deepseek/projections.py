"""The products of an attention: channels to queries and keys, and what the heads found back to channels.

Knows nothing of which keys a query meets.

Legend: `T` positions, `C` channels, `H` heads, `D` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.rope import Turns
from deepinfer_workers.models.deepseek.weights import DeepseekWeights


class Projections:
    def __init__(self, weights: DeepseekWeights, name: str) -> None:
        self._config = config = weights.config
        self._ops = weights.ops
        self._wq_a, self._wq_b = weights.linear(f"{name}.wq_a"), weights.linear(f"{name}.wq_b")
        self._q_norm = weights.norm(f"{name}.q_norm")
        self._wkv, self._kv_norm = weights.linear(f"{name}.wkv"), weights.norm(f"{name}.kv_norm")
        # The released model takes the weights of the first output product as they are, without rounding its input.
        first, _ = weights.matrix(f"{name}.wo_a")
        self._wo_a = [weights.product(part, quantizes=False) for part in first.chunk(config.o_groups)]
        self._wo_b = weights.linear(f"{name}.wo_b")
        # V4: queries of one length, head by head.
        self._head_norm = torch.ones(config.head_dim, device=weights.device) if config.family == "v4" else None

    def latent(self, x: Tensor) -> Tensor:
        """What the queries of `x` [T, C] are made of: [T, rank]."""
        return self._q_norm(self._wq_a(x))

    def queries(self, latent: Tensor, turns: Turns) -> Tensor:
        """Turned: [T, H, D]."""
        config = self._config
        queries = self._wq_b(latent).unflatten(1, (config.num_heads, config.head_dim))
        if self._head_norm is not None:
            queries = self._ops.exact_norm(queries, self._head_norm, config.rms_eps)
        return self._ops.turn_pairs(queries, *turns)

    def keys(self, x: Tensor, turns: Turns) -> Tensor:
        """Of `x` [T, C], turned and not rounded: [T, D]."""
        return self._ops.turn_pairs(self._kv_norm(self._wkv(x))[:, None], *turns)[:, 0]

    def output(self, out: Tensor, turns: Turns) -> Tensor:
        """`out` [T, H, D], which is turned back: [T, C]."""
        turned = self._ops.turn_pairs(out, *turns, back=True)
        groups = turned.flatten(1).chunk(len(self._wo_a), 1)  # [T, H * D / groups] each
        return self._wo_b(torch.cat([linear(group) for linear, group in zip(self._wo_a, groups, strict=True)], 1))
