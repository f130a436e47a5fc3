"""The calls of tools that a DeepSeek model may write, as a grammar in Lark's notation.

A call is written in DSML, tags around a mark that is a token of its own and in no text. A parameter that is text stands
there as it is, any other as JSON. Parameters come in the order of their schema.
Knows nothing of requests, or of who compiles the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from deepinfer.deepseek_chat import Family
from deepinfer.grammar import JSON_OPTIONS, MAX_GRAMMAR_BYTES

_ANNOTATIONS: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema"})
_OF_PARAMETERS: Final = _ANNOTATIONS | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}
_OF_TEXT: Final = _ANNOTATIONS | {"type", "minLength", "maxLength"}
_PLAIN_NAME: Final = re.compile(r'[^"<>\\\s\x00-\x1f]+')
_JSON_AS_THE_MODEL_WRITES_IT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_MAX_DEPTH: Final = 16
"""Of references and alternatives of one parameter."""
_MAX_VALUES: Final = 4096
"""Alternatives of one parameter."""
_MAX_VISITED: Final = 1 << 16
"""Keys of schemas and listed values that are looked at for one grammar: some tens of milliseconds."""


class CannotEnforce(ValueError):
    """Says which tool, which parameter, and why."""


class CannotEnforceForm(CannotEnforce):
    """That of an answer that calls nothing."""


class Tool(NamedTuple):
    """One that may be called."""

    name: str
    parameters: Any
    """The schema of its arguments, as it came."""
    is_strict: bool
    """Its arguments satisfy the schema; else they have its names, and any values."""


class _Dialect(NamedTuple):
    block: str
    invoke: str
    parameter: str


_DIALECTS: Final[Mapping[Family, _Dialect]] = {
    "v4.1": _Dialect(" calls", " invoke", " parameter"),
    "v4": _Dialect("tool_calls", "invoke", "parameter"),
}


def calls_grammar(tools: Sequence[Tool], *, is_required: bool, family: Family, mark_id: int, form: Any = None) -> str:
    """What may follow the prompt: text, calls, or both; with `is_required` calls, whose block the prompt has begun.

    With `form`, a JSON Schema: what satisfies it, or calls, and no other text. `mark_id` is the token of the mark.
    Raises `CannotEnforce`, and `CannotEnforceForm` where `form` is at fault.
    """
    try:
        return _Writer(_DIALECTS[family], mark_id).grammar(tools, is_required, form)
    except RecursionError:
        raise CannotEnforce("a schema is nested too deep") from None


class _Writer:
    """Rules as they come."""

    def __init__(self, dialect: _Dialect, mark_id: int) -> None:
        self._dialect = dialect
        self._mark = f"<[{mark_id}]>"
        self._lengths: dict[tuple[int, int | None], str] = {}  # names of the rules for text
        self._budget = _Budget()
        self._num_characters = 0  # of the rules that are there

    def grammar(self, tools: Sequence[Tool], is_required: bool, form: Any) -> str:
        block, mark = self._dialect.block, self._mark
        begun = f'call+ "</" {mark} {_literal(f"{block}>")}'
        text, before = ("FREE", "BEGIN") if form is None else ("form", _literal("\n\n<"))
        start = f'{text} | {before} {mark} {_literal(f"{block}>")} "\\n" {begun}'
        rules = [
            f"start: {begun if is_required else start}",
            f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
        ]
        for index, tool in enumerate(tools):
            for rule in self._call(f"call_{index}", tool):
                rules.append(rule)
                self._num_characters += len(rule)
                _check_size(self._num_characters, tool.name)
        if form is not None and not is_required:
            rules.append(f"form: %json {_form(form)}")
        elif not is_required:
            rules += [r"FREE: /(.|\n)*/", r"BEGIN: /(.|\n)*\n\n</"]
        rules += [f"{name}: /(.|\\n){_times(*length)}<\\//" for length, name in self._lengths.items()]
        return "\n".join(rules) + "\n"

    def _call(self, rule: str, tool: Tool) -> Iterator[str]:
        invoke, mark = self._dialect.invoke, self._mark
        schema = _parameters(tool)
        properties, required = schema.get("properties", {}), frozenset(schema.get("required", ()))
        begin = f'"<" {mark} {_literal(f"{invoke} name={_quoted(tool.name)}>")} "\\n"'
        end = f'"</" {mark} {_literal(f"{invoke}>")} "\\n"'
        parts = []
        for index, (name, value) in enumerate(properties.items()):
            place = f"{tool.name}.{name}"
            parts.append(f"{rule}_{index}{'' if name in required else '?'}")
            parameter = _Parameter(place, schema, self._budget, set())
            found = _alternatives(value, parameter, _MAX_DEPTH) if tool.is_strict else _ANY
            yield f"{rule}_{index}: {self._parameter(_name(name, place), place, found)}"
        if not tool.is_strict and not properties and schema.get("additionalProperties") is not False:
            parts = [f"{rule}_any*"]
            yield f"{rule}_any: {self._parameter(None, tool.name, _ANY)}"
        yield f"{rule}: {' '.join([begin, *parts, end])}"

    def _parameter(self, name: str | None, place: str, values: Iterable[_Value]) -> str:
        """`None`: of any name."""
        tag, mark = self._dialect.parameter, self._mark
        called = r"/[^\"<>\\\s]+/" if name is None else _literal(name)
        either = " | ".join(self._either(place, values))
        return f'"<" {mark} {_literal(tag + " name=" + chr(34))} {called} ({either}) {mark} {_literal(f"{tag}>")} "\\n"'

    def _either(self, place: str, values: Iterable[_Value]) -> Iterable[str]:
        """Each once. Nothing is written any more as soon as it has become too much."""
        found: dict[str, None] = {}
        num_characters = self._num_characters
        for value in values:
            text = self._value(value)
            num_characters += len(text)
            _check_size(num_characters, place)
            found[text] = None
            if len(found) > _MAX_VALUES:
                raise CannotEnforce(f"{place}: more than {_MAX_VALUES} alternatives")
        if not found:
            raise CannotEnforce(f"{place}: its schema refers to nothing but itself")
        return found

    def _value(self, value: _Value) -> str:
        """To the beginning of the tag that ends it."""
        text, other = _literal('" string="true">'), _literal('" string="false">')
        if isinstance(value, str):
            return f"{text} {_literal(value + '</')}"
        if isinstance(value, _Json):
            return f'{other} %json {json.dumps(value.schema | {"x-guidance": _JSON_AS_THE_MODEL_WRITES_IT})} "</"'
        return f"{text} {self._lengths.setdefault(value, f'TEXT_{len(self._lengths)}')}"


def _form(schema: Any) -> str:
    """As the engine takes a schema that stands alone."""
    schema = {} if schema is True else schema
    if not isinstance(schema, dict) or "x-guidance" in schema:
        raise CannotEnforceForm("it is no schema that an answer can satisfy")
    try:
        return json.dumps(schema | {"x-guidance": JSON_OPTIONS})
    except RecursionError:
        raise CannotEnforceForm("it is nested too deep") from None


class _Json(NamedTuple):
    """Any value that this schema accepts, but no text."""

    schema: dict[str, Any]


class _Text(NamedTuple):
    """Any text of a length, in characters."""

    least: int
    most: int | None


_Value = str | _Json | _Text
"""A certain text, JSON, or text."""
_ANY: Final[tuple[_Value, ...]] = (_Text(0, None), _Json({}))


class _Budget:
    """What may still be looked at for one grammar."""

    def __init__(self) -> None:
        self.num_left = _MAX_VISITED

    def spend(self, count: int, place: str) -> None:
        self.num_left -= count
        if self.num_left < 0:
            raise CannotEnforce(f"{place}: with it the schemas of all tools have become too many to follow")


class _Parameter(NamedTuple):
    """Whose alternatives are looked for."""

    place: str
    root: Mapping[str, Any]
    """The schema that its references are in."""
    budget: _Budget
    followed: set[str]
    """References; what they stand for is an alternative once."""


def _check_size(num_characters: int, place: str) -> None:
    if num_characters > MAX_GRAMMAR_BYTES:  # definitions may be there once for every parameter
        raise CannotEnforce(f"{place}: with it the grammar of calls has become too large")


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of its arguments. Of a tool that is not strict as far as it can be read."""
    schema = {} if tool.parameters is None else tool.parameters
    if tool.is_strict and len(msgspec.json.encode(schema)) > MAX_GRAMMAR_BYTES:
        raise CannotEnforce(f"{tool.name}: its parameters have more than {MAX_GRAMMAR_BYTES} bytes")
    if _is_plain(schema):
        return dict(schema)
    if tool.is_strict:
        raise CannotEnforce(f"{tool.name}: its parameters are no plain object of properties")
    return {}


