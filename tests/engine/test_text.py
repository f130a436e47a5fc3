"""Where a prompt lets a model think before it answers."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from deepinfer.text import TextPipeline
from doubles.byte_tokenizer import ANSWER, save_byte_tokenizer


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [
        ("Say it.<think>", True),
        ("Say it.<think>\n", True),
        ("Say it.<think>\r\n\n \t", True),
        ("Say it.<think>Well", False),
        ("Say it.<think>\n</think>\n\n", False),
        ("What is <think>\nfor?", False),
        ("Say it.\n", False),
        ("<think>" + "\n" * 20, False),
        ("", False),
    ],
)
def test_a_model_thinks_where_its_prompt_ends_with_the_mark_of_thinking(
    prompt: str, thinks: bool, tmp_path: Path
) -> None:
    text = TextPipeline(Path(save_byte_tokenizer(tmp_path)))
    ids = array("i", text.encode(prompt, add_special_tokens=False))
    assert text.answer_opening(ids) == (ANSWER if thinks else None)
