"""FLOPs of a DeepSeek-V4.1 prompt by formula: from a model's shapes, and from the rows that its layers computed.

An addition and its multiplication are two FLOPs. What is no product (norms, roundings, hyper-connections behind their
mixes) is left out. Knows nothing of how rows come to be computed or not, and measures nothing.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

import numpy as np

from deepinfer_workers.batch import Ints
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.model import RowCounts
from deepinfer_workers.models.deepseek.tensors import TensorSpec, expected_tensors

_EVERY_POSITION: Final = frozenset(
    {"attention", "indexer", "hyper-connections", "gate", "shared experts", "routed experts", "engram projection"}
)


class Flops(NamedTuple):
    """Of one prompt, or of one of its tokens."""

    products: float
    """With weights."""
    attention: float
    """Queries with keys and their weights with values."""
    scores: float
    """Index queries with index keys."""

    @property
    def total(self) -> float:
        return sum(self)

    def per_token(self, num_tokens: int) -> Flops:
        return Flops(*(part / num_tokens for part in self))


class LayerMatrices(NamedTuple):
    """Weights that a row goes through, in one layer."""

    position: int
    """Attention, experts and all else between the streams."""
    compressor: int
    """What makes compressed rows: every token of a source layer."""
    index_key: int
    """Every compressed row of a source layer."""


@lru_cache(maxsize=8)
def layer_matrices(config: DeepseekConfig) -> list[LayerMatrices]:
    """Of each layer, with as many routed experts as a token is sent to. A pure memo."""
    sizes: Counter[tuple[int, str]] = Counter()
    for name, spec in expected_tensors(config).items():
        part = _part(name, spec)
        if spec.layer is not None and part and (spec.expert or 0) < config.experts_per_token:  # all are alike
            sizes[spec.layer, part] += prod(spec.shape) * (2 if spec.dtypes[0] == "I8" else 1)  # two codes a byte
    return [
        LayerMatrices(*(sizes[layer, part] for part in LayerMatrices._fields)) for layer in range(config.num_layers)
    ]


def prompt_flops(config: DeepseekConfig, rows: RowCounts, num_tokens: int) -> Flops:
    """Of one prompt of `num_tokens`, computed from its beginning; a layer's `rows` are its last ones.

    Keys of a position: those of its window that its layer computed, and the compressed rows that it chooses. An index
    source scores every row that a position sees; above the candidate source, candidates alone.
    """
    products = 2.0 * rows.head * config.hidden_size * config.vocab_size
    attention = scores = 0.0
    for layer, weights in enumerate(layer_matrices(config)):
        num_rows, ratio = int(rows.through_layer[layer]), config.ratios[layer]
        products += 2.0 * (num_rows * weights.position + int(rows.into_rows[layer]) * weights.compressor)
        if ratio:
            products += 2.0 * (int(rows.into_rows[layer]) // ratio) * weights.index_key
        positions = np.arange(num_tokens - num_rows, num_tokens)
        attention += 4.0 * config.num_heads * config.head_dim * _num_keys(config, ratio, positions)
        if layer in config.index_sources:
            scored = _num_scored(config, layer, (positions + 1) // ratio)
            scores += 2.0 * config.index_heads * config.index_dim * scored
    return Flops(products, attention, scores)


def _num_keys(config: DeepseekConfig, ratio: int, positions: Ints) -> int:
    in_window = np.minimum(np.arange(1, len(positions) + 1), config.window)  # windows begin with the rows
    chosen = np.minimum((positions + 1) // ratio, config.index_topk) if ratio else np.zeros_like(positions)
    return int((in_window + chosen).sum())


def _num_scored(config: DeepseekConfig, layer: int, num_visible: Ints) -> int:
    if config.candidate_source is None or layer <= config.candidate_source:
        return int(num_visible.sum())
    return int(np.minimum(num_visible, config.candidate_blocks * config.candidate_block_size).sum())


def _part(name: str, spec: TensorSpec) -> str | None:
    """The field of `LayerMatrices` that counts it; `None`: it is no matrix of a product."""
    if len(spec.shape) != 2 or name.endswith((".scale", ".q_weight", ".k_weight")):
        return None
    if spec.group == "compressor":
        return "compressor"
    if name.endswith("indexer.wk.weight"):
        return "index_key"
    return "position" if spec.group in _EVERY_POSITION else None
