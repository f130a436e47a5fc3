"""Our dequantisation has the bits of the gguf package's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from deepinfer_workers.dequantize import dequantize


@pytest.mark.parametrize(
    "type_", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_0, Type.Q6_K, Type.Q4_K]
)
@pytest.mark.parametrize("num_rows", [1, 37])
def test_bits_are_those_of_the_gguf_package(type_: Type, num_rows: int) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    num_blocks = 512 // block_size
    data = np.random.default_rng(0).integers(0, 256, (num_rows, num_blocks * block_bytes), np.uint8)
    with np.errstate(all="ignore"):  # random bytes hold infinities
        expected = gguf.dequantize(data, type_).astype(np.float32)
        found = dequantize(data.reshape(-1), type_).reshape(expected.shape)
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])
