"""What a config.json of the family says, in its three ways, and what it asks of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_workers.config_file import config_architecture
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.loading import check_block_size
from deepinfer_workers.models.deepseek.tensors import GROUPS, expected_tensors
from deepinfer_workers.models.registry import open_checkpoint
from deepinfer_workers.runner import WorkerFault
from doubles.released_deepseek import v4_flash_0731, v41_flash, v41_flash_flat
from doubles.tiny_deepseek import tiny_v4, tiny_v41, with_vision

Json = dict[str, Any]


def read(config: Json) -> DeepseekConfig:
    return DeepseekConfig.read(config, "config.json")


@pytest.mark.parametrize(
    ("released", "num_tensors", "num_bytes"),
    [(v41_flash, 96_085, 510_286_023_000), (v41_flash_flat, 96_085, 510_286_023_000),
     (v4_flash_0731, 72_317, 166_878_536_440)],
)  # fmt: skip
def test_a_released_config_asks_for_the_released_tensors(
    released: Callable[[], Json], num_tensors: int, num_bytes: int
) -> None:
    specs = expected_tensors(read(released()))
    assert (len(specs), sum(spec.num_bytes for spec in specs.values())) == (num_tensors, num_bytes)
    assert {spec.group for spec in specs.values()} <= set(GROUPS)


def test_the_nested_and_the_flat_file_of_a_release_say_the_same() -> None:
    assert read(v41_flash()) == read(v41_flash_flat())


def test_v4_stores_three_draft_stages_where_it_says_one() -> None:
    config = read(v4_flash_0731())
    assert config.dspark is not None and (config.dspark.num_stages, config.num_mtp_layers) == (3, 0)
    assert (config.dspark.num_experts, config.dspark.experts_per_token) == (256, 6)


def test_v4_before_dspark_has_a_draft_layer_of_the_older_kind() -> None:
    config = {name: value for name, value in v4_flash_0731().items() if not name.startswith("dspark")}
    config["compress_ratios"] = config["compress_ratios"][:44]
    older = read(config)
    assert (older.dspark, older.num_mtp_layers) == (None, 1)
    drafts = {name for name in expected_tensors(older) if name.startswith("mtp.")}
    assert {"mtp.0.e_proj.weight", "mtp.0.hnorm.weight", "mtp.0.hc_head_fn"} < drafts
    assert not any(name.startswith(("mtp.1", "mtp.0.main")) for name in drafts)


def test_layers_find_their_sources() -> None:
    config = read(tiny_v41())
    kinds = [(config.kv_source_of(layer), config.index_source_of(layer)) for layer in range(config.num_layers)]
    assert kinds == [
        (None, None), (None, None), (2, 2), (2, 2), (2, 4), (5, 5), (5, 5), (5, 7), (5, 7), (5, 9),
    ]  # fmt: skip
    assert config.decoder_start == 5


def test_what_newer_writers_call_rope_parameters_is_read_too() -> None:
    config = tiny_v41()
    text = config["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": 10000.0}
    assert read(config) == read(tiny_v41())


def test_without_quantisation_there_are_no_scales() -> None:
    for config in (tiny_v41(is_quantized=False), tiny_v4(is_quantized=False)):
        specs = expected_tensors(read(config))
        assert not any(name.endswith(".scale") for name in specs)
        assert {frozenset(spec.dtypes) for spec in specs.values()} <= {frozenset({"BF16", "F32"}), frozenset({"I64"})}


def without(key: str) -> Callable[[Json], None]:
    return lambda config: config["text_config"].pop(key)


def put(**changes: Any) -> Callable[[Json], None]:
    return lambda config: config["text_config"].update(changes)


def put_root(**changes: Any) -> Callable[[Json], None]:
    return lambda config: config.update(changes)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (without("hidden_size"), "model_file", "hidden_size was expected and is missing"),
        (without("rms_norm_eps"), "model_file", "rms_norm_eps was expected"),
        (without("index_topk"), "model_file", "index_topk"),
        (without("dspark_markov_rank"), "model_file", "dspark_markov_rank"),
        (put(vocab_size=0), "model_file", "vocab_size: a number from 1 to 16777216 expected, 0 came"),
        (put(vocab_size=True), "model_file", "vocab_size: .* True came"),
        (put(hidden_size=1 << 40), "model_file", "hidden_size"),
        (put(hidden_size=130), "model_file", "hidden_size: a multiple of 32 was expected, 130 came"),
        (put(num_hidden_layers=5000), "model_file", "num_hidden_layers: a number from 1 to 1024"),
        (put(num_hidden_layers=11), "model_file", "compress_ratios: 11 layers \\+ 3 draft stages .* 13 entries"),
        (put(compress_ratios="none"), "model_file", "compress_ratios: a list of numbers .* 'none' came"),
        (put(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 4, 0, 0, 0]), "model_file", "0 or 1 or 2 .* layer 9, 4 came"),
        (put(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0]), "model_file", "0 was expected for layer 10"),
        (put(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0]), "model_file", "ratio 1 .* layer 4, layer 2 of"),
        (put(kv_source_layer_ids=[5, 2]), "model_file", "kv_source_layer_ids: numbers in ascending .* \\[5, 2\\] came"),
        (put(kv_source_layer_ids=[1, 2, 5]), "model_file", "kv_source_layer_ids: .* layer 1 of ratio 0 came"),
        (put(kv_source_layer_ids=[5]), "model_file", "a source of ratio 2 was expected for layer 2, none came"),
        (put(kv_source_layer_ids=[]), "model_file", "kv_source_layer_ids: at least one"),
        (put(index_source_layer_ids=[2, 4, 7, 9]), "model_file", "index_source_layer_ids: layer 5 of"),
        (put(index_source_layer_ids=[2, 4, 5, 7, 10]), "model_file", "index_source_layer_ids: .* from 0 to 9"),
        (put(candidate_source_layer_id=6), "model_file", "candidate_source_layer_id: .* 6 came"),
        (put(candidate_source_layer_id=4), "model_file", "candidate_source_layer_id: the last of .* 5"),
        (put(o_groups=3), "model_file", "o_groups: a divisor of 4 heads was expected, 3 came"),
        (put(qk_rope_head_dim=15), "model_file", "qk_rope_head_dim: an even number .* 15 came"),
        (put(qk_rope_head_dim=48), "model_file", "qk_rope_head_dim: .* 48 came"),
        (put(num_experts_per_tok=9), "model_file", "num_experts_per_tok: at most 8 experts were expected, 9 came"),
        (put(dspark_num_experts_per_tok=5), "model_file", "dspark_num_experts_per_tok: at most 4"),
        (put(dspark_target_layer_ids=[9, 10]), "model_file", "dspark_target_layer_ids: .* from 0 to 9"),
        (put(dspark_noise_token_id=256), "model_file", "dspark_noise_token_id: a number from 0 to 255"),
        (put(rms_norm_eps=0.0), "model_file", "rms_norm_eps: a positive number was expected, 0.0 came"),
        (put(rms_norm_eps=float("nan")), "model_file", "rms_norm_eps: .* nan came"),
        (put(rms_norm_eps=1e-46), "model_file", "rms_norm_eps: at least 1e-38 was expected, 1e-46 came"),
        (put(hc_eps=1e-46), "model_file", "hc_eps: at least 1e-38"),
        (put(rope_theta=1), "model_file", "rope_theta: a number above 1 was expected, 1.0 came"),
        (put(compress_rope_theta=0.5), "model_file", "compress_rope_theta: a number above 1"),
        (put(hidden_size=8192), "model_file", "hc_mult: up to 32767 numbers of all streams .* 32768 came"),
        (put(q_lora_rank=32768), "model_file", "q_lora_rank: up to 32767"),
        (put(head_dim=32768), "model_file", "head_dim: up to 32767"),
        (put(engram_num_embeddings=[420]), "model_file", "engram_num_embeddings: a number for each of 2 layers"),
        (put(engram_num_embeddings=[420, 300]), "model_file", "engram_num_embeddings: at least 404 rows .* 300 came"),
        (put(engram_pad_token_id=256), "model_file", "engram_pad_token_id"),
        (put(engram_layer_ids=[1, 12]), "model_file", "engram_layer_ids"),
        (put(rope_scaling=[16]), "model_file", "rope_scaling: an object was expected, \\[16\\] came"),
        (put(rope_scaling={"rope_type": "yarn", "factor": 16}), "model_file", "rope_scaling: beta_fast was expected"),
        (put(rope_scaling={"rope_type": "linear", "factor": 2}), "unsupported_model", "rope_type = 'linear'"),
        (put(num_key_value_heads=2), "unsupported_model", "num_key_value_heads = 2 is not supported"),
        (put(n_shared_experts=2), "unsupported_model", "n_shared_experts = 2"),
        (put(scoring_func="softmax"), "unsupported_model", "scoring_func = 'softmax'"),
        (put(attention_bias=True), "unsupported_model", "attention_bias = True"),
        (put(norm_topk_prob=False), "unsupported_model", "norm_topk_prob = False"),
        (put(first_k_dense_replace=3), "unsupported_model", "first_k_dense_replace = 3 is not understood"),
        (put_root(tie_word_embeddings=True), "unsupported_model", "tie_word_embeddings = True"),
        (put_root(lora={"rank": 8}), "unsupported_model", "lora = {'rank': 8} is not understood"),
        (put_root(text_config=7), "model_file", "text_config: an object was expected, 7 came"),
        (put(n_routed_experts=1_000_000), "model_file", "n_routed_experts: at most 43690 .* 10000012 came"),
        (put(engram_n_heads=1024, engram_max_ngram_size=4), "model_file", "engram_n_heads: at most 4096 .* 6144 came"),
        (put_root(architectures=["DeepseekV4ForCausalLM"]), "unsupported_model", "architectures = .*V4ForCausalLM"),
        (put_root(model_type="deepseek_v5"), "unsupported_model", "model_type = 'deepseek_v5'"),
        (lambda c: c["quantization_config"].update(quant_method="awq"), "unsupported_model", "quant_method = 'awq'"),
        (lambda c: c["quantization_config"].update(weight_block_size=[9, 9]), "unsupported_model", "weight_block_size"),
        (lambda c: c["quantization_config"].pop("expert_dtype"), "model_file", "expert_dtype: 'fp4' was expected"),
        (lambda c: c["quantization_config"].update(expert_dtype="fp8"), "unsupported_model", "expert_dtype = 'fp8'"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_by_name_and_value(
    change: Callable[[Json], object], code: str, words: str
) -> None:
    config = tiny_v41()
    change(config)
    with pytest.raises(WorkerFault, match=words) as caught:
        read(config)
    assert caught.value.code == code and str(caught.value).startswith("config.json")


def test_a_flat_file_is_refused_by_its_own_names() -> None:
    with pytest.raises(WorkerFault, match=r"config\.json: dim: a number from 1"):
        read(v41_flash_flat() | {"dim": 0})
    with pytest.raises(WorkerFault, match="kv_source_layers: at least one"):
        read(v41_flash_flat() | {"kv_source_layers": []})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": [0, 0, 4, 100, 4, 0, 0, 0]}, "0 or 4 or 128 was expected for layer 3, 100 came"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "architectures = .* is not supported"),
        ({"num_hash_layers": 6}, "num_hash_layers: a number from 0 to 5"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids: at least one"),
        ({"index_head_dim": 96}, "index_head_dim: a power of two was expected, 96 came"),
    ],
)
def test_a_v4_config_that_does_not_fit_is_refused(changes: Json, words: str) -> None:
    with pytest.raises(WorkerFault, match=words):
        read(tiny_v4(**changes))


def test_an_image_encoder_is_checked_too() -> None:
    config = with_vision(tiny_v41())
    vision = config["vision_config"]
    config["vision_config"] = vision | {"num_attention_heads": 3}
    with pytest.raises(WorkerFault, match=r"vision_config: hidden_size: .* 3 heads .* 64 came"):
        read(config)
    config["vision_config"] = vision | {"num_register_tokens": 4}
    with pytest.raises(WorkerFault, match=r"vision_config: num_register_tokens = 4 is not understood"):
        read(config)
    config["vision_config"] = vision | {"num_hidden_layers": 0}
    assert read(config).vision is None


def test_every_way_of_writing_names_the_architecture() -> None:
    assert config_architecture(v41_flash()) == config_architecture(v41_flash_flat()) == "hf:DeepseekV41ForCausalLM"
    assert config_architecture(v4_flash_0731()) == "hf:DeepseekV4ForCausalLM"


def test_blocks_hold_whole_compressed_rows_of_every_layer() -> None:
    v41, v4 = read(tiny_v41()), read(tiny_v4())
    assert (v41.block_multiple, v4.block_multiple) == (2, 128)
    for block_size, config in ((16, v41), (128, v4), (256, v4), (0, v4)):  # 0: the model's choice
        check_block_size(block_size, config)
    with pytest.raises(WorkerFault, match="block_size: 16 is no multiple of 128") as refused:
        check_block_size(16, v4)
    assert refused.value.code == "setting"


def test_random_weights_of_a_config_alone_are_written_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(v41_flash()))
    with pytest.raises(WorkerFault, match="random_checkpoint writes one"):
        open_checkpoint(tmp_path, "dummy")