def _is_plain(schema: Any) -> bool:
    """Nothing but properties, and which of them are required."""
    if not isinstance(schema, dict) or schema.get("type", "object") != "object" or not schema.keys() <= _OF_PARAMETERS:
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _alternatives(schema: Any, parameter: _Parameter, depth: int) -> Iterator[_Value]:
    """The values that it may have. Raises `CannotEnforce`."""
    place, root = parameter.place, parameter.root
    if not isinstance(schema, dict | bool) or schema is False or depth == 0:
        raise CannotEnforce(f"{place}: its schema is none that a parameter can have, or refers too far")
    schema = {} if schema is True else schema
    parameter.budget.spend(1 + len(schema), place)
    keys, kinds = schema.keys() - _ANNOTATIONS, schema.get("type")
    if not keys:
        yield from _ANY
    elif keys == {"$ref"}:
        found = _referred(schema["$ref"], root, place)
        if schema["$ref"] not in parameter.followed:
            parameter.followed.add(schema["$ref"])
            yield from _alternatives(found, parameter, depth - 1)
    elif keys == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
        for part in schema["anyOf"]:
            yield from _alternatives(part, parameter, depth - 1)
    elif keys <= {"type", "enum"} and isinstance(schema.get("enum"), list):
        parameter.budget.spend(len(schema["enum"]), place)
        yield from _listed(schema["enum"], schema, place)
    elif keys <= {"type", "const"} and "const" in schema:
        yield from _listed([schema["const"]], schema, place)
    elif isinstance(kinds, list) and kinds:
        for kind in kinds:
            yield from _alternatives(schema | {"type": kind}, parameter, depth - 1)
    elif kinds == "string":
        yield _text(schema, place)
    elif not isinstance(kinds, str):
        raise CannotEnforce(f"{place}: {', '.join(sorted(keys))} without a type cannot be enforced")
    else:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        yield _Json(schema | definitions if '"$ref"' in json.dumps(schema) else schema)


