"""Conversations as token ids, in the form of a DeepSeek-V4.1 prompt without thinking. Knows nothing of files.

BOS, perhaps `<｜System｜>` and a line, then for every turn `<｜User｜>` prompt `<｜Assistant｜></think>` answer EOS.
Text is never read as a special token. What is not to be learnt, all but answers and their ends, has `UNLEARNT` added.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

Ids = list[int]
UNLEARNT = 1 << 15
"""Added to an id: the token is seen, and not asked for."""


class Turn(NamedTuple):
    prompt: Ids
    answer: Ids
    is_cut: bool


@dataclass(frozen=True)
class ChatTokens:
    """The ids that stand between texts."""

    bos: int
    eos: int
    system: int
    user: int
    assistant: int
    end_of_thinking: int

    @classmethod
    def of(cls, vocabulary: dict[str, int]) -> ChatTokens:
        names = (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜System｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "</think>",
        )
        return cls(*(vocabulary[name] for name in names))

    def render(self, turns: Sequence[Turn], system: Ids | None = None) -> Ids:
        """The end of an answer that was cut is not to be learnt."""
        ids = [self.bos] if system is None else [self.bos, self.system, *system]
        ids = [token + UNLEARNT for token in ids]
        for turn in turns:
            asked = (self.user, *turn.prompt, self.assistant, self.end_of_thinking)
            ids += [token + UNLEARNT for token in asked]
            ids += [*turn.answer, self.eos + UNLEARNT * turn.is_cut]
        return ids


class TextEncoder:
    """Plain text to ids."""

    def __init__(self, tokenizer_json: Path) -> None:
        backend = json.loads(tokenizer_json.read_text(encoding="utf-8"))
        self.vocabulary: dict[str, int] = backend["model"]["vocab"] | {
            token["content"]: token["id"] for token in backend["added_tokens"]
        }
        self.chat = ChatTokens.of(self.vocabulary)
        self._backend = Tokenizer.from_str(json.dumps(backend | {"added_tokens": []}))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
