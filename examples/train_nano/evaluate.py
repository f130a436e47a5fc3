"""Held-out loss by the training model and by the engine, on the same documents, and a few sampled answers.

    python -m examples.train_nano.evaluate DATA CHECKPOINT SERVED [--documents N] [--samples N] [--json FILE]

CHECKPOINT holds what `train` wrote, SERVED what `export` made of it. The two losses differ by what rounding does to
sums: in training whole documents are computed at once, in the engine step by step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer import Engine, SamplingParams
from examples.train_nano.figures import Figures
from examples.train_nano.layers import Switches
from examples.train_nano.model import Model
from examples.train_nano.packed import UNLEARNT, Packer
from examples.train_nano.packing import RowPacker
from examples.train_nano.parameters import Weights
from examples.train_nano.rows import Mixture
from examples.train_nano.tensor_parts import read_parts

Ids = list[int]
_TOKENS_AT_ONCE = 4096
_MOST_TOKENS = 300
"""Of a sampled answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "checkpoint", "served"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    documents = held_out(arguments.data, arguments.documents)
    loss = trained_loss(arguments.data, read_parts(arguments.checkpoint, "model"), documents)
    prompts = held_out_prompts(arguments.data, arguments.samples)
    report = {"trained_loss": loss} | asyncio.run(served(arguments.served, documents, prompts, _MOST_TOKENS))
    for answer in report["samples"]:
        print(f"\n> {answer['prompt']}\n{answer['text']}")
    print(f"\nheld-out loss of {len(documents)} documents, nats per token of answers: ", end="")
    print(f"{report['trained_loss']:.4f} trained, {report['served_loss']:.4f} served")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, ensure_ascii=False, indent=1), encoding="utf-8")


def held_out(data: Path, most: int) -> list[Ids]:
    """Documents of the test rows, single turns and conversations in turn, with their marks of what is not learnt."""
    figures = Figures.of_file(data / "config.json")
    mixture = Mixture(data, "test", 1 << 20, torch.device("cpu"))
    kinds: list[list[Ids]] = [[], []]
    for part in mixture.in_order():
        for row in part.tolist():
            kinds[part.shape[1] == mixture.lengths[1]] += documents_of(row, figures)
    mixed = [document for pair in zip(*kinds, strict=False) for document in pair]
    return (mixed + kinds[0][len(kinds[1]) :])[:most]


def documents_of(row: Ids, figures: Figures) -> list[Ids]:
    """A row's documents without their padding."""
    starts = [place for place, token in enumerate(row) if token % UNLEARNT == figures.bos]
    parts = [row[start:end] for start, end in zip(starts, [*starts[1:], len(row)], strict=True)]
    return [[token for token in part if token % UNLEARNT != figures.pad] for part in parts]


def held_out_prompts(data: Path, most: int) -> list[str]:
    """The first question of each held-out conversation."""
    lines = (data / "test_conversations.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines[:most]]


@torch.no_grad()
def trained_loss(data: Path, weights: Weights, documents: Sequence[Ids]) -> float:
    """Nats per token of answers, with everything rounded as inference does."""
    figures, device = Figures.of_file(data / "config.json"), torch.device("cpu")
    length = -(-max(map(len, documents)) // figures.window) * figures.window
    packer = RowPacker(length, figures.pad + UNLEARNT)
    for document in documents:
        packer.add(document)
    rows = torch.from_numpy(packer.rows().astype(np.int64))
    model = Model(figures, torch.from_numpy(np.load(data / "compressed.npy", allow_pickle=False)), torch.float32)
    weights = {name: weight.float() for name, weight in weights.items()}
    total, count = 0.0, 0
    for part in rows.split(max(_TOKENS_AT_ONCE // length, 1)):
        packed = Packer(figures, length, device)(part)
        num_learnt = int((packed.targets >= 0).sum())
        switches = Switches(torch.tensor(True), torch.tensor(True))
        total += model.losses(weights, packed, switches).text.item() * num_learnt if num_learnt else 0.0
        count += num_learnt
    return total / max(count, 1)


async def served(folder: Path, documents: Sequence[Ids], prompts: Sequence[str], most: int) -> dict[str, Any]:
    """The loss, and answers of at most `most` tokens, by the engine."""
    async with Engine(folder) as engine:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        plain = [[token % UNLEARNT for token in document] for document in documents]
        read = await engine.generate_many(plain, params, progress=False)
        sampling = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=most, seq_seed=1)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        answers = await engine.generate_many(chats, sampling, thinking=False, progress=False)
    learnt = [
        entry.logprob
        for document, completion in zip(documents, read, strict=True)
        for token, entry in zip(document, completion.prompt_token_logprobs or (), strict=True)
        if token < UNLEARNT and entry is not None
    ]
    samples = [
        {"prompt": prompt, "text": answer.text, "finish_reason": answer.samples[0].finish_reason}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return {"served_loss": -sum(learnt) / max(len(learnt), 1), "samples": samples}


if __name__ == "__main__":
    main()
