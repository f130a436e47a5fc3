"""Makes a trained model the one that comes with the workers: its files, its figures, its card, its experts' loads.

    python -m examples.train_nano.ship DATA CHECKPOINT MODEL [--drafts CHECKPOINT ...]

MODEL is what `export` made; the other arguments are those of `evaluate`: what they leave out stays as it was found
before. Takes some ten minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import deepinfer_workers
from examples.train_nano.card import FIGURES, LOADS, write_card
from examples.train_nano.evaluate import add_options, evaluate, show, write
from examples.train_nano.expert_loads import record

NAME = "v41-nano"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "checkpoint", "model"):
        parser.add_argument(name, type=Path)
    add_options(parser)
    arguments = parser.parse_args()
    folder = Path(deepinfer_workers.__file__).with_name("shipped") / NAME
    before = read(folder / FIGURES)
    put(arguments.model, folder)
    arguments.served = folder
    report = before | evaluate(arguments)
    show(report)
    write(report, folder / FIGURES)
    write_card(folder)
    record(arguments.data, folder, folder / LOADS)


def read(figures: Path) -> dict[str, Any]:
    """Nothing, where there is no such file."""
    found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    return found


def put(model: Path, folder: Path) -> None:
    """What is in `folder` goes, and the files of `model` come. They may be the same."""
    if model.resolve() != folder.resolve():
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(model, folder)
    file = folder / "tokenizer_config.json"
    told = json.loads(file.read_text(encoding="utf-8")) | {"thinking": False}  # no answer that it learnt from began so
    file.write_text(json.dumps(told, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
