"""Three sources of a setting, and which of them wins."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from deepinfer import ConfigError, Engine
from deepinfer.config import EngineConfig, explain_config, resolve_config
from deepinfer.env import ENVIRONMENT_NAMES


def test_argument_beats_environment_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_config({}).max_num_seqs == 256
    monkeypatch.setenv("DEEPINFER_MAX_NUM_SEQS", "32")
    assert resolve_config({}).max_num_seqs == 32
    assert resolve_config({"max_num_seqs": 8}).max_num_seqs == 8


def test_what_approximates_and_what_is_rounded_is_set_by_the_names_of_the_model_s_makers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve_config({})
    assert (config.prefill_truncation, config.prefill_keep_tokens, config.prefix_hits) == ("compact", 140, "bounded")
    assert (config.cache_format, config.quantize_activations, config.quantize_cache) == ("auto", True, True)
    for name, text in (
        ("YOCO_PREFILL_TRUNCATION_MODE", "off"),
        ("YOCO_PREFILL_KEEP_TOKENS", "200"),
        ("PREFIX_HITS", "exact"),
        ("CACHE_FORMAT", "packed"),
        ("QUANTIZE_ACTIVATIONS", "0"),
        ("QUANTIZE_CACHE", "0"),
    ):
        monkeypatch.setenv(f"DEEPINFER_{name}", text)
    config = resolve_config({})
    assert (config.prefill_truncation, config.prefill_keep_tokens, config.prefix_hits) == ("off", 200, "exact")
    assert (config.cache_format, config.quantize_activations, config.quantize_cache) == ("packed", False, False)


def test_drafts_are_set_by_the_names_of_the_model_s_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_config({})
    assert (config.num_drafts, config.scheduled_drafts, config.cost_table) == (-1, False, "")
    for name, text in (("USE_NEXTN_DECODE", "3"), ("ENABLE_MTP_VARLEN", "1"), ("COST_TABLE", "costs.json")):
        monkeypatch.setenv(f"DEEPINFER_{name}", text)
    config = resolve_config({})
    assert (config.num_drafts, config.scheduled_drafts, config.cost_table) == (3, True, "costs.json")


@pytest.mark.parametrize(
    ("settings", "has_bounded"),
    [
        ({}, True),
        ({"prefix_hits": "exact"}, False),
        ({"prefill_truncation": "off"}, False),
        ({"prefill_truncation": "off", "prefix_hits": "bounded"}, False),
    ],
)
def test_who_wants_no_truncation_gets_exact_hits(settings: dict[str, str], has_bounded: bool) -> None:
    assert resolve_config(settings).has_bounded_hits is has_bounded


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("false", False), ("true", True)])
def test_switches_are_read_as_deepseek_writes_them(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", text)
    assert resolve_config({}).overlap is value


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_BLOCK_SIZE", "")
    assert resolve_config({}).block_size == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("DEEPINFER_BLOCK_SIZE", "-1", "DEEPINFER_BLOCK_SIZE: '-1': Expected `int` >= 0"),
        ("DEEPINFER_BLOCK_SIZE", "many", "DEEPINFER_BLOCK_SIZE: 'many'"),
        ("DEEPINFER_ACCELERATOR", "gpu", r"known: cpu, nvidia, ascend"),
        ("DEEPINFER_PREFIX_CACHE", "maybe", "DEEPINFER_PREFIX_CACHE: 'maybe'"),
        ("DEEPINFER_SLOW_CONSUMER_S", "-1", "DEEPINFER_SLOW_CONSUMER_S"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "on", "known: compact, off"),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "0", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS: '0': Expected `int` >= 1"),
        ("DEEPINFER_USE_NEXTN_DECODE", "65", "DEEPINFER_USE_NEXTN_DECODE: '65': Expected `int` <= 64"),
        ("DEEPINFER_USE_NEXTN_DECODE", "-2", "DEEPINFER_USE_NEXTN_DECODE: '-2': Expected `int` >= -1"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "maybe", "DEEPINFER_ENABLE_MTP_VARLEN: 'maybe'"),
        ("DEEPINFER_PREFIX_HITS", "approximate", "known: bounded, exact"),
        ("DEEPINFER_CACHE_FORMAT", "fp8", "known: auto, packed, bfloat16, float32"),
        ("DEEPINFER_QUANTIZE_CACHE", "maybe", "DEEPINFER_QUANTIZE_CACHE: 'maybe'"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        resolve_config({})


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="blocksize: there is no such setting"):
        Engine("fake", blocksize=3)
    with pytest.raises(ConfigError, match="block_size: '16'"):
        Engine("fake", block_size="16")
    with pytest.raises(ConfigError, match="max_num_seqs: 600 sequences need a position each"):
        Engine("fake", max_num_seqs=600)
    with pytest.raises(ConfigError, match="dtype: 'fast' is an arithmetic of cpu, accelerator is 'nvidia'"):
        Engine("fake", dtype="fast", accelerator="nvidia")
    with pytest.raises(ConfigError, match="dtype: 'bfloat16' is an arithmetic of nvidia, accelerator is 'cpu'"):
        Engine("fake", dtype="bfloat16")
    with pytest.raises(ConfigError, match="model: no model"):
        Engine()


def test_every_setting_is_explained() -> None:
    settings = explain_config({})
    assert [setting.field for setting in settings] == list(EngineConfig.__struct_fields__)
    assert all(setting.description and setting.argument is msgspec.UNSET for setting in settings)
    assert set(ENVIRONMENT_NAMES) <= set(EngineConfig.__struct_fields__)


def run_env(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # also where nothing is installed
    return subprocess.run([sys.executable, "-m", "deepinfer", "env", *arguments], capture_output=True, text=True)


def test_the_command_shows_all_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_MAX_NUM_SEQS", "32")
    shown = run_env(monkeypatch, "block_size=32", "model=[/x] [red]y").stdout
    assert "model=[/x] [red]y *" in shown, "it is no markup"
    assert "DEEPINFER_MAX_NUM_SEQS=32 *" in shown and "block_size=32 *" in shown and "cpu *" in shown
    assert all(name in shown for name in ENVIRONMENT_NAMES.values())


def test_the_command_refuses_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run_env(monkeypatch, "block_size=zero")
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("deepinfer env: block_size: 'zero'") and "Traceback" not in refused.stderr
