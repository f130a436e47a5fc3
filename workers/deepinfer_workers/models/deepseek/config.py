"""The figures of a DeepSeek-V4.1 or V4 model. Knows nothing of tensors' contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, Final, Literal

Family = Literal["v4.1", "v4"]
SCALE_GROUP: Final = 32
"""Numbers that share a scale, where not a square of them does: rows of weights, of activations and of cached keys are
whole groups of it."""


@dataclass(frozen=True)
class Yarn:
    """RoPE of the layers with compressed keys, for contexts longer than it was trained for."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_len: int


@dataclass(frozen=True)
class EngramConfig:
    """Tables of n-grams, looked up by token ids alone."""

    layers: tuple[int, ...]
    table_rows: tuple[int, ...]
    """Of each of `layers`: the sum of its primes."""
    max_ngram: int
    vocab_size: int
    """The primes lie above it."""
    num_heads: int
    head_dim: int
    pad_id: int
    """In the full vocabulary."""
    compressed_vocab_size: int


@dataclass(frozen=True)
class DsparkConfig:
    """The draft stages."""

    num_stages: int
    block_size: int
    noise_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True)
class VisionConfig:
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True)
class DeepseekConfig:
    """One model of the family. Layers count from 0, without the draft stages."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_len: int
    rms_eps: float
    # Attention
    num_heads: int
    head_dim: int
    rope_dim: int
    """The last dims of every head are turned."""
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window: int
    # Compressed keys
    ratios: tuple[int, ...]
    """Of every layer: tokens a compressed row; 0 where there is the window alone."""
    kv_sources: tuple[int, ...]
    """Layers with a compressor of their own; those above them read its rows. V4: every layer whose ratio is not 0."""
    index_sources: tuple[int, ...]
    """Layers that choose rows; those above them take the same. V4: the layers of ratio 4."""
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int | None
    """The layer whose scores bound what later index sources may choose."""
    candidate_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_theta: float
    yarn: Yarn | None
    # Experts
    num_experts: int
    experts_per_token: int
    expert_width: int
    route_scale: float
    swiglu_limit: float
    num_hash_layers: int
    """V4: the first layers choose experts by token id."""
    # Streams
    hc_mult: int
    hc_iters: int
    hc_eps: float
    # Storage
    is_quantized: bool
    """FP8 linears and FP4 experts, as released; else plain BF16 or F32 weights without scales."""
    scale_block: int
    """Side of the square that shares an FP8 weight's scale."""
    image_token_id: int | None
    # Parts that not every model has
    engram: EngramConfig | None
    dspark: DsparkConfig | None
    vision: VisionConfig | None
    num_mtp_layers: int = 0
    """V4 before DSpark: draft layers of the older kind. They are checked with the rest, and never served."""

    @classmethod
    def read(cls, metadata: Mapping[str, Any], name: str) -> DeepseekConfig:
        """From the released nested config.json, the flat one of the official inference code, or a V4 config.json.

        `name` is the file's, for messages. Raises `WorkerFault`.
        """
        from deepinfer_workers.models.deepseek.config_reader import read_deepseek  # it needs the classes above

        return read_deepseek(metadata, name)

    @property
    def num_stages(self) -> int:
        """Draft stages, stored as `mtp.0`, `mtp.1` and so on."""
        return self.num_mtp_layers if self.dspark is None else self.dspark.num_stages

    @property
    def num_draft_experts(self) -> int:
        """Of a draft stage."""
        return self.num_experts if self.dspark is None else self.dspark.num_experts

    @property
    def decoder_start(self) -> int:
        """V4.1: the first layer of the decoder half, the last that owns global keys. V4: the number of layers."""
        return self.kv_sources[-1] if self.family == "v4.1" else self.num_layers

    @property
    def block_multiple(self) -> int:
        """Blocks of a multiple of as many tokens hold whole compressed rows of every layer."""
        return lcm(*(ratio for ratio in self.ratios if ratio))

    def kv_source_of(self, layer: int) -> int | None:
        """The layer whose compressed keys `layer` attends to."""
        if not self.ratios[layer]:
            return None
        return max(source for source in self.kv_sources if source <= layer)

    def index_source_of(self, layer: int) -> int | None:
        """The layer whose choice of rows `layer` takes; `None`: window only, or all visible rows (V4, ratio 128)."""
        if not self.ratios[layer] or (self.family == "v4" and layer not in self.index_sources):
            return None
        return max(source for source in self.index_sources if source <= layer)
