"""The record of deepseek-recipe: 95 bodies, each with the prompt, the ids and the options, or the error, made of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

RECORD: Final = Path(__file__).resolve().parents[1] / "data" / "deepseek_prompts.json"
CASES: Final[dict[str, dict[str, Any]]] = {case["name"]: case for case in json.loads(RECORD.read_text())["cases"]}
NAMES: Final = ("DeepSeek-V4.1-Flash", "DeepSeek-V4-Pro")
SHORTENED: Final = {"context_overflow_4k": "word " * 5000, "oversize_prompt_2MB": "word " * 440_000}
"""What the user says where the record leaves it out."""
NUM_IN_SHORT_CONTEXT: Final = 4096


def body_of(case: dict[str, Any]) -> bytes:
    request = case["request"]
    if text := SHORTENED.get(case["name"]):
        said = {"role": "user", "content": text}
        request = {"model": NAMES[0], "messages": [said], "thinking": {"type": "disabled"}}
    return json.dumps(request).encode()


def limit_of(case: dict[str, Any]) -> int:
    """The context that the case was recorded with."""
    is_short = case["name"].startswith("context_")
    return int(case.get("context_limit", NUM_IN_SHORT_CONTEXT if is_short else 1 << 20))


def check_options(request: Any, case: dict[str, Any]) -> None:
    """A request that the recipe has converted has the options on record."""
    for field, value in case["inference_options"].items():
        found = getattr(request.inference_options, field)
        if isinstance(value, float):
            assert math.isclose(found, value, rel_tol=1e-6), field
        elif field == "output_constraint":
            assert (found is None) == (value is None) and (value is None or found.kind == value["kind"])
        else:
            assert found == value, field
    for field, value in case["parsing_options"].items():
        found = getattr(request.parsing_options, field)
        assert (str(found) if field == "thinking_initial_stage" else found) == value, field
