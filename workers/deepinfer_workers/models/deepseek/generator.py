"""Writes random checkpoints in the released format, for any config. What such a model says means nothing.

Every value depends on the seed, the tensor's name and its shape alone, and has a size that keeps a forward pass in
range: matrices keep the length of their input, norms are near 1, hyper-connections mix gently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from deepinfer_kernels import quantize_fp4, quantize_fp8_blocks, quantize_fp8_rows
from deepinfer_workers.checkpoint import bad_file
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary
from deepinfer_workers.models.deepseek.random_tokenizer import write_tokenizer
from deepinfer_workers.models.deepseek.tensors import TensorSpec, expected_tensors
from deepinfer_workers.safetensors_file import DTYPES
from deepinfer_workers.safetensors_writer import SafetensorsWriter, Slot

EngramTables = Literal["dense", "sparse"]
SHARD_BYTES: Final = 4 << 30
_COMPRESSED: Final = "engram_compressed_vocab_size"
HEAD_SCALE: Final = 2.0
"""Logits are this far apart: near ties are rare."""


def write_checkpoint(
    config_json: Mapping[str, Any],
    folder: Path,
    *,
    seed: int = 0,
    engram_tables: EngramTables = "dense",
    shard_bytes: int = SHARD_BYTES,
) -> DeepseekConfig:
    """config.json, files of about `shard_bytes` and their index: every tensor that the config asks for.

    `sparse` tables are holes: they read as zeros. Plain tensors are BF16. Raises `WorkerFault` for a config that
    cannot be read.
    """
    config = DeepseekConfig.read(config_json, "config.json")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config_json), indent=1), encoding="utf-8")
    specs = expected_tensors(config)
    slots = [Slot(name, spec.dtypes[0], spec.shape) for name, spec in specs.items()]
    writer = SafetensorsWriter(folder, slots, shard_bytes=shard_bytes)
    for name, spec in specs.items():
        if name.endswith(".scale") or (spec.is_table and engram_tables == "sparse"):
            continue
        for part, tensor in _parts(name, spec, specs, config, seed):
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


def _parts(
    name: str, spec: TensorSpec, specs: Mapping[str, TensorSpec], config: DeepseekConfig, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensor, and its scales where it has any."""
    scale = f"{name.removesuffix('.weight')}.scale"
    if scale not in specs:
        dtype = DTYPES[spec.dtypes[0]]
        yield name, _values(name, spec.shape, config, seed).to(dtype)
        return
    rows, columns = spec.shape
    if spec.dtypes[0] == "I8":
        codes, scales = quantize_fp4(_values(name, (rows, 2 * columns), config, seed))
    elif spec.is_table:
        codes, scales = quantize_fp8_rows(_values(name, spec.shape, config, seed))
    else:
        codes, scales = quantize_fp8_blocks(_values(name, spec.shape, config, seed), config.scale_block)
    yield name, codes
    yield scale, scales


def _values(name: str, shape: tuple[int, ...], config: DeepseekConfig, seed: int) -> Tensor:
    """float32 (int64 for a table of expert ids)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    if name.endswith("tid2eid"):
        scores = torch.rand((shape[0], config.num_experts), generator=generator)
        ids: Tensor = scores.topk(shape[1], sorted=False).indices  # no expert twice
        return ids
    noise = torch.randn(shape, generator=generator)
    if name.endswith(_NEAR_ONE):
        return 1 + 0.1 * noise
    for ending, scale in _SCALES:
        if name.endswith(ending):
            return noise * scale
    return noise * ((HEAD_SCALE if name == "head.weight" else 1.0) / sqrt(shape[-1]))


_NEAR_ONE: Final = (
    "norm.weight", "norm1.weight", "norm2.weight", "engram.q_weight", "engram.k_weight",
)  # fmt: skip
_SCALES: Final = (
    ("embed.weight", 1.0),  # also the n-gram tables and the Markov table
    ("_base", 0.5), ("_scale", 0.5), ("attn_sink", 1.0), (".bias", 0.1), (".bias_vl", 0.1), (".ape", 0.1),
    ("image_start", 1.0), ("image_end", 1.0), ("image_newline", 1.0),
)  # fmt: skip
