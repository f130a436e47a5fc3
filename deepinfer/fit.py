"""Whether this machine can hold a DeepSeek model, looked at before workers are started.

Such a folder may be larger than any memory, or be a config.json alone. What the model needs is the workers' to say:
`python -m deepinfer_workers.inspect` is asked. Knows nothing of tensors.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from deepinfer.env import worker_environment
from deepinfer.errors import ModelError, ModelFileError, ModelTooLarge
from deepinfer.supervisor import module_folders

INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"
SMALL: Final = 16
"""A model of which this many times over would fit needs no closer look: numbers in memory are at most 8 times as wide
as in its files."""
_INSPECT_TIMEOUT_S: Final = 120.0
_NUM_NAMED: Final = 3
_MEMINFO: Final = Path("/proc/meminfo")


class Needs(msgspec.Struct, frozen=True):
    """What a model takes, in bytes."""

    file_bytes: int
    """Of all its weights."""
    memory_bytes: int
    """Of the machine's memory, for one worker: weights, and what it must have beside them."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_fit(folder: Path, *, counts_memory: bool = True) -> None:
    """Raises `ModelFileError` when weights are missing, `ModelTooLarge` when memory is, both with the figures."""
    missing, here_bytes = missing_files(folder), _size_bytes(folder)
    available_bytes = available_memory() if counts_memory else None
    if missing or (available_bytes is not None and here_bytes * SMALL > available_bytes):
        judge(str(folder), read_needs(folder), missing, here_bytes, available_bytes)


def judge(name: str, needs: Needs, missing: list[str], here_bytes: int, available_bytes: int | None) -> None:
    """Raises `ModelFileError` and `ModelTooLarge`. `None`: the system does not say."""
    memory = _memory_in_words(needs.memory_bytes, available_bytes)
    if missing:
        here = f"{_in_words(here_bytes)} of {_in_words(needs.file_bytes)} are here"
        raise ModelFileError(name, f"files are missing: {_listed(missing)}; {here}; {memory}")
    if available_bytes is not None and needs.memory_bytes > available_bytes:
        raise ModelTooLarge(f"{name}: {memory}", needs.memory_bytes, available_bytes)


def missing_files(folder: Path) -> list[str]:
    """The weights that the index in `folder` names and that are not there, and beside them the tokenizer.

    Raises `ModelFileError` for an index that is none.
    """
    weights = _missing_weights(folder)
    return weights if not weights or (folder / TOKENIZER).is_file() else [*weights, TOKENIZER]


def _missing_weights(folder: Path) -> list[str]:
    file = folder / INDEX
    try:
        shards = sorted(set(msgspec.json.decode(file.read_bytes(), type=_Index).weight_map.values()))
    except FileNotFoundError:
        return [] if any(folder.glob("*.safetensors")) else [INDEX, "model-*.safetensors"]
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelFileError(str(file), f"cannot be read: {error}") from None
    return [shard for shard in shards if not (folder / shard).is_file()]


def available_memory(meminfo: Path = _MEMINFO) -> int | None:
    """Bytes that can be had without swapping; `None` where the system does not say."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def read_needs(folder: Path) -> Needs:
    """Raises `ModelError`, for a config.json that is none as well."""
    command = [sys.executable, "-P", "-m", "deepinfer_workers.inspect", "--json", str(folder)]
    options: dict[str, Any] = {"capture_output": True, "stdin": subprocess.DEVNULL, "timeout": _INSPECT_TIMEOUT_S}
    try:
        done = subprocess.run(command, env=worker_environment(module_folders()), **options, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"{folder}: cannot be looked at: {error}") from None
    if done.returncode:
        raise ModelError(f"{folder}: {done.stderr.decode(errors='replace').strip()}")
    return msgspec.json.decode(done.stdout, type=Needs)


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())


def _memory_in_words(needed: int, available: int | None) -> str:
    needs = f"the model needs {_in_words(needed)} of memory"
    if available is None:
        return needs
    short = f", {_in_words(needed - available)} too little" if needed > available else ""
    return f"{needs}, this machine can hold {_in_words(available)}{short}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
