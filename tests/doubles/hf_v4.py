"""The oracle of DeepSeek-V4: transformers' model at a tiny size, all at random. Knows nothing of our model.

Importing this module where transformers is not installed skips the tests that do so.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from doubles.choices import margin

pytest.importorskip("transformers", minversion="5.23")
with warnings.catch_warnings():  # its imports warn of their own uses of torch
    warnings.simplefilter("ignore")
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCAB_SIZE: Final = 256

_CONFIG: Final[Mapping[str, Any]] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 4, 128, 4, 128],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 8,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,  # tight enough to cut some of what comes
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_RELEASED: Final = (
    # A part of their names, and what the release calls it; in this order.
    (r"^lm_head\.", "head."),
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.self_attn\.sinks$", ".attn.attn_sink"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.(q_[ab]|kv|o_[ab])_proj\.", r".w\1."),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
)


class Trace(NamedTuple):
    """One forward of the whole model."""

    streams: list[torch.Tensor]
    """[tokens, streams, hidden]: into the first layer, then out of each."""
    logits: torch.Tensor
    """[tokens, vocab]"""
    margin: float
    """Of the choices of experts and of rows, the closest: below what a rounding makes, it is a tie."""


class HfV4:
    """A model with weights of `seed`; `changes` replace entries of its config."""

    def __init__(self, seed: int = 0, **changes: Any) -> None:
        self.config = {**_CONFIG, **changes}
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            self.model = _build(self.config)
            _randomize(self.model)

    def tensors(self) -> dict[str, torch.Tensor]:
        """In the released names."""
        released: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            for part, value in _split_experts(name, tensor.detach()):
                released[_released_name(part)] = value.clone().contiguous()
        return released

    def write(self, folder: Path) -> Path:
        """A checkpoint folder: config and weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder

    @torch.no_grad()
    def trace(self, ids: Sequence[int]) -> Trace:
        """A forward without a cache, and what came out of every layer."""
        streams: list[torch.Tensor] = []
        margins = [float("inf")]
        layers = self.model.model.layers
        hooks = [layers[0].register_forward_pre_hook(lambda _, given: streams.append(given[0][0]))]
        for layer in layers:
            hooks.append(layer.register_forward_hook(lambda _, given, made: streams.append(made[0])))
            hooks.append(layer.mlp.gate.register_forward_hook(_gate_hook(margins)))
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is not None:
                hooks.append(indexer.scorer.register_forward_hook(_scorer_hook(margins, indexer)))
        try:
            logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return Trace(streams, logits, min(margins))


def _build(config: Mapping[str, Any]) -> Any:
    theirs = dict(config)
    yarn = dict(theirs.pop("rope_scaling"))
    yarn["rope_type"] = yarn.pop("type")
    parsed = DeepseekV4Config(**theirs, rope_parameters=yarn)
    parsed._attn_implementation = "eager"
    parsed._experts_implementation = "eager"
    model = DeepseekV4ForCausalLM(parsed)
    model.eval()
    return model


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Every tensor, so that no zero hides a sum and no one a product; matrices keep the size of what they turn."""
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            num_experts = model.config.n_routed_experts
            for row in tensor:
                row.copy_(torch.randperm(num_experts)[: row.shape[0]])
        elif "norm" in name or name.endswith("scale"):
            tensor.copy_(1 + 0.2 * torch.randn(tensor.shape))
        elif tensor.ndim == 1 or name.endswith("position_bias"):
            tensor.copy_(0.5 * torch.randn(tensor.shape))
        elif "embed_tokens" in name:
            tensor.copy_(torch.randn(tensor.shape))
        else:  # [..., out, in]
            tensor.copy_(torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5)


def _split_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    prefix, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        return [
            (f"{prefix}.{index}.{kind}.weight", part[index])
            for kind, part in (("w1", gate), ("w3", up))
            for index in range(len(part))
        ]
    if leaf == "down_proj":
        return [(f"{prefix}.{index}.w2.weight", part) for index, part in enumerate(tensor)]
    return [(name, tensor)]


def _released_name(name: str) -> str:
    for pattern, replacement in _RELEASED:
        name = re.sub(pattern, replacement, name)
    return name


def _gate_hook(margins: list[float]) -> Any:
    def hook(gate: Any, _given: Any, made: Any) -> None:
        if hasattr(gate, "e_score_correction_bias"):
            scores = torch.nn.functional.softplus(made[0]).sqrt() + gate.e_score_correction_bias
            margins.append(margin(scores, gate.top_k))

    return hook


def _scorer_hook(margins: list[float], indexer: Any) -> Any:
    def hook(_scorer: Any, _given: Any, scores: torch.Tensor) -> None:
        visible = (torch.arange(scores.shape[1]) + 1) // indexer.compress_rate
        scores = scores.masked_fill(torch.arange(scores.shape[2]) >= visible[:, None], -torch.inf)
        margins.append(margin(scores, indexer.index_topk))

    return hook
