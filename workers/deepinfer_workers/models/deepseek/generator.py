"""Writes random checkpoints in the released format, for any config. What such a model says means nothing.

Every value depends on the seed, the tensor's name and its shape alone, and has a size that keeps a forward pass in
range: matrices keep the length of their input, norms are near 1, hyper-connections mix gently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from math import floor, log
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import quantize_fp8_blocks, quantize_fp8_rows
from deepinfer_workers.checkpoint import bad_file
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary
from deepinfer_workers.models.deepseek.random_tokenizer import write_tokenizer
from deepinfer_workers.models.deepseek.tensors import SCALE_GROUP, TensorSpec, expected_tensors
from deepinfer_workers.safetensors_file import DTYPES
from deepinfer_workers.safetensors_writer import SafetensorsWriter, Slot

EngramTables = Literal["dense", "sparse"]
SHARD_BYTES: Final = 4 << 30
_COMPRESSED: Final = "engram_compressed_vocab_size"
_E8M0_BIAS: Final = 127
FP4_MEAN_SQUARE: Final = 8.5625
"""Of the sixteen values of an E2M1 code."""
HEAD_SCALE: Final = 2.0
"""Logits are this far apart: near ties are rare."""


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

    `sparse` tables are holes, and so are routed experts that are none of `experts`: they read as zeros and take no
    room. Plain tensors are BF16. Raises `WorkerFault` for a config that cannot be read.
    """
    config = DeepseekConfig.read(config_json, "config.json")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config_json), indent=1), encoding="utf-8")
    specs = expected_tensors(config)
    slots = [Slot(name, spec.dtypes[0], spec.shape) for name, spec in specs.items()]
    writer = SafetensorsWriter(folder, slots, shard_bytes=shard_bytes)
    for name, spec in specs.items():
        is_hole = spec.is_table and engram_tables == "sparse"
        if spec.expert is not None and experts is not None:
            is_hole = spec.expert not in experts
        if is_hole or name.endswith(".scale"):
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
        codes, scales = _fp4(name, rows, columns, seed)
    elif spec.is_table:
        codes, scales = quantize_fp8_rows(_values(name, spec.shape, config, seed))
    else:
        codes, scales = quantize_fp8_blocks(_values(name, spec.shape, config, seed), config.scale_block)
    yield name, codes
    yield scale, scales


def _values(name: str, shape: tuple[int, ...], config: DeepseekConfig, seed: int) -> Tensor:
    """float32 (int64 for a table of expert ids)."""
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    if name.endswith("tid2eid"):
        scores = torch.rand((shape[0], config.num_experts), generator=generator)
        ids: Tensor = scores.topk(shape[1], sorted=False).indices  # no expert twice
        return ids
    noise = torch.randn(shape, generator=generator)
    if name.endswith(_NEAR_ONE):
        return noise.mul_(0.1).add_(1)
    for ending, scale in _SCALES:
        if name.endswith(ending):
            return noise.mul_(scale)
    return noise.mul_((HEAD_SCALE if name == "head.weight" else 1.0) * shape[-1] ** -0.5)


def _fp4(name: str, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] of two each, and scales. Drawn as they are stored: a model has very many of them."""
    generator = np.random.default_rng(_seed_of(name, seed))
    codes = np.frombuffer(bytearray(generator.bytes(rows * columns)), np.int8).reshape(rows, columns)
    # Scales are one power of two or the next, as often as makes the mean square 1 / inputs: 4^low * (1 + 3 * share).
    wanted = 1 / (2 * columns * FP4_MEAN_SQUARE)
    low = floor(log(wanted, 4))
    share = (wanted / 4.0**low - 1) / 3
    scales = (generator.random((rows, 2 * columns // SCALE_GROUP)) < share) + np.uint8(_E8M0_BIAS + low)
    return torch.from_numpy(codes), torch.from_numpy(scales).view(torch.float8_e8m0fnu)


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")


_NEAR_ONE: Final = (
    "norm.weight", "norm1.weight", "norm2.weight", "engram.q_weight", "engram.k_weight",
)  # fmt: skip
_SCALES: Final = (
    ("embed.weight", 1.0),  # also the n-gram tables and the Markov table
    ("_base", 0.5), ("_scale", 0.5), ("attn_sink", 1.0), (".bias", 0.1), (".bias_vl", 0.1), (".ape", 0.1),
    ("image_start", 1.0), ("image_end", 1.0), ("image_newline", 1.0),
)  # fmt: skip
