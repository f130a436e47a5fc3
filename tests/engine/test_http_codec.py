"""Bodies of the three APIs: the prompts, options and errors on record, and what is done about the recipe's gaps."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Final

import deepseek_recipe as recipe
import msgspec
import pytest

from deepinfer.admission import ModelLimits
from deepinfer.deepseek_chat import DeepseekFormat
from deepinfer.errors import ContextLengthExceeded, InvalidRequest
from deepinfer.grammar import MAX_GRAMMAR_BYTES
from deepinfer.http.codec import CHAT, MESSAGES, RESPONSES, Api, Codec
from deepinfer.http.exchange import ConversationExchange, Usage
from deepinfer.http.fault import HttpFault
from deepinfer.http.fields import check_values, decode_fields, decode_object
from deepinfer.stream import TokenChunk
from doubles.deepseek import v4_tokenizer, write_v41_tokenizer
from doubles.recipe_record import CASES, NAMES, SHORTENED, body_of, check_options, limit_of

APIS: Final = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
OURS: Final = {
    "developer_role": "OpenAI's name of the role system",
    "n2": "the engine has samples",
    "unknown_model": "404, as OpenAI has it",
}
"""Errors of the recipe that are not ours."""
IMAGES: Final = {name for name, case in CASES.items() if case.get("images") or name == "image_not_an_image"}
FAULTY: Final = sorted(name for name, case in CASES.items() if "error" in case and name not in {*OURS, *IMAGES})
READ: Final = {"max_completion_tokens": "it counts", "responses_previous_id": "refused: nothing is kept"}
"""Fields that the recipe ignores, and we do not."""
RENDERED: Final = sorted(
    name for name, case in CASES.items() if "error" not in case and name not in {*SHORTENED, *READ}
)
HELLO: Final = {"model": NAMES[0], "messages": [{"role": "user", "content": "Hello"}]}
OFF: Final[dict[str, Any]] = {"thinking": {"type": "disabled"}}
BEGUN: Final = {"role": "assistant", "content": "{", "prefix": True}
CITY: Final[dict[str, Any]] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL: Final = {"type": "function", "function": CITY}
PATTERN: Final = {"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}, "required": ["a"]}
PATTERNED_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": PATTERN, "strict": True}}
CLAUDES_TOOL: Final = {"name": "weather", "input_schema": CITY["parameters"]}
TRIP: Final = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/town"}},
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"town": {"type": "string", "maxLength": 9}},
}
FORM: Final = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}}
NAMED_FORM: Final = {"type": "json_schema", "name": "trip", "schema": TRIP, "strict": True}
PLAIN_FORM: Final = {"type": "json_schema", "schema": TRIP}


def codec_of(chat: Any, max_length: int = 1 << 20) -> Codec:
    limits = ModelLimits(129_280, max_length, max_length, (1,), True)
    pipeline: Any = SimpleNamespace(chat=chat, max_token_characters=128)
    return Codec(pipeline, limits, NAMES)


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DeepseekFormat]:
    v41 = write_v41_tokenizer(tmp_path_factory.mktemp("v4.1"))
    return {"v4.1": DeepseekFormat("v4.1", v41), "v4": DeepseekFormat("v4", v4_tokenizer())}


@pytest.fixture
def codec(formats: dict[str, DeepseekFormat]) -> Codec:
    return codec_of(formats["v4.1"])


def ask(codec: Codec, api: Api = CHAT, **fields: Any) -> Any:
    return codec.ask(api, json.dumps({**HELLO, **fields}).encode())


def test_the_record_is_whole() -> None:
    assert len(CASES) == 95
    assert len(RENDERED) + len(FAULTY) + len(OURS) + len(READ) + len(IMAGES - set(RENDERED)) + 1 == 95


@pytest.mark.parametrize("name", RENDERED)
def test_a_body_becomes_the_prompt_and_the_options_on_record(name: str, formats: dict[str, DeepseekFormat]) -> None:
    case = CASES[name]
    codec = codec_of(formats[case["model_version"]], case["context_limit"])
    request = codec.convert(APIS[case["protocol"]], body_of(case)).request
    encoding = recipe.DeepseekV4Encoding() if case["model_version"] == "v4" else recipe.DeepseekV41Encoding()
    assert encoding.render_conversation(request.conversation).prompt == case["prompt"]
    if name in IMAGES:
        with pytest.raises(HttpFault, match="unsupported: image"):
            codec.encode(request)
        return
    ids = codec.encode(request)
    assert ids == case["token_ids"]
    assert codec.max_tokens(request, len(ids)) == case["max_tokens_resolved"]
    check_options(request, case)


@pytest.mark.parametrize("name", FAULTY)
def test_a_body_that_is_refused_on_record_is_refused_here_in_the_same_words(
    name: str, formats: dict[str, DeepseekFormat]
) -> None:
    case = CASES[name]
    codec = codec_of(formats[case.get("model_version", "v4.1")], limit_of(case))
    with pytest.raises((HttpFault, InvalidRequest)) as caught:
        codec.ask(APIS[case["protocol"]], body_of(case))
    if isinstance(caught.value, ContextLengthExceeded):
        assert case["error"]["stage"] == "resolve"
        return
    assert isinstance(caught.value, HttpFault) and caught.value.status == 400
    assert caught.value.message == case["error"]["message"][:500]


@pytest.mark.parametrize(
    ("name", "field"),
    {
        "effort_bad": "reasoning_effort",
        "null_user": "messages",
        "missing_messages": "messages",
        "max_tokens_zero": "max_tokens",
        "temperature_bad": "temperature",
        "stop_17": "stop",
        "logprobs_bad": "top_logprobs",
        "stream_options_no_stream": "stream_options",
        "tools_mixed_strict": "tools",
        "json_schema_invalid": "response_format",
        "tool_orphan": "messages",
    }.items(),
)
def test_a_refusal_names_the_field_that_the_recipe_does_not(name: str, field: str, codec: Codec) -> None:
    with pytest.raises(HttpFault) as caught:
        codec.ask(CHAT, body_of(CASES[name]))
    assert caught.value.field == field


@pytest.mark.parametrize("name", [*OURS, *READ])
def test_beneath_what_is_ours_the_record_holds(name: str, codec: Codec) -> None:
    """A body as it came, without what is done about the recipe's gaps, on the same path."""
    case, body = CASES[name], body_of(CASES[name])
    api = APIS[case["protocol"]]
    fields, raw = decode_fields(body, api.fields), decode_object(body)
    if name in OURS:
        with pytest.raises(codec._refusals) as caught:
            codec._convert(api, fields, raw)
        assert str(caught.value) == case["error"]["message"]
        return
    request = codec._convert(api, fields, raw).request
    ids = codec.encode(request)
    assert ids == case["token_ids"]
    assert codec.max_tokens(request, len(ids)) == case["max_tokens_resolved"]
    check_options(request, case)


