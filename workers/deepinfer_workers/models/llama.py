"""The Llama forward pass over a paged cache. Knows nothing of slots, plans or sampling; computes by `ops` alone.

Legend: `T` packed positions, `R` sampled rows, `C` hidden size, `H` query heads, `K` kv heads, `D` head dim, `F`
feed-forward size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_kernels import AttentionPlan, LinearWeight, Ops
from deepinfer_workers.checkpoint import Checkpoint
from deepinfer_workers.kv import CacheShape, PagedKVCache
from deepinfer_workers.models.llama_config import LlamaConfig
from deepinfer_workers.models.llama_weights import LlamaWeights


@dataclass(frozen=True)
class Positions:
    """Where the positions of a step are."""

    tokens: Tensor
    """[T]"""
    positions: Tensor
    """[T]: index in the sequence."""
    cache_indices: Tensor
    """[T]: where their keys and values go."""
    attention: AttentionPlan
    sampled: Tensor
    """[R]: which of them need logits."""


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # [C]
    qkv: LinearWeight  # [(H + 2K) * D, C]
    attention_out: LinearWeight  # [C, H * D]
    ffn_norm: Tensor  # [C]
    gate_up: LinearWeight  # [2F, C]
    down: LinearWeight  # [C, F]


class Llama:
    """Weights and forward pass."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, max_len: int, report: Callable[[int, int], None]) -> None:
        self.config = LlamaConfig.read(checkpoint)
        self.max_len = max_len or self.config.max_len
        self._ops = ops
        weights = LlamaWeights(checkpoint, self.config, report)
        self._embedding = weights.read("model.embed_tokens").to(ops.device)  # [V, C]
        head = self._embedding if weights.is_tied else weights.read("lm_head").to(ops.device)
        self._head = ops.pack_linear(head)  # [V, C]
        self._norm = weights.read("model.norm").to(ops.device)  # [C]
        self._layers = [self._read_layer(weights, layer) for layer in range(self.config.num_layers)]
        self._cos, self._sin = self._rope_tables(weights.read_rope_factors())  # [max_len, D/2] each

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def group_size(self) -> int:
        """Query heads a kv head."""
        return self.config.num_heads // self.config.num_kv_heads

    def forward(self, step: Positions, cache: PagedKVCache) -> Tensor:
        """Logits [R, V] of the sampled positions; writes the keys and values of all."""
        ops, eps = self._ops, self.config.rms_eps
        cos = self._cos.index_select(0, step.positions)[:, None]  # [T, 1, D/2]
        sin = self._sin.index_select(0, step.positions)[:, None]
        x = ops.embedding(step.tokens, self._embedding)  # [T, C]
        for index, layer in enumerate(self._layers):
            keys, values = cache.layer(index)
            heads = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)  # [T, (H + 2K) * D]
            x = x + ops.linear(self._attend(heads, cos, sin, keys, values, step), layer.attention_out)
            x = x + ops.linear(
                ops.silu_mul(ops.linear(ops.rms_norm(x, layer.ffn_norm, eps), layer.gate_up)), layer.down
            )
        if not step.sampled.shape[0]:  # prompts that are not complete yet
            return x.new_empty(0, self.vocab_size)
        return ops.linear(ops.rms_norm(x.index_select(0, step.sampled), self._norm, eps), self._head)

    def _attend(self, heads: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, step: Positions) -> Tensor:
        config = self.config
        num_turned = config.num_heads + config.num_kv_heads
        heads = heads.view(-1, num_turned + config.num_kv_heads, config.head_dim)  # [T, H + 2K, D]
        turned = self._ops.rotary(heads[:, :num_turned], cos, sin)  # [T, H + K, D]
        self._ops.kv_write(keys, turned[:, config.num_heads :], step.cache_indices)
        self._ops.kv_write(values, heads[:, num_turned:], step.cache_indices)
        return self._ops.paged_attention(turned[:, : config.num_heads], keys, values, step.attention)  # [T, H * D]

    def _read_layer(self, weights: LlamaWeights, layer: int) -> _Layer:
        def pack(*names: str) -> LinearWeight:
            return self._ops.pack_linear(torch.cat([weights.read(name, layer) for name in names]).to(self._ops.device))

        return _Layer(
            attention_norm=weights.read("input_layernorm", layer).to(self._ops.device),
            qkv=pack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            attention_out=pack("self_attn.o_proj"),
            ffn_norm=weights.read("post_attention_layernorm", layer).to(self._ops.device),
            gate_up=pack("mlp.gate_proj", "mlp.up_proj"),
            down=pack("mlp.down_proj"),
        )

    def _rope_tables(self, factors: Tensor | None) -> tuple[Tensor, Tensor]:
        inv_freq = torch.from_numpy(self.config.inv_freq())  # [D/2] float64
        if factors is not None:
            inv_freq = inv_freq / factors.to(torch.float64)
        angles = torch.arange(self.max_len, dtype=torch.float64)[:, None] * inv_freq  # [max_len, D/2]
        device = self._ops.device
        return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)
