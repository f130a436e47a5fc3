"""Device operations behind one table, and number formats. Knows nothing of models, of wires, or of the engine."""

from deepinfer_kernels.attention import PackedRows
from deepinfer_kernels.codes import FormatError
from deepinfer_kernels.draws import DraftedRows, Drafts, Draw, Kept, Verify
from deepinfer_kernels.expert_tiles import ExpertTiles, expert_tiles
from deepinfer_kernels.linear import LinearWeight
from deepinfer_kernels.native import KEY_LANES
from deepinfer_kernels.ops import Ops, UnknownAccelerator, select_ops
from deepinfer_kernels.reference import hadamard, mix_numbers, sigmoid
from deepinfer_kernels.row_formats import (
    fake_index_row,
    fake_main_row,
    fake_quantize_activation,
    fake_v4_row,
    fake_window_row,
    index_row_bytes,
    main_row_bytes,
    pack_index_row,
    pack_main_row,
    pack_v4_row,
    pack_window_row,
    quantize_activation,
    unpack_index_row,
    unpack_main_row,
    unpack_v4_row,
    unpack_window_row,
    v4_row_bytes,
    window_row_bytes,
)
from deepinfer_kernels.weight_formats import (
    dequantize_fp4,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
    quantize_fp4,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)

__all__ = [
    "KEY_LANES",
    "DraftedRows",
    "Drafts",
    "Draw",
    "ExpertTiles",
    "FormatError",
    "Kept",
    "LinearWeight",
    "Ops",
    "PackedRows",
    "UnknownAccelerator",
    "Verify",
    "dequantize_fp4",
    "dequantize_fp8_blocks",
    "dequantize_fp8_rows",
    "expert_tiles",
    "fake_index_row",
    "fake_main_row",
    "fake_quantize_activation",
    "fake_v4_row",
    "fake_window_row",
    "hadamard",
    "index_row_bytes",
    "main_row_bytes",
    "mix_numbers",
    "pack_index_row",
    "pack_main_row",
    "pack_v4_row",
    "pack_window_row",
    "quantize_activation",
    "quantize_fp4",
    "quantize_fp8_blocks",
    "quantize_fp8_rows",
    "select_ops",
    "sigmoid",
    "unpack_index_row",
    "unpack_main_row",
    "unpack_v4_row",
    "unpack_window_row",
    "v4_row_bytes",
    "window_row_bytes",
]
