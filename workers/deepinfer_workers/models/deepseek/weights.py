"""The tensors of a DeepSeek checkpoint as a rank computes with them. Knows their storage, and no formula.

Linears are expanded to the arithmetic of the operations once; routed experts stay as they are stored, in the mapped
file, and are expanded when a token is sent to them (`moe.ExpertCache`). Pages of what has been expanded are given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from deepinfer_kernels import (
    ExpertTiles,
    LinearWeight,
    Ops,
    dequantize_fp4,
    dequantize_fp8_blocks,
)
from deepinfer_workers.checkpoint import bad_file
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors
from deepinfer_workers.runner import WorkerFault

Linear = Callable[[Tensor], Tensor]
"""[T, in] to [T, out], float32."""
Norm = Callable[[Tensor], Tensor]
"""[T, C] to [T, C]."""
_FP8: Final = torch.float8_e4m3fn
E8M0_NAN: Final = 255


class DeepseekWeights:
    """Reads by released names. What is there, and of what shape, has been checked."""

    def __init__(
        self,
        tensors: RankTensors,
        config: DeepseekConfig,
        ops: Ops,
        quantizes_activations: bool,
    ) -> None:
        """`quantizes_activations`: inputs of products with FP8 and FP4 weights are rounded to FP8."""
        self.config = config
        self.ops = ops
        self.device = ops.device
        self._quantizes_activations = quantizes_activations
        self.tensors = tensors

    def stored(self, name: str) -> Tensor:
        """As it lies in the file: a mapped tensor on the CPU."""
        return self.tensors.stored(name)

    def bad(self, name: str, text: str) -> WorkerFault:
        """What tensor `name` holds cannot be; `text` says what was expected and what came."""
        return bad_file(self.tensors.path.name, f"tensor {name}: {text}")

    def plain(self, name: str) -> Tensor:
        """Any shape, float32, on the device."""
        values = self.stored(name).to(self.device).to(torch.float32)
        self.tensors.release(name)
        return values

    def norm(self, name: str) -> Norm:
        """By the root mean square, in float32 whatever products are computed in."""
        weight, eps = self.plain(f"{name}.weight"), self.config.rms_eps
        return lambda x: self.ops.exact_norm(x, weight, eps)

    def plain_linear(self, name: str) -> Linear:
        """A product whose weight `name` is stored in F32 or BF16: in float32 whatever other products are computed in.

        A gate, a choice of rows or a mix of streams that is off by a rounding sends tokens elsewhere.
        """
        packed = self.ops.pack_exact(self.plain(name))
        return lambda x: self.ops.linear(x, packed)

    def head(self, name: str) -> LinearWeight:
        """For `ops.project`. The largest weight of all: it is not expanded before it is packed."""
        packed = self.ops.pack_project(self.stored(name).to(self.device))
        self.tensors.release(name)
        return packed

    def linear(self, name: str) -> Linear:
        """The product `name`.weight, in the quantised form that it is stored in."""
        weight, is_quantized = self.matrix(name)
        return self.product(weight, quantizes=is_quantized)

    def product(self, weight: Tensor, *, quantizes: bool) -> Linear:
        """A product with `weight` [out, in] float32, whose input is rounded to FP8 before if asked."""
        packed = self.ops.pack_linear(weight)
        return lambda x: self.ops.linear(self._input(x, quantizes), packed).to(torch.float32)

    def expert_product(self, weight: Tensor, *, quantizes: bool) -> Callable[[Tensor, ExpertTiles], Tensor]:
        """Products with a `weight` [E, out, in] for each expert, as `ops.expert_linear` has them, which must be there.

        `weight` is of the operations' dtype.
        """
        multiply = self.ops.expert_linear
        assert multiply is not None
        return lambda x, tiles: multiply(self._input(x, quantizes), weight, tiles)

    def _input(self, x: Tensor, quantizes: bool) -> Tensor:
        """What of `x` [T, in] a product sees."""
        if quantizes and self._quantizes_activations:
            x = self.ops.round_activation(x, self.config.scale_block)
        return x.to(self.ops.dtype)

    def matrix(self, name: str) -> tuple[Tensor, bool]:
        """`name`.weight [out, in] in float32, and whether it is stored quantised. Raises `WorkerFault`."""
        weight = self.stored(f"{name}.weight").to(self.device)
        is_quantized = weight.dtype in (_FP8, torch.int8)
        if is_quantized:
            scales = self.stored(f"{name}.scale").to(self.device)
            if bool((scales.view(torch.uint8) == E8M0_NAN).any()):
                raise self.bad(f"{name}.scale", f"powers of two were expected, {E8M0_NAN} came, which is no number")
            values = self._dequantized(weight, scales)
            self.tensors.release(f"{name}.scale")
        else:
            values = weight.to(torch.float32)
        self.tensors.release(f"{name}.weight")
        return values, is_quantized

    def _dequantized(self, weight: Tensor, scales: Tensor) -> Tensor:
        if weight.dtype == torch.int8:
            return dequantize_fp4(weight, scales)
        return dequantize_fp8_blocks(weight, scales, self.config.scale_block)
