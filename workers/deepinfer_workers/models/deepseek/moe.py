"""The gate and the experts. Knows nothing of streams or attention.

Legend: `T` positions, `C` channels, `E` experts, `k` experts a token, `F` expert width.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import ExpertTiles, expert_tiles
from deepinfer_workers.device_memory import free_bytes
from deepinfer_workers.models.deepseek.weights import DeepseekWeights, Linear

DEFAULT_BYTES: Final = 1 << 30
"""Of expanded experts, where the system does not say what is free."""
_LEAST_SUM: Final = 1e-20


class ExpertWeights(NamedTuple):
    gate: Linear  # w1: [T, C] to [T, F]
    up: Linear  # w3
    down: Linear  # w2: [T, F] to [T, C]


class StackedExperts(NamedTuple):
    """All of a rank's experts of one layer, where the device multiplies by many of them at once. `P` as in
    `ExpertTiles`."""

    own: range
    gate_up: Callable[[Tensor, ExpertTiles], Tensor]
    """w1 and w3: [T, C] to [P, 2F]."""
    down: Callable[[Tensor, ExpertTiles], Tensor]
    """w2: [P, F] to [P, C]."""


class ExpertCache:
    """Routed experts, expanded from the mapped file when they are needed; those used last are kept.

    A step needs few of them, and to expand them all would take up to eight times the file's size. Layers ask one after
    the other: where less than the experts of one token fit, each would be dropped before it is asked for again, and
    none is kept.
    """

    def __init__(self, weights: DeepseekWeights, most_bytes: int | None = None, num_workers: int = 1) -> None:
        """`most_bytes`: of experts as they are expanded, at most. `None`: this worker's part of a half of what is free
        when the first one is asked for, which is after all else has its memory."""
        self._weights = weights
        self._most_bytes = most_bytes
        self._num_workers = num_workers
        self._most: int | None = None  # experts; not known before the first one is asked for
        self._experts: OrderedDict[str, ExpertWeights] = OrderedDict()
        self.num_expanded: Counter[str] = Counter()
        """How often each expert was, by name."""

    def get(self, name: str) -> ExpertWeights:
        """The expert whose tensors' names begin with `name`."""
        if self._most is None:
            self._most = self._find_most()
        expert = self._experts.pop(name, None)
        if expert is None:
            while self._experts and len(self._experts) >= self._most:
                self._experts.popitem(last=False)
            expert = read_expert(self._weights, name)
            self.num_expanded[name] += 1
        if self._most:
            self._experts[name] = expert
        return expert

    def stack(self, name: str, own: range) -> StackedExperts | None:
        """Those whose tensors' names begin with `name`, for as long as the caller keeps them.

        `None` where the device does nothing for many at once, has no room for those of all layers, or where not all of
        them are stored in one way.
        """
        return stack_experts(self._weights, name, own) if self.are_at_once else None

    @property
    def are_at_once(self) -> bool:
        """The device has something of it, and room for the experts of all layers."""
        if self._weights.ops.expert_linear is None:
            return False
        if self._most is None:
            self._most = self._find_most()
        return self._most >= self._num_all()

    def _num_all(self) -> int:
        """Of all layers and stages, on this rank."""
        config, tensors = self._weights.config, self._weights.tensors
        num_drafting = config.num_stages * len(tensors.draft_experts) if config.dspark is not None else 0
        return config.num_layers * len(tensors.experts) + num_drafting

    def _find_most(self) -> int:
        config, ops, own = self._weights.config, self._weights.ops, self._weights.tensors.experts
        most_bytes = self._most_bytes
        if most_bytes is None:
            free = free_bytes(ops.device)
            most_bytes = DEFAULT_BYTES if free is None else free // 2 // self._num_workers
        most = most_bytes // (3 * config.hidden_size * config.expert_width * ops.dtype.itemsize)
        least = config.num_layers * min(config.experts_per_token, len(own))
        if config.dspark is not None:
            drafting = self._weights.tensors.draft_experts
            least += config.num_stages * min(config.dspark.experts_per_token, len(drafting))
        return most if most >= least else 0


class Routing(NamedTuple):
    """How a layer shares out its tokens."""

    experts_per_token: int
    own: range
    """The experts of this rank."""
    is_hashed: bool = False
    """V4: by token id."""

    @classmethod
    def of_layer(cls, weights: DeepseekWeights, layer: int) -> Routing:
        config = weights.config
        return cls(config.experts_per_token, weights.tensors.experts, layer < config.num_hash_layers)