def test_a_developer_is_a_system(codec: Codec) -> None:
    roles = [{"role": role, "content": "Be brief."} for role in ("developer", "system")]
    first, second = (ask(codec, messages=[role, *HELLO["messages"]]).prompt for role in roles)
    assert first == second


def test_the_newer_name_of_max_tokens_counts(codec: Codec) -> None:
    assert ask(codec, max_completion_tokens=7).params.max_tokens == 7
    assert ask(codec, max_completion_tokens=7, max_tokens=7).params.max_tokens == 7
    with pytest.raises(HttpFault, match="another number than max_tokens"):
        ask(codec, max_completion_tokens=7, max_tokens=8)


def test_a_prompt_that_fills_the_context_is_refused_where_the_recipe_would_have_one_token(
    formats: dict[str, DeepseekFormat],
) -> None:
    num_prompt = len(ask(codec_of(formats["v4.1"]), **OFF).prompt)
    with pytest.raises(ContextLengthExceeded):
        ask(codec_of(formats["v4.1"], num_prompt), **OFF)
    assert ask(codec_of(formats["v4.1"], num_prompt + 1), **OFF).params.max_tokens == 1


def test_sampling_is_as_the_recipe_has_it_and_the_rest_as_it_came(codec: Codec) -> None:
    thinking = ask(codec, temperature=0.2, top_p=0.3, top_k=5, n=2, seed=9, logit_bias={"7": -3}).params
    assert (thinking.temperature, round(thinking.top_p, 6), thinking.top_k, thinking.n) == (1.0, 0.95, 5, 2)
    assert (thinking.seq_seed, thinking.logit_bias) == (9, {"7": -3})
    assert ask(codec, temperature=0.25, top_p=0.3, **OFF).params.temperature == 0.25
    assert ask(codec, top_p=0.3, **OFF).params.top_p == 1.0


