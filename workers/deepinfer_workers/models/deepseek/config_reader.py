"""Reads a config.json of the family, in the three ways that it is written. Knows nothing of tensors.

The released V4.1 file nests the model under `text_config`; the one beside the official inference code is flat and has
names of its own (`dim` for `hidden_size`); V4 is flat with the first names. All three end in one `DeepseekConfig`.
Every figure is bounded and checked against the others, and a key that is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepinfer_workers.checkpoint import MAX_TENSORS
from deepinfer_workers.config_fields import REQUIRED, Fields
from deepinfer_workers.models.deepseek.config import SCALE_GROUP, DeepseekConfig, Family, VisionConfig, Yarn
from deepinfer_workers.models.deepseek.config_parts import (
    MAX_LAYERS,
    MAX_STAGES,
    read_drafts,
    read_engram,
    read_vision,
    read_yarn,
)

EXPERT_TENSORS: Final = 6
"""Of an expert: three matrices and their scales."""
LEAST_EPS: Final = 1e-38
"""Of what is much less float32 makes zero."""
MAX_NORMED: Final = 32767
"""Numbers under one norm: of a longer row the bits of the sum depend on how many rows there are."""
SCALE_BLOCKS: Final[dict[Family, int]] = {"v4.1": 32, "v4": 128}
ARCHITECTURES: Final[dict[Family, str]] = {"v4.1": "DeepseekV41ForCausalLM", "v4": "DeepseekV4ForCausalLM"}
RATIOS: Final[dict[Family, tuple[int, ...]]] = {"v4.1": (0, 1, 2), "v4": (0, 4, 128)}
INDEXED_RATIO_V4: Final = 4
"""V4 layers of this ratio choose rows; those of the other see all."""

_OFFICIAL: Final = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_seq_len",
}
"""How the file of the official inference code writes what the released one writes otherwise."""
_OFFICIAL_VISION: Final = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "downsample_ratio": "vision_downsample_ratio",
}
_IGNORED: Final = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id",
    "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder",
    "id2label", "label2id", "problem_type", "_name_or_path", "rope_theta", "max_image_tokens", "min_pixels",
    "max_wh_ratio", "vision_rope_theta", "vision_max_n_token", "vision_min_pixels", "vision_max_wh_ratio",
    "max_batch_size", "temperature",
})  # fmt: skip
"""They say nothing about a forward pass of tokens."""


def read_deepseek(metadata: Mapping[str, Any], name: str) -> DeepseekConfig:
    """Raises `WorkerFault`."""
    root = Fields(name, metadata)
    text = root.child("text_config")
    if text is not None:
        return _Reader("v4.1", text, root, root.child("vision_config")).read()
    if "n_layers" not in metadata:
        return _Reader("v4", root, root, None).read()
    official = Fields(name, metadata, spelling=_OFFICIAL)
    official.know(*_OFFICIAL_VISION.values())
    vision = Fields(name, metadata, spelling=_OFFICIAL_VISION) if "vision_n_layers" in metadata else None
    return _Reader("v4.1", official, official, vision, is_official=True).read()


class _Reader:
    """One file. `text` holds the model, `root` what stands beside it."""

    def __init__(
        self, family: Family, text: Fields, root: Fields, vision: Fields | None, *, is_official: bool = False
    ) -> None:
        self._family = family
        self._text = text
        self._root = root
        self._vision = vision
        self._is_official = is_official

    def read(self) -> DeepseekConfig:
        text, is_v4 = self._text, self._family == "v4"
        self._refuse_variants()
        num_layers, vocab_size = text.size("num_hidden_layers", high=MAX_LAYERS), text.size("vocab_size")
        all_ratios = text.sizes("compress_ratios", high=max(RATIOS["v4"]))
        num_stages = self._num_stages(num_layers, len(all_ratios))
        self._check_ratios(all_ratios, num_layers, num_stages)
        ratios = all_ratios[:num_layers]
        kv_sources, index_sources, candidate_source = self._sources(ratios)
        has_candidates = int(candidate_source is not None)
        yarn, vision = self._yarn(), read_vision(self._vision)
        dspark = read_drafts(text, num_layers, vocab_size, num_stages=num_stages, is_v4=is_v4)
        is_quantized, scale_block = self._storage()
        config = DeepseekConfig(
            family=self._family,
            vocab_size=vocab_size,
            hidden_size=text.size("hidden_size"),
            num_layers=num_layers,
            max_len=text.size("max_position_embeddings", self._default_len(yarn)),
            rms_eps=text.number("rms_norm_eps"),
            num_heads=text.size("num_attention_heads"),
            head_dim=text.size("head_dim"),
            rope_dim=text.size("qk_rope_head_dim"),
            q_lora_rank=text.size("q_lora_rank"),
            o_lora_rank=text.size("o_lora_rank"),
            o_groups=text.size("o_groups"),
            window=text.size("sliding_window"),
            ratios=ratios,
            kv_sources=kv_sources,
            index_sources=index_sources,
            index_heads=text.size("index_n_heads"),
            index_dim=text.size("index_head_dim"),
            index_topk=text.size("index_topk"),
            candidate_source=candidate_source,
            candidate_blocks=text.size("candidate_topk_blocks", REQUIRED if has_candidates else 0, low=has_candidates),
            candidate_block_size=text.size(
                "candidate_block_size", REQUIRED if has_candidates else 0, low=has_candidates
            ),
            rope_theta=text.number("rope_theta"),
            compress_theta=text.number("compress_rope_theta"),
            yarn=yarn,
            num_experts=text.size("n_routed_experts"),
            experts_per_token=text.size("num_experts_per_tok"),
            expert_width=text.size("moe_intermediate_size"),
            route_scale=text.number("routed_scaling_factor"),
            swiglu_limit=text.number("swiglu_limit"),
            num_hash_layers=text.size("num_hash_layers", low=0, high=num_layers) if is_v4 else 0,
            hc_mult=text.size("hc_mult", high=64),
            hc_iters=text.size("hc_sinkhorn_iters", high=1000),
            hc_eps=text.number("hc_eps"),
            is_quantized=is_quantized,
            scale_block=scale_block,
            image_token_id=self._image_token(vision, vocab_size),
            engram=None if is_v4 else read_engram(text, num_layers, vocab_size),
            dspark=dspark,
            vision=vision,
            num_mtp_layers=0 if dspark is not None else num_stages,
        )
        self._check(config)
        for fields in (self._text, self._root, None if self._is_official else self._vision):
            if fields is not None:
                fields.refuse_others(_IGNORED)
        return config

    def _refuse_variants(self) -> None:
        """What a checkpoint might say that this forward pass does not do."""
        for key, *allowed in (
            ("num_key_value_heads", 1), ("n_shared_experts", 1), ("hidden_act", "silu"), ("attention_bias", False),
            ("attention_dropout", 0.0), ("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True), ("tie_word_embeddings", False),
        ):  # fmt: skip
            self._text.refuse_unless(key, *allowed)
        self._root.refuse_unless("tie_word_embeddings", False)
        self._root.refuse_unless("architectures", [ARCHITECTURES[self._family]])
        models = {"v4.1": ("deepseek_v41", "deepseek_v41_text"), "v4": ("deepseek_v4",)}[self._family]
        self._root.refuse_unless("model_type", *models)
        self._text.refuse_unless("model_type", *models)

    # Layers

    def _num_stages(self, num_layers: int, num_ratios: int) -> int:
        """Draft stages, of either kind.

        V4 says 1 also where three DSpark stages are stored: there they are the ratios beyond those of the layers.
        """
        num_stages = self._text.size("num_nextn_predict_layers", 0, low=0, high=MAX_STAGES)
        if num_stages and self._family == "v4" and self._text.has("dspark_block_size"):
            return min(max(num_ratios - num_layers, 1), MAX_STAGES)
        return num_stages

    def _check_ratios(self, all_ratios: tuple[int, ...], num_layers: int, num_stages: int) -> None:
        if len(all_ratios) != num_layers + num_stages:
            text = f"{num_layers} layers + {num_stages} draft stages were expected, {len(all_ratios)} entries came"
            raise self._text.bad("compress_ratios", text)
        for layer, ratio in enumerate(all_ratios):
            allowed = RATIOS[self._family] if layer < num_layers else (0,)
            if ratio not in allowed:
                words = " or ".join(map(str, allowed))
                raise self._text.bad("compress_ratios", f"{words} was expected for layer {layer}, {ratio} came")

    def _sources(self, ratios: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
        """Layers that own keys, layers that choose rows, the layer that bounds the choice."""
        if self._family == "v4":
            owners = tuple(layer for layer, ratio in enumerate(ratios) if ratio)
            return owners, tuple(layer for layer in owners if ratios[layer] == INDEXED_RATIO_V4), None
        kv_sources = self._compressed("kv_source_layer_ids", ratios)
        index_sources = self._compressed("index_source_layer_ids", ratios)
        if not kv_sources:
            raise self._text.bad("kv_source_layer_ids", "at least one layer was expected, [] came")
        if missing := sorted(set(kv_sources) - set(index_sources)):
            text = f"layer {missing[0]} of kv_source_layer_ids was expected, {list(index_sources)} came"
            raise self._text.bad("index_source_layer_ids", text)
        for layer, ratio in enumerate(ratios):
            owner = max((source for source in kv_sources if source <= layer), default=None)
            if ratio and (owner is None or ratios[owner] != ratio):
                came = "none" if owner is None else f"layer {owner} of ratio {ratios[owner]}"
                text = f"a source of ratio {ratio} was expected for layer {layer}, {came} came"
                raise self._text.bad("kv_source_layer_ids", text)
        return kv_sources, index_sources, self._candidate_source(kv_sources, index_sources)

    def _compressed(self, key: str, ratios: tuple[int, ...]) -> tuple[int, ...]:
        """Layers that have compressed keys."""
        layers = self._text.ascending(key, len(ratios) - 1)
        for layer in layers:
            if not ratios[layer]:
                raise self._text.bad(key, f"layers with a ratio were expected, layer {layer} of ratio 0 came")
        return layers

    def _candidate_source(self, kv_sources: tuple[int, ...], index_sources: tuple[int, ...]) -> int | None:
        key = "candidate_source_layer_id"
        layer = self._text.size(key, -1, low=-1, high=MAX_LAYERS)
        if layer == -1:
            return None
        if layer not in index_sources:
            raise self._text.bad(key, f"one of index_source_layer_ids {list(index_sources)} expected, {layer} came")
        if layer < kv_sources[-1]:  # the rows that it numbers would not be those of layers above
            text = f"the last of kv_source_layer_ids, {kv_sources[-1]}, or a layer above was expected, {layer} came"
            raise self._text.bad(key, text)
        return layer

    # What is written in more than one way

    def _yarn(self) -> Yarn | None:
        """`rope_scaling`, or `rope_parameters` of newer writers, or flat in the official file."""
        if self._is_official:
            return read_yarn(self._text) if self._text.has("factor") else None
        children = [self._text.child(key) for key in ("rope_scaling", "rope_parameters")]
        fields = children[0] or children[1]
        if fields is None:
            return None
        kind = "rope_type" if fields.has("rope_type") else "type"
        fields.refuse_unless("rope_type", "yarn")
        fields.refuse_unless("type", "yarn")
        if not fields.has(kind):
            raise fields.bad(kind, "'yarn' was expected, nothing came")
        yarn = read_yarn(fields)
        fields.refuse_others(_IGNORED)
        return yarn

    def _default_len(self, yarn: Yarn | None) -> Any:
        """The official file does not say it, and means all that RoPE was stretched to."""
        return int(yarn.original_len * yarn.factor) if self._is_official and yarn is not None else REQUIRED

    def _storage(self) -> tuple[bool, int]:
        """Whether weights are quantised, and the side of an FP8 block."""
        released = SCALE_BLOCKS[self._family]
        self._root.refuse_unless("expert_dtype", "fp4")
        if self._is_official:
            self._root.refuse_unless("dtype", "fp8", "bf16")
            return self._root.has("expert_dtype"), released
        fields = self._root.child("quantization_config")
        if fields is None:
            return False, released
        for key, *allowed in (
            ("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("scale_fmt", "ue8m0"),
            ("expert_dtype", "fp4"), ("weight_block_size", [32, 32], [128, 128]),
        ):  # fmt: skip
            fields.refuse_unless(key, *allowed)
        if not (fields.has("expert_dtype") or self._root.has("expert_dtype")):
            raise self._root.bad("expert_dtype", "'fp4' was expected beside quantization_config, nothing came")
        fields.refuse_others(_IGNORED)
        return True, fields.sizes("weight_block_size", [released, released])[0]

    def _image_token(self, vision: VisionConfig | None, vocab_size: int) -> int | None:
        """None where no image can be seen: a small vocabulary may not even have the token."""
        self._root.know("image_token_id")
        return None if vision is None else self._root.size("image_token_id", low=0, high=vocab_size - 1)

    # What figures say about each other

    def _check_num_experts(self, config: DeepseekConfig) -> None:
        """Before anything is made for each of them."""
        num_drafted = config.num_stages * config.num_draft_experts
        num_experts, most = config.num_layers * config.num_experts + num_drafted, MAX_TENSORS // EXPERT_TENSORS
        if num_experts > most:
            text = f"at most {most} experts of all layers and draft stages were expected, {num_experts} came"
            raise self._text.bad("n_routed_experts", text)

    def _check(self, config: DeepseekConfig) -> None:
        self._check_num_experts(config)
        multiples = [
            ("hidden_size", config.hidden_size), ("head_dim", config.head_dim), ("q_lora_rank", config.q_lora_rank),
            ("o_lora_rank", config.o_lora_rank), ("index_head_dim", config.index_dim),
            ("moe_intermediate_size", config.expert_width),
        ]  # fmt: skip
        if config.engram is not None:
            multiples.append(("engram_head_dim", config.engram.head_dim))
        self._check_numerics(config)
        for key, value in multiples:
            if value % SCALE_GROUP:
                raise self._text.bad(key, f"a multiple of {SCALE_GROUP} was expected, {value} came")
        if config.num_heads % config.o_groups:
            text = f"a divisor of {config.num_heads} heads was expected, {config.o_groups} came"
            raise self._text.bad("o_groups", text)
        if config.rope_dim % 2 or config.rope_dim > min(config.head_dim, config.index_dim):
            text = f"an even number up to head_dim and index_head_dim was expected, {config.rope_dim} came"
            raise self._text.bad("qk_rope_head_dim", text)
        if config.experts_per_token > config.num_experts:
            text = f"at most {config.num_experts} experts were expected, {config.experts_per_token} came"
            raise self._text.bad("num_experts_per_tok", text)

    def _check_numerics(self, config: DeepseekConfig) -> None:
        """What would divide by zero, or cost a row its independence of others."""
        num_streamed, index_dim = config.hc_mult * config.hidden_size, config.index_dim
        is_rotated = config.family == "v4"  # by a Hadamard matrix
        for key, is_fine, expected, came in (
            ("rms_norm_eps", config.rms_eps >= LEAST_EPS, f"at least {LEAST_EPS}", config.rms_eps),
            ("hc_eps", config.hc_eps >= LEAST_EPS, f"at least {LEAST_EPS}", config.hc_eps),
            ("rope_theta", config.rope_theta > 1, "a number above 1", config.rope_theta),
            ("compress_rope_theta", config.compress_theta > 1, "a number above 1", config.compress_theta),
            ("hc_mult", num_streamed <= MAX_NORMED, f"up to {MAX_NORMED} numbers of all streams", num_streamed),
            ("q_lora_rank", config.q_lora_rank <= MAX_NORMED, f"up to {MAX_NORMED}", config.q_lora_rank),
            ("head_dim", config.head_dim <= MAX_NORMED, f"up to {MAX_NORMED}", config.head_dim),
            ("index_head_dim", not is_rotated or index_dim.bit_count() == 1, "a power of two", index_dim),
        ):
            if not is_fine:
                raise self._text.bad(key, f"{expected} was expected, {came} came")
