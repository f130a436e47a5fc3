"""A tokenizer for a generated model: bytes, a few merges, and every special token by the name that DeepSeek gives it.

It makes any vocabulary full: each id decodes to something, and any text can be encoded. Knows nothing of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

HEAD: Final = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
"""Ids 0 to 2, as in the release."""
TAIL: Final = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
    "<｜image｜>",
)
"""The last ids."""
MIN_VOCAB_SIZE: Final = len(HEAD) + 256 + len(TAIL)
MAX_VOCAB_SIZE: Final = 1 << 18
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPACE: Final = "Ġ"
_LETTERS: Final = _SPACE + "etaoinshrdlucmfwygpbvkxqjz"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json, of exactly `vocab_size` ids. Raises `ValueError`."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size {vocab_size}: expected {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}")
    write_bpe(folder, list(islice(_merges(), vocab_size - MIN_VOCAB_SIZE)))


def write_bpe(folder: Path, merges: Sequence[tuple[str, str]]) -> None:
    """The two files for byte-level `merges`, the first the most urgent: `MIN_VOCAB_SIZE` and one id for each."""
    tokens = [*HEAD, *_byte_letters(), *("".join(pair) for pair in merges)]
    specials = [*enumerate(HEAD), *enumerate(TAIL, start=len(tokens))]
    backend = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token_id, content) for token_id, content in specials],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }
    bos, eos, pad = HEAD
    settings = {"add_bos_token": False, "bos_token": bos, "eos_token": eos, "pad_token": pad}
    for name, content in (("tokenizer.json", backend), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _byte_letters() -> list[str]:
    """The character that stands for each byte, in the order of the bytes: GPT-2's table."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of letters, then pairs of those; a space begins a word and stands nowhere else."""
    inner = _LETTERS.replace(_SPACE, "")
    pairs = [first + second for first in _LETTERS for second in inner]
    yield from ((pair[0], pair[1]) for pair in pairs)
    for first in pairs:
        yield from ((first, second) for second in pairs if not second.startswith(_SPACE))


def _added(token_id: int, content: str) -> dict[str, Any]:
    # As in the release: what only ends or pads is special, and left out of text; the others are seen in it.
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": token_id < len(HEAD)}
