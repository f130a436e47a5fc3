"""The Llama forward pass over a paged cache. Knows nothing of slots, plans or sampling; computes by `ops` alone.

Legend: `T` packed positions, `R` sampled rows, `C` hidden size, `H` query heads, `K` kv heads, `D` head dim, `F`
feed-forward size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_kernels import LinearWeight, Ops
from deepinfer_workers.batch import Admission, DeviceBatch, Ints, Limits
from deepinfer_workers.checkpoint import Checkpoint
from deepinfer_workers.kv import CacheShape, PagedKVCache
from deepinfer_workers.models.llama_config import LlamaConfig
from deepinfer_workers.models.llama_weights import LlamaWeights
from deepinfer_workers.models.model import CacheNeeds, Drafter, ModelOptions, Step, check_max_len
from deepinfer_workers.runner import WorkerFault


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # [C]
    qkv: LinearWeight  # [(H + 2K) * D, C]
    attention_out: LinearWeight  # [C, H * D]
    ffn_norm: Tensor  # [C]
    gate_up: LinearWeight  # [2F, C]
    down: LinearWeight  # [C, F]


class Llama:
    """A `Model`: one paged cache of keys and values, and nothing by slot."""

    drafter: Drafter | None = None
    block_multiple = 1
    needs_host = False

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, options: ModelOptions, report: Callable[[int, int], None]
    ) -> None:
        """Raises `WorkerFault`."""
        self.config = LlamaConfig.read(checkpoint)
        if options.num_drafts > 0:
            text = f"num_drafts: this architecture has no draft stages, {options.num_drafts} came"
            raise WorkerFault("setting", text)
        check_max_len(checkpoint.name, options.max_len, self.config.max_len)
        self.vocab_size = self.config.vocab_size
        self.max_len = options.max_len or self.config.max_len
        self._ops = ops
        weights = LlamaWeights(checkpoint, self.config, report)
        self._embedding = weights.read("model.embed_tokens").to(ops.device, ops.dtype)  # [V, C]
        head = self._embedding if weights.is_tied else weights.read("lm_head").to(ops.device)
        self._head = ops.pack_project(head)  # [V, C]
        self._norm = weights.read("model.norm").to(ops.device)  # [C]
        self._layers = [self._read_layer(weights, layer) for layer in range(self.config.num_layers)]
        self._cos, self._sin = self._rope_tables(weights.read_rope_factors())  # [max_len, D/2] each

    @property
    def cache_shape(self) -> CacheShape:
        config = self.config
        return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, self._ops.cache_dtype)

    @property
    def group_size(self) -> int:
        """Query heads a kv head."""
        return self.config.num_heads // self.config.num_kv_heads

    def cache_needs(self, block_size: int) -> CacheNeeds:
        position_bytes = self.cache_shape.position_bytes
        return CacheNeeds(position_bytes * block_size, token_bytes=position_bytes)

    def allocate(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._cache = PagedKVCache(self.cache_shape, limits.num_blocks, limits.block_size, self._ops.device)

    def typical_steps(self) -> list[Ints]:
        return self._ops.typical_steps(self.config.num_kv_heads)

    def admit(self, admissions: Sequence[Admission]) -> None:
        pass

    def prefetch(self, batch: DeviceBatch, starts: Ints) -> None:
        pass

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, C] behind the last norm; writes the keys and values of all positions."""
        ops, eps = self._ops, self.config.rms_eps
        attention = ops.plan_attention(
            step.rows, block_size=self._block_size, group_size=self.group_size, num_kv=self.config.num_kv_heads
        )
        cos = self._cos.index_select(0, step.rows.positions)  # [T, D/2]
        sin = self._sin.index_select(0, step.rows.positions)
        x = ops.embedding(step.tokens, self._embedding)  # [T, C]
        normed = ops.rms_norm(x, self._layers[0].attention_norm, eps)  # [T, C]
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            keys, values = self._cache.layer(index)
            heads = ops.linear(normed, layer.qkv).view(normed.shape[0], -1, self.config.head_dim)  # [T, H + 2K, D]
            queries = ops.rotate_and_cache(heads, cos, sin, keys, values, step.cache_indices)  # [T, H, D]
            attended = ops.paged_attention(queries, keys, values, attention)  # [T, H * D]
            x, normed = ops.add_rms_norm(x, ops.linear(attended, layer.attention_out), layer.ffn_norm, eps)
            delta = ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)  # [T, C]
            x, normed = ops.add_rms_norm(x, delta, next_norm, eps)
        return normed

    @property
    def capture_lengths(self) -> Sequence[int]:
        return (self.max_len,)

    def is_flat(self, batch: DeviceBatch) -> bool:
        return True

    def stage(self, step: Step) -> None:
        """Nothing."""

    def forward_flat(self, step: Step, most_positions: int) -> Tensor:
        return self.forward(step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of `hidden` [R, C]: [R, V] float32."""
        if not hidden.shape[0]:  # prompts that are not complete yet
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return self._ops.project(hidden, self._head)

    def close(self) -> None:
        pass

    def _read_layer(self, weights: LlamaWeights, layer: int) -> _Layer:
        def pack(*names: str) -> LinearWeight:
            parts = [weights.read(name, layer).to(self._ops.device) for name in names]
            return self._ops.pack_linear(parts[0] if len(parts) == 1 else torch.cat(parts))

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
