"""The tensors of a DeepSeek checkpoint as a rank computes with them. Knows their storage, and no formula.

Linears are expanded to the arithmetic of the operations once; routed experts stay as they are stored, in the mapped
file, and are expanded when a token is sent to them (`moe.ExpertCache`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepinfer_kernels import Ops, dequantize_fp4, dequantize_fp8_blocks, fake_quantize_activation
from deepinfer_workers.checkpoint import Checkpoint
from deepinfer_workers.models.deepseek.config import DeepseekConfig

Linear = Callable[[Tensor], Tensor]
"""[T, in] to [T, out]."""
_FP8: Final = torch.float8_e4m3fn


class Quantization(NamedTuple):
    """What is rounded as the released model rounds it. Off: for parity with float references."""

    activations: bool = True
    """Inputs of products with FP8 and FP4 weights."""
    caches: bool = True
    """Keys, index keys and index queries."""


class DeepseekWeights:
    """Reads by released names. What is there, and of what shape, has been checked."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DeepseekConfig,
        ops: Ops,
        quantization: Quantization,
        report: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """`report` gets the bytes of every tensor that has been read."""
        self.config = config
        self.ops = ops
        self.device = ops.device
        self.quantization = quantization
        self.checkpoint = checkpoint
        self._report = report

    def stored(self, name: str) -> Tensor:
        """As it lies in the file: a mapped tensor on the CPU."""
        return self.checkpoint.stored(name)

    def plain(self, name: str) -> Tensor:
        """Any shape, float32, on the device."""
        tensor = self.stored(name)
        self._count(tensor)
        return tensor.to(self.device).to(torch.float32)

    def norm(self, name: str) -> Tensor:
        return self.plain(f"{name}.weight")

    def plain_linear(self, name: str) -> Linear:
        """A float32 product whose weight `name` is stored in F32 or BF16."""
        return partial(self.ops.linear, weight=self.ops.pack_linear(self.plain(name)))

    def linear(self, name: str) -> Linear:
        """The product `name`.weight, in the quantised form that it is stored in."""
        weight, is_quantized = self.matrix(name)
        return self.product(weight, quantizes=is_quantized)

    def product(self, weight: Tensor, *, quantizes: bool) -> Linear:
        """A product with `weight` [out, in] float32, whose input is rounded to FP8 before if asked."""
        packed = self.ops.pack_linear(weight)
        if not (quantizes and self.quantization.activations):
            return partial(self.ops.linear, weight=packed)
        return lambda x: self.ops.linear(fake_quantize_activation(x), packed)

    def matrix(self, name: str) -> tuple[Tensor, bool]:
        """`name`.weight [out, in] in float32, and whether it is stored quantised."""
        weight = self.stored(f"{name}.weight")
        if weight.dtype not in (_FP8, torch.int8):
            return self.plain(f"{name}.weight"), False
        scales = self.stored(f"{name}.scale")
        self._count(weight, scales)
        weight, scales = weight.to(self.device), scales.to(self.device)
        if weight.dtype == torch.int8:
            return dequantize_fp4(weight, scales), True
        return dequantize_fp8_blocks(weight, scales, self.config.scale_block), True

    def _count(self, *tensors: Tensor) -> None:
        self._report(sum(prod(tensor.shape) * tensor.element_size() for tensor in tensors))
