"""Whether this machine can hold a DeepSeek model, looked at before workers are started.

Such a folder may be larger than any memory, or be a config.json alone. Only what a worker keeps in memory counts: its
routed experts and n-gram tables stay in mapped files. Knows nothing of tensors (`inspection` asks those who do).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from deepinfer.errors import ModelFileError, ModelTooLarge
from deepinfer.inspection import Inspection, inspect_model
from deepinfer.model_files import read_model_file

INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"
MAX_NAME: Final = 64
"""Characters of a file's name, which is written out where the file is missing."""
FLOAT32_BYTES: Final = 4
"""Of a number in memory. In a file it has one byte at least, experts apart."""
_NUM_NAMED: Final = 3
_MEMINFO: Final = Path("/proc/meminfo")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_fit(folder: Path, num_workers: int, *, counts_memory: bool = True) -> None:
    """Raises `ModelFileError` when files are missing, `ModelTooLarge` when memory is, both with the figures.

    Also what `inspect_model` raises. A model whose files are small beside the memory is not looked into.
    """
    missing, here_bytes = missing_files(folder), _size_bytes(folder)
    available_bytes = available_memory() if counts_memory else None
    most_bytes = here_bytes * FLOAT32_BYTES * num_workers
    if missing or (available_bytes is not None and most_bytes > available_bytes):
        judge(folder, inspect_model(folder), num_workers, missing, here_bytes, available_bytes)


def judge(
    folder: Path,
    found: Inspection,
    num_workers: int,
    missing: list[str],
    here_bytes: int,
    available_bytes: int | None,
) -> None:
    """Raises `ModelFileError` and `ModelTooLarge`. `available_bytes` is `None` where the system does not say."""
    needed_bytes = found.shared.dense_numbers * FLOAT32_BYTES * num_workers
    memory = _memory_in_words(found, needed_bytes, available_bytes)
    if missing:
        here = f"{_in_words(here_bytes)} of {_in_words(found.num_bytes)} are here"
        raise ModelFileError(str(folder), f"files are missing: {_listed(missing)}; {here}. {memory}")
    if available_bytes is not None and needed_bytes > available_bytes:
        raise ModelTooLarge(f"{folder}: {memory}", needed_bytes, available_bytes)


def missing_files(folder: Path) -> list[str]:
    """The weights that the index in `folder` names and that are not there, and beside them the tokenizer.

    Raises `ModelFileError` for an index that is none.
    """
    weights = _missing_weights(folder)
    return weights if not weights or (folder / TOKENIZER).is_file() else [*weights, TOKENIZER]


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


def _missing_weights(folder: Path) -> list[str]:
    file = folder / INDEX
    content = read_model_file(file)
    if content is None:
        return [] if any(folder.glob("*.safetensors")) else [INDEX, "model-*.safetensors"]
    try:
        shards = sorted(set(msgspec.json.decode(content, type=_Index).weight_map.values()))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelFileError(str(file), f"cannot be read: {error}") from None
    for shard in shards:
        if not shard.isprintable() or "/" in shard or len(shard) > MAX_NAME:
            raise ModelFileError(str(file), f"files in its folder were expected, {shard!r:.80} came")
    return [shard for shard in shards if not (folder / shard).is_file()]


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())


def _memory_in_words(found: Inspection, needed: int, available: int | None) -> str:
    alone = found.ranks[0]
    mapped = found.num_bytes - alone.dense_bytes - (alone.draft_bytes or 0) - alone.vision_bytes
    kept = f"{_in_words(needed)} of memory for its dense weights (float32), beside {_in_words(mapped)} in mapped files"
    if available is None:
        return f"It takes {kept}"
    short = f", {_in_words(needed - available)} too little" if needed > available else ""
    return f"It takes {kept}; this machine can hold {_in_words(available)}{short}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
