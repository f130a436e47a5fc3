"""Random small Llama checkpoints on disk, and their forward pass written out in plain float64 numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TinyLlama:
    num_layers: int = 2
    hidden: int = 48
    ffn: int = 80
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 199
    max_len: int = 512
    theta: float = 10_000.0
    is_tied: bool = False
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "tie_word_embeddings": self.is_tied,
            **self.extra,
        }

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        rng = np.random.default_rng(self.seed)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (self.vocab, self.hidden)}
        if not self.is_tied:
            shapes["lm_head"] = (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            shapes |= {
                f"model.layers.{layer}.{name}": shape
                for name, shape in {
                    "self_attn.q_proj": (queries, self.hidden),
                    "self_attn.k_proj": (keys, self.hidden),
                    "self_attn.v_proj": (keys, self.hidden),
                    "self_attn.o_proj": (self.hidden, queries),
                    "mlp.gate_proj": (self.ffn, self.hidden),
                    "mlp.up_proj": (self.ffn, self.hidden),
                    "mlp.down_proj": (self.hidden, self.ffn),
                }.items()
            }
        weights = {f"{name}.weight": self._random(rng, shape) for name, shape in shapes.items()}
        norms = [f"model.layers.{layer}.{name}" for layer in range(self.num_layers) for name in _NORMS]
        for name in [*norms, "model.norm"]:
            weights[f"{name}.weight"] = (1 + 0.1 * rng.standard_normal(self.hidden)).astype(np.float32)
        return weights

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder

    def logits(self, tokens: list[int], inv_freq: Array | None = None) -> Array:
        """[tokens, vocab], by the definition."""
        w = {name: value.astype(np.float64) for name, value in self.tensors().items()}
        if inv_freq is None:
            inv_freq = self.theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.arange(len(tokens))[:, None, None] * inv_freq  # [T, 1, D/2]
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(self.num_layers):
            p = {name.split(f"layers.{layer}.")[1]: v for name, v in w.items() if f"layers.{layer}." in name}
            h = _norm(x, p["input_layernorm.weight"])
            q, k, v = (
                (h @ p[f"self_attn.{name}_proj.weight"].T).reshape(len(tokens), -1, self.head_dim) for name in "qkv"
            )
            x = x + self._attend(_turn(q, angles), _turn(k, angles), v) @ p["self_attn.o_proj.weight"].T
            h = _norm(x, p["post_attention_layernorm.weight"])
            gate = h @ p["mlp.gate_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        head = w["model.embed_tokens.weight" if self.is_tied else "lm_head.weight"]
        logits: Array = _norm(x, w["model.norm.weight"]) @ head.T
        return logits

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out: Array = np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)
        return out

    @staticmethod
    def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return np.asarray(rng.standard_normal(shape) * shape[-1] ** -0.5 * 2, np.float32)


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _norm(x: Array, weight: Array) -> Array:
    out: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return out


def _turn(x: Array, angles: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
