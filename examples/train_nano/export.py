"""Trained weights to a model folder in the released format, which the engine serves.

    python -m examples.train_nano.export DATA CHECKPOINT OUT [--drafts DRAFTS]

DATA holds what `prepare` wrote, CHECKPOINT the parts that `train` wrote, DRAFTS those of `train_drafts`: without them,
the model has no draft stages, whatever DATA's configuration says.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels import quantize_fp4, quantize_fp8_blocks, quantize_fp8_rows
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.tensors import expected_tensors
from deepinfer_workers.safetensors_writer import SafetensorsWriter, Slot
from examples.train_nano.figures import Figures
from examples.train_nano.parameters import SCALE_BLOCK, Parameter, Storage, Weights, draft_parameters, parameters
from examples.train_nano.tensor_parts import read_parts

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SHARD_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "checkpoint", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--drafts", type=Path)
    arguments = parser.parse_args()
    weights = read_parts(arguments.checkpoint, "model")
    if arguments.drafts:
        weights |= read_parts(arguments.drafts, "drafts")
    num_bytes = export(weights, arguments.data, arguments.out)
    print(f"{num_bytes / 1e6:.1f} MB of tensors in {arguments.out}")


def export(weights: Weights, data: Path, out: Path) -> int:
    """The bytes of the tensors in `out`, a folder with the configuration and tokenizer of `data`."""
    out.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (data / name).exists():
            shutil.copyfile(data / name, out / name)
    metadata = json.loads((data / "config.json").read_text(encoding="utf-8"))
    if not any(name.startswith("mtp.") for name in weights):
        _leave_out_drafts(metadata["text_config"])
    (out / "config.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    specs = expected_tensors(DeepseekConfig.read(metadata, "config.json"))
    slots = [Slot(name, spec.dtypes[0], spec.shape) for name, spec in specs.items()]
    writer = SafetensorsWriter(out, slots, shard_bytes=_SHARD_BYTES)
    left = set(specs)
    for name, tensor in released(Figures.of(metadata), weights):
        writer.write(name, tensor)
        left.remove(name)
    assert not left, sorted(left)
    return sum(slot.num_bytes for slot in slots)


def _leave_out_drafts(text: dict[str, Any]) -> None:
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]


def released(figures: Figures, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its released name, as it is stored."""
    for name, parameter in (parameters(figures) | (draft_parameters(figures) if figures.drafts else {})).items():
        weight = weights[name].detach().float().cpu()
        if parameter.storage is Storage.FP4:
            prefix, matrix = name.rsplit(".", 1)
            for expert, part in enumerate(weight):
                yield from _stored(f"{prefix}.{expert}.{matrix}.weight", parameter, part)
        else:
            yield from _stored(name, parameter, weight)
        if name.endswith("ffn.gate.bias"):
            yield f"{name}_vl", weight  # no image is ever seen


def _stored(name: str, parameter: Parameter, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """With its scales, where it has any."""
    if parameter.storage in (Storage.BF16, Storage.F32):
        yield name, weight.to(torch.bfloat16) if parameter.storage is Storage.BF16 else weight
        return
    if parameter.storage is Storage.FP8:
        codes, scales = quantize_fp8_blocks(weight, SCALE_BLOCK)
    else:
        codes, scales = (quantize_fp4 if parameter.storage is Storage.FP4 else quantize_fp8_rows)(weight)
    yield name, codes
    yield f"{name.removesuffix('.weight')}.scale", scales


if __name__ == "__main__":
    main()
