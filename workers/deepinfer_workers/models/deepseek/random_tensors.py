"""Random tensors for a checkpoint of the family, stored as its config says. Writes nothing.

Every value depends on the seed, the tensor's name and its shape alone, and has a size that keeps a forward pass in
range: matrices keep the length of their input, norms are near 1, hyper-connections mix gently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Final

import torch
from torch import Tensor

from deepinfer_kernels import quantize_fp4, quantize_fp8_blocks, quantize_fp8_rows
from deepinfer_workers.models.deepseek.config import SCALE_GROUP, DeepseekConfig
from deepinfer_workers.models.deepseek.tensors import TensorSpec
from deepinfer_workers.safetensors_file import DTYPES

DRAWN: Final = 1 << 18
"""Numbers of a matrix that are drawn, at least. A larger one repeats its first rows, each time with its columns moved
on, so that no row comes twice: a layer of the release would take minutes otherwise."""
HEAD_SCALE: Final = 2.0
"""Logits are this far apart: near ties are rare."""
_NEAR_ONE: Final = ("norm.weight", "norm1.weight", "norm2.weight", "engram.q_weight", "engram.k_weight")
_SCALES: Final = (
    ("embed.weight", 1.0),  # also the n-gram tables and the Markov table
    ("_base", 0.5), ("_scale", 0.5), ("attn_sink", 1.0), (".bias", 0.1), (".bias_vl", 0.1), (".ape", 0.1),
    ("image_start", 1.0), ("image_end", 1.0), ("image_newline", 1.0),
)  # fmt: skip


class RandomTensors:
    """The tensors of `specs`, one by one."""

    def __init__(self, config: DeepseekConfig, specs: Mapping[str, TensorSpec], seed: int) -> None:
        self._config = config
        self._specs = specs
        self._seed = seed

    def parts(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The tensor, and its scales where it has any."""
        spec, scale = self._specs[name], f"{name.removesuffix('.weight')}.scale"
        if scale in self._specs:
            yield from zip((name, scale), self._quantized(name, spec), strict=True)
        elif name.endswith("tid2eid"):
            yield name, self._expert_ids(name, spec.shape)
        else:
            dtype = DTYPES[spec.dtypes[0]]
            is_matrix = len(spec.shape) == 2
            num_drawn = _num_drawn(*spec.shape) if is_matrix else spec.shape[0]
            drawn = self._values(name, (num_drawn, *spec.shape[1:])).to(dtype)
            yield name, _repeated(drawn, spec.shape[0], 1) if is_matrix else drawn

    def _quantized(self, name: str, spec: TensorSpec) -> tuple[Tensor, Tensor]:
        """Codes and scales. Groups of numbers that share a scale move together."""
        rows, columns = spec.shape
        block = self._config.scale_block
        if spec.dtypes[0] == "I8":
            codes, scales = quantize_fp4(self._values(name, (_num_drawn(rows, 2 * columns, SCALE_GROUP), 2 * columns)))
            return _repeated(codes, rows, SCALE_GROUP // 2), _repeated(scales, rows, 1)
        if spec.is_table:
            codes, scales = quantize_fp8_rows(self._values(name, (_num_drawn(rows, columns, SCALE_GROUP), columns)))
            return _repeated(codes, rows, SCALE_GROUP), _repeated(scales, rows, 1)
        num_drawn = rows if columns % block else _num_drawn(rows, columns, block, block)
        codes, scales = quantize_fp8_blocks(self._values(name, (num_drawn, columns)), block)
        return _repeated(codes, rows, block), _repeated(scales, -(-rows // block), 1)

    def _values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """float32"""
        noise = torch.randn(shape, generator=self._generator(name))
        if name.endswith(_NEAR_ONE):
            return 1 + 0.1 * noise
        for ending, scale in _SCALES:
            if name.endswith(ending):
                return noise * scale
        return noise * ((HEAD_SCALE if name == "head.weight" else 1.0) / sqrt(shape[-1]))

    def _expert_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """int64: for every token as many experts as it goes to, none twice."""
        scores = torch.rand((shape[0], self._config.num_experts), generator=self._generator(name))
        ids: Tensor = scores.topk(shape[1], sorted=False).indices
        return ids

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _num_drawn(rows: int, columns: int, group: int = 1, multiple: int = 1) -> int:
    """Rows of a matrix that are drawn, a `multiple` or all: so many that turns of a `group` of columns all differ."""
    least = max(-(-rows * group // columns), DRAWN // columns, 1)
    return min(rows, -(-least // multiple) * multiple)


def _repeated(drawn: Tensor, rows: int, step: int) -> Tensor:
    """`rows` rows: those of `drawn` again and again, the columns moved on by `step` each time."""
    if len(drawn) >= rows:
        return drawn
    source = drawn.view(torch.uint8 if drawn.element_size() == 1 else drawn.dtype)  # torch moves no 8-bit floats
    out = source.new_empty(rows, *drawn.shape[1:])
    for turn, start in enumerate(range(0, rows, len(drawn))):
        count = min(len(drawn), rows - start)
        out[start : start + count] = source[:count].roll(turn * step, dims=1)
    return out.view(drawn.dtype)
