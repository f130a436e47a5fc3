"""config.json contents of small DeepSeek models: every part that the released ones have, at sizes that run in tests."""

from __future__ import annotations

from typing import Any

_YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}


def tiny_v41(*, vocab_size: int = 256, is_quantized: bool = True, **changes: Any) -> dict[str, Any]:
    """V4.1: window-only, Full, Reindex and Reuse layers of both ratios; Engram, candidates and draft stages.

    `changes` go to `text_config`. The n-gram tables are those of 2 heads above 101, for 2- and 3-grams.
    """
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "num_hidden_layers": 10,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 5],
        "index_source_layer_ids": [2, 4, 5, 7, 9],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", **_YARN},
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [420, 508],
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 101,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 128,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": vocab_size - 1,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "text_config": text | changes,
    }
    if is_quantized:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    return config


def with_vision(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with a small image encoder."""
    vision = {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "patch_size": 2,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 36,
        "max_wh_ratio": None,
    }
    return config | {"vision_config": vision, "image_token_id": config["text_config"]["vocab_size"] - 2}


def tiny_v4(*, vocab_size: int = 256, is_quantized: bool = True, **changes: Any) -> dict[str, Any]:
    """V4 with draft stages as of 0731: both ratios, layers that choose experts by token id."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0],
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {"type": "yarn", **_YARN},
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_hash_layers": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_markov_rank": 16,
        "dspark_noise_token_id": vocab_size - 1,
        "dspark_target_layer_ids": [2, 3, 4],
        "expert_dtype": "fp4",
    }
    if is_quantized:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    return config | changes
