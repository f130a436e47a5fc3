"""Refusals of drafts before anything is started, by field and reason; and which policy a rank gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from deepinfer import ConfigError, Engine, ModelFileError
from deepinfer.budget import FixedDrafts, NoDrafts, ScheduledDrafts
from deepinfer.config import resolve_config
from deepinfer.draft_settings import check_drafts, cost_table, draft_policy
from deepinfer_protocol import StepCosts, pack_float32, pack_int32

V41: Final[dict[str, Any]] = {
    "model_type": "deepseek_v41",
    "text_config": {"num_nextn_predict_layers": 3, "dspark_block_size": 5, "sliding_window": 128},
}
V4: Final[dict[str, Any]] = {
    "model_type": "deepseek_v4",
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "sliding_window": 128,
}
OFFICIAL: Final[dict[str, Any]] = {
    "kv_source_layers": [1],
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "window_size": 128,
}
PLAIN_V41: Final[dict[str, Any]] = {"model_type": "deepseek_v41", "text_config": {"sliding_window": 128}}
OLD_V4: Final[dict[str, Any]] = {"model_type": "deepseek_v4", "num_nextn_predict_layers": 1, "sliding_window": 128}
LLAMA: Final[dict[str, Any]] = {"model_type": "llama"}
COSTS: Final = StepCosts(pack_int32([1, 64]), pack_float32([10.0, 20.0]), pack_int32([1]), pack_float32([5.0]))


def folder(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_bytes(msgspec.json.encode(config))
    return path


@pytest.mark.parametrize("config", [V41, V4, OFFICIAL, PLAIN_V41, OLD_V4, LLAMA], ids=lambda config: str(config)[:60])
@pytest.mark.parametrize("num_drafts", [-1, 0])
def test_whoever_asks_for_no_length_gets_what_the_model_can(
    tmp_path: Path, config: dict[str, Any], num_drafts: int
) -> None:
    check_drafts(resolve_config({"num_drafts": num_drafts}), folder(tmp_path, config))


@pytest.mark.parametrize("config", [V41, V4, OFFICIAL], ids=["v4.1", "v4", "official"])
def test_a_draft_is_at_most_as_long_as_the_block(tmp_path: Path, config: dict[str, Any]) -> None:
    model = folder(tmp_path, config)
    check_drafts(resolve_config({"num_drafts": 5}), model)
    with pytest.raises(ConfigError, match="num_drafts: 6 are beyond the model's block of 5"):
        check_drafts(resolve_config({"num_drafts": 6}), model)


@pytest.mark.parametrize("config", [PLAIN_V41, OLD_V4, LLAMA], ids=["v4.1", "v4", "llama"])
def test_drafts_need_draft_stages(tmp_path: Path, config: dict[str, Any]) -> None:
    model = folder(tmp_path, config)
    with pytest.raises(ConfigError, match="num_drafts: 3 are asked for, and the model has no DSpark draft stages"):
        check_drafts(resolve_config({"num_drafts": 3}), model)


def test_a_file_has_no_draft_stages(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    check_drafts(resolve_config({}), file)
    with pytest.raises(ConfigError, match="num_drafts: 1 are asked for, and the model has no"):
        check_drafts(resolve_config({"num_drafts": 1}), file)


@pytest.mark.parametrize(
    ("num_drafts", "keep_tokens", "least"),
    [(-1, 134, 134), (-1, 133, 134), (2, 131, 131), (2, 130, 131), (0, 128, 129)],
)
def test_a_truncated_prompt_keeps_a_window_and_what_drafts_may_take_back(
    tmp_path: Path, num_drafts: int, keep_tokens: int, least: int
) -> None:
    model = folder(tmp_path, V41)
    config = resolve_config({"num_drafts": num_drafts, "prefill_keep_tokens": keep_tokens})
    if keep_tokens >= least:
        check_drafts(config, model)
        return
    drafts = least - 129
    words = rf"prefill_keep_tokens: {keep_tokens} is below window \+ drafts \+ 1 = 128 \+ {drafts} \+ 1 = {least}"
    with pytest.raises(ConfigError, match=words):
        check_drafts(config, model)
    check_drafts(resolve_config({"prefill_keep_tokens": keep_tokens, "prefill_truncation": "off"}), model)
    check_drafts(resolve_config({"prefill_keep_tokens": keep_tokens}), folder(tmp_path, V4))  # it has one half alone


def test_the_fake_model_drafts_as_it_is_told() -> None:
    check_drafts(resolve_config({"fake_num_drafts": 4, "num_drafts": 4}), None)
    with pytest.raises(ConfigError, match="num_drafts: 5 are beyond the model's block of 4"):
        check_drafts(resolve_config({"fake_num_drafts": 4, "num_drafts": 5}), None)
    with pytest.raises(ConfigError, match="num_drafts: 1 are asked for, and the model has no"):
        check_drafts(resolve_config({"num_drafts": 1}), None)


@pytest.mark.parametrize("text", ["{", '{"model_type": "deepseek_v41", "text_config": []'])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read"):
        check_drafts(resolve_config({}), tmp_path)


@pytest.mark.parametrize("value", ["five", None, -3, [5], 2.5, {}])
def test_sizes_that_are_none_are_left_to_the_worker(tmp_path: Path, value: Any) -> None:
    text = {"num_nextn_predict_layers": 3, "dspark_block_size": value, "sliding_window": value}
    check_drafts(resolve_config({}), folder(tmp_path, {"model_type": "deepseek_v41", "text_config": text}))


def test_a_cost_table_is_read_before_anything_starts(tmp_path: Path) -> None:
    settings = {"cost_table": str(tmp_path / "costs.json"), "fake_num_drafts": 3}
    check_drafts(resolve_config(settings), None)  # nobody asks for it
    with pytest.raises(ConfigError, match=r"cost_table: .*cannot be read"):
        check_drafts(resolve_config(settings | {"scheduled_drafts": True}), None)


async def test_an_engine_refuses_before_its_workers_start() -> None:
    engine = Engine("fake", num_drafts=2)
    with pytest.raises(ConfigError, match="num_drafts: 2 are asked for"):
        await engine.open()
    assert not engine.worker_pids


def test_a_rank_has_the_policy_of_its_settings(tmp_path: Path) -> None:
    fixed, scheduled = resolve_config({}), resolve_config({"scheduled_drafts": True})
    assert isinstance(draft_policy(fixed, 0, COSTS), NoDrafts)
    assert isinstance(draft_policy(scheduled, 0, None), NoDrafts)
    assert isinstance(policy := draft_policy(fixed, 3, COSTS), FixedDrafts) and policy.longest == 3
    assert isinstance(policy := draft_policy(scheduled, 3, COSTS), ScheduledDrafts) and policy.longest == 3
    with pytest.raises(ConfigError, match="scheduled_drafts: the worker has not measured"):
        draft_policy(scheduled, 3, None)
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode({"accelerator": "cpu", "positions": [1], "forward_us": [7.0]}))
    from_file = resolve_config({"scheduled_drafts": True, "cost_table": str(file)})
    assert isinstance(draft_policy(from_file, 3, None), ScheduledDrafts)
    table = cost_table(from_file, COSTS)
    assert table is not None and table.forward_us(1) == 7, "the file wins"
    assert cost_table(fixed, None) is None


def test_costs_are_measured_where_they_are_asked_for_and_not_given() -> None:
    assert not resolve_config({}).measures_costs
    assert resolve_config({"scheduled_drafts": True}).measures_costs
    assert not resolve_config({"scheduled_drafts": True, "num_drafts": 0}).measures_costs
    assert not resolve_config({"scheduled_drafts": True, "cost_table": "costs.json"}).measures_costs
