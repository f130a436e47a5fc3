"""Prompts of DeepSeek models: those on record, what is refused, and text that would like to be a special token."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from deepinfer.chat import NO_OPTIONS, ChatOptions, chat_options
from deepinfer.deepseek_chat import EFFORTS, DeepseekFormat, Family, deepseek_family
from deepinfer.errors import InvalidRequest, ModelError, ModelFileError
from deepinfer.text import TextPipeline
from deepinfer.tokenizer import Tokenizer
from deepinfer_workers.models.deepseek.random_tokenizer import (
    HEAD,
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    TAIL,
    write_tokenizer,
)
from doubles.deepseek import v4_tokenizer, write_v41_tokenizer

RECORD: Final = Path(__file__).resolve().parents[1] / "data" / "deepseek_prompts.json"
CASES: Final[dict[str, dict[str, Any]]] = {case["name"]: case for case in json.loads(RECORD.read_text())["cases"]}
CHAT_FIELDS: Final = ("thinking", "reasoning_effort", "tools", "tool_choice")
HELLO: Final = [{"role": "user", "content": "Hello"}]
TOOL: Final = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def why_left_out(case: dict[str, Any]) -> str | None:
    """What the case is about, if that is no matter of `stream(messages=...)`."""
    request, error = case["request"], case.get("error") or {}
    if case["protocol"] != "chat":
        return f"the protocol {case['protocol']}: a server's"
    if case["name"] in ("oversize_prompt_2MB", "context_overflow_4k"):
        return "too long: the record has it in short"
    if "response_format" in request:
        return "response_format: constrained decoding is not served"
    if "image" in case["name"]:
        return "images: refused before they are looked at (tested below)"
    if error.get("stage") in ("parse", "convert") and not request.keys() <= {"model", "messages", *CHAT_FIELDS}:
        return "a fault in sampling parameters or transport: a server's"
    if case["name"] == "unknown_model":
        return "the name of the model: a server's"
    return None


LEFT_OUT: Final = {name: why for name, case in CASES.items() if (why := why_left_out(case)) is not None}
RENDERED: Final = sorted(name for name, case in CASES.items() if "prompt" in case and name not in LEFT_OUT)
REFUSED: Final = {
    "audio_part": "messages[0].content[0]",
    "bad_role": "messages[0].role",
    "developer_role": "messages[0].role",
    "effort_bad": "reasoning_effort",
    "effort_int": "reasoning_effort",
    "empty_messages": "messages",
    "missing_messages": "messages",
    "null_user": "messages[0].content",
    "tool_missing_result": "messages",
    "tool_orphan": "messages",
    "tools_mixed_strict": "tools",
    "tools_required_thinking": "tool_choice",
}
"""Cases that the recipe refuses, and the field that we name."""


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DeepseekFormat]:
    v41 = write_v41_tokenizer(tmp_path_factory.mktemp("v4.1"))
    return {"v4.1": DeepseekFormat("v4.1", v41), "v4": DeepseekFormat("v4", v4_tokenizer())}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DeepseekFormat:
    folder = tmp_path_factory.mktemp("small")
    write_tokenizer(folder, MIN_VOCAB_SIZE)
    return DeepseekFormat("v4.1", folder / "tokenizer.json")


def options_of(request: dict[str, Any]) -> ChatOptions:
    given = {field: request.get(field) for field in CHAT_FIELDS}
    if given["thinking"] is not None:
        given["thinking"] = {"enabled": True, "disabled": False}[given["thinking"]["type"]]
    return chat_options(**given)


def test_every_case_of_the_record_is_checked_or_left_out_for_a_reason() -> None:
    reasons = Counter(LEFT_OUT.values())
    print(f"{len(RENDERED)} prompts and {len(REFUSED)} refusals are checked; left out:", *reasons.items(), sep="\n  ")
    assert {*RENDERED, *REFUSED, *LEFT_OUT} == CASES.keys()
    assert (len(RENDERED), len(REFUSED), len(LEFT_OUT)) == (45, 12, 38)


@pytest.mark.parametrize("name", RENDERED)
def test_a_prompt_is_that_on_record(name: str, formats: dict[str, DeepseekFormat]) -> None:
    case = CASES[name]
    prompt = formats[case["model_version"]].render(case["request"]["messages"], options_of(case["request"]))
    assert prompt.text == case["prompt"]
    assert prompt.encode() == case["token_ids"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_recipe_refuses_is_refused_by_the_name_of_its_field(name: str, small: DeepseekFormat) -> None:
    request = CASES[name]["request"]
    with pytest.raises(InvalidRequest) as caught:
        small.render(request.get("messages"), options_of(request))
    assert caught.value.field == REFUSED[name]


IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
DEEP: Final[list[Any]] = []
for _ in range(5000):
    DEEP[:] = [DEEP.copy()]


@pytest.mark.parametrize(
    ("messages", "options", "refusal"),
    [
        ([{"role": "user", "content": ["a"]}], {}, r"messages\[0\]\.content\[0\]: expected \{"),
        ([{"role": "user", "content": [IMAGE]}], {}, r"messages\[0\]\.content\[0\]: unsupported: image"),
        ([*HELLO, {"role": "tool", "content": [IMAGE]}], {}, r"messages\[1\]\.content\[0\]: unsupported: image"),
        (["Hello"], {}, r"messages\[0\]: expected an object"),
        ("Hello", {}, "messages: expected a list"),
        ([{"role": ["user"], "content": "x"}], {}, r"messages\[0\]\.role"),
        ([{"role": "assistant", "content": None}], {}, "messages: .*content or tool_calls must be set"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages: cannot be written as JSON"),
        ([{"role": "user", "content": "x", "name": 3}], {}, "messages: .*expected a string"),
        ([{"role": "user", "content": "x", "more": object()}], {}, "messages: cannot be written as JSON"),
        ([{"role": "user", "content": "x", "more": DEEP}], {}, "messages: "),
        (HELLO, {"tools": [{"type": "function"}]}, "tools: "),
        (HELLO, {"tools": [TOOL, TOOL]}, "tools: Tool names must be unique"),
        (HELLO, {"tools": [TOOL], "tool_choice": "some"}, "tool_choice: a model that thinks"),
        (HELLO, {"tools": [TOOL], "tool_choice": "some", "thinking": False}, "tool_choice: .*expected one of"),
        (HELLO, {"tools": [TOOL], "tool_choice": "required", "reasoning_effort": "low"}, "tool_choice: a model that"),
        (HELLO, {"tool_choice": "required", "thinking": False}, "tool_choice: there are no tools"),
        ([*HELLO, {"role": "tool", "content": "x"}], {"tools": [TOOL]}, "messages: "),
    ],
)
def test_bad_conversations_are_refused(messages: Any, options: Any, refusal: str, small: DeepseekFormat) -> None:
    given = {field: options.get(field) for field in CHAT_FIELDS}
    with pytest.raises(InvalidRequest, match=f"^{refusal}"):
        small.render(messages, chat_options(**given))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"thinking": 1}, "thinking"),
        ({"reasoning_effort": 50}, "reasoning_effort"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": ["add"]}, "tools"),
        ({"tools": [{"a": object()}]}, "tools"),
        ({"tools": [{"a": DEEP}]}, "tools"),
        ({"tool_choice": 1}, "tool_choice"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_options(**{name: options.get(name) for name in CHAT_FIELDS})
    assert caught.value.field == field


CALL: Final = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "{}"}'}}
EVERYTHING: Final[dict[str, Any]] = {
    "messages": [
        {"role": "system", "content": "{}"},
        {"role": "user", "content": "{}", "name": "Ada"},
        {"role": "assistant", "content": "x", "reasoning_content": "{}", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "{}"},
        {"role": "latest_reminder", "content": "{}"},
        {"role": "user", "content": [{"type": "text", "text": "{}"}]},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "{}",
                "strict": False,
                "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
            },
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
"""A call with something of each kind in it."""
ODD: Final[list[Any]] = [
    None, True, -1, 2**70, 1.5, float("nan"), "", "x" * 300, "\ud800", "<｜User｜>", [], {}, [[]], {"": 1}, IMAGE, DEEP,
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value`, with each of its keys."""
    for key in range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ():
        yield value, key
        yield from places(value[key])


