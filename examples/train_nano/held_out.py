"""Text that no training has seen: documents as token ids, questions, and conversations as prompts have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.train_nano.chat import TextEncoder, Turn
from examples.train_nano.figures import Figures
from examples.train_nano.packed import UNLEARNT
from examples.train_nano.rows import Mixture

Ids = list[int]


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


def as_prompts(documents: Sequence[Ids]) -> list[Ids]:
    """Without the marks."""
    return [[token % UNLEARNT for token in document] for document in documents]


def questions(data: Path, most: int) -> list[str]:
    """Of the held-out conversations, each once: first those that conversations begin with."""
    asked = [
        [message["content"] for message in messages if message["role"] == "user"] for messages in _conversations(data)
    ]
    firsts, others = ([part for each in asked for part in each[chosen]] for chosen in (slice(1), slice(1, None)))
    return list(dict.fromkeys(firsts + others))[:most]


def conversations(data: Path) -> list[Ids]:
    """As a prompt renders them, all answers included."""
    encoder = TextEncoder(data / "tokenizer.json")
    rendered = []
    for messages in _conversations(data):
        texts = iter(encoder.encode([message["content"] for message in messages]))
        turns = [Turn(prompt, answer, False) for prompt, answer in zip(texts, texts, strict=True)]
        rendered.append(encoder.chat.render(turns))
    return as_prompts(rendered)


def _conversations(data: Path) -> list[list[dict[str, str]]]:
    lines = (data / "test_conversations.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]
