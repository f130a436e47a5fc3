"""What an engine's settings ask of drafts: refusals before anything is started, and the policy of a rank.

What a model can do is read in its config.json. Knows nothing of tensors, and of how a policy chooses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from deepinfer.budget import DraftPolicy, FixedDrafts, NoDrafts, ScheduledDrafts
from deepinfer.config import EngineConfig
from deepinfer.costs import CostTable
from deepinfer.deepseek_chat import deepseek_family
from deepinfer.errors import ConfigError, ModelFileError
from deepinfer.model_files import read_model_file
from deepinfer_protocol import StepCosts

_CONFIG: Final = "config.json"


class _Config(msgspec.Struct):
    """What the files say of drafts: the released one, and that beside the official inference code (the second names).

    Values of other types are a worker's to refuse.
    """

    num_nextn_predict_layers: Any = None
    n_mtp_layers: Any = None
    dspark_block_size: Any = None
    sliding_window: Any = None
    window_size: Any = None
    text_config: Any = None


class _Stages(msgspec.Struct):
    """What a model drafts with."""

    block_size: int
    """0: it has no DSpark stages."""
    window: int
    is_truncated: bool
    """`prefill_keep_tokens` means something to it."""


def check_drafts(config: EngineConfig, model: Path | None) -> None:
    """Refuse drafts that `model` cannot make; `None` is the fake one. Raises `ConfigError`, and `ModelFileError`."""
    if config.cost_table and config.scheduled_drafts:
        CostTable.read(Path(config.cost_table).expanduser(), config.accelerator)
    stages = _Stages(config.fake_num_drafts, 0, is_truncated=False) if model is None else _read_stages(model)
    if config.num_drafts > 0 and not stages.block_size:
        reason = f"{config.num_drafts} are asked for, and the model has no DSpark draft stages: leave it out, or give 0"
        raise ConfigError("num_drafts", reason)
    if config.num_drafts > stages.block_size:
        raise ConfigError("num_drafts", f"{config.num_drafts} are beyond the model's block of {stages.block_size}")
    num_drafts = stages.block_size if config.num_drafts < 0 else config.num_drafts
    least = stages.window + num_drafts + 1
    if stages.is_truncated and config.prefill_truncation == "compact" and config.prefill_keep_tokens < least:
        total = f"window + drafts + 1 = {stages.window} + {num_drafts} + 1 = {least}"
        raise ConfigError("prefill_keep_tokens", f"{config.prefill_keep_tokens} is below {total}")


def draft_policy(config: EngineConfig, num_drafts: int, costs: StepCosts | None) -> DraftPolicy:
    """For a rank that drafts at most `num_drafts` tokens and has measured `costs`. Raises `ConfigError`."""
    if not num_drafts:
        return NoDrafts()
    if not config.scheduled_drafts:
        return FixedDrafts(num_drafts)
    table = cost_table(config, costs)
    if table is None:
        raise ConfigError("scheduled_drafts", "the worker has not measured what steps cost: give a cost_table")
    return ScheduledDrafts(num_drafts, table)


def cost_table(config: EngineConfig, costs: StepCosts | None) -> CostTable | None:
    """The file that the settings name, else what was measured, if anything. Raises `ConfigError`."""
    if config.cost_table:
        return CostTable.read(Path(config.cost_table).expanduser(), config.accelerator)
    return None if costs is None else CostTable.of(costs)


def _read_stages(model: Path) -> _Stages:
    """Only DeepSeek models have any. Raises `ModelFileError`."""
    family = deepseek_family(model) if model.is_dir() else None
    if family is None:
        return _Stages(0, 0, is_truncated=False)
    file = model / _CONFIG
    content = read_model_file(file)
    try:
        config = msgspec.json.decode(content or b"{}", type=_Config)
        if isinstance(config.text_config, dict):
            config = msgspec.convert(config.text_config, _Config)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(str(file), f"cannot be read: {error}") from None
    num_stages = _size(config.num_nextn_predict_layers, config.n_mtp_layers)
    block_size = _size(config.dspark_block_size) if num_stages else 0
    return _Stages(block_size, _size(config.sliding_window, config.window_size), is_truncated=family == "v4.1")


def _size(*values: Any) -> int:
    """The first that is given; 0 where none is, or it is no size."""
    found = next((value for value in values if value is not None), 0)
    return found if isinstance(found, int) and found > 0 else 0