@pytest.mark.parametrize(
    ("api", "fields", "field"),
    [
        (CHAT, {"tools": [TOOL], "response_format": {"type": "regex", "regex": "a+"}}, "response_format"),
        (CHAT, {"tools": [PATTERNED_TOOL]}, "tools"),
        (CHAT, {"messages": [*HELLO["messages"], BEGUN], "response_format": FORM}, "response_format"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"guided_json": {"type": "object"}}, "guided_json"),
        (CHAT, {"audio": {"voice": "x"}}, "audio"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (MESSAGES, {"container": "x"}, "container"),
    ],
)
def test_what_would_change_an_answer_and_is_not_served_is_refused(
    api: Api, fields: dict[str, Any], field: str, codec: Codec
) -> None:
    body = {"model": NAMES[0], "input": "json"} if api is RESPONSES else {**HELLO, "max_tokens": 4}
    with pytest.raises(HttpFault) as caught:
        codec.ask(api, json.dumps({**body, **fields}).encode())
    assert (caught.value.status, caught.value.code) == (400, "unsupported")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"response_format": FORM}),
        (RESPONSES, {"text": {"format": NAMED_FORM}}),
        (MESSAGES, {"output_config": {"format": PLAIN_FORM}}),
    ],
)
def test_a_schema_is_enforced_as_it_came(api: Api, fields: dict[str, Any], codec: Codec) -> None:
    body = {"model": NAMES[0], "input": "Hello"} if api is RESPONSES else {**HELLO, "max_tokens": 4}
    asked = codec.ask(api, json.dumps({**body, **fields}).encode())
    assert json.loads(str(asked.params.json_schema)) == TRIP, "strict ones have lost their definitions elsewhere"
    told: dict[str, Any] = {} if api is MESSAGES else {"response_format": FORM}
    assert asked.prompt == ask(codec, **told).prompt, "of Messages the recipe does not tell the model"


@pytest.mark.parametrize(
    ("api", "fields", "field"),
    [
        (CHAT, {"tools": [TOOL], "response_format": FORM}, "response_format"),
        (RESPONSES, {"tools": [CITY | {"type": "function"}], "text": {"format": NAMED_FORM}}, "text.format"),
        (MESSAGES, {"tools": [CLAUDES_TOOL], "output_config": {"format": PLAIN_FORM}}, "output_config.format"),
    ],
)
def test_beside_tools_a_form_is_part_of_their_grammar(
    api: Api, fields: dict[str, Any], field: str, codec: Codec
) -> None:
    body = {"model": NAMES[0], "input": "Hello"} if api is RESPONSES else {**HELLO, "max_tokens": 4}
    asked = codec.ask(api, json.dumps({**body, **fields}).encode())
    assert asked.params.json_schema is None and '"maxLength": 9' in str(asked.params.grammar)
    assert asked.names == {"grammar": field}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_fault_of_a_form_beside_tools_is_the_form_s(choice: str, codec: Codec) -> None:
    schema = {"type": "string", "x-guidance": {"lenient": True}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    if choice == "required":  # then it is not in the grammar
        assert ask(codec, tools=[TOOL], tool_choice=choice, response_format=form, **OFF).names == {"grammar": "tools"}
        return
    with pytest.raises(HttpFault, match="response_format: it is no schema that an answer can satisfy") as caught:
        ask(codec, tools=[TOOL], tool_choice=choice, response_format=form)
    assert (caught.value.code, caught.value.field) == ("unsupported", "response_format")


def test_any_object_and_a_pattern_are_enforced(codec: Codec) -> None:
    told = {"role": "user", "content": "Answer in json."}
    whole = ask(codec, messages=[told], response_format={"type": "json_object"})
    assert whole.params.json_schema == '{"type":"object"}'
    assert ask(codec, response_format={"type": "regex", "regex": "a+"}).params.regex == "a+"
    assert ask(codec, response_format={"type": "text"}).params == ask(codec).params
    formed = ask(codec, tools=[TOOL], tool_choice="none", response_format=FORM)
    assert json.loads(str(formed.params.json_schema)) == TRIP


def test_a_schema_that_is_too_large_is_refused_where_bodies_are_read(codec: Codec) -> None:
    schema = {"type": "object", "description": "x" * MAX_GRAMMAR_BYTES}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(HttpFault, match=f"response_format: .* bytes, at most {MAX_GRAMMAR_BYTES}") as caught:
        ask(codec, response_format=form)
    assert (caught.value.status, caught.value.code, caught.value.field) == (400, "grammar", "response_format")


@pytest.mark.parametrize(
    "form", [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "schema": "x"}, {"schema": TRIP}, 5]
)
def test_a_form_of_messages_that_is_none_is_refused(form: Any, codec: Codec) -> None:
    with pytest.raises(HttpFault) as caught:
        ask(codec, MESSAGES, max_tokens=4, output_config={"format": form})
    assert caught.value.status == 400 and str(caught.value.field).startswith("output_config.format")


