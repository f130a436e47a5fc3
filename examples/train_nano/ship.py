"""Makes a trained model the one that comes with the workers: its files, its figures, its card, its experts' loads.

    python -m examples.train_nano.ship DATA CHECKPOINT MODEL [--drafts CHECKPOINT]

MODEL is what `export` made; the other arguments are those of `evaluate`. Takes some ten minutes of one core.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

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
    put(arguments.model, folder)
    arguments.served = folder
    report = evaluate(arguments)
    show(report)
    write(report, folder / FIGURES)
    write_card(folder)
    record(arguments.data, folder, folder / LOADS)


def put(model: Path, folder: Path) -> None:
    """What is in `folder` goes, and the files of `model` come. They may be the same."""
    if model.resolve() == folder.resolve():
        return
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(model, folder)


if __name__ == "__main__":
    main()
