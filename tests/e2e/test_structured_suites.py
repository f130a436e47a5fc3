"""The JSON Schema Test Suite and real schemas: each is refused with a reason, or every finished output validates.

From tokens that are as good as random, with and without drafts. The files are not part of the project.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from benchmarks.structured import Case, is_right, judge, read_options, run

DATA: Final = Path(__file__).parents[3] / "shared/data"
FOLDERS: Final = [DATA / "json_schema_test_suite/draft2020-12", DATA / "jsonschemabench"]

pytestmark = pytest.mark.skipif(not all(map(Path.is_dir, FOLDERS)), reason="the schemas are not here")


def outcome(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """With drafts, and without."""
    found = asyncio.run(run(read_options([*map(str, FOLDERS), *arguments])))
    assert is_right(found), found["differing"] or [one["wrong"] for one in found.values() if "wrong" in one]
    with_drafts, without = found["num_drafts -1"], found["num_drafts 0"]
    assert with_drafts["refusals"] == without["refusals"]
    assert with_drafts["drafts_accepted"] > 0 == without["drafts_verified"]
    return with_drafts, without


@pytest.mark.parametrize(
    ("text", "is_multiple"),
    [("1510.3010", True), ("0.00751", False), ("0.0075", True), ('"0.00751"', True), ("-2", True)],
)
def test_multiples_are_judged_as_they_are_written(text: str, is_multiple: bool) -> None:
    sample: Any = SimpleNamespace(text=text, finish_reason="stop", token_ids=())
    verdict = judge(Case("", {"multipleOf": 0.0001}), SimpleNamespace(samples=[sample]))  # type: ignore[arg-type]
    assert (not verdict.wrong, verdict.num_unjudged) == (is_multiple, 0)


def test_some_are_refused_or_validate() -> None:
    for one in outcome("--model", "fake", "--every", "11", "--max-tokens", "60"):
        assert one["accepted_share"] > 0.5 and one["finished"] > 20


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_are_refused_or_validate() -> None:
    for one in outcome("--model", "fake", "--max-tokens", "200"):
        assert one["schemas"] > 700 and one["accepted_share"] > 0.55 and one["finished"] > 300


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_model_with_random_logits_writes_what_validates() -> None:
    for one in outcome("--model", "v41-nano", "--every", "7", "--max-tokens", "60"):
        assert one["finished"] > 30