def _listed(values: Sequence[Any], schema: Mapping[str, Any], place: str) -> tuple[_Value, ...]:
    """Those of them that are of the type, where there is one."""
    kinds = schema.get("type", list(_TYPES))
    fitting = [value for value in values if _is_of(value, kinds if isinstance(kinds, list) else [kinds])]
    if not fitting:
        raise CannotEnforce(f"{place}: no value satisfies its schema")
    others = [value for value in fitting if not isinstance(value, str)]
    return *(value for value in fitting if isinstance(value, str)), *([_Json({"enum": others})] if others else [])


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def _is_of(value: Any, kinds: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES.get(kind, ())) for kind in kinds if isinstance(kind, str))


def _text(schema: Mapping[str, Any], place: str) -> _Text:
    if beyond := schema.keys() - _OF_TEXT:
        raise CannotEnforce(f"{place}: {', '.join(sorted(beyond))} of a text cannot be enforced")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if (
        not isinstance(least, int)
        or not isinstance(most, int | None)
        or not 0 <= least <= (least if most is None else most)
    ):
        raise CannotEnforce(f"{place}: no text has that length")
    return _Text(least, most)


def _referred(reference: Any, root: Mapping[str, Any], place: str) -> Any:
    match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference) if isinstance(reference, str) else None
    found = root.get(match[1]) if match is not None else None
    if match is None or not isinstance(found, dict) or match[2] not in found:
        raise CannotEnforce(f"{place}: {reference!r} is no definition of its tool's schema")
    return found[match[2]]


def _name(name: str, place: str) -> str:
    if not _PLAIN_NAME.fullmatch(name):
        raise CannotEnforce(f"{place}: a call with such a name cannot be read")
    return name


def _quoted(name: str) -> str:
    return f'"{name}"'


def _literal(text: str) -> str:
    """As Lark has it."""
    return json.dumps(text)


def _times(least: int, most: int | None) -> str:
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"
