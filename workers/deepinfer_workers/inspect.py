"""`python -m deepinfer_workers.inspect PATH --ep N --dp N`: what a checkpoint holds and what its ranks need, as JSON.

PATH is a folder with config.json, with weights or without, or such a file. Tensors are compared by the headers of
their files: no weight is read. What cannot be told is one object with `error`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_workers.checkpoint import bad_file
from deepinfer_workers.config_file import MAX_CONFIG_BYTES, read_config, read_json
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.memory import memory_by_rank, num_ranks_of, shared_memory
from deepinfer_workers.models.deepseek.rank_tensors import check_tensors
from deepinfer_workers.models.deepseek.tensors import GROUPS, TensorSpec, expected_tensors
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.safetensors_folder import SafetensorsFolder, has_weights


def inspect(path: Path, num_ep: int, num_dp: int) -> dict[str, Any]:
    """Raises `WorkerFault`; files that do not fit the config are reported, and counted as the config has them."""
    num_ranks_of(num_ep, num_dp)
    config = DeepseekConfig.read(_read(path), path.name if path.is_file() else "config.json")
    specs = expected_tensors(config)
    sizes = {name: spec.num_bytes for name, spec in specs.items()}
    files, problem = "none", None
    if path.is_dir() and has_weights(path):
        try:
            folder = SafetensorsFolder(path)
            check_tensors(folder, specs)
            files, sizes = "match", {name: info.num_bytes for name, info in folder.tensors.items()}
        except WorkerFault as fault:
            files, problem = "differ", _words(fault)
    return {
        "name": path.name,
        "family": config.family,
        "is_quantized": config.is_quantized,
        "files": files,
        "problem": problem,
        "num_tensors": len(specs),
        "num_bytes": sum(sizes.values()),
        "groups": _groups(specs, sizes),
        "shared": shared_memory(config, specs, sizes)._asdict(),
        "ranks": [
            rank._asdict() for rank in memory_by_rank(config, specs, sizes, num_ep=num_ep, num_dp=num_dp)
        ],
    }  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    if path.is_file():
        return read_json(path, MAX_CONFIG_BYTES)
    if not path.is_dir():
        raise bad_file(path.name, "there is no such file or folder")
    return read_config(path)


def _groups(specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Those that have a tensor, in the order of `GROUPS`."""
    counts, totals = dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0)
    for name, spec in specs.items():
        counts[spec.group] += 1
        totals[spec.group] += sizes[name]
    return [
        {"name": group, "num_tensors": counts[group], "num_bytes": totals[group]} for group in GROUPS if counts[group]
    ]


def _words(fault: WorkerFault) -> dict[str, str]:
    return {"code": fault.code, "text": str(fault)}


def main(arguments: list[str]) -> int:
    """Exit codes: 0 told, 1 an error was told, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_workers.inspect", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    chosen = parser.parse_args(arguments)
    try:
        told: dict[str, Any] = inspect(chosen.path, chosen.ep, chosen.dp)
    except WorkerFault as fault:
        told = {"error": _words(fault)}
    sys.stdout.write(json.dumps(told) + "\n")
    return 1 if "error" in told else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
