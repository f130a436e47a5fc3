"""Writes random checkpoints in the released format, for any config. What such a model says means nothing."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch

from deepinfer_workers.checkpoint import bad_file
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary
from deepinfer_workers.models.deepseek.random_tensors import RandomTensors
from deepinfer_workers.models.deepseek.random_tokenizer import write_tokenizer
from deepinfer_workers.models.deepseek.tensors import expected_tensors
from deepinfer_workers.safetensors_writer import SafetensorsWriter, Slot

EngramTables = Literal["dense", "sparse"]
SHARD_BYTES: Final = 4 << 30
_COMPRESSED: Final = "engram_compressed_vocab_size"


def write_checkpoint(
    config_json: Mapping[str, Any],
    folder: Path,
    *,
    seed: int = 0,
    engram_tables: EngramTables = "dense",
    experts: Container[int] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> DeepseekConfig:
    """config.json, files of about `shard_bytes` and their index: every tensor that the config asks for.

    `sparse` tables are holes, and so are routed experts that are none of `experts`: they read as zeros, and take no
    room. What has no scales is BF16, or F32 where the release has that.

    Raises `WorkerFault` for a config that cannot be read.
    """
    config = DeepseekConfig.read(config_json, "config.json")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config_json), indent=1), encoding="utf-8")
    specs = expected_tensors(config)
    slots = [Slot(name, spec.dtypes[0], spec.shape) for name, spec in specs.items()]
    writer = SafetensorsWriter(folder, slots, shard_bytes=shard_bytes)
    tensors = RandomTensors(config, specs, seed)
    with _one_thread():
        for name, spec in specs.items():
            is_foreign = spec.expert is not None and experts is not None and spec.expert not in experts
            if is_foreign or name.endswith(".scale") or (spec.is_table and engram_tables == "sparse"):
                continue
            for part, tensor in tensors.parts(name):
                writer.write(part, tensor)
    return config


def write_model(config_json: Mapping[str, Any], folder: Path, **options: Any) -> DeepseekConfig:
    """`write_checkpoint` with a tokenizer, and with the number of compressed tokens that this tokenizer has.

    Raises `WorkerFault` also for a vocabulary that is too small for a tokenizer.
    """
    config = DeepseekConfig.read(config_json, "config.json")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_tokenizer(folder, config.vocab_size)
    except ValueError as error:
        raise bad_file("config.json", str(error)) from None
    if config.engram is None:
        return write_checkpoint(config_json, folder, **options)
    num_tokens = int(compressed_vocabulary(folder / "tokenizer.json", config.vocab_size).max()) + 1
    fitting = dict(config_json)
    if "text_config" in fitting:
        fitting["text_config"] = fitting["text_config"] | {_COMPRESSED: num_tokens}
    else:
        fitting[_COMPRESSED] = num_tokens
    return write_checkpoint(fitting, folder, **options)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The pieces are small: on a busy machine a team of threads spends most of its time waiting for itself."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
