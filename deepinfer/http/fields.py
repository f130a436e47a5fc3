"""The fields of a request's body that are read here, with their bounds, and those that are refused by name.

What deepseek-recipe reads (messages, tools, thinking, temperature, max_tokens and so on) it checks itself. A field that
is in no table is ignored, as the SDKs send new ones before anybody serves them; `docs/http.md` has the whole list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from deepinfer.http.fault import HttpFault, refused
from deepinfer.http.tool_calls import Tool

T = TypeVar("T", bound=Struct)

MAX_NAME_CHARACTERS: Final = 256
MAX_PROMPTS: Final = 128
MAX_ITEMS: Final[Mapping[str, int]] = {"messages": 8192, "input": 8192, "tools": 1024}
"""Each becomes an object of its own."""
MAX_IDS: Final = 1 << 16
"""Token ids of a body, unless the model's context is longer: making a million of them keeps everybody waiting."""
MAX_VALUES: Final = 1 << 15
"""Values of all kinds in a body, token ids of a completion aside."""
_MAX_DEPTH: Final = 1024
"""Of values in values: no parser here goes deeper."""
_FIELD: Final = re.compile(r" - at `\$\.?(.*?)`$")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Count = Annotated[int, Meta(ge=1, le=128)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Ids = list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]


class SamplingFields(Struct, kw_only=True):
    """What all of them have for sampling beyond the recipe. `None`: not asked for; the engine checks the values."""

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`."""
        return {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}


_SAMPLING: Final = tuple(name for name in SamplingFields.__struct_fields__ if name != "priority")


class ToolFields(Struct):
    """A tool as any of the APIs has it, as far as its arguments go."""

    name: str = ""
    parameters: Any = None
    input_schema: Any = None
    strict: bool | None = None
    function: ToolFields | None = None
    tools: list[ToolFields] = []
    """Of a group."""

    def known(self, group: str = "") -> Iterator[Tool]:
        """Under the name that the model has for it; all of a group."""
        if self.function is not None:
            yield from self.function.known()
        elif self.tools:
            for tool in self.tools:
                yield from tool.known(f"{self.name}::")
        else:
            schema = self.parameters if self.input_schema is None else self.input_schema
            yield Tool(group + self.name, schema, bool(self.strict))


class StreamOptions(Struct):
    include_usage: bool | None = None


class ChatFields(SamplingFields):
    """Of /v1/chat/completions."""

    model: Name
    n: Count | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None


class ResponsesFields(SamplingFields):
    """Of /v1/responses."""

    model: Name
    n: None = None
    stream: bool | None = None


class JsonFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class OutputConfig(Struct):
    format: JsonFormat | None = None


class MessagesFields(SamplingFields):
    """Of /v1/messages."""

    model: Name
    n: None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None


class CompletionFields(SamplingFields):
    """Of /v1/completions: all that it has."""

    model: Name
    prompt: Raw
    n: Count | None = None
    max_tokens: Tokens | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: Ids | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    def prompts(self, max_ids: int) -> list[str | list[int]]:
        """One or several, each of them text or token ids. Raises `HttpFault`."""
        text = bytes(self.prompt)
        if text[:1] == b'"':
            return [_decode_part(text, str, "prompt")]
        if b'"' in text:
            texts = _decode_part(text, list[str], "prompt")
            check_count("prompt", len(texts), MAX_PROMPTS)
            return list(texts)
        check_count("prompt", text.count(b",") + 1, max(max_ids, MAX_IDS))
        if text[1:].lstrip()[:1] != b"[":
            return [_decode_part(text, Ids, "prompt")]
        lists = _decode_part(text, list[Ids], "prompt")
        check_count("prompt", len(lists), MAX_PROMPTS)
        return list(lists)


class TokenizeFields(Struct, kw_only=True):
    """Of /tokenize: text, or messages as /v1/chat/completions has them."""

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Raw = Raw()
    """Empty: none came."""
    return_token_strs: bool = False


class DetokenizeFields(Struct, kw_only=True):
    """Of /detokenize."""

    model: Name | None = None
    tokens: Raw
    skip_special_tokens: bool = False

    def ids(self, max_ids: int) -> list[int]:
        """Raises `HttpFault`."""
        check_count("tokens", bytes(self.tokens).count(b",") + 1, max(max_ids, MAX_IDS))
        found: list[int] = _decode_part(bytes(self.tokens), Ids, "tokens")
        return found


UNSERVED: Final[Mapping[type[Struct], Mapping[str, tuple[Any, ...]]]] = {
    ChatFields: {
        "functions": (None, []),
        "function_call": (None,),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "best_of": (None, 1),
        "prompt_logprobs": (None,),
        "structured_outputs": (None,),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_grammar": (None,),
        "guided_choice": (None,),
    },
    ResponsesFields: {
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "prompt": (None,),
        "max_tool_calls": (None,),
        "truncation": (None, "disabled"),
    },
    MessagesFields: {"container": (None,), "mcp_servers": (None, []), "context_management": (None,)},
    CompletionFields: {
        "suffix": (None, ""),
        "best_of": (None, 1),
        "prompt_logprobs": (None,),
        "structured_outputs": (None,),
        "response_format": (None, {"type": "text"}),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_grammar": (None,),
        "guided_choice": (None,),
    },
}
"""Fields that would change an answer, and the values of them that do not."""


def check_values(body: bytes, limit: int) -> None:
    """Raises `HttpFault` for more values than a parser gets through before others notice.

    Commas outside strings are counted, in a loop that gives way to other threads; a parser does not.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    if plain.count(b'"') > 4 * (limit + _MAX_DEPTH):  # a value and its name are two strings
        raise too_many_values(limit)
    num_commas, end = 0, 0
    while (start := plain.find(b'"', end)) >= 0 and num_commas <= limit:
        num_commas += plain.count(b",", end, start)
        end = plain.find(b'"', start + 1) + 1 or len(plain)
    if num_commas + plain.count(b",", end) > limit:
        raise too_many_values(limit)


def too_many_values(limit: int) -> HttpFault:
    return refused(None, f"the body has more than {limit} values in it")


def decode_object(body: bytes) -> dict[str, Raw]:
    """The fields of a body, not looked into. Of a name that is there twice the last counts, here and everywhere."""
    found: dict[str, Raw] = _decode(body, dict[str, Raw])
    return found


def decode_fields(body: bytes, kind: type[T]) -> T:
    """What `kind` reads of a body. Raises `HttpFault`, which names the field."""
    found: T = _decode(body, kind)
    return found


def check_served(raw: Mapping[str, Raw], kind: type[Struct]) -> None:
    """Raises `HttpFault` for a field that would have to be ignored, though it asks for something."""
    for name, harmless in UNSERVED.get(kind, {}).items():
        if name in raw and _decode(raw[name], object) not in harmless:
            raise refused(name, f"{name}: it is not served here", "unsupported")


def asked_tools(raw: Mapping[str, Raw]) -> dict[str, Tool]:
    """By name, as they came: the recipe drops what it does not know of the schema of a strict one."""
    found: list[ToolFields] | None = _decode(raw["tools"], list[ToolFields] | None) if "tools" in raw else None
    return {tool.name: tool for fields in found or () for tool in fields.known()}


def check_lists(raw: Mapping[str, Raw]) -> None:
    """Raises `HttpFault` for more messages, items or tools than are looked at."""
    for name, limit in MAX_ITEMS.items():
        if name in raw and bytes(memoryview(raw[name])[:1]) == b"[":
            check_count(name, len(_decode(raw[name], list[Raw])), limit)


def check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise refused(field, f"{field}: {count} of them, at most {limit} are expected")


def _decode_part(text: bytes, kind: Any, field: str) -> Any:
    """As `_decode`, for the value of one field."""
    try:
        return _decode(text, kind)
    except HttpFault as fault:
        raise refused(field, f"{field}: {fault.message}") from None


def _decode(body: bytes | Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error)) or _MISSING.search(str(error))
        field = found[1] if found is not None and found[1] else None
        raise refused(field, _plain(str(error), field)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpFault(400, "invalid_json", f"the body is no JSON: {error}") from None
    except RecursionError:
        raise HttpFault(400, "invalid_json", "the body is nested too deep") from None


def _plain(text: str, field: str | None) -> str:
    """msgspec's words, without its way to point at a place."""
    reason = _FIELD.sub("", text)
    return f"{field}: {reason}" if field else reason
