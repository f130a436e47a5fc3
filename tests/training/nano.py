"""A tiny model and a small corpus for the training's tests."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import torch

from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary
from deepinfer_workers.models.deepseek.random_tokenizer import write_tokenizer
from doubles.tiny_deepseek import tiny_v41
from examples.train_nano.figures import Figures
from examples.train_nano.parameters import Parameter, Weights, initial, parameters, stored
from examples.train_nano.prepare import prepare

VOCAB_SIZE = 320
OFF = torch.tensor(False)
ON = torch.tensor(True)
CPU = torch.device("cpu")


def tiny_config(folder: Path, *, has_drafts: bool = False) -> dict[str, Any]:
    """Written to `folder` with its tokenizer: a tiny model."""
    config = tiny_v41(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        n_routed_experts=4,
        dspark_noise_token_id=VOCAB_SIZE - 2,
    )
    if not has_drafts:
        config["text_config"] |= {"num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1]}
    write_tokenizer(folder, VOCAB_SIZE)
    compressed = compressed_vocabulary(folder / "tokenizer.json", VOCAB_SIZE)
    config["text_config"]["engram_compressed_vocab_size"] = int(compressed.max()) + 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config


def random_weights(figures: Figures, seed: int, found: dict[str, Parameter] | None = None) -> Weights:
    """Of checkpoints: every number as it is stored. Nothing is left at a start that hides an error."""
    generator = torch.Generator().manual_seed(seed)
    found = parameters(figures) if found is None else found
    start = initial(figures, seed, CPU, found)
    for name, parameter in found.items():
        if parameter.start <= 0.0:
            start[name] = start[name] + 0.3 * torch.randn(parameter.shape, generator=generator)
        start[name] = stored(name, start[name], parameter.storage)
    return start


def write_corpus(path: Path) -> None:
    source = random.Random(5)
    words = ["the", "a", "cat", "dog", "sea", "old", "small", "blue", "runs", "sings", "near", "house", "tree", "and"]
    with lzma.open(path, "wt", encoding="utf-8") as lines:
        for index in range(400):
            text = " ".join(source.choices(words, k=source.randint(3, 20)))
            line = {"p": f"Say {source.choice(words)} {index}.", "a": text + "."} | (
                {"cut": 1} if index % 3 == 0 else {}
            )
            lines.write(json.dumps(line) + "\n")


def prepared(folder: Path, *, has_drafts: bool = False) -> Path:
    """What `prepare` makes of the corpus."""
    write_corpus(folder / "corpus.jsonl.xz")
    tiny_config(folder, has_drafts=has_drafts)
    prepare(folder / "data", [folder / "corpus.jsonl.xz"], folder / "config.json", 1_000_000, (64, 128))
    return folder / "data"
