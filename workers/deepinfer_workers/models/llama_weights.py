"""Names, shapes and layout of a Llama checkpoint's tensors, in GGUF and in Hugging Face files. Computes nothing.

Legend: `C` hidden size, `H` heads, `K` kv heads, `D` head dim, `F` feed-forward size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from deepinfer_workers.checkpoint import Checkpoint, bad_file, unsupported
from deepinfer_workers.models.llama_config import LlamaConfig

_GGUF_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
_DERIVED: Final = "rotary_emb.inv_freq"
"""Old Hugging Face checkpoints store what the config already says."""


class LlamaWeights:
    """The tensors by their Hugging Face names, in half-split RoPE layout. All are there and fit, once constructed."""

    def __init__(self, checkpoint: Checkpoint, config: LlamaConfig, report: Callable[[int, int], None]) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._report = report
        self._is_gguf = checkpoint.architecture.startswith("gguf:")
        self._done_bytes = 0
        self._total_bytes = sum(info.num_bytes for info in checkpoint.tensors.values())
        self._check()

    @property
    def is_tied(self) -> bool:
        """The head is the embedding."""
        is_declared = not self._is_gguf and self._checkpoint.metadata.get("tie_word_embeddings") is True
        return is_declared or self._stored("lm_head") not in self._checkpoint.tensors

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """[out, in] or [C], float32."""
        tensor = self._read(self._stored(name, layer))
        if self._is_gguf and name == "self_attn.q_proj":
            return _unpermute(tensor, self._config.num_heads)
        if self._is_gguf and name == "self_attn.k_proj":
            return _unpermute(tensor, self._config.num_kv_heads)
        return tensor

    def read_rope_factors(self) -> Tensor | None:
        """[D / 2]: what the frequencies are divided by, where the file says so."""
        return self._read(_ROPE_FACTORS) if _ROPE_FACTORS in self._checkpoint.tensors else None

    def _read(self, stored: str) -> Tensor:
        tensor = self._checkpoint.read(stored)
        self._done_bytes += self._checkpoint.tensors[stored].num_bytes
        self._report(self._done_bytes, self._total_bytes)
        return tensor

    def _stored(self, name: str, layer: int | None = None) -> str:
        if self._is_gguf:
            return f"{_GGUF_NAMES[name]}.weight" if layer is None else f"blk.{layer}.{_GGUF_NAMES[name]}.weight"
        return f"{name}.weight" if layer is None else f"model.layers.{layer}.{name}.weight"

    def _check(self) -> None:
        expected = self._expected_shapes()
        tensors = self._checkpoint.tensors
        for name, shape in expected.items():
            if name not in tensors:
                raise bad_file(self._checkpoint.name, f"tensor {name} was expected and is missing")
            if tensors[name].shape != shape:
                came = tensors[name].shape
                raise bad_file(self._checkpoint.name, f"tensor {name}: shape {shape} was expected, {came} came")
        for name in tensors.keys() - expected.keys():
            if not name.endswith(_DERIVED) and name != self._stored("lm_head"):
                raise unsupported(self._checkpoint.name, f"tensor {name} has no place in a Llama model")

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        config = self._config
        shapes = {self._stored(name): shape for name, shape in _model_shapes(config, self.is_tied).items()}
        if self._is_gguf and _ROPE_FACTORS in self._checkpoint.tensors:
            shapes[_ROPE_FACTORS] = (config.head_dim // 2,)
        for layer in range(config.num_layers):
            shapes |= {self._stored(name, layer): shape for name, shape in _layer_shapes(config).items()}
        return shapes


def random_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The tensors that a folder with this config.json would hold. Raises `WorkerFault`."""
    config = LlamaConfig.read(checkpoint)
    is_tied = checkpoint.metadata.get("tie_word_embeddings") is True
    shapes = {f"{name}.weight": shape for name, shape in _model_shapes(config, is_tied).items()}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _model_shapes(config: LlamaConfig, is_tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config.vocab_size, config.hidden_size),
        "model.norm": (config.hidden_size,),
    }
    if not is_tied:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (config.ffn_size, hidden),
        "mlp.up_proj": (config.ffn_size, hidden),
        "mlp.down_proj": (hidden, config.ffn_size),
    }


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF interleaves the two halves of every head ([H, D/2, 2]); half-split RoPE wants [H, 2, D/2]."""
    num_out, num_in = weight.shape
    return weight.view(num_heads, num_out // num_heads // 2, 2, num_in).transpose(1, 2).reshape(num_out, num_in)
