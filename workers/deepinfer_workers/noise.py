"""Counter-based noise: the bits of (seed, position, token) are a pure function, there is no generator state.

So a seeded token is the same in any batch, after a preemption and after a restart. The function is SplitMix64 (Steele,
Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of Stafford's variant 13): with
`mix` its finaliser and G its increment,

    key(seed, position) = mix(mix(seed + G) + (position + 1) * G)
    bits(seed, position, token) = mix(key(seed, position) + (token + 1) * G)      all modulo 2**64

which is output `token` of a SplitMix64 generator that starts from `key`. Knows nothing of sampling parameters.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_GAMMA: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # as signed 64 bits: torch integers wrap, which is what is wanted
_MIX_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2: Final = 0x94D049BB133111EB - (1 << 64)


def noise_bits(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """64 bits for each token: `seeds`, `positions` [R] int64 -> [R, num_tokens] int64."""
    keys = _mix(_mix(seeds + _GAMMA) + (positions + 1) * _GAMMA)  # [R]
    tokens = torch.arange(1, num_tokens + 1, dtype=torch.int64, device=seeds.device)
    return _mix(keys[:, None] + tokens * _GAMMA)  # [R, V]


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number for each of `seeds`, `positions` [R]: [R] float64, strictly between 0 and 1."""
    return _uniform(noise_bits(seeds, positions, 1))[:, 0]


def gumbel_noise(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise -log(-log(u)) from the upper 53 bits: [R, num_tokens] float64, finite."""
    return _uniform(noise_bits(seeds, positions, num_tokens)).log_().neg_().log_().neg_()


def _uniform(bits: Tensor) -> Tensor:
    uniform = _shift_right(bits, 11).to(torch.float64).add_(0.5).mul_(2.0**-53)  # strictly between 0 and 1
    # The largest value rounds to 1: keep it below, so that no token gets infinite noise.
    return uniform.clamp_(max=1.0 - 2.0**-53)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
