"""`python -m deepinfer_workers.random_checkpoint CONFIG.json DIR`: a random model with a tokenizer, as released ones.

For tests and benchmarks: its answers mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer_workers.config_file import MAX_CONFIG_BYTES, read_json
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.runner import WorkerFault


def main(arguments: list[str]) -> int:
    """Exit codes: 0 written, 1 the config cannot be used, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_workers.random_checkpoint", description=__doc__)
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sparse-tables", action="store_true", help="n-gram tables that take no room, and hold zeros")
    chosen = parser.parse_args(arguments)
    try:
        write_model(
            read_json(chosen.config, MAX_CONFIG_BYTES),
            chosen.folder,
            seed=chosen.seed,
            engram_tables="sparse" if chosen.sparse_tables else "dense",
        )
    except WorkerFault as fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
