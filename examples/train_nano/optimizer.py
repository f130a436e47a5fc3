"""Muon for the matrices between the streams, AdamW for all else. Knows shapes and names, and no model.

Muon: K. Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024; the size of its updates as
in "Muon is scalable for LLM training", 2025, so that one learning rate serves both.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from examples.train_nano.parameters import Parameter, Storage, Weights

_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_DECAY = 0.1
_UPDATE_SIZE = 0.2
"""Root mean square of AdamW's updates, about."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NUM_ITERS = 5
_MOST_NORM = 1.0
_RATES = (("embed.weight", 5.0), ("hc_", 0.2), ("ffn.gate.weight", 0.3))
"""Of AdamW, as multiples: tables whose rows are seldom seen, and what everything hangs on."""


class Optimizer:
    """Updates `weights` in place from their gradients."""

    def __init__(self, weights: Weights, parameters: dict[str, Parameter]) -> None:
        self._weights = weights
        is_muon = {
            name: parameters[name].storage in (Storage.FP8, Storage.FP4)
            for name, weight in weights.items()
            if weight.requires_grad
        }
        self._muon = _Muon({name: weights[name] for name, is_matrix in is_muon.items() if is_matrix})
        self._others = [name for name, is_matrix in is_muon.items() if not is_matrix]
        by_rate: dict[float, list[Tensor]] = defaultdict(list)
        for name in self._others:
            by_rate[_rate(name)].append(weights[name])
        groups = [{"params": group, "lr": 0.0, "multiple": multiple} for multiple, group in by_rate.items()]
        self._adam = torch.optim.AdamW(groups, betas=_BETAS, eps=1e-12, weight_decay=0.0)

    def step(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_([self._weights[name] for name in self._others], _MOST_NORM)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["multiple"]
        self._adam.step()
        self._muon.step(rate)
        for weight in self._weights.values():
            weight.grad = None

    def state(self) -> dict[str, Tensor]:
        found = {f"muon.{shape[0]}x{shape[1]}": tensor for shape, tensor in self._muon.momenta.items()}
        for name in self._others:
            for key, value in self._adam.state[self._weights[name]].items():
                found[f"adam.{key}.{name}"] = value
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        for shape, momentum in self._muon.momenta.items():
            momentum.copy_(state[f"muon.{shape[0]}x{shape[1]}"])
        for name in self._others:
            weight = self._weights[name]
            for key in ("exp_avg", "exp_avg_sq"):
                self._adam.state[weight][key] = state[f"adam.{key}.{name}"].to(weight.device)
            self._adam.state[weight]["step"] = state[f"adam.step.{name}"]


class _Muon:
    """All matrices of a shape at once."""

    def __init__(self, weights: Weights) -> None:
        self._groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for weight in weights.values():
            self._groups[weight.shape[-2], weight.shape[-1]].append(weight)
        self.momenta = {
            shape: torch.zeros(sum(_num_matrices(weight) for weight in group), *shape, device=group[0].device)
            for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self._groups.items():
            momentum = self.momenta[shape]
            gradients = torch.cat([_gradient(weight).view(-1, *shape) for weight in group])
            momentum.lerp_(gradients, 1 - _MOMENTUM)
            updates = _orthogonal(gradients.lerp_(momentum, _MOMENTUM)) * (_UPDATE_SIZE * max(shape) ** 0.5)
            parts = updates.split([_num_matrices(weight) for weight in group])
            for weight, part in zip(group, parts, strict=True):
                weight.mul_(1 - rate * _DECAY).sub_(part.view(weight.shape), alpha=rate)


def _orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest matrices with orthogonal rows or columns, by Newton and Schulz: [K, rows, columns]."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NUM_ITERS):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    found: Tensor = (x.transpose(1, 2) if is_tall else x).float()
    return found


def _num_matrices(weight: Tensor) -> int:
    return weight.shape[0] if weight.dim() == 3 else 1


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _rate(name: str) -> float:
    return next((multiple for part, multiple in _RATES if part in name), 1.0)
