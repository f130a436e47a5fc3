"""The figures of a config.json that training needs. Reads the released nested form, and checks no more than it uses.

Needs neither torch nor anything of the engine: training runs where little is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Yarn:
    factor: float
    beta_fast: float
    beta_slow: float
    original_len: int


@dataclass(frozen=True)
class EngramFigures:
    layers: tuple[int, ...]
    max_ngram: int
    vocab_size: int
    num_heads: int
    head_dim: int
    compressed_vocab_size: int
    pad: int


@dataclass(frozen=True)
class DraftFigures:
    """Of DSpark stages."""

    num_stages: int
    block_size: int
    noise: int
    target_layers: tuple[int, ...]
    markov_rank: int
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True)
class Figures:
    """Of a V4.1 model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    rms_eps: float
    bos: int
    eos: int
    pad: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    """-1: there is none."""
    candidate_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_theta: float
    yarn: Yarn | None
    num_experts: int
    experts_per_token: int
    expert_width: int
    route_scale: float
    swiglu_limit: float
    hc_mult: int
    hc_iters: int
    hc_eps: float
    engram: EngramFigures | None
    drafts: DraftFigures | None

    @property
    def of_stages(self) -> Figures:
        """What a draft stage is as a layer. Raises `ValueError` where there are none."""
        if self.drafts is None:
            raise ValueError("num_nextn_predict_layers is 0: the model has no draft stages")
        stages = self.drafts
        return replace(
            self,
            num_layers=stages.num_stages,
            num_experts=stages.num_experts,
            experts_per_token=stages.experts_per_token,
            ratios=(0,) * stages.num_stages,
            kv_sources=(),
            index_sources=(),
            engram=None,
        )

    @classmethod
    def of_file(cls, path: Path) -> Figures:
        return cls.of(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, root: Mapping[str, Any]) -> Figures:
        text = root["text_config"]
        num_layers = text["num_hidden_layers"]
        scaling = text.get("rope_scaling")
        yarn = None
        if scaling is not None:
            names = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
            yarn = Yarn(*(scaling[name] for name in names))
        engram = None
        if text.get("engram_layer_ids"):
            keys = ("max_ngram_size", "vocab_size", "n_heads", "head_dim", "compressed_vocab_size", "pad_token_id")
            engram = EngramFigures(tuple(text["engram_layer_ids"]), *(text[f"engram_{key}"] for key in keys))
        drafts = None
        if text.get("num_nextn_predict_layers"):
            drafts = DraftFigures(
                text["num_nextn_predict_layers"],
                text["dspark_block_size"],
                text["dspark_noise_token_id"],
                tuple(text["dspark_target_layer_ids"]),
                text["dspark_markov_rank"],
                text["dspark_n_routed_experts"],
                text["dspark_num_experts_per_tok"],
            )
        return cls(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            num_layers=num_layers,
            rms_eps=text["rms_norm_eps"],
            bos=root["bos_token_id"],
            eos=root["eos_token_id"],
            pad=root["pad_token_id"],
            num_heads=text["num_attention_heads"],
            head_dim=text["head_dim"],
            rope_dim=text["qk_rope_head_dim"],
            q_lora_rank=text["q_lora_rank"],
            o_lora_rank=text["o_lora_rank"],
            o_groups=text["o_groups"],
            window=text["sliding_window"],
            ratios=tuple(text["compress_ratios"][:num_layers]),
            kv_sources=tuple(text["kv_source_layer_ids"]),
            index_sources=tuple(text["index_source_layer_ids"]),
            index_heads=text["index_n_heads"],
            index_dim=text["index_head_dim"],
            index_topk=text["index_topk"],
            candidate_source=text.get("candidate_source_layer_id", -1),
            candidate_blocks=text.get("candidate_topk_blocks", 0),
            candidate_block_size=text.get("candidate_block_size", 0),
            rope_theta=text["rope_theta"],
            compress_theta=text["compress_rope_theta"],
            yarn=yarn,
            num_experts=text["n_routed_experts"],
            experts_per_token=text["num_experts_per_tok"],
            expert_width=text["moe_intermediate_size"],
            route_scale=text["routed_scaling_factor"],
            swiglu_limit=text["swiglu_limit"],
            hc_mult=text["hc_mult"],
            hc_iters=text["hc_sinkhorn_iters"],
            hc_eps=text["hc_eps"],
            engram=engram,
            drafts=drafts,
        )
