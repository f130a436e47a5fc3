"""What an output may be forced into: a JSON Schema, a regular expression, a choice or a grammar, as text.

Pure, and quick: what is asked is checked as far as that needs neither the model nor a compiler.
Knows nothing of tokens: see `grammar_compiler`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from deepinfer.chat import as_json
from deepinfer.errors import GrammarError, InvalidRequest
from deepinfer_protocol import SamplingParams

FIELDS: Final = ("json_schema", "regex", "choice", "grammar")
"""Of `SamplingParams`; a request has one of them at most."""
MAX_GRAMMAR_BYTES: Final = 128 * 1024
"""Of a schema or a grammar."""
MAX_REGEX_BYTES: Final = 8 * 1024
"""Of a regular expression: each of its characters is a state of a machine."""
MAX_CHOICES: Final = 4096
JSON_OPTIONS: Final[Mapping[str, Any]] = {
    "lenient": False,
    "coerce_one_of": False,
    # Enough to indent; a model that likes spaces would go on for ever.
    "whitespace_pattern": r"[ ]|\n[ \t]{0,32}",
}
"""How llguidance takes a schema."""


class GrammarSource(NamedTuple):
    """What one request asks for. Equal ones are compiled once."""

    field: str
    """Which of `FIELDS`."""
    text: str
    """JSON for a schema and for a choice."""


def grammar_source(params: SamplingParams) -> GrammarSource | None:
    """What `params` force the output into. Raises `InvalidRequest`, and `GrammarError` for what can be no grammar."""
    asked = [field for field in FIELDS if getattr(params, field) is not None]
    if not asked:
        return None
    if len(asked) > 1:
        raise InvalidRequest(asked[1], f"{asked[0]} came, too: at most one of {', '.join(FIELDS)} is expected")
    [field] = asked
    if params.ignore_eos is True:
        raise InvalidRequest("ignore_eos", f"the output of a {field} ends with an end-of-sequence token")
    text = _text(field, getattr(params, field))
    limit = MAX_REGEX_BYTES if field == "regex" else MAX_GRAMMAR_BYTES
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError(field, "has lone surrogates, text that is valid Unicode is expected") from None
    if num_bytes > limit:
        raise GrammarError(field, f"{num_bytes} bytes, at most {limit} are expected")
    return GrammarSource(field, text)


def _text(field: str, value: Any) -> str:
    if field == "choice":
        return _choices(value)
    if field == "json_schema" and isinstance(value, Mapping | bool):
        return as_json(field, value).decode()
    if not isinstance(value, str):
        expected = "a JSON Schema, as a mapping or as text," if field == "json_schema" else "a string"
        raise GrammarError(field, f"a {type(value).__name__} came, {expected} is expected")
    if not value:
        raise GrammarError(field, "is empty")
    return value


def _choices(value: Any) -> str:
    """JSON without a character beyond ASCII."""
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise GrammarError("choice", f"a {type(value).__name__} came, a list of strings is expected")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise GrammarError("choice", f"{len(value)} strings, 1 to {MAX_CHOICES} are expected")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise GrammarError("choice", "has lone surrogates, text that is valid Unicode is expected") from None
    return json.dumps(list(value))
