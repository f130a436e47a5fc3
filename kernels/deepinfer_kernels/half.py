"""Matrix products on the CPU with weights of half the width: the fast path. Knows nothing of models.

A step with few rows takes as long as reading the weights takes, so half the bytes are half the time. There are two
kinds; both round a weight once, when it is packed, and add up in float32:

- fp16 weights: activations stay float32, the result is float32; by FBGEMM. A Q4 or Q8 weight loses next to nothing.
- bf16 products: activations and results are rounded too; by oneDNN, where the CPU multiplies bfloat16 in hardware and
  is then up to twice as fast with many rows.

Legend: `T` rows, `C` inputs, `F` outputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from deepinfer_kernels.linear import TILE_ROWS, Backend, LinearWeight, pack_linear, pack_with

MAX_FP16: Final = 65504.0


def missing_for_half() -> str:
    """What this torch or CPU lacks for weights of half the width; empty: nothing."""
    if not hasattr(torch.ops.quantized, "linear_prepack_fp16"):
        return f"torch {torch.__version__} has no fp16 product for the CPU"
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return f"torch {torch.__version__} was built without FBGEMM"
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "this CPU has no AVX2"
    return ""


def has_bf16_products() -> bool:
    """The CPU multiplies bfloat16 in hardware, and torch lets oneDNN do it."""
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # torch has no public name for it
    if is_supported is None or not is_supported() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    try:
        _pack_bf16(torch.zeros(TILE_ROWS, TILE_ROWS))
    except RuntimeError:  # oneDNN is held to less than the CPU can do
        return False
    return True


def pack_fp16(weight: Tensor, *, batch_invariant: bool) -> LinearWeight:
    """`weight` [F, C] in float16. One with values that float16 cannot hold stays in float32."""
    if not bool(weight.abs().max() <= MAX_FP16):
        return pack_linear(weight, batch_invariant=batch_invariant)
    return pack_with(FP16, weight, batch_invariant=batch_invariant)


def pack_bf16(weight: Tensor, *, batch_invariant: bool, keeps_bf16: bool = False) -> LinearWeight:
    """`weight` [F, C] in bfloat16. Results are float32, or stay as they are computed (`keeps_bf16`)."""
    return pack_with(BF16_THROUGHOUT if keeps_bf16 else BF16, weight, batch_invariant=batch_invariant)


def _pack_fp16(weight: Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)


def _multiply_fp16(x: Tensor, packed: Any) -> Tensor:
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return out


def _pack_bf16(weight: Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16).contiguous(), TILE_ROWS)


def _multiply_bf16_throughout(x: Tensor, packed: Any) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), packed, None, "none", [], "")
    return out


def _multiply_bf16(x: Tensor, packed: Any) -> Tensor:
    return _multiply_bf16_throughout(x, packed).to(torch.float32)


FP16: Final = Backend(_pack_fp16, _multiply_fp16, takes_any_height=True)
BF16: Final = Backend(_pack_bf16, _multiply_bf16, takes_any_height=True)
BF16_THROUGHOUT: Final = Backend(_pack_bf16, _multiply_bf16_throughout, takes_any_height=True, dtype=torch.bfloat16)