def altered(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`call` with one value out, or with another in its place, for every value in it."""
    call = copy.deepcopy(call)
    for container, key in list(places(call)):
        kept = container[key]
        for odd in ODD:
            container[key] = odd
            yield call
        if isinstance(container, dict):
            del container[key]
            yield call
        container[key] = kept


def test_whatever_stands_in_a_call_it_is_rendered_or_refused(small: DeepseekFormat) -> None:
    num_rendered, num_refused = 0, 0
    for call in altered(EVERYTHING):
        given = {field: call.get(field) for field in ("tools", "tool_choice")}
        try:
            options = chat_options(thinking=False, reasoning_effort=None, **given)
            assert small.render(call.get("messages"), options).encode()  # type: ignore[arg-type]
            num_rendered += 1
        except InvalidRequest as error:
            assert error.field.split("[")[0] in EVERYTHING
            num_refused += 1
    assert num_rendered > 50 and num_refused > 500, (num_rendered, num_refused)


def test_thinking_decides_and_an_effort_says_how_much(small: DeepseekFormat) -> None:
    def prompt(**options: Any) -> str:
        return small.render(HELLO, chat_options(**{name: options.get(name) for name in CHAT_FIELDS})).text

    def effort(text: str) -> int:
        return int(text.partition("Reasoning Effort: ")[2].partition(" ")[0])

    efforts = {name: effort(prompt(reasoning_effort=name)) for name in EFFORTS if name != "none"}
    assert efforts == {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "ultra": 100, "max": 100}
    assert prompt() == prompt(thinking=True) == prompt(reasoning_effort="high")
    assert prompt(thinking=False) == prompt(reasoning_effort="none") == prompt(thinking=False, reasoning_effort="max")
    assert prompt(thinking=True, reasoning_effort="none") == prompt()
    assert prompt(thinking=False).endswith("<｜Assistant｜></think>") and prompt().endswith("<｜Assistant｜><think>")


def test_no_tools_is_not_a_choice_of_tools(small: DeepseekFormat) -> None:
    empty = chat_options(thinking=None, reasoning_effort=None, tools=[], tool_choice="auto")
    assert small.render(HELLO, empty).text == small.render(HELLO, NO_OPTIONS).text


def test_text_never_becomes_a_special_token(tmp_path: Path) -> None:
    """Each of them, spelt in every place where a caller's text can stand."""
    write_tokenizer(tmp_path, 400)
    chat, tokenizer = DeepseekFormat("v4.1", tmp_path / "tokenizer.json"), Tokenizer.from_model(tmp_path)
    special = {tokenizer.encode(token, add_special_tokens=False)[0] for token in (*HEAD, *TAIL)}
    assert len(special) == len(HEAD) + len(TAIL)
    values = EVERYTHING["messages"], EVERYTHING["tools"]

    def num_special(text: str) -> int:
        messages, tools = (json.loads(json.dumps(value).replace("{}", text)) for value in values)
        options = chat_options(thinking=True, reasoning_effort=None, tools=tools, tool_choice=None)
        prompt = chat.render(messages, options)
        assert prompt.text.count(text) >= 6
        return sum(token_id in special for token_id in prompt.encode())

    grounding = {f"<｜{end}{name}｜>" for name in ("ref", "box", "point", "polygon") for end in ("", "/")}
    plain = num_special("plain")
    for token in (*HEAD, *TAIL):  # an assistant's own words, of which there are some here, may hold marks of grounding
        assert num_special(token) == plain + (token in grounding), token


def test_a_tokenizer_of_another_model_is_named_when_the_model_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r'tokenizer.json: .*special token "<｜System｜>" is not in'):
        DeepseekFormat("v4.1", v4_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer.json: not a tokenizer"):
        DeepseekFormat("v4", tmp_path / "tokenizer.json")


def test_without_the_recipe_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, MIN_VOCAB_SIZE)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}')
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(ModelError, match=r"pip install 'deepinfer-runtime\[deepseek\]'"):
        TextPipeline(tmp_path)


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"model_type": "deepseek_v41"}, "v4.1"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "v4.1"),
        ({"model_type": "deepseek_v4", "architectures": None}, "v4"),
        ({"architectures": ["Other", "DeepseekV4ForCausalLM"]}, "v4"),
        ({"dim": 5120, "kv_source_layers": [2, 8, 14, 20]}, "v4.1"),
        ({"model_type": "llama"}, None),
        ({"model_type": ["deepseek_v4"], "architectures": 3}, None),
        ({}, None),
    ],
)
def test_the_family_is_what_the_config_says(config: dict[str, Any], family: Family | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert deepseek_family(tmp_path) == family


def test_a_folder_without_a_config_is_of_no_family_and_one_that_is_no_json_is_refused(tmp_path: Path) -> None:
    assert deepseek_family(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read"):
        deepseek_family(tmp_path)


def test_a_model_takes_its_tokenizer_from_elsewhere_and_keeps_its_way_with_messages(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write_tokenizer(other, MIN_VOCAB_SIZE)
    assert not TextPipeline(other).has_chat_template
    (model / "config.json").write_text('{"model_type": "deepseek_v41"}')
    assert TextPipeline(other, model).render(HELLO).text.endswith("<｜Assistant｜><think>")


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 320, 1000, 20_000])
def test_a_generated_tokenizer_fills_its_vocabulary(vocab_size: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer.from_model(tmp_path)
    assert tokenizer.vocab_size == vocab_size and tokenizer.is_byte_level
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.token(2)) == (0, (1,), "<｜▁pad▁｜>")
    tokens = [tokenizer.token(token_id) for token_id in range(vocab_size)]
    assert None not in tokens and len(set(tokens)) == vocab_size
    text = "The ribbon of the sea, größer than 你好 🙂\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and len(ids) <= len(text.encode())
    assert DeepseekFormat("v4.1", tmp_path / "tokenizer.json").render(HELLO, NO_OPTIONS).encode()[0] == 0


@pytest.mark.parametrize("vocab_size", [0, MIN_VOCAB_SIZE - 1, MAX_VOCAB_SIZE + 1])
def test_a_vocabulary_that_cannot_be_filled_is_refused(vocab_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"vocab_size {vocab_size}: expected {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}"):
        write_tokenizer(tmp_path, vocab_size)
    assert not list(tmp_path.iterdir())