def test_what_nobody_knows_is_ignored(codec: Codec) -> None:
    assert ask(codec, user="me", metadata={"a": "b"}, store=False, invented=[1]).prompt == ask(codec).prompt


def test_more_items_than_are_looked_at_are_refused(codec: Codec) -> None:
    for api, field, item in ((CHAT, "messages", HELLO["messages"][0]), (CHAT, "tools", {}), (RESPONSES, "input", {})):
        with pytest.raises(HttpFault, match=r"10000 of them, at most (8192|1024)") as caught:
            codec.ask(api, json.dumps({**HELLO, field: [item] * 10_000}).encode())
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "num_commas"),
    [
        (b"", 0),
        (b'{"a": 1, "b,c": [2, 3], "d": "\\",\\\\", "e": ","}', 4),
        (b'{"a": ",,,', 0),
        (b'{"a": ",\\', 0),
        (b'"' + b'\\"' * 1_000_000, 0),  # in a time that does not grow with the square
        (b'["\\\\", 1, "\\\\", 2]', 3),
    ],
)
def test_values_are_counted_outside_strings(body: bytes, num_commas: int) -> None:
    check_values(body, num_commas)
    if num_commas:
        with pytest.raises(HttpFault, match=f"more than {num_commas - 1} values"):
            check_values(body, num_commas - 1)


@pytest.mark.parametrize(
    "fields",
    [
        {f"x{index}": 1 for index in range(40_000)},
        {"messages": [{"role": "user", "content": "x", "y": [0] * 40_000}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * 40_000}}}]},
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(fields: dict[str, Any], codec: Codec) -> None:
    with pytest.raises(HttpFault, match="more than 32768 values"):
        ask(codec, **fields)


# ---- answers


def run(codec: Codec, chunks: list[TokenChunk], api: Api = CHAT, **fields: Any) -> list[Any]:
    exchange = ConversationExchange(codec, ask(codec, api, stream=True, **fields), "id")
    events = exchange.begin(Usage(5, 2, None))
    for chunk in chunks:
        events += exchange.push(chunk)
    assert exchange.is_finished
    return [msgspec.json.decode(event.data) for event in events]


def chunk(ids: list[int], reason: Any = None, sample_index: int = 0) -> TokenChunk:
    return TokenChunk("", tuple(ids), 0, sample_index, None, reason)


def test_the_token_that_ends_an_answer_is_not_in_it(codec: Codec) -> None:
    events = run(codec, [chunk([19923]), chunk([1], "stop")], **OFF)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "Hello"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 1
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_a_stop_string_ends_an_answer_before_the_model_does(codec: Codec) -> None:
    events = run(codec, [chunk([19923, 19923])], stop=["oH"], **OFF)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "Hell"


