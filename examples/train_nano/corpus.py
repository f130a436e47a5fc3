"""Prompts and answers in compressed files, in an order that is random and always the same. Knows no tokens."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

_HELD_OUT = 100
"""One prompt of so many is for tests, with all its answers."""


class Answer(NamedTuple):
    prompt: str
    text: str
    is_cut: bool
    """It ends behind a sentence, and not where its writer ended."""

    @property
    def is_held_out(self) -> bool:
        return crc32(self.prompt.encode()) % _HELD_OUT == 0


def read_answers(paths: Sequence[Path], seed: int) -> list[Answer]:
    """All lines of xz files of JSON objects: `p` the prompt, `a` the answer, `cut` 1 where it was cut."""
    answers: list[Answer] = []
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                fields = json.loads(line)
                answers.append(Answer(fields["p"], fields["a"], bool(fields.get("cut"))))
    random.Random(seed).shuffle(answers)
    return answers
