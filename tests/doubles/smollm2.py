"""Finds the SmolLM2 weights, and builds their tokenizer from the file's own fields."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deepinfer.catalog import default_cache_dir, resolve
from deepinfer.errors import ModelError
from deepinfer_workers.gguf_file import GGUFFile

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONTROL = 3
"""Token type of special tokens in GGUF files."""


def model_path() -> Path:
    """The weights: DEEPINFER_TEST_SMOLLM2, else pulled as a user's would be; a skip where there is no way to them."""
    given = os.environ.get("DEEPINFER_TEST_SMOLLM2")
    if given:
        return Path(given)
    try:
        return resolve("smollm2-135m", cache_dir=default_cache_dir(), report=lambda _: None).path
    except ModelError as error:
        pytest.skip(f"no SmolLM2 weights: {error}")


def build_tokenizer(path: Path) -> Tokenizer:
    fields = GGUFFile(path).metadata
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment, unused-ignore]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def chat_prompt(question: str) -> str:
    turns = (("system", SYSTEM), ("user", question))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