def test_samples_have_their_numbers_and_one_usage(codec: Codec) -> None:
    chunks = [chunk([19923]), chunk([19923], None, 1), chunk([1], "stop", 1), chunk([19923], "length")]
    events = run(codec, chunks, n=2, **OFF)
    told = [(event["choices"][0]["index"], event["choices"][0]["finish_reason"]) for event in events]
    assert (1, "stop") in told and told[-1] == (0, "length")
    assert [event["usage"] for event in events if event.get("usage")] == [
        events[-1]["usage"] | {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    ]


@pytest.mark.parametrize(("reason", "status"), [("abort", 503), ("timeout", 504), ("queue_timeout", 503)])
def test_an_end_that_is_no_answer_is_a_fault(reason: str, status: int, codec: Codec) -> None:
    with pytest.raises(HttpFault) as caught:
        run(codec, [chunk([], reason)], **OFF)
    assert caught.value.status == status


DSML: Final = "｜DSML｜"
CALL: Final = (
    f'\n\n<{DSML} calls>\n<{DSML} invoke name="weather">\n'
    f'<{DSML} parameter name="city" string="true">Paris</{DSML} parameter>\n'
    f'<{DSML} parameter name="days" string="false">3</{DSML} parameter>\n'
    f"</{DSML} invoke>\n</{DSML} calls>"
)
ARGUMENTS: Final = {"city": "Paris", "days": 3}
PROPERTIES: Final = {"city": {"type": "string"}, "days": {"type": "integer"}}
SCHEMA: Final = {"type": "object", "properties": PROPERTIES}
TOOLS: Final[dict[str, list[Any]]] = {
    "chat": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "responses": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    "messages": [{"name": "weather", "input_schema": SCHEMA}],
}


def said(codec: Codec, api: Api, text: str, **fields: Any) -> Any:
    """The whole response where the model says `text`, a token a step."""
    assert codec.deepseek is not None
    asked = {"model": NAMES[0], "input": "?"} if api is RESPONSES else HELLO
    exchange = ConversationExchange(codec, codec.ask(api, json.dumps({**asked, **fields}).encode()), "id")
    exchange.begin(Usage(5, 0, None))
    for token_id in codec.deepseek.tokenizer.encode(text):
        exchange.push(chunk([token_id]))
    exchange.push(chunk([1], "stop"))
    return json.loads(exchange.whole())


def test_a_call_of_a_tool_comes_as_each_api_has_it(codec: Codec) -> None:
    off: dict[str, Any] = {"chat": OFF, "messages": OFF, "responses": {"reasoning": {"effort": "none"}}}
    chat, responses, messages = (
        said(codec, api, "Let me look." + CALL, tools=TOOLS[api.name], **off[api.name])
        for api in (CHAT, RESPONSES, MESSAGES)
    )
    [choice] = chat["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me look."
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == ARGUMENTS
    kinds = {item["type"]: item for item in responses["output"]}
    assert json.loads(kinds["function_call"]["arguments"]) == ARGUMENTS
    assert messages["stop_reason"] == "tool_use" and messages["content"][-1]["input"] == ARGUMENTS


def test_reasoning_and_answer_are_told_apart(codec: Codec) -> None:
    [choice] = said(codec, CHAT, "Hm.</think>Yes.")["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Yes.")
    thought, answer = said(codec, MESSAGES, "Hm.</think>Yes.")["content"]
    assert (thought["thinking"], answer["text"]) == ("Hm.", "Yes.")


def test_markers_that_are_only_spelt_are_text(codec: Codec) -> None:
    ids = codec.ask(CHAT, json.dumps({**HELLO, **OFF, "messages": [{"role": "user", "content": CALL}]}).encode()).prompt
    exchange = ConversationExchange(codec, ask(codec, tools=TOOLS["chat"], **OFF), "id")
    exchange.begin(Usage(5, 0, None))
    exchange.push(chunk([*ids[2:-2], 1], "stop"))  # as a user's text is encoded: without special tokens
    [choice] = json.loads(exchange.whole())["choices"]
    assert choice["message"]["content"] == CALL.lstrip("\n") and choice["finish_reason"] == "stop"
