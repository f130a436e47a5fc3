"""The trained tensors: names as released, shapes, how each is stored, and where it starts. Computes no forward pass.

The routed experts of a layer are one tensor: `ffn.experts.w1` [E, W, C] stands for the released `ffn.experts.0.w1` and
so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_kernels import (
    dequantize_fp4,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
    quantize_fp4,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)
from examples.train_nano.engram_rows import table_sizes
from examples.train_nano.figures import Figures

Weights = dict[str, Tensor]
SCALE_BLOCK = 32
_STREAM_BIAS = 2.0
"""A sublayer reads mostly one stream at first, and each the next one."""
_KEEP_BIAS = 4.0
"""A stream stays what it is at first."""


class Storage(StrEnum):
    """How a checkpoint holds a tensor."""

    FP8 = "fp8"
    FP8_ROWS = "fp8 rows"
    FP4 = "fp4"
    BF16 = "bf16"
    F32 = "f32"


class Parameter(NamedTuple):
    shape: tuple[int, ...]
    storage: Storage
    start: float
    """Standard deviation around zero; norms start at 1 instead."""

    @property
    def is_norm(self) -> bool:
        return self.start < 0


_NORM = -1.0


def parameters(figures: Figures) -> dict[str, Parameter]:
    """All of them, the gates' biases included, which are not trained by gradients."""
    hidden = figures.hidden_size
    found = {"embed.weight": Parameter((figures.vocab_size, hidden), Storage.BF16, 1.0)}
    for layer in range(figures.num_layers):
        found |= {f"layers.{layer}.{name}": parameter for name, parameter in _layer(figures, layer)}
    found["norm.weight"] = Parameter((hidden,), Storage.BF16, _NORM)
    found["head.weight"] = _matrix(figures.vocab_size, hidden, Storage.BF16)
    return found


def draft_parameters(figures: Figures) -> dict[str, Parameter]:
    """Those of the draft stages. Raises `ValueError` where there are none."""
    stages, drafts = figures.of_stages, figures.drafts
    assert drafts is not None
    hidden, last = figures.hidden_size, drafts.num_stages - 1
    found = {
        "mtp.0.main_proj.weight": _matrix(hidden, len(drafts.target_layers) * hidden),
        "mtp.0.main_norm.weight": Parameter((hidden,), Storage.BF16, _NORM),
    }
    for stage in range(drafts.num_stages):
        found |= {f"mtp.{stage}.{name}": parameter for name, parameter in _layer(stages, stage)}
    markov = (figures.vocab_size, drafts.markov_rank)
    return found | {
        f"mtp.{last}.norm.weight": Parameter((hidden,), Storage.BF16, _NORM),
        f"mtp.{last}.markov_head.embed.weight": Parameter(markov, Storage.BF16, 1.0),
        f"mtp.{last}.markov_head.head.weight": Parameter(markov, Storage.BF16, 0.1 / sqrt(drafts.markov_rank)),
        f"mtp.{last}.confidence_head.proj.weight": Parameter((1, hidden + drafts.markov_rank), Storage.BF16, 1e-3),
    }


def of_layer(weights: Weights, layer: int, part: str) -> Weights:
    """Those of a `part`, without what names of the layer begin with: one compiled function serves layers of a kind."""
    prefix = f"layers.{layer}."
    found = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix + part)}
    return found


