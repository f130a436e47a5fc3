"""The JSON files of a model folder. Bounded, and never more than data: code that they name is not run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deepinfer_workers.checkpoint import bad_file, read_bounded, unsupported

MAX_CONFIG_BYTES: Final = 1 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json holds. Raises `WorkerFault`."""
    config = read_json(folder / "config.json", MAX_CONFIG_BYTES)
    if "auto_map" in config:
        raise unsupported(folder.name, "config.json names code in its folder (auto_map), and such code is not run")
    return config


def config_architecture(config: Mapping[str, Any]) -> str:
    """As `Checkpoint.architecture` has it. The file beside V4.1's official inference code names none."""
    if "architectures" not in config and "kv_source_layers" in config:
        return "hf:DeepseekV41ForCausalLM"
    names = config.get("architectures")
    return f"hf:{names[0] if isinstance(names, list) and names else names}"


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """An object of at most `max_bytes`. Raises `WorkerFault`."""
    try:
        content = json.loads(read_bounded(path, max_bytes))
    except (OSError, ValueError, RecursionError) as error:
        raise bad_file(path.name, f"cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise bad_file(path.name, f"a JSON object was expected, {type(content).__name__} came")
    return content
