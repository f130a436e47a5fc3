"""The figures of a Llama model, from config.json or from GGUF fields. Knows nothing of tensors' contents.

What is not understood is refused by name: a model that runs with a part of it ignored gives wrong tokens, not errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_workers.checkpoint import Checkpoint, bad_file, unsupported
from deepinfer_workers.config_fields import Fields


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE for longer contexts: low frequencies are divided by `factor`, those in between blend over."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def apply(self, inv_freq: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        turns = self.original_context * inv_freq / (2 * pi)  # in the original context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return (1.0 - blend) * inv_freq / self.factor + blend * inv_freq


@dataclass(frozen=True)
class LlamaConfig:
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_len: int
    rms_eps: float
    rope_theta: float
    scaling: Llama3Scaling | None = None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> LlamaConfig:
        """Raises `WorkerFault`."""
        if checkpoint.architecture.startswith("gguf:"):
            return _from_gguf(checkpoint)
        return _from_hf(checkpoint)

    def inv_freq(self) -> npt.NDArray[np.float64]:
        """[D / 2]: radians a position, without what a checkpoint's own rope factors add."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        inv_freq: npt.NDArray[np.float64] = self.rope_theta**-exponents
        return inv_freq if self.scaling is None else self.scaling.apply(inv_freq)


def _from_gguf(checkpoint: Checkpoint) -> LlamaConfig:
    fields = Fields(checkpoint.name, checkpoint.metadata, "llama.")
    fields.refuse_unless("rope.scaling.type", "none")
    fields.refuse_unless("expert_count", 0)
    fields.refuse_unless("attention.sliding_window", 0)
    hidden_size, num_heads = fields.size("embedding_length"), fields.size("attention.head_count")
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise bad_file(checkpoint.name, "tensor token_embd.weight was expected and is missing")
    config = LlamaConfig(
        num_layers=fields.size("block_count"),
        hidden_size=hidden_size,
        ffn_size=fields.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=fields.size("attention.key_length", max(hidden_size // num_heads, 1)),
        vocab_size=embedding.shape[0],
        max_len=fields.size("context_length"),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
    )
    fields.refuse_unless("attention.value_length", config.head_dim)
    fields.refuse_unless("rope.dimension_count", config.head_dim)
    return _checked(checkpoint.name, config)


def _from_hf(checkpoint: Checkpoint) -> LlamaConfig:
    raw = checkpoint.metadata
    fields = Fields("config.json", raw)
    for key, *allowed in (
        ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False), ("sliding_window",),
        ("quantization_config",), ("partial_rotary_factor", 1.0),
    ):  # fmt: skip
        fields.refuse_unless(key, *allowed)
    rope = _rope_of(raw)
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    config = LlamaConfig(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", max(hidden_size // num_heads, 1)),
        vocab_size=fields.size("vocab_size"),
        max_len=fields.size("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps"),
        rope_theta=Fields("config.json", rope).number("rope_theta", raw.get("rope_theta", 10_000.0)),
        scaling=_scaling_of(rope),
    )
    return _checked("config.json", config)


def _rope_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the older `rope_scaling` or the newer `rope_parameters` says."""
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if value is not None:
            if not isinstance(value, dict):
                raise bad_file("config.json", f"{key}: an object was expected, {value!r} came")
            return value
    return {}


def _scaling_of(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise unsupported("config.json", f"RoPE scaling {kind!r} is not supported")
    fields = Fields("config.json", rope)
    scaling = Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_context=fields.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise bad_file("config.json", "high_freq_factor was expected to be above low_freq_factor")
    return scaling


def _checked(name: str, config: LlamaConfig) -> LlamaConfig:
    if config.num_heads % config.num_kv_heads:
        raise bad_file(name, f"{config.num_heads} heads are no multiple of {config.num_kv_heads} kv heads")
    if config.head_dim % 2:
        raise bad_file(name, f"an even head dimension was expected, {config.head_dim} came")
    if config.num_layers > 1024:
        raise bad_file(name, f"at most 1024 layers were expected, {config.num_layers} came")
    return config