def of_stage(weights: Weights, stage: int) -> Weights:
    """As `of_layer`, of a draft stage."""
    prefix = f"mtp.{stage}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def initial(figures: Figures, seed: int, device: torch.device, found: dict[str, Parameter] | None = None) -> Weights:
    """Of the model's `parameters`, or of those that were `found` otherwise."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, parameter in (parameters(figures) if found is None else found).items():
        if parameter.is_norm:
            value = torch.ones(parameter.shape)
        else:
            value = torch.randn(parameter.shape, generator=generator) * parameter.start
        if "hc_" in name:
            value = _streams_start(figures, name, value)
        weights[name] = value.to(device)
    return weights


def stored(name: str, weight: Tensor, storage: Storage) -> Tensor:
    """What a checkpoint keeps of `weight`: as many dimensions, float32."""
    if storage is Storage.F32:
        return weight
    if storage is Storage.BF16:
        return weight.to(torch.bfloat16).float()
    if storage is Storage.FP8:
        return dequantize_fp8_blocks(*quantize_fp8_blocks(weight, SCALE_BLOCK), SCALE_BLOCK)
    if storage is Storage.FP8_ROWS:
        return dequantize_fp8_rows(*quantize_fp8_rows(weight))
    rows = weight.flatten(0, -2)
    return dequantize_fp4(*quantize_fp4(rows)).view(weight.shape)


def _layer(figures: Figures, layer: int) -> Iterator[tuple[str, Parameter]]:
    hidden, heads, dim = figures.hidden_size, figures.num_heads, figures.head_dim
    narrow = 1 / sqrt(2 * figures.num_layers)  # what is added to the streams starts small
    for name, size in (
        ("attn_norm", hidden),
        ("ffn_norm", hidden),
        ("attn.q_norm", figures.q_lora_rank),
        ("attn.kv_norm", dim),
    ):
        yield f"{name}.weight", Parameter((size,), Storage.BF16, _NORM)
    streams = figures.hc_mult
    for part in ("attn", "ffn"):
        size = 2 * streams + streams**2
        yield f"hc_{part}_fn", Parameter((size, streams * hidden), Storage.F32, 1 / sqrt(streams * hidden))
        yield f"hc_{part}_base", Parameter((size,), Storage.F32, 0.0)
        yield f"hc_{part}_scale", Parameter((3,), Storage.F32, 0.0)
    group, outputs = heads * dim // figures.o_groups, figures.o_groups * figures.o_lora_rank
    yield "attn.wq_a.weight", _matrix(figures.q_lora_rank, hidden)
    yield "attn.wq_b.weight", _matrix(heads * dim, figures.q_lora_rank)
    yield "attn.wkv.weight", _matrix(dim, hidden)
    yield "attn.wo_a.weight", _matrix(outputs, group)
    yield "attn.wo_b.weight", _matrix(hidden, outputs, scale=narrow)
    yield "attn.attn_sink", Parameter((heads,), Storage.F32, 0.0)
    yield from _rows(figures, layer)
    yield from _experts(figures, narrow)
    engram = figures.engram
    if engram is not None and layer in engram.layers:
        columns = (engram.max_ngram - 1) * engram.num_heads * engram.head_dim
        num_rows = int(table_sizes(engram)[engram.layers.index(layer)].sum())
        yield "engram.embed.weight", Parameter((num_rows, engram.head_dim), Storage.FP8_ROWS, 1.0)
        yield "engram.wkv.weight", _matrix((streams + 1) * hidden, columns, scale=0.5)
        for name in ("q_weight", "k_weight"):
            yield f"engram.{name}", Parameter((streams, hidden), Storage.BF16, _NORM)


def _rows(figures: Figures, layer: int) -> Iterator[tuple[str, Parameter]]:
    """What makes compressed rows and chooses among them."""
    hidden, dim = figures.hidden_size, figures.head_dim
    if layer in figures.kv_sources:
        yield "attn.compressor.wkv.weight", _matrix(dim, hidden, Storage.BF16)
        if figures.ratios[layer] > 1:
            yield "attn.compressor.wgate.weight", _matrix(dim, hidden, Storage.BF16)
        yield "attn.compressor.norm.weight", Parameter((dim,), Storage.BF16, _NORM)
        yield "attn.indexer.wk.weight", _matrix(figures.index_dim, dim, Storage.BF16)
        yield "attn.indexer.k_norm.weight", Parameter((figures.index_dim,), Storage.BF16, _NORM)
    if layer in figures.index_sources:
        yield "attn.indexer.wq_b.weight", _matrix(figures.index_heads * figures.index_dim, figures.q_lora_rank)
        yield "attn.indexer.weights_proj.weight", _matrix(figures.index_heads, hidden, Storage.BF16)


def _experts(figures: Figures, narrow: float) -> Iterator[tuple[str, Parameter]]:
    hidden, width, num = figures.hidden_size, figures.expert_width, figures.num_experts
    yield "ffn.gate.weight", _matrix(num, hidden, Storage.BF16)
    yield "ffn.gate.bias", Parameter((num,), Storage.F32, 0.0)
    for name, rows, columns, scale in (
        ("w1", width, hidden, 1.0),
        ("w3", width, hidden, 1.0),
        ("w2", hidden, width, narrow),
    ):
        yield f"ffn.shared_experts.{name}.weight", _matrix(rows, columns, scale=scale)
        yield f"ffn.experts.{name}", Parameter((num, rows, columns), Storage.FP4, scale / sqrt(columns))


def _matrix(rows: int, columns: int, storage: Storage = Storage.FP8, *, scale: float = 1.0) -> Parameter:
    """Starts by keeping the length of its input."""
    return Parameter((rows, columns), storage, scale / sqrt(columns))


def _streams_start(figures: Figures, name: str, value: Tensor) -> Tensor:
    """The mixes of streams at the start: read one, write all, keep each."""
    streams = figures.hc_mult
    if name.endswith("_scale"):
        return torch.full_like(value, 0.1)
    if not name.endswith("_base"):
        return value
    sublayer = 2 * int(name.split(".")[1]) + ("hc_ffn" in name)
    read = torch.full((streams,), -_STREAM_BIAS)
    read[(sublayer + 1) % streams] = _STREAM_BIAS  # the next sublayer reads by these
    return torch.cat((read, torch.zeros(streams), _KEEP_BIAS * torch.eye(streams).flatten()))
