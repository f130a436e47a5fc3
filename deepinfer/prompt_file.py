"""Prompts in a file, one JSON object a line: read lazily, checked a line at a time.

    {"prompt": "The sea is", "id": "a", "params": {"max_tokens": 20}}
    {"prompt_token_ids": [1, 2, 3]}
    {"messages": [{"role": "user", "content": "Hello"}]}

Knows nothing of engines: what only a loaded model can refuse is not found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final
from zlib import crc32

import msgspec

from deepinfer.admission import ModelLimits, check_params
from deepinfer.chat import NO_OPTIONS, check_messages
from deepinfer.errors import ConfigError, DeepInferError, InvalidRequest
from deepinfer.grammar import grammar_source
from deepinfer.migrating import SamplingParams as AnySamplingParams
from deepinfer.migrating import rename_params
from deepinfer_protocol import SamplingParams

MAX_LINE_BYTES: Final = 64 << 20

_ANY_MODEL: Final = ModelLimits(
    vocab_size=2**31 - 1, max_model_len=1 << 24, max_cached_tokens=1 << 24, eos_token_ids=(), has_tokenizer=True
)
"""Refuses nothing that some model would serve."""


class PromptLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line that can be asked: exactly one of `prompt` and `messages` is set."""

    line: int
    """Its number in the file, from 1."""
    id: str | int | None
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    chat: dict[str, Any]
    """What the line says of `thinking`, `reasoning_effort`, `tools` and `tool_choice`."""
    params: SamplingParams
    crc: int
    """Of what was asked: the line as it stands, and the defaults."""


class BadLine(msgspec.Struct, frozen=True):
    """One line that cannot be asked, and why."""

    line: int
    id: str | int | None
    code: str
    reason: str
    crc: int


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    id: str | int | None = None
    params: dict[str, Any] = {}


class PromptFile:
    """The lines of one file."""

    def __init__(self, path: Path, defaults: Mapping[str, Any] | None = None) -> None:
        """`defaults` are fields of `SamplingParams` for lines that do not set them. Raises `ConfigError`."""
        self.path = path
        self._defaults = dict(defaults or {})
        if not path.is_file():
            raise ConfigError("prompts", f"{path}: no such file")
        read_defaults(self._defaults)
        self._crc = crc32(msgspec.json.encode(self._defaults, order="deterministic"))

    def __iter__(self) -> Iterator[PromptLine | BadLine]:
        """Every line that is not empty. Raises `ConfigError` when the file cannot be read."""
        try:
            with self.path.open("rb") as file:
                number = 0
                while raw := file.readline(MAX_LINE_BYTES):
                    number += 1
                    if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                        reason = f"is longer than {MAX_LINE_BYTES} bytes"
                        yield BadLine(number, None, InvalidRequest.code, reason, self._crc_of(raw))
                        _skip_line(file)
                    elif raw.strip():
                        yield self._read(number, raw)
        except OSError as error:
            raise ConfigError("prompts", f"{self.path} cannot be read: {error.strerror}") from None

    def _crc_of(self, raw: bytes) -> int:
        return crc32(raw.strip(), self._crc)

    def _read(self, number: int, raw: bytes) -> PromptLine | BadLine:
        line_id, crc = None, self._crc_of(raw)
        try:
            content = _decode(raw)
            line_id = content.id
            return self._line(number, content, crc)
        except DeepInferError as error:
            return BadLine(number, line_id, error.code, str(error), crc)

    def _line(self, number: int, content: _Content, crc: int) -> PromptLine:
        given = [content.prompt, content.prompt_token_ids, content.messages]
        if sum(each is not None for each in given) != 1:
            raise InvalidRequest("prompt", "exactly one of prompt, prompt_token_ids and messages is expected")
        if content.messages is not None:
            check_messages(content.messages)
        chat = {field: value for field in NO_OPTIONS._fields if (value := getattr(content, field)) is not None}
        if chat and content.messages is None:
            raise InvalidRequest(next(iter(chat)), "it says how messages become a prompt, and a prompt came")
        return PromptLine(
            line=number,
            id=content.id,
            prompt=content.prompt if content.prompt is not None else content.prompt_token_ids,
            messages=content.messages,
            chat=chat,
            params=_checked(read_params({**self._defaults, **content.params})),
            crc=crc,
        )


def _skip_line(file: BinaryIO) -> None:
    """To the start of the next line, without holding this one."""
    while (more := file.readline(MAX_LINE_BYTES)) and not more.endswith(b"\n"):
        pass


def _decode(raw: bytes) -> _Content:
    try:
        return msgspec.json.decode(raw, type=_Content)
    except msgspec.ValidationError as error:
        raise _refusal(error, "json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("json", str(error)) from None


def read_params(fields: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from a JSON object's fields, by our names or others'. Raises `InvalidRequest`, by field."""
    try:
        own = rename_params(fields, SamplingParams.__struct_fields__)
        return msgspec.convert(own, AnySamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(error, "params") from None


def read_defaults(fields: Mapping[str, Any]) -> SamplingParams:
    """The same for what holds for all requests. Raises `ConfigError` for what no model would serve."""
    try:
        return _checked(read_params(fields))
    except InvalidRequest as error:
        raise ConfigError(error.field, str(error).removeprefix(f"{error.field}: ")) from None


def _checked(params: SamplingParams) -> SamplingParams:
    grammar_source(params)
    return check_params(params, _ANY_MODEL)


def _refusal(error: msgspec.ValidationError, whole: str) -> InvalidRequest:
    """msgspec says where after the rest: "Expected `int`, got `str` - at `$.params.n`"."""
    text = str(error)
    if (unknown := re.search(r"unknown field `([^`]*)`", text)) is not None:
        return InvalidRequest(unknown[1], "there is no such field")
    reason, _, place = text.partition(" - at `$")
    return InvalidRequest(place.strip("`.") or whole, reason)