def read_expert(weights: DeepseekWeights, name: str) -> ExpertWeights:
    return ExpertWeights(*(weights.linear(f"{name}.{part}") for part in ("w1", "w3", "w2")))


def stack_experts(weights: DeepseekWeights, name: str, own: range) -> StackedExperts | None:
    """Read one by one: as a whole they are of the operations' dtype alone. `None`: some are quantised, and some not."""
    config, ops = weights.config, weights.ops
    width, channels = config.expert_width, config.hidden_size
    gate_up = torch.empty(len(own), 2 * width, channels, dtype=ops.dtype, device=ops.device)
    down = torch.empty(len(own), channels, width, dtype=ops.dtype, device=ops.device)
    are_quantized: set[bool] = set()
    for place, expert in enumerate(own):
        for part, target in (
            ("w1", gate_up[place, :width]), ("w3", gate_up[place, width:]), ("w2", down[place])
        ):  # fmt: skip
            values, is_quantized = weights.matrix(f"{name}.{expert}.{part}")
            target.copy_(values)
            are_quantized.add(is_quantized)
    if len(are_quantized) > 1:
        return None
    quantizes = True in are_quantized
    return StackedExperts(
        own, weights.expert_product(gate_up, quantizes=quantizes), weights.expert_product(down, quantizes=quantizes)
    )


class Gate:
    """Which experts a token goes to, and with what weight."""

    def __init__(self, weights: DeepseekWeights, name: str, routing: Routing) -> None:
        config = weights.config
        self._config = config
        self._num_chosen = routing.experts_per_token
        self._scores = weights.plain_linear(f"{name}.weight")  # [E, C]
        self._table: Tensor | None = None
        if routing.is_hashed:
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
            experts = biased.sort(dim=-1, descending=True, stable=True).indices[:, : self._num_chosen]
        else:
            experts = self._table.index_select(0, tokens)
        chosen = scores.gather(1, experts)
        if self._num_chosen > 1 or config.family == "v4":  # V4.1 leaves the weight of a single expert
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

    def __init__(self, weights: DeepseekWeights, name: str, experts: ExpertCache, routing: Routing) -> None:
        config = weights.config
        self._name = name
        self._limit = config.swiglu_limit
        self._gate = Gate(weights, f"{name}.gate", routing)
        self._shared = read_expert(weights, f"{name}.shared_experts")
        self._experts = experts
        self._own = routing.own
        self._sigmoid = weights.ops.sigmoid
        self._stacked: StackedExperts | None = None
        self._has_asked = False  # for them: what is free is known at the first step

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        """`x` [T, C]: [T, C], the shared expert added last."""
        return self.routed(x, tokens) + self.shared(x)

    def routed(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The part of this rank's experts, [T, C]. Those of a token are added up in the order of their numbers."""
        experts, shares = self._gate.route(x, tokens)
        if not self._has_asked:
            self._stacked, self._has_asked = self._experts.stack(f"{self._name}.experts", self._own), True
        if self._stacked is not None:
            return self._at_once(self._stacked, x, experts, shares)
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

    def _at_once(self, stacked: StackedExperts, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """Without a look at who goes where: nothing waits for the device."""
        experts, order = experts.sort(-1)
        tiles = expert_tiles(experts - stacked.own.start, len(stacked.own))
        gate, up = stacked.gate_up(x, tiles).chunk(2, -1)
        inner = self._inner(gate, up, shares.gather(1, order).view(-1, 1))
        total: Tensor = stacked.down(inner, tiles).unflatten(0, experts.shape).sum(1)
        return total

    def shared(self, x: Tensor) -> Tensor:
        """The part of the shared expert, [T, C]."""
        return self._run(self._shared, x, None)

    def _run(self, expert: ExpertWeights, x: Tensor, share: Tensor | None) -> Tensor:
        """`share` [T, 1] goes in before the last product."""
        return expert.down(self._inner(expert.gate(x), expert.up(x), share))

    def _inner(self, gate: Tensor, up: Tensor, share: Tensor | None) -> Tensor:
        """What goes into the last product."""
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        inner = gate * self._sigmoid(gate) * up
        return inner if share is None else inner * share


def _expert_table(weights: DeepseekWeights, name: str) -> Tensor:
    table, num_experts = weights.stored(name), weights.config.num_experts
    wrong = table[(table < 0) | (table >= num_experts)]
    if len(wrong):
        raise weights.bad(name, f"ids below {num_experts} were expected, {int(wrong[0])} came")
    return table.to(weights.device)


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0.0) + x.abs().neg().exp().log1p()
