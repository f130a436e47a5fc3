"""Forced calls of tools: whatever a model does within their grammar, the recipe reads arguments that validate."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import jsonschema
import pytest

from deepinfer.admission import ModelLimits
from deepinfer.deepseek_chat import DeepseekFormat, Family
from deepinfer.errors import GrammarError
from deepinfer.grammar import MAX_GRAMMAR_BYTES, GrammarSource
from deepinfer.grammar_compiler import GrammarCompiler
from deepinfer.http import tool_calls
from deepinfer.http.codec import CHAT, MESSAGES, RESPONSES, Api, Codec
from deepinfer.http.exchange import ConversationExchange, Usage
from deepinfer.http.fault import HttpFault
from deepinfer.http.tool_calls import CannotEnforce, Tool, calls_grammar
from deepinfer.stream import TokenChunk
from deepinfer_protocol import SlotSampling
from doubles.deepseek import v4_tokenizer, write_v41_tokenizer

VOCAB_SIZE: Final = 129_280
EOS: Final = 1
NAMES: Final[dict[Family, str]] = {"v4.1": "DeepSeek-V4.1-Flash", "v4": "DeepSeek-V4-Pro"}
MARK: Final = "｜DSML｜"
TRIP: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "minItems": 1, "maxItems": 2},
        "kind": {"$ref": "#/$defs/kind"},
    },
    "required": ["city", "note", "days", "unit", "stops", "kind"],
    "additionalProperties": False,
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 4}, "is_long": {"type": "boolean"}},
            "required": ["at", "is_long"],
            "additionalProperties": False,
        },
        "kind": {"type": "string", "enum": ["by </rail>", "ходьба"]},
    },
}
NOW: Final[dict[str, Any]] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
SCHEMAS: Final = {"plan_trip": TRIP, "now": NOW}


def openai_tools(*, is_strict: bool) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": is_strict}}
        for name, schema in SCHEMAS.items()
    ]


class Model:
    """Says anything at all that a grammar lets it, from tokens that come to an end."""

    def __init__(self, family: Family, tokenizer: Path) -> None:
        self.deepseek = DeepseekFormat(family, tokenizer)
        limits = ModelLimits(VOCAB_SIZE, 1 << 20, 1 << 20, (EOS,), True)
        pipeline: Any = SimpleNamespace(chat=self.deepseek, max_token_characters=128)
        self.name = NAMES[family]
        self.codec = Codec(pipeline, limits, (self.name,))
        self.compiler = GrammarCompiler(tokenizer.read_text, VOCAB_SIZE, [EOS])
        [self.mark] = self.deepseek.tokenizer.encode(MARK)
        texts = [
            *map(chr, range(32, 127)),
            "\n",
            "\n\n",
            "</",
            "ходьба",
            '">',
            "string",
            "parameter",
            " name",
            " calls",
        ]
        self.tokens = {token for text in texts for token in self.deepseek.tokenizer.encode(text)}
        self.ending = {self.mark, EOS, *self.deepseek.tokenizer.encode("</")}

    def ask(self, api: Api = CHAT, **fields: Any) -> Any:
        talk: dict[str, Any] = {"model": self.name, "messages": [{"role": "user", "content": "Go."}]}
        off = {"thinking": {"type": "disabled"}}
        if api is RESPONSES:
            talk, off = {"model": self.name, "input": "Go."}, {"reasoning": {"effort": "none"}}
        return self.codec.ask(api, json.dumps({**talk, **off, **fields}).encode())

    def says(self, grammar: str, rng: random.Random, begun: str = "") -> list[int]:
        """Tokens, to their end; `begun` is how they begin."""
        matcher = self.compiler.compile(GrammarSource("grammar", grammar)).matcher(SlotSampling(), None)
        said = self.deepseek.tokenizer.encode(begun)
        new = list(said)
        while said[-1:] != [EOS]:
            assert len(said) < 3000
            mask = int.from_bytes(matcher.next_mask(new), "little")
            allowed = [token for token in sorted(self.tokens | self.ending) if mask >> token & 1]
            allowed = allowed or [
                (mask & -mask).bit_length() - 1
            ]  # where the text is given, one way to spell it may be
            ends = [token for token in allowed if token in self.ending]
            found = rng.choice(ends if ends and rng.random() < 0.2 else allowed)
            new = [found]
            said.append(found)
        return said

    def answer(self, asked: Any, tokens: list[int]) -> Any:
        """As the recipe reads it."""
        exchange = ConversationExchange(self.codec, asked, "id")
        exchange.begin(Usage(5, 0, None))
        for token in tokens:
            exchange.push(TokenChunk("", (token,), 0, finish_reason="stop" if token == EOS else None))
        return json.loads(exchange.whole())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Model]:
    v41 = write_v41_tokenizer(tmp_path_factory.mktemp("v4.1"))
    return {"v4.1": Model("v4.1", v41), "v4": Model("v4", v4_tokenizer())}


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("family", ["v4.1", "v4"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_required_call_is_made_and_read(family: Family, is_strict: bool, models: dict[Family, Model]) -> None:
    model, rng, names = models[family], random.Random(7), set[str]()
    asked = model.ask(tools=openai_tools(is_strict=is_strict), tool_choice="required")
    for _ in range(8):
        [choice] = model.answer(asked, model.says(asked.params.grammar, rng))["choices"]
        calls = calls_of(choice)
        assert choice["finish_reason"] == "tool_calls" and calls
        for name, arguments in calls:
            names.add(name)
            assert SCHEMAS[name]["properties"].keys() >= arguments.keys() >= set(SCHEMAS[name]["required"])
            if is_strict:
                jsonschema.validate(arguments, SCHEMAS[name], jsonschema.Draft202012Validator)
    assert names == set(SCHEMAS)


def test_strict_tools_may_be_left_alone_and_are_called_as_their_schemas_say(models: dict[Family, Model]) -> None:
    model, rng = models["v4.1"], random.Random(3)
    asked = model.ask(tools=openai_tools(is_strict=True))
    begun = f"So.\n\n<{MARK}"
    spoken, called = 0, 0
    for turn in range(30):
        tokens = model.says(asked.params.grammar, rng, begun if turn % 3 == 0 else "")
        [choice] = model.answer(asked, tokens)["choices"]
        for name, arguments in calls_of(choice):
            called += 1
            jsonschema.validate(arguments, SCHEMAS[name], jsonschema.Draft202012Validator)
        spoken += choice["finish_reason"] == "stop"
    assert spoken > 5 and called > 5


FORM: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "why": {"$ref": "#/$defs/why"}},
    "required": ["ok", "why"],
    "additionalProperties": False,
    "$defs": {"why": {"enum": ["rain", None, 5]}},
}


@pytest.mark.parametrize("family", ["v4.1", "v4"])
def test_an_answer_beside_tools_has_its_form_or_calls_them(family: Family, models: dict[Family, Model]) -> None:
    model, rng = models[family], random.Random(5)
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM}}
    asked = model.ask(tools=openai_tools(is_strict=False), response_format=form)
    spoken, called = 0, 0
    for turn in range(24):
        tokens = model.says(asked.params.grammar, rng, f"\n\n<{MARK}" if turn % 3 == 0 else "{")
        [choice] = model.answer(asked, tokens)["choices"]
        calls = calls_of(choice)
        called += len(calls)
        if choice["finish_reason"] == "stop":
            spoken += 1
            jsonschema.validate(json.loads(choice["message"]["content"]), FORM, jsonschema.Draft202012Validator)
        else:
            assert calls and not choice["message"]["content"]
    assert spoken > 5 and called > 5


@pytest.mark.parametrize("begun", ["Well, ", "[", '\n\n<"'])
def test_beside_tools_nothing_else_is_said(begun: str, models: dict[Family, Model]) -> None:
    model = models["v4.1"]
    told = {"role": "user", "content": "In json."}
    asked = model.ask(messages=[told], tools=openai_tools(is_strict=False), response_format={"type": "json_object"})
    with pytest.raises(GrammarError):
        model.says(asked.params.grammar, random.Random(1), begun)


def test_a_required_tool_leaves_no_other_form(models: dict[Family, Model]) -> None:
    tools: dict[str, Any] = {"tools": openai_tools(is_strict=False), "tool_choice": "required"}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM}}
    ask = models["v4.1"].ask
    assert ask(**tools, response_format=form).params.grammar == ask(**tools).params.grammar


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "string", "x-guidance": {"lenient": True}}])
def test_a_form_beside_tools_is_refused_where_it_is_refused_alone(schema: Any, models: dict[Family, Model]) -> None:
    model = models["v4.1"]
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    with pytest.raises((GrammarError, HttpFault)):
        asked = model.ask(tools=openai_tools(is_strict=False), response_format=form)
        assert asked.names["grammar"] == "response_format"
        model.compiler.compile(GrammarSource("grammar", asked.params.grammar))


def test_a_named_tool_is_the_only_one(models: dict[Family, Model]) -> None:
    model = models["v4.1"]
    named = {"type": "function", "function": {"name": "now"}}
    asked = model.ask(tools=openai_tools(is_strict=False), tool_choice=named)
    [choice] = model.answer(asked, model.says(asked.params.grammar, random.Random(1)))["choices"]
    assert {name for name, _ in calls_of(choice)} == {"now"}


def test_every_api_has_strict_tools_by_their_own_schemas(models: dict[Family, Model]) -> None:
    model = models["v4.1"]
    chat = model.ask(tools=openai_tools(is_strict=True), tool_choice="required").params.grammar
    flat = [{"type": "function", "name": name, "parameters": it, "strict": True} for name, it in SCHEMAS.items()]
    assert model.ask(RESPONSES, tools=flat, tool_choice="required").params.grammar == chat
    claudes = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    one = {"type": "tool", "name": "now"}
    assert "now" in model.ask(MESSAGES, tools=claudes, tool_choice=one, max_tokens=9).params.grammar
    strict = [tool | {"strict": True} for tool in claudes]
    free = model.ask(tools=openai_tools(is_strict=True)).params.grammar
    assert model.ask(MESSAGES, tools=strict, max_tokens=9).params.grammar == free
    patch = {"type": "custom", "name": "apply_patch", "description": "d"}
    assert "input" in model.ask(RESPONSES, tools=[patch], tool_choice="required").params.grammar
    group = {"type": "namespace", "name": "travel", "description": "d", "tools": flat}
    assert '"days' in model.ask(RESPONSES, tools=[group]).params.grammar


def test_tools_that_are_neither_strict_nor_required_are_free(models: dict[Family, Model]) -> None:
    assert models["v4.1"].ask(tools=openai_tools(is_strict=False)).params.grammar is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "^a$"}, "n.p: pattern of a text cannot be enforced"),
        ({"type": "string", "format": "date"}, "n.p: format of a text cannot be enforced"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no text has that length"),
        ({"oneOf": [{"type": "string"}]}, "n.p: oneOf without a type cannot be enforced"),
        ({"$ref": "#/$defs/none"}, "is no definition"),
        ({"$ref": "#/$defs/loop"}, "refers to nothing but itself"),
        ({"anyOf": [{"$ref": f"#/$defs/far{at}"} for at in range(20)]}, "refers too far"),
        ({"type": "string", "enum": [3]}, "no value satisfies"),
        (False, "is none that a parameter can have"),
    ],
)
def test_a_parameter_that_cannot_be_enforced_is_named(schema: Any, words: str) -> None:
    loop = {"loop": {"$ref": "#/$defs/loop"}}
    far = {f"far{at}": {"$ref": f"#/$defs/far{at + 1}"} for at in range(20)}
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": loop | far}
    with pytest.raises(CannotEnforce, match=words):
        calls_grammar([Tool("n", parameters, True)], is_required=True, family="v4.1", mark_id=5)
    assert calls_grammar([Tool("n", parameters, False)], is_required=True, family="v4.1", mark_id=5)


SAME: Final = {"d": {"enum": ["x"] * 400}}


def wide(levels: int) -> dict[str, Any]:
    """Few words for very many alternatives."""
    found: dict[str, Any] = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 99} for at in range(levels)}
    return found | {f"d{levels}": {"enum": [0] * 400}}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"p": {"enum": [str(at) for at in range(4097)]}}}, "n.p: more than 4096 alternatives"),
        ({"properties": {f"p{at}": {"$ref": "#/$defs/d"} for at in range(200)}, "$defs": SAME}, "too many to follow"),
        ({"properties": {"p": {"type": "string", "description": "x" * 200_000}}}, "have more than 131072 bytes"),
        (
            {
                "properties": {f"p{at}": {"type": "array", "items": {"$ref": "#/$defs/d"}} for at in range(500)},
                "$defs": {"d": {"type": "string", "enum": ["x" * 1000]}},
            },
            "too large",
        ),
        ({"properties": []}, "no plain object"),
        ({"properties": {"p": {}}, "required": [[]]}, "no plain object"),
        ({"properties": {"p": {}}, "required": "p"}, "no plain object"),
        ({"properties": {"p": {"type": [["string"]], "enum": ["x"]}}}, "no value satisfies"),
        ({"properties": {"p": {"type": [[[]]]}}}, "without a type"),
        ({"properties": {"p": {"type": "string", "minLength": "x"}}}, "no text has that length"),
        ({"properties": {"p": {"$ref": 5}}}, "is no definition"),
        ({"properties": {"p": {"anyOf": []}}}, "without a type"),
        ({"properties": {'a"b': {}}}, "such a name"),
        ({"properties": {"a b": {}}}, "such a name"),
        ([], "no plain object"),
        ("x", "no plain object"),
    ],
)
def test_schemas_that_explode_or_are_none_are_refused_soon(parameters: Any, words: str) -> None:
    began = time.perf_counter()
    with pytest.raises(CannotEnforce, match=words):
        calls_grammar([Tool("n", parameters, True)], is_required=False, family="v4.1", mark_id=5)
    assert time.perf_counter() - began < 1.0


def test_what_is_referred_to_often_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []

    def is_of(value: Any, kinds: Any) -> bool:
        looked_at.append(value)
        return True

    monkeypatch.setattr(tool_calls, "_is_of", is_of)
    parameters = {"properties": {"p": {"$ref": "#/$defs/d0"}}, "$defs": wide(6)}
    found = calls_grammar([Tool("n", parameters, True)], is_required=True, family="v4.1", mark_id=5)
    assert len(looked_at) == 400
    assert found.count("%json") == 1


def test_no_more_is_written_than_a_grammar_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def dumps(value: Any) -> str:
        written.append(len(text := json.dumps(value)))
        return text

    monkeypatch.setattr(tool_calls, "json", SimpleNamespace(dumps=dumps))
    parts = [{"type": "object", "minProperties": at, "properties": {"x": {"$ref": "#/$defs/d"}}} for at in range(200)]
    definitions = {"d": {"type": "string", "description": "x" * 50_000}}
    parameters = {"properties": {"p": {"anyOf": parts}}, "$defs": definitions}
    with pytest.raises(CannotEnforce, match=r"n\.p: .* too large"):
        calls_grammar([Tool("n", parameters, True)], is_required=True, family="v4.1", mark_id=5)
    assert sum(written) < 2 * MAX_GRAMMAR_BYTES


def test_a_refusal_is_the_request_s(models: dict[Family, Model]) -> None:
    parameters = {"type": "object", "properties": {"p": {"type": "string", "pattern": "a"}}, "required": ["p"]}
    tool = {"type": "function", "function": {"name": "n", "parameters": parameters, "strict": True}}
    with pytest.raises(HttpFault, match=r"tools: n\.p: pattern") as caught:
        models["v4.1"].ask(tools=[tool])
    assert (caught.value.code, caught.value.field) == ("unsupported", "tools")
