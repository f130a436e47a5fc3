"""Names of other engines: what means the same works, what asks for nothing is dropped, the rest is refused in words."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from deepinfer import ConfigError, Engine, EngineConfig, InvalidRequest, SamplingParams
from deepinfer.migrating import (
    FOREIGN_OPTIONS,
    FOREIGN_PARAMS,
    FOREIGN_SETTINGS,
    FOREIGN_VALUES,
    OPTION_ALIASES,
    OWN_OPTIONS,
    PARAM_ALIASES,
    SETTING_ALIASES,
    Elsewhere,
    Ignored,
    Table,
    plain_prompt,
    rename_options,
    rename_settings,
)
from deepinfer_protocol import SamplingParams as PlainSamplingParams

FIELDS: Final = PlainSamplingParams.__struct_fields__
DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"

VLLM_FIELDS: Final = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "detokenize", "logprob_token_ids", "flat_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "output_kind", "include_stop_str_in_output", "stream_interval", "structured_outputs", "logit_bias",
    "allowed_token_ids", "bad_words", "extra_args", "skip_reading_prefix_cache", "thinking_token_budget",
    "repetition_detection", "best_of",
    "use_beam_search", "logits_processors", "truncate_prompt_tokens",
)  # fmt: skip
SGLANG_FIELDS: Final = (
    "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "stop_regex", "json_schema", "regex", "ebnf", "n",
    "structural_tag", "beam_width", "sampling_seed", "no_stop_trim", "stream_interval", "custom_params",
)  # fmt: skip


def named(name: str, value: Any) -> SamplingParams:
    fields: dict[str, Any] = {name: value}
    return SamplingParams(**fields)


@pytest.mark.parametrize("name", [*VLLM_FIELDS, *SGLANG_FIELDS])
def test_every_field_of_the_others_is_known(name: str) -> None:
    assert name in FIELDS or name in PARAM_ALIASES or name in FOREIGN_PARAMS


@pytest.mark.parametrize("name", PARAM_ALIASES)
def test_an_alias_sets_the_field(name: str) -> None:
    value: Any = True if name == "no_stop_trim" else 7
    assert getattr(named(name, value), PARAM_ALIASES[name]) == value
    assert named(name, None) == SamplingParams()
    assert named(name, value) == named(PARAM_ALIASES[name], value)


def test_two_names_of_one_field_agree_or_are_refused() -> None:
    fields: dict[str, Any] = {"seed": 5, "seq_seed": 5, "sampling_seed": 5}
    assert SamplingParams(**fields) == SamplingParams(seq_seed=5)
    conflicts: list[dict[str, Any]] = [
        {"seed": 5, "seq_seed": 6},
        {"seed": 5, "sampling_seed": 6},
        {"seq_seed": 6, "sampling_seed": 5},
    ]
    for fields in conflicts:
        with pytest.raises(InvalidRequest, match="it is seq_seed, which has another value here"):
            SamplingParams(**fields)


def test_a_params_object_is_a_struct_like_any_other() -> None:
    params = named("seed", 5)
    assert isinstance(params, PlainSamplingParams) and params.__struct_fields__ == FIELDS
    assert msgspec.structs.replace(params, n=2) == SamplingParams(seq_seed=5, n=2)
    assert msgspec.convert({"n": 2}, SamplingParams) == SamplingParams(n=2)
    with pytest.raises(TypeError, match="nonsense"):
        named("nonsense", 1)
    with pytest.raises(AttributeError):
        params.n = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", FOREIGN_PARAMS)
def test_a_field_without_a_counterpart_is_dropped_where_it_asks_for_nothing_and_else_refused(name: str) -> None:
    entry = FOREIGN_PARAMS[name]
    if isinstance(entry, Ignored):
        assert named(name, True) == named(name, False) == SamplingParams()
        return
    for harmless in entry.harmless:
        assert named(name, harmless) == SamplingParams()
    with pytest.raises(InvalidRequest) as caught:
        named(name, "something")
    assert caught.value.field == name and entry.advice in str(caught.value)


class Kind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def test_a_kind_of_output_may_be_an_enumeration_of_the_others() -> None:
    assert named("output_kind", Kind.DELTA) == SamplingParams()
    for kind in (Kind.CUMULATIVE, Kind.FINAL_ONLY):
        with pytest.raises(InvalidRequest, match="output_kind: stream\\(\\) yields deltas, generate\\(\\) returns"):
            named("output_kind", kind)


def test_values_are_compared_with_their_types() -> None:
    """`beam_width=True` is not one beam."""
    with pytest.raises(InvalidRequest, match="beam_width"):
        named("beam_width", True)


# ---- settings


@pytest.mark.parametrize("name", SETTING_ALIASES)
def test_a_setting_has_the_name_of_the_others(name: str) -> None:
    assert SETTING_ALIASES[name] in EngineConfig.__struct_fields__
    assert rename_settings({name: 7}) == {SETTING_ALIASES[name]: 7}
    assert rename_settings({name: None}) == {}


@pytest.mark.parametrize("name", FOREIGN_SETTINGS)
def test_a_setting_without_a_counterpart_is_dropped_or_refused(name: str) -> None:
    entry = FOREIGN_SETTINGS[name]
    if isinstance(entry, Ignored):
        assert rename_settings({name: 0.9}) == {}
        return
    for harmless in entry.harmless:
        assert rename_settings({name: harmless}) == {}
    with pytest.raises(ConfigError) as caught:
        rename_settings({name: "something"})
    assert caught.value.field == name and entry.advice in str(caught.value)


def test_vllm_s_speculative_config_says_how_many_tokens_are_drafted() -> None:
    for fields in ({"num_speculative_tokens": 3}, {"num_speculative_tokens": 3, "method": "mtp", "model": None}):
        assert rename_settings({"speculative_config": fields}) == {"num_drafts": 3}
        assert Engine("fake", speculative_config=fields).config.num_drafts == 3
    assert rename_settings({"speculative_config": {"method": "deepseek_mtp"}}) == {}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"method": "ngram"}, "method 'ngram': a model drafts by its own DSpark stages alone"),
        ({"model": "draft", "num_speculative_tokens": 3}, "'model' is not understood"),
        ({"num_speculative_tokens": 4}, "it is num_drafts, which has another value"),
    ]
    for fields, words in refused:
        with pytest.raises(ConfigError, match=f"speculative_config.*: {words}"):
            rename_settings({"speculative_config": fields, "num_drafts": 3})


def test_an_engine_takes_them() -> None:
    engine = Engine(
        model_path="fake",
        max_num_batched_tokens=300,
        max_num_seqs=64,
        enable_prefix_caching=False,
        seed=3,
        dtype="auto",
    )
    config = engine.config
    assert (config.model, config.max_batch_tokens, config.max_num_seqs) == ("fake", 300, 64)
    assert (config.prefix_cache, config.seed) == (False, 3)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"trust_remote_code": True}, "no code from model folders is run"),
        ({"tensor_parallel_size": 2}, "num_workers adds workers"),
        ({"max_num_batched_tokens": 300, "max_batch_tokens": 400}, "it is max_batch_tokens, which has another value"),
        ({"nonsense": 1}, "there is no such setting"),
        *(({name: value}, re.escape(advice)) for (name, value), advice in FOREIGN_VALUES.items()),
    ]
    for setting, words in refused:
        with pytest.raises(ConfigError, match=words):
            Engine("fake", **setting)


# ---- arguments of a request


def test_arguments_of_a_request_have_the_names_of_the_others() -> None:
    params = SamplingParams()
    assert rename_options({"prompt": None}, {"rid": "a", "sampling_params": params, "input_ids": [1]}) == {
        "request_id": "a",
        "params": params,
        "prompt": [1],
    }
    assert rename_options({"prompt": "x", "priority": 0}, {"timeout_s": 3}) == {
        "prompt": "x",
        "priority": 0,
        "timeout_s": 3,
    }
    for elsewhere in ({"rid": "a", "request_id": "b"}, {"request_id": "b", "rid": "a"}):
        with pytest.raises(InvalidRequest, match="rid: it is request_id"):
            rename_options({}, elsewhere)


@pytest.mark.parametrize("name", FOREIGN_OPTIONS)
def test_an_argument_without_a_counterpart_is_dropped_or_refused(name: str) -> None:
    entry = FOREIGN_OPTIONS[name]
    assert isinstance(entry, Elsewhere)
    for harmless in entry.harmless:
        assert rename_options({}, {name: harmless}) == {}
    with pytest.raises(InvalidRequest, match=re.escape(f"{name}: {entry.advice}")):
        rename_options({}, {name: "something"})


def test_a_prompt_may_come_in_a_mapping() -> None:
    assert plain_prompt({"prompt": "x"}) == "x"
    assert plain_prompt({"prompt": "x", "prompt_token_ids": [1], "cache_salt": None}) == [1]
    with pytest.raises(InvalidRequest, match="neither prompt nor prompt_token_ids"):
        plain_prompt({"role": "user", "content": "x"})
    with pytest.raises(InvalidRequest, match="multi_modal_data: text only"):
        plain_prompt({"prompt": "x", "multi_modal_data": {"image": b""}})


# ---- the page about it


@pytest.mark.parametrize(
    "table", [PARAM_ALIASES, SETTING_ALIASES, OPTION_ALIASES], ids=["params", "settings", "options"]
)
def test_the_page_has_every_alias_beside_its_name(table: dict[str, str]) -> None:
    lines = DOCS.read_text().splitlines()
    for name, ours in table.items():
        assert any(f"`{name}`" in line and f"`{ours}`" in line for line in lines), name


@pytest.mark.parametrize(
    "table", [FOREIGN_PARAMS, FOREIGN_SETTINGS, FOREIGN_OPTIONS], ids=["params", "settings", "options"]
)
def test_the_page_has_every_name_without_a_counterpart_and_what_to_do(table: Table) -> None:
    lines = DOCS.read_text().splitlines()
    for name, entry in table.items():
        words = entry.reason if isinstance(entry, Ignored) else entry.advice
        assert any(f"`{name}`" in line and words in line for line in lines), (name, words)


def test_the_page_refuses_and_ignores_no_name_that_is_in_no_table() -> None:
    tables = [FOREIGN_PARAMS, FOREIGN_SETTINGS, FOREIGN_OPTIONS]
    known = {(name, isinstance(entry, Ignored)) for table in tables for name, entry in table.items()}
    is_ignored: bool | None = None
    told: set[tuple[str, bool]] = set()
    for line in DOCS.read_text().splitlines():
        if line.startswith(("Refused, but", "Without effect")):
            is_ignored = line.startswith("Without")
        elif line and not line.startswith("|"):
            is_ignored = None
        elif is_ignored is not None:
            told |= {(name, is_ignored) for name in re.findall(r"`(\w+)`", line.split("|")[1] if line else "")}
    assert told == known


def test_the_page_has_every_field_and_its_default() -> None:
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    defaults = {row[1].strip().strip("`"): row[2].strip() for row in rows}
    for name in FIELDS:
        assert defaults[name] == f"`{getattr(SamplingParams(), name)!r}`", name
    for name in OWN_OPTIONS:
        assert f"`{name}`" in DOCS.read_text()
