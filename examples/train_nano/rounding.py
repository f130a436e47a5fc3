"""What small float formats keep of activations and cached rows, in arithmetic that torch.compile fuses.

The numbers are those of `deepinfer_kernels.row_formats` (a test compares the bits); there the codes are made, here
only the values. A gradient passes as if nothing had been rounded. Knows nothing of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX, FP4_MAX = 448.0, 6.0
_FP8_GROUP, _INDEX_GROUP, _MAIN_GROUP = 32, 32, 16
_LEAST_FP8_AMAX = 1e-4
_LEAST_INDEX_AMAX = FP4_MAX * 2.0**-126
_LEAST_MAIN_SCALE = 2.0**-9
_MANTISSA_BITS = 23
_BIAS = 127


def fp8_rows(x: Tensor, enabled: Tensor) -> Tensor:
    """`x` [..., K] in E4M3 with a power of two for every 32: inputs of quantised products, and window keys."""
    return _straight_through(x, _fp8(x.detach().float()), enabled)


def main_rows(x: Tensor, enabled: Tensor) -> Tensor:
    """`x` [..., K] in E2M1 with an E4M3 scale for every 16: compressed keys."""
    return _straight_through(x, _main(x.detach().float()), enabled)


def index_rows(x: Tensor, enabled: Tensor) -> Tensor:
    """`x` [..., K] in E2M1 with a power of two for every 32: index keys and queries."""
    return _straight_through(x, _index(x.detach().float()), enabled)


def _straight_through(x: Tensor, rounded: Tensor, enabled: Tensor) -> Tensor:
    """`enabled` is a tensor, not a flag: switching it on compiles nothing anew."""
    return x + torch.where(enabled, rounded - x.detach(), 0.0).to(x.dtype)


def _fp8(x: Tensor) -> Tensor:
    groups: Tensor = x.unflatten(-1, (-1, _FP8_GROUP))
    scales = _power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST_FP8_AMAX) / FP8_MAX)
    values: Tensor = (groups / scales).to(torch.float8_e4m3fn).float() * scales
    return values.flatten(-2)


def _main(x: Tensor) -> Tensor:
    groups: Tensor = x.unflatten(-1, (-1, _MAIN_GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / FP4_MAX).clamp(_LEAST_MAIN_SCALE, FP8_MAX)
    scales = scales.to(torch.float8_e4m3fn).float()
    return (_fp4(groups / scales) * scales).flatten(-2)


def _index(x: Tensor) -> Tensor:
    groups: Tensor = x.unflatten(-1, (-1, _INDEX_GROUP))
    scales = _power_of_two(groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST_INDEX_AMAX) / FP4_MAX)
    return (_fp4(groups / scales) * scales).flatten(-2)


def _power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below `x` > 0, from the bits of the float."""
    bits = x.view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) + ((bits & ((1 << _MANTISSA_BITS) - 1)) != 0).int()
    return (exponent.clamp(1, 2 * _BIAS) << _MANTISSA_BITS).view(torch.float32)


def _fp4(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with the sign of `x`; ties go to the even code."""
    size = x.abs().clamp(max=FP4_MAX)
    rounded = torch.where(size < 2, (size * 2).round() / 2, torch.where(size < 4, size.round(), (size / 2).round() * 2))
    return torch.where(x < 0, -rounded, rounded)
