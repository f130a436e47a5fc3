"""Reads the parts of a config.json that not every model has: YaRN, Engram, draft stages, vision.

Knows nothing of how the file spells its keys (`Fields` does), and nothing of tensors.
"""

from __future__ import annotations

from typing import Final

from deepinfer_workers.config_fields import REQUIRED, Fields
from deepinfer_workers.models.deepseek.config import DsparkConfig, EngramConfig, VisionConfig, Yarn

MAX_LAYERS: Final = 1024
MAX_STAGES: Final = 16
MAX_TABLE_ROWS: Final = 1 << 36
MAX_TABLE_PARTS: Final = 1 << 12
"""One a layer, length and head, each the size of a prime of its own, which is to be found. The release has 48."""
_DSPARK_KEYS: Final = (
    "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip
_ENGRAM_KEYS: Final = (
    "engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads",
    "engram_head_dim", "engram_pad_token_id", "engram_compressed_vocab_size",
)  # fmt: skip
_VISION_KEYS: Final = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio",
)  # fmt: skip


def read_yarn(fields: Fields) -> Yarn:
    return Yarn(
        factor=fields.number("factor"),
        beta_fast=fields.number("beta_fast"),
        beta_slow=fields.number("beta_slow"),
        original_len=fields.size("original_max_position_embeddings"),
    )


def read_engram(fields: Fields, num_layers: int, vocab_size: int) -> EngramConfig | None:
    """None without a layer that has it."""
    fields.know(*_ENGRAM_KEYS)
    layers = fields.ascending("engram_layer_ids", num_layers - 1) if fields.has("engram_layer_ids") else ()
    if not layers:
        return None
    engram = EngramConfig(
        layers=layers,
        table_rows=fields.sizes("engram_num_embeddings", low=1, high=MAX_TABLE_ROWS),
        max_ngram=fields.size("engram_max_ngram_size", low=2, high=16),
        vocab_size=fields.size("engram_vocab_size", low=2),
        num_heads=fields.size("engram_n_heads", high=1024),
        head_dim=fields.size("engram_head_dim"),
        pad_id=fields.size("engram_pad_token_id", low=0, high=vocab_size - 1),
        compressed_vocab_size=fields.size("engram_compressed_vocab_size", high=vocab_size),
    )
    if len(engram.table_rows) != len(layers):
        text = f"a number for each of {len(layers)} layers was expected, {list(engram.table_rows)} came"
        raise fields.bad("engram_num_embeddings", text)
    num_parts = len(layers) * (engram.max_ngram - 1) * engram.num_heads
    if num_parts > MAX_TABLE_PARTS:
        text = f"at most {MAX_TABLE_PARTS} parts of all tables were expected, {num_parts} came"
        raise fields.bad("engram_n_heads", text)
    least = (engram.max_ngram - 1) * engram.num_heads * engram.vocab_size  # as many primes, none below it
    if min(engram.table_rows) < least:
        raise fields.bad("engram_num_embeddings", f"at least {least} rows expected, {min(engram.table_rows)} came")
    return engram


def read_drafts(
    fields: Fields, num_layers: int, vocab_size: int, *, num_stages: int, is_v4: bool
) -> DsparkConfig | None:
    """None without stages, and for the older draft layers of V4, which say nothing but their number."""
    fields.know(*_DSPARK_KEYS)
    if not num_stages or (is_v4 and not fields.has("dspark_block_size")):
        return None
    experts, chosen = "n_routed_experts", "num_experts_per_tok"
    dspark = DsparkConfig(
        num_stages=num_stages,
        block_size=fields.size("dspark_block_size", high=64),
        noise_token_id=fields.size("dspark_noise_token_id", low=0, high=vocab_size - 1),
        target_layers=fields.ascending("dspark_target_layer_ids", num_layers - 1),
        markov_rank=fields.size("dspark_markov_rank"),
        # V4: stages are as wide as layers
        num_experts=fields.size("dspark_n_routed_experts", fields.size(experts) if is_v4 else REQUIRED),
        experts_per_token=fields.size("dspark_num_experts_per_tok", fields.size(chosen) if is_v4 else REQUIRED),
    )
    if not dspark.target_layers:
        raise fields.bad("dspark_target_layer_ids", "at least one layer was expected, [] came")
    if dspark.experts_per_token > dspark.num_experts:
        text = f"at most {dspark.num_experts} experts were expected, {dspark.experts_per_token} came"
        raise fields.bad("dspark_num_experts_per_tok", text)
    return dspark


def read_vision(fields: Fields | None) -> VisionConfig | None:
    """None without an encoder, or with one of no layers."""
    if fields is None:
        return None
    fields.know(*_VISION_KEYS)
    if not fields.size("num_hidden_layers", 0, low=0, high=MAX_LAYERS):
        return None
    vision = VisionConfig(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        num_heads=fields.size("num_attention_heads"),
        ffn_size=fields.size("intermediate_size"),
        patch_size=fields.size("patch_size", high=1024),
        downsample_ratio=fields.size("downsample_ratio", high=64),
    )
    if vision.hidden_size % (4 * vision.num_heads):  # 2D RoPE turns pairs by row and pairs by column
        text = f"a multiple of 4 for each of {vision.num_heads} heads was expected, {vision.hidden_size} came"
        raise fields.bad("hidden_size", text)
    return vision
