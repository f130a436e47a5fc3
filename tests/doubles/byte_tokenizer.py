"""A tokenizer with a token for each byte, an end, and the marks of thinking. Enough for any grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS, THINK, ANSWER = 256, 257, 258
VOCAB_SIZE: Final = 259


def save_byte_tokenizer(folder: Path) -> str:
    """A tokenizer.json, and what names its end. Returns the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment, unused-ignore]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    backend.add_special_tokens([AddedToken("<eos>")])
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return str(folder)
