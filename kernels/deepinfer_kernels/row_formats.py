"""Activations and cache rows in the formats a DeepSeek model was trained with. Knows nothing of caches or layers.

A row is packed as its codes, then its scales, in one run of bytes:

| row | codes | scales | bytes at the released size |
| --- | --- | --- | --- |
| main | E2M1 | E4M3, one of 16 dims | 512 dims: 256 + 32 |
| index | E2M1 | E8M0, one of 32 dims | 128 dims: 64 + 4 |
| window | E4M3 | E8M0, one of 32 dims | 512 dims: 512 + 16 |
| V4 | E4M3, and BF16 for the turned dims | E8M0, one of 64 dims, filled up to 8 bytes | 448 + 64 dims: 448 + 128 + 8 |

What is not finite: a NaN makes its group NaN, in all of them. An infinity does so too where scales are E8M0; a main
row holds at most 6 * 448 = 2688 and takes what exceeds it, infinities too, to that; BF16 has both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer_kernels.codes import (
    E8M0,
    FP4_MAX,
    FP8,
    FP8_MAX,
    FormatError,
    dequantize_fp8_groups,
    fake_quantize_fp8_groups,
    grouped,
    pack_fp4,
    power_of_two_scale,
    quantize_fp8_groups,
    unpack_fp4,
)

ACTIVATION_GROUP = 32
MAIN_GROUP = 16
INDEX_GROUP = 32
WINDOW_GROUP = 32
V4_GROUP = 64

MIN_FP8_AMAX = 1e-4
MIN_MAIN_SCALE = 2.0**-9  # the least E4M3 above zero
MIN_INDEX_AMAX = FP4_MAX * 2.0**-126  # so that no scale lies below float32's normal numbers
V4_SCALE_BYTES = 8  # a record's scales fill a multiple of this


def quantize_activation(x: Tensor, group: int = ACTIVATION_GROUP) -> tuple[Tensor, Tensor]:
    """`x` [..., K] float32 as E4M3 codes [..., K] and E8M0 scales [..., K / group]: the input of a quantised linear.

    Scale = 2^ceil(log2(max(amax, 1e-4) / 448)). Raises `FormatError` where K is no multiple of `group`, which is 32 in
    V4.1 and 128 in V4.
    """
    return quantize_fp8_groups(x, group, MIN_FP8_AMAX)


def fake_quantize_activation(x: Tensor, group: int = ACTIVATION_GROUP) -> Tensor:
    """What `quantize_activation` leaves of `x` [..., K]: [..., K] float32. The last group may be short."""
    width = x.shape[-1]
    filled = pad(x, (0, -width % group)) if width % group else x
    return fake_quantize_fp8_groups(filled, group, MIN_FP8_AMAX)[..., :width]


def main_row_bytes(dim: int) -> int:
    """Bytes of a packed main row of `dim`."""
    return dim // 2 + dim // MAIN_GROUP


def pack_main_row(x: Tensor) -> Tensor:
    """Compressed keys `x` [..., D] float32 as [..., D / 2 + D / 16] uint8.

    Scale = E4M3 of amax / 6 within 2^-9 and 448; codes = E2M1 of x / scale. Raises `FormatError` where D is no multiple
    of 16.
    """
    groups = grouped(x, MAIN_GROUP)  # [..., G, 16]
    scales = (groups.abs().amax(-1) / FP4_MAX).clamp(MIN_MAIN_SCALE, FP8_MAX).to(FP8)  # [..., G]
    codes = pack_fp4(groups / scales.float()[..., None]).flatten(-2)
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1)


def unpack_main_row(rows: Tensor) -> Tensor:
    """`rows` [..., bytes] of `pack_main_row`: [..., D] float32."""
    return _unpack_fp4_row(rows, MAIN_GROUP, FP8)


def fake_main_row(x: Tensor) -> Tensor:
    """What a packed main row keeps of `x` [..., D]: [..., D] float32."""
    return unpack_main_row(pack_main_row(x))


def index_row_bytes(dim: int) -> int:
    """Bytes of a packed index row of `dim`."""
    return dim // 2 + dim // INDEX_GROUP


def pack_index_row(x: Tensor) -> Tensor:
    """Index keys or queries `x` [..., D] float32 as [..., D / 2 + D / 32] uint8.

    Scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); codes = E2M1 of x / scale. Raises `FormatError` where D is no
    multiple of 32.
    """
    groups = grouped(x, INDEX_GROUP)  # [..., G, 32]
    scales = power_of_two_scale(groups.abs().amax(-1).clamp(min=MIN_INDEX_AMAX), FP4_MAX)  # [..., G]
    codes = pack_fp4(groups / scales.float()[..., None]).flatten(-2)
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1)


def unpack_index_row(rows: Tensor) -> Tensor:
    """`rows` [..., bytes] of `pack_index_row`: [..., D] float32."""
    return _unpack_fp4_row(rows, INDEX_GROUP, E8M0)


def fake_index_row(x: Tensor) -> Tensor:
    """What a packed index row keeps of `x` [..., D]: [..., D] float32."""
    return unpack_index_row(pack_index_row(x))


def window_row_bytes(dim: int) -> int:
    """Bytes of a packed window row of `dim`."""
    return dim + dim // WINDOW_GROUP


def pack_window_row(x: Tensor) -> Tensor:
    """Window keys `x` [..., D] float32 as [..., D + D / 32] uint8, by the rule of `quantize_activation`."""
    codes, scales = quantize_fp8_groups(x, WINDOW_GROUP, MIN_FP8_AMAX)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)


def unpack_window_row(rows: Tensor) -> Tensor:
    """`rows` [..., bytes] of `pack_window_row`: [..., D] float32."""
    dim = _row_groups(rows, WINDOW_GROUP + 1) * WINDOW_GROUP
    return dequantize_fp8_groups(rows[..., :dim].view(FP8), rows[..., dim:].view(E8M0), WINDOW_GROUP)


def fake_window_row(x: Tensor) -> Tensor:
    """What a packed window row keeps of `x` [..., D]: [..., D] float32."""
    return fake_quantize_fp8_groups(x, WINDOW_GROUP, MIN_FP8_AMAX)


def v4_row_bytes(dim: int, rope_dim: int) -> int:
    """Bytes of a packed V4 row of `dim`, whose last `rope_dim` are turned."""
    return (dim - rope_dim) + 2 * rope_dim + _v4_scale_bytes(dim - rope_dim)


def pack_v4_row(x: Tensor, rope_dim: int) -> Tensor:
    """V4's keys `x` [..., D] float32 as [..., bytes] uint8: E4M3, the last `rope_dim` as BF16, scales, zeros.

    By the rule of `quantize_activation` with groups of 64, of which the last may be short. Raises `FormatError` for
    another dtype, and where D is less than `rope_dim`.
    """
    dim = x.shape[-1] - rope_dim
    if dim < 0:
        raise FormatError(f"values: expected at least {rope_dim} in the last dimension, got {list(x.shape)}")
    filled = pad(x[..., :dim], (0, -dim % V4_GROUP))
    codes, scales = quantize_fp8_groups(filled, V4_GROUP, MIN_FP8_AMAX)
    turned = x[..., dim:].to(torch.bfloat16).view(torch.uint8)  # [..., 2 * rope_dim]
    scale_bytes = pad(scales.view(torch.uint8), (0, _v4_scale_bytes(dim) - scales.shape[-1]))
    return torch.cat((codes[..., :dim].view(torch.uint8), turned, scale_bytes), dim=-1)


def unpack_v4_row(rows: Tensor, rope_dim: int) -> Tensor:
    """`rows` [..., bytes] of `pack_v4_row`: [..., D] float32. Raises `FormatError` for another dtype or size."""
    dim = _v4_code_dims(rows, rope_dim)
    codes, turned, scale_bytes = rows.split((dim, 2 * rope_dim, _v4_scale_bytes(dim)), dim=-1)
    scales = scale_bytes[..., : -(-dim // V4_GROUP)].view(E8M0)
    filled = pad(codes, (0, -dim % V4_GROUP)).view(FP8)
    values = dequantize_fp8_groups(filled, scales, V4_GROUP)[..., :dim]
    aligned = turned.clone(memory_format=torch.contiguous_format)
    return torch.cat((values, aligned.view(torch.bfloat16).float()), dim=-1)


def fake_v4_row(x: Tensor, rope_dim: int) -> Tensor:
    """What a packed V4 row keeps of `x` [..., D]: [..., D] float32."""
    return unpack_v4_row(pack_v4_row(x, rope_dim), rope_dim)


def _unpack_fp4_row(rows: Tensor, group: int, scale_dtype: torch.dtype) -> Tensor:
    num_groups = _row_groups(rows, group // 2 + 1)
    code_bytes = num_groups * (group // 2)
    scales = rows[..., code_bytes:].view(scale_dtype).float()  # [..., G]
    values = grouped(unpack_fp4(rows[..., :code_bytes]), group)  # [..., G, group]
    return values.mul_(scales[..., None]).flatten(-2)


def _row_groups(rows: Tensor, group_bytes: int) -> int:
    """Groups in a packed row, whose codes and scale take `group_bytes` each."""
    if rows.dtype != torch.uint8 or rows.dim() == 0 or rows.shape[-1] % group_bytes:
        raise FormatError(f"rows: expected torch.uint8 [..., n * {group_bytes}], got {rows.dtype} {list(rows.shape)}")
    return rows.shape[-1] // group_bytes


def _v4_scale_bytes(dim: int) -> int:
    """Bytes of the scales of `dim` E4M3 codes, filled up."""
    return -(-dim // (V4_GROUP * V4_SCALE_BYTES)) * V4_SCALE_BYTES


def _v4_code_dims(rows: Tensor, rope_dim: int) -> int:
    """E4M3 codes in a packed V4 row."""
    rest = rows.shape[-1] - 2 * rope_dim  # codes and scales: each 512 codes, or what is left of them, bring 8 bytes
    dim = rest - -(-rest // ((V4_GROUP + 1) * V4_SCALE_BYTES)) * V4_SCALE_BYTES
    if rows.dtype != torch.uint8 or dim < 0 or v4_row_bytes(dim + rope_dim, rope_dim) != rows.shape[-1]:
        raise FormatError(f"rows: expected torch.uint8 rows with {rope_dim} BF16, got {rows.dtype} {list(rows.shape)}")
    return dim
