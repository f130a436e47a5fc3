"""Weights as a DeepSeek checkpoint stores them: FP8 in squares, FP4 or FP8 in rows. Knows nothing of names or files.

Legend: `N` rows (outputs), `K` columns (inputs), `B` the side of a square that shares a scale.

Writing is for checkpoints made here; reading is exact: a code times a power of two.
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
    expect,
    grouped,
    pack_fp4,
    power_of_two_scale,
    quantize_fp8_groups,
    unpack_fp4,
)

SCALE_COLUMNS = 32
"""Neighbours in a row that share a scale, in FP4 and in FP8 rows."""


def dequantize_fp8_blocks(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """`codes` [N, K] E4M3 times `scales` [ceil(N / B), ceil(K / B)] E8M0, one a square of `block`: [N, K] float32.

    Raises `FormatError` for other dtypes or shapes.
    """
    expect("codes", codes, FP8, _matrix_shape("codes", codes))
    num_rows, num_columns = codes.shape
    expect("scales", scales, E8M0, (-(-num_rows // block), -(-num_columns // block)))
    row_scales = scales.float().repeat_interleave(block, dim=0)[:num_rows]  # [N, ceil(K / B)]
    num_whole = num_columns // block
    values = codes.float()
    whole, rest = values[:, : num_whole * block], values[:, num_whole * block :]
    whole.unflatten(1, (num_whole, block)).mul_(row_scales[:, :num_whole, None])  # in place: weights are large
    rest.mul_(row_scales[:, num_whole:])
    return values


def quantize_fp8_blocks(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] float32 as E4M3 codes [N, K] and E8M0 scales [ceil(N / B), ceil(K / B)], one a square of `block`.

    A scale is 2^ceil(log2(amax / 448)), and 2^-9 for zeros. Raises `FormatError` for another dtype or shape.
    """
    expect("weight", weight, torch.float32, _matrix_shape("weight", weight))
    num_rows, num_columns = weight.shape
    padded = pad(weight, (0, -num_columns % block, 0, -num_rows % block))
    squares = grouped(padded, block).unflatten(0, (padded.shape[0] // block, block))  # [N / B, B, K / B, B]
    scales = power_of_two_scale(squares.abs().amax(dim=(1, 3)), FP8_MAX)  # [N / B, K / B]
    codes = (squares / scales.float()[:, None, :, None]).to(FP8).view(padded.shape)
    return codes[:num_rows, :num_columns].contiguous(), scales


def dequantize_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """`codes` [N, K / 2] int8, two E2M1 each, the even column low, times `scales` [N, K / 32] E8M0: [N, K] float32.

    Raises `FormatError` for other dtypes or shapes.
    """
    expect("codes", codes, torch.int8, _matrix_shape("codes", codes))
    expect("scales", scales, E8M0, (codes.shape[0], 2 * codes.shape[1] // SCALE_COLUMNS))
    values = grouped(unpack_fp4(codes.view(torch.uint8)), SCALE_COLUMNS)  # [N, K / 32, 32]
    return values.mul_(scales.float()[..., None]).flatten(-2)


def quantize_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] float32 as `codes` [N, K / 2] int8 and `scales` [N, K / 32] E8M0, as `dequantize_fp4` reads them.

    A scale is 2^ceil(log2(amax / 6)), and 2^-3 for zeros. Raises `FormatError` for other dtypes or shapes.
    """
    expect("weight", weight, torch.float32, _matrix_shape("weight", weight))
    groups = grouped(weight, SCALE_COLUMNS)  # [N, K / 32, 32]
    scales = power_of_two_scale(groups.abs().amax(-1), FP4_MAX)
    return pack_fp4(groups / scales.float()[..., None]).flatten(-2).view(torch.int8), scales


def dequantize_fp8_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """`codes` [..., K] E4M3 times `scales` [..., K / 32] E8M0: [..., K] float32. So the Engram tables are stored.

    Raises `FormatError` for other dtypes or shapes.
    """
    expect("codes", codes, FP8, codes.shape)
    return dequantize_fp8_groups(codes, scales, SCALE_COLUMNS)


def quantize_fp8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` [..., K] float32 as E4M3 codes [..., K] and E8M0 scales [..., K / 32], for `dequantize_fp8_rows`.

    A scale is 2^ceil(log2(amax / 448)), and 2^-9 for zeros. Raises `FormatError` where K is no multiple of 32.
    """
    return quantize_fp8_groups(rows, SCALE_COLUMNS)


def _matrix_shape(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise FormatError(f"{name}: expected two dimensions, got {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]
