"""Blocks of GGUF quantisation types to float32, with the bits of `gguf.dequantize`. Knows nothing of files.

A quantised row is a run of blocks of 32 weights: a float16 scale `d`, for some types a float16 offset `m`, then the
quants. The types that small models come in are done here, in whole-tensor operations; the rest by the gguf package,
which takes some ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantize(data: Bytes, type_: Type) -> Floats:
    """All weights of `data`, flat. Raises `NotImplementedError` for a type that nobody here knows."""
    convert = _CONVERTERS.get(type_)
    if convert is not None:
        return convert(data)
    _, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    values: Any = gguf.dequantize(data.reshape(-1, block_bytes), type_)
    return np.asarray(values, np.float32).reshape(-1)


def _from_f32(data: Bytes) -> Floats:
    return data.view("<f4").astype(np.float32)


def _from_f16(data: Bytes) -> Floats:
    return data.view("<f2").astype(np.float32)


def _from_bf16(data: Bytes) -> Floats:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _from_q4_0(data: Bytes) -> Floats:
    blocks = data.reshape(-1, 18)
    return _scale(_nibbles(blocks[:, 2:]) - np.float32(8), blocks[:, :2])


def _from_q4_1(data: Bytes) -> Floats:
    blocks = data.reshape(-1, 20)
    values = _scale(_nibbles(blocks[:, 4:]), blocks[:, :2]).reshape(-1, 32)
    values += _half(blocks[:, 2:4])
    return values.reshape(-1)


def _from_q8_0(data: Bytes) -> Floats:
    blocks = data.reshape(-1, 34)
    return _scale(blocks[:, 2:].view(np.int8).astype(np.float32), blocks[:, :2])


def _half(column: Bytes) -> Floats:
    """[blocks, 2] bytes -> [blocks, 1]."""
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _nibbles(quants: Bytes) -> Floats:
    """[blocks, 16] bytes -> [blocks, 32]: the low halves of all bytes, then the high ones."""
    values = np.empty((len(quants), 32), np.float32)
    values[:, :16] = quants & 15
    values[:, 16:] = quants >> 4
    return values


def _scale(values: Floats, scales: Bytes) -> Floats:
    values *= _half(scales)
    return values.reshape(-1)


_CONVERTERS: Final[dict[Type, Callable[[Bytes], Floats]]] = {
    Type.F32: _from_f32,
    Type.F16: _from_f16,
    Type.BF16: _from_bf16,
    Type.Q4_0: _from_q4_0,
    Type.Q4_1: _from_q4_1,
    Type.Q8_0: _from_q8_0,
}
