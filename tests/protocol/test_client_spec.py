"""docs/wire.md has all that a client of another language needs: every field, every code, every limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, get_args

import pytest

from deepinfer_protocol import SamplingParams
from deepinfer_protocol.client import (
    CLIENT_VERSION,
    RETRYABLE,
    ClientMessage,
    ErrorCode,
    Finish,
    Limits,
    ServerMessage,
    Submit,
    Timings,
    Usage,
    Welcome,
)
from deepinfer_protocol.client.limits import MAX_DEPTH, MAX_HELLO_BYTES, MAX_ITEMS, MAX_KEY_BYTES

DOCS: Final = Path(__file__).resolve().parents[2] / "docs" / "wire.md"
TEXT: Final = DOCS.read_text(encoding="utf-8").split("\n## The client wire\n")[1]
KINDS: Final = [*get_args(ClientMessage), *get_args(ServerMessage)]
INNER: Final[dict[Any, tuple[Any, ...]]] = {Submit: (SamplingParams,), Welcome: (Limits,), Finish: (Usage, Timings)}
"""The maps that are fields of a message."""


def section_of(kind: Any) -> str:
    """What is said of one message."""
    found = re.search(rf"\n\*\*[A-Z]+\*\* `{kind.__struct_config__.tag}`(.*?)(?=\n\*\*[A-Z]+\*\* `|\n### )", TEXT, re.S)
    assert found is not None, f"nothing is said of {kind.__name__}"
    return found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_message_is_there(kind: Any) -> None:
    said = set(re.findall(r"`([a-z_]+)`", section_of(kind)))
    fields = {field for struct in (kind, *INNER.get(kind, ())) for field in struct.__struct_fields__}
    assert fields - said == set()


@pytest.mark.parametrize("kind", KINDS)
def test_no_table_has_a_field_that_is_not_there(kind: Any) -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", section_of(kind), re.M)
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} <= set(kind.__struct_fields__)


def test_codes_have_their_numbers_names_and_hints() -> None:
    table = TEXT.split("\n### Errors\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (\d+) \| `(E_[A-Z_]+)` \| (yes)? ?\| ", table, re.M)
    said = {int(number): (name, bool(retry)) for number, name, retry in rows}
    assert said == {int(code): (code.name, code in RETRYABLE) for code in ErrorCode}


def test_limits_are_those_of_the_decoder() -> None:
    table = TEXT.split("\n### Encoding\n")[1].split("\n### ")[0]
    for said in (
        f"HELLO of at most {MAX_HELLO_BYTES} bytes",
        f"text of at most {MAX_KEY_BYTES} bytes",
        f"at most {MAX_DEPTH} maps and arrays",
        f"at most {MAX_ITEMS:,} in a message",
    ):
        assert said in table
    assert f"this text is version {CLIENT_VERSION}" in TEXT
