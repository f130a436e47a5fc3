"""Element codes and scales of the small float formats: FP8 E4M3, FP4 E2M1, E8M0. Knows nothing of weights or rows.

Source: OCP Microscaling Formats (MX) 1.0. FP8 E4M3 has a NaN and no infinity, E2M1 neither, E8M0 is 2^(code - 127) with
NaN at 255.
Values round to nearest, ties to the even code. Every step here is exact or rounds once, so a result's bits depend
on its own group alone, on every device. What is not finite shows: where the scale has a NaN, a NaN in a group makes
the scale NaN, and with it every value that is read back.

Nothing here leaves saturation to torch: its cast to E4M3 of what exceeds 448 differs from version to version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu

FP8_MAX = 448.0
FP4_MAX = 6.0
E8M0_BIAS = 127
E8M0_NAN = 255
_MANTISSA = 1 << 23  # of a float32's bits: below are the mantissa's, from there on the exponent's


class FormatError(ValueError):
    """A tensor is not what a number format holds: the message names it, what was expected and what came."""


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Refuse a `tensor` of another dtype or shape.

    Raises `FormatError`.
    """
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise FormatError(f"{name}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def grouped(x: Tensor, size: int) -> Tensor:
    """`x` [..., K] float32 as groups of `size` neighbours, a view: [..., K / size, size].

    Raises `FormatError` for another dtype, and where K is no multiple of `size`.
    """
    if x.dtype != torch.float32:
        raise FormatError(f"values: expected torch.float32, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % size:
        raise FormatError(f"values: expected a multiple of {size} in the last dimension, got {list(x.shape)}")
    groups: Tensor = x.unflatten(-1, (x.shape[-1] // size, size))
    return groups


def power_of_two_scale(amax: Tensor, limit: float) -> Tensor:
    """2^ceil(log2(amax / limit)) of float32 `amax` [...]: the least power of two that scales it to `limit`, as E8M0.

    From the exponents, not by a logarithm, which rounds. Within what E8M0 holds; its NaN where `amax` is not finite.
    Of zero: 2^-9 for FP8's limit, 2^-3 for FP4's.
    """
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, 0.5 <= mantissa < 1; both 0 for 0
    limit_mantissa, limit_exponent = math.frexp(limit)
    codes = exponent + (mantissa > limit_mantissa).int() + (E8M0_BIAS - limit_exponent)
    codes = codes.clamp(0, E8M0_NAN - 1).where(amax.isfinite(), E8M0_NAN)
    return codes.to(torch.uint8).view(E8M0)


def quantize_fp8_groups(x: Tensor, size: int, min_amax: float = 0.0) -> tuple[Tensor, Tensor]:
    """`x` [..., K] float32 as E4M3 codes [..., K] and the E8M0 scale of every `size` neighbours [..., K / size].

    A group counts as at least `min_amax`.
    """
    groups = grouped(x, size)  # [..., G, size]
    scales = power_of_two_scale(groups.abs().amax(-1).clamp(min=min_amax), FP8_MAX)  # [..., G]
    return (groups / scales.float()[..., None]).to(FP8).flatten(-2), scales  # exact quotients, none above 448


def fake_quantize_fp8_groups(x: Tensor, size: int, min_amax: float) -> Tensor:
    """What `quantize_fp8_groups` leaves of `x` [..., K]: [..., K] float32. `min_amax` is a plain number above 2^-100.

    In half as many operations: scales stay float32.
    """
    groups = grouped(x, size)  # [..., G, size]
    amax = groups.abs().amax(-1, keepdim=True).clamp_(min=min_amax)  # [..., G, 1]
    # In a float32's bits: up to the next power of two unless the mantissa is within the limit's, then over the limit's.
    mantissa, exponent = math.frexp(FP8_MAX)
    within = int(2 * mantissa * _MANTISSA) - _MANTISSA
    bits = (amax.view(torch.int32) + (_MANTISSA - 1 - within)).bitwise_and_(-_MANTISSA).sub_((exponent - 1) * _MANTISSA)
    scales = bits.view(torch.float32) + (amax - amax)  # NaN where it is not finite
    return (groups / scales).to(FP8).float().mul_(scales).flatten(-2)


def dequantize_fp8_groups(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """E4M3 `codes` [..., K] times the E8M0 scale of every `size` neighbours [..., K / size]: [..., K] float32."""
    expect("scales", scales, E8M0, (*codes.shape[:-1], codes.shape[-1] // size))
    values = grouped(codes.float(), size)
    return values.mul_(scales.float()[..., None]).flatten(-2)


def pack_fp4(x: Tensor) -> Tensor:
    """Float32 `x` [..., K] as E2M1, the even columns in the low halves of bytes: [..., K / 2] uint8.

    What exceeds 6, and NaN, becomes 6 with its sign.
    """
    magnitude = torch.fmin(x.abs(), x.new_full((), FP4_MAX))
    # A code counts steps: of a half up to 2, of one up to 4, of two up to 6. Torch's round takes ties to even.
    steps = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude, magnitude / 2)).round()
    codes = torch.where(magnitude < 2, steps, torch.where(magnitude < 4, steps + 2, steps + 4))
    nibbles = codes.to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """E2M1 pairs `packed` [..., K / 2] uint8, the even columns in the low halves: [..., K] float32."""
    pairs = torch.view_as_complex(_fp4_pairs(packed.device))  # one word a pair, so that a look-up moves both
    values = pairs.index_select(0, packed.int().flatten())  # [..] complex64
    return torch.view_as_real(values).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@lru_cache(maxsize=16)
def _fp4_pairs(device: torch.device) -> Tensor:
    """What every byte holds: [256, 2] float32. A pure memo, made on the device, since a copy to it would wait."""
    codes = torch.arange(16, device=device)
    steps = codes & 7
    magnitude = torch.where(steps < 4, steps / 2, torch.where(steps < 6, steps - 2, steps * 2 - 8))
    values = torch.where(codes < 8, magnitude, -magnitude)
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
