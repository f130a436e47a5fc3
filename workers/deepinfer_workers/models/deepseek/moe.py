"""The gate and the experts. Knows nothing of streams or attention.

Legend: `T` positions, `C` channels, `E` experts, `k` experts a token, `F` expert width.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import sigmoid
from deepinfer_workers.models.deepseek.weights import DeepseekWeights, Linear

_LEAST_SUM: Final = 1e-20


class ExpertWeights(NamedTuple):
    gate: Linear  # w1: [T, C] to [T, F]
    up: Linear  # w3
    down: Linear  # w2: [T, F] to [T, C]


class ExpertCache:
    """Routed experts, expanded from the mapped file when they are needed; those used last are kept.

    An expert is a twentieth of a layer, and a step needs few of them: to expand them all would take eight times the
    file's size.
    """

    def __init__(self, weights: DeepseekWeights, most_bytes: int) -> None:
        self._weights = weights
        self._most = max(most_bytes // (4 * 3 * weights.config.hidden_size * weights.config.expert_width), 1)
        self._experts: OrderedDict[str, ExpertWeights] = OrderedDict()
        self.num_expanded: Counter[str] = Counter()
        """How often each expert was, by name."""

    def get(self, name: str) -> ExpertWeights:
        """The expert whose tensors' names begin with `name`."""
        expert = self._experts.get(name)
        if expert is None:
            while len(self._experts) >= self._most:
                self._experts.popitem(last=False)
            expert = self._experts[name] = read_expert(self._weights, name)
            self.num_expanded[name] += 1
        self._experts.move_to_end(name)
        return expert


def read_expert(weights: DeepseekWeights, name: str) -> ExpertWeights:
    return ExpertWeights(*(weights.linear(f"{name}.{part}") for part in ("w1", "w3", "w2")))


class Gate:
    """Which experts a token goes to, and with what weight."""

    def __init__(self, weights: DeepseekWeights, name: str, layer: int) -> None:
        config = weights.config
        self._config = config
        self._scores = weights.plain_linear(f"{name}.weight")  # [E, C]
        self._table: Tensor | None = None
        if layer < config.num_hash_layers:
            self._table = _expert_table(weights, f"{name}.tid2eid")  # [V, k]
        else:
            self._bias = weights.plain(f"{name}.bias")  # [E]
            self._image_bias = weights.plain(f"{name}.bias_vl") if config.family == "v4.1" else self._bias

    def route(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of `x` [T, C] and their `tokens` [T]: expert numbers and weights, [T, k] each."""
        config = self._config
        scores = _softplus(self._scores(x)).sqrt()  # [T, E]
        if self._table is None:
            biased = scores + self._bias_of(tokens)
            experts = biased.sort(dim=-1, descending=True, stable=True).indices[:, : config.experts_per_token]
        else:
            experts = self._table.index_select(0, tokens)
        chosen = scores.gather(1, experts)
        if config.experts_per_token > 1 or config.family == "v4":  # V4.1 leaves the weight of a single expert
            chosen = chosen / (chosen.sum(-1, keepdim=True) + _LEAST_SUM)
        return experts, chosen * config.route_scale

    def _bias_of(self, tokens: Tensor) -> Tensor:
        image_id = self._config.image_token_id
        if image_id is None:
            return self._bias
        return torch.where((tokens == image_id)[:, None], self._image_bias, self._bias)


class MoE:
    """Gate, routed experts and the shared one.

    Gate and shared expert are on every expert-parallel rank, routed experts on one each. What a whole group computes is
    the sum of the `routed` parts of its ranks, in the order of the ranks, and one `shared` part: the sum of calls would
    count the shared expert once a rank.
    """

    def __init__(self, weights: DeepseekWeights, name: str, layer: int, experts: ExpertCache) -> None:
        config = weights.config
        self._name = name
        self._limit = config.swiglu_limit
        self._gate = Gate(weights, f"{name}.gate", layer)
        self._shared = read_expert(weights, f"{name}.shared_experts")
        self._experts = experts
        self._own = weights.tensors.experts

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        """`x` [T, C]: [T, C], the shared expert added last."""
        return self.routed(x, tokens) + self.shared(x)

    def routed(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The part of this rank's experts, [T, C]. Those of a token are added up in the order of their numbers."""
        experts, shares = self._gate.route(x, tokens)
        total = torch.zeros_like(x)
        chosen = experts.cpu().numpy()
        for expert in np.unique(chosen).tolist():
            if expert not in self._own:
                continue
            rows, ranks = (torch.from_numpy(index).to(x.device) for index in np.nonzero(chosen == expert))
            weights = self._experts.get(f"{self._name}.experts.{expert}")
            out = self._run(weights, x.index_select(0, rows), shares[rows, ranks, None])
            total.index_add_(0, rows, out)
        return total

    def shared(self, x: Tensor) -> Tensor:
        """The part of the shared expert, [T, C]."""
        return self._run(self._shared, x, None)

    def _run(self, expert: ExpertWeights, x: Tensor, share: Tensor | None) -> Tensor:
        """`share` [T, 1] goes in before the last product."""
        gate = expert.gate(x).clamp(max=self._limit)
        up = expert.up(x).clamp(-self._limit, self._limit)
        inner = gate * sigmoid(gate) * up
        return expert.down(inner if share is None else inner * share)


def _expert_table(weights: DeepseekWeights, name: str) -> Tensor:
    table, num_experts = weights.stored(name), weights.config.num_experts
    wrong = table[(table < 0) | (table >= num_experts)]
    if len(wrong):
        raise weights.bad(name, f"ids below {num_experts} were expected, {int(wrong[0])} came")
    return table.to(weights.device)


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0.0) + x.abs().neg().exp().log1p()
