"""The official SDKs of OpenAI and Anthropic against `deepinfer serve v41-nano`, as a process of its own."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import anthropic
import httpx
import jsonschema
import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from deepinfer.shipped import SHIPPED, shipped_folder
from doubles.command import running

NAME: Final = "v41-nano"
HELLO: Final[list[Any]] = [{"role": "user", "content": "Why do people like music?"}]
TOOL_PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Final[Any] = {"type": "function", "function": {"name": "weather", "parameters": TOOL_PARAMETERS}}
STRICT_TOOL: Final[Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 2, "maxLength": 9},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
        },
    },
}
CALLED: Final[list[Any]] = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "It is sunny."},
]


PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["kind", "old", "wise"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Town(pydantic.BaseModel):
    name: Literal["Rome", "Paris"]


class Person(pydantic.BaseModel):
    age: Literal[7, 70]
    town: Town


def vocabulary() -> dict[str, int]:
    folder = shipped_folder(SHIPPED[0])
    assert folder is not None
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()


VOCAB: Final = vocabulary()
CALLS: Final[dict[str, Any]] = {"logit_bias": {str(VOCAB["/"]): 5}}
"""It would call for ever."""
NEWLINES: Final = {str(token_id): -100 for token, token_id in VOCAB.items() if "\u010a" in token}
"""A model as small as this one likes to indent more than it likes to end."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = ("--set", "num_threads=1", "--set", "max_num_seqs=16")
    with running("serve", NAME, "--http", "127.0.0.1:0", "--no-log", *settings) as server:
        while (found := re.search(r"listening on (http://127\.0\.0\.1:\d+)\n", server.written)) is None:
            server.read_until("\n", times=server.written.count("\n") + 1)
        yield found[1]
        server.process.terminate()
        assert server.end() == 0, server.written


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**{"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 16} | fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    create: Any = client.completions.create
    return create(**{"model": NAME, "prompt": "The sea is", "temperature": 0, "max_tokens": 8} | fields)


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    create: Any = client.responses.create
    asked = {"model": NAME, "input": HELLO[0]["content"], "temperature": 0, "max_output_tokens": 16}
    return create(**asked | fields)


def message(claude: anthropic.Anthropic, **fields: Any) -> Any:
    """The SDK has no temperature of its own any more."""
    create: Any = claude.messages.create
    return create(**{"model": NAME, "messages": HELLO, "max_tokens": 16} | fields, extra_body={"temperature": 0})


# ---- Chat Completions


def test_chat_whole(client: openai.OpenAI) -> None:
    found = chat(client)
    assert found.object == "chat.completion" and found.model == NAME and found.id.startswith("chatcmpl-")
    assert len(found.choices[0].message.content) > 20 and found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason in ("stop", "length")
    assert 0 < found.usage.completion_tokens <= 16 and found.usage.prompt_tokens > 5
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_chat_streamed_is_chat_whole(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(client).choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 5
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_chat_usage_of_a_stream(client: openai.OpenAI) -> None:
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert last.usage == chat(client).usage or last.usage.prompt_tokens == chat(client).usage.prompt_tokens
    assert last.usage.completion_tokens == chat(client).usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_by_the_helper_of_the_sdk(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=NAME, messages=HELLO, temperature=0, stop=["."]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == chat(client, stop=".", max_tokens=200).choices[0].message.content


def test_chat_length(client: openai.OpenAI) -> None:
    found = chat(client, max_tokens=3)
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == 3


def test_chat_max_completion_tokens(client: openai.OpenAI) -> None:
    found = chat(client, max_tokens=openai.omit, max_completion_tokens=4)
    assert found.usage.completion_tokens == 4


def test_chat_stop(client: openai.OpenAI) -> None:
    text = chat(client).choices[0].message.content
    stop = text[8:12]
    found = chat(client, stop=[stop])
    assert found.choices[0].message.content == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_chat_samples(client: openai.OpenAI) -> None:
    found = chat(client, n=3, temperature=1, seed=7)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) > 1
    assert found.usage.completion_tokens <= 48
    again = chat(client, n=3, temperature=1, seed=7)
    assert [choice.message.content for choice in again.choices] == [choice.message.content for choice in found.choices]


def test_chat_samples_streamed(client: openai.OpenAI) -> None:
    texts, ends, usages = {0: "", 1: ""}, set(), []
    for chunk in chat(client, n=2, temperature=1, seed=7, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends |= {choice.index} if choice.finish_reason else set()
        usages += [chunk.usage] if chunk.usage else []
    whole = chat(client, n=2, temperature=1, seed=7)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {0, 1} and [usage.completion_tokens for usage in usages] == [whole.usage.completion_tokens]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    found = chat(client, logprobs=True, top_logprobs=2, max_tokens=5)
    entries = found.choices[0].logprobs.content
    assert len(entries) == 5 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert "".join(entry.token for entry in entries) == found.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in entries)


def test_chat_logprobs_streamed(client: openai.OpenAI) -> None:
    chunks = list(chat(client, logprobs=True, max_tokens=5, stream=True))
    told = [entry for chunk in chunks if (known := chunk.choices[0].logprobs) for entry in known.content]
    assert [entry.token for entry in told] == [
        entry.token for entry in chat(client, logprobs=True, max_tokens=5).choices[0].logprobs.content
    ]


def test_chat_system_and_developer(client: openai.OpenAI) -> None:
    prompts = [
        chat(client, messages=[{"role": role, "content": "Answer in one word."}, *HELLO]).usage.prompt_tokens
        for role in ("system", "developer")
    ]
    assert prompts[0] == prompts[1] > chat(client).usage.prompt_tokens


def test_chat_parts(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    assert chat(client, messages=parts).choices[0].message.content == chat(client).choices[0].message.content


def test_chat_thinking(client: openai.OpenAI) -> None:
    found = chat(client, extra_body={"thinking": {"type": "enabled"}}, seed=1)
    assert found.choices[0].message.reasoning_content
    assert found.usage.completion_tokens_details.reasoning_tokens > 0


def test_chat_thinking_streamed(client: openai.OpenAI) -> None:
    chunks = chat(client, extra_body={"thinking": {"type": "enabled"}}, seed=1, stream=True)
    assert "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)


def test_chat_reasoning_effort_none(client: openai.OpenAI) -> None:
    found = chat(client, reasoning_effort="none")
    assert found.choices[0].message.content == chat(client).choices[0].message.content


def test_chat_tools_and_their_results(client: openai.OpenAI) -> None:
    found = chat(client, messages=CALLED, tools=[TOOL], max_tokens=8)
    assert found.usage.prompt_tokens > chat(client, messages=CALLED[:1]).usage.prompt_tokens + 20


def arguments_of(choice: Any) -> list[Any]:
    assert choice.finish_reason == "tool_calls"
    found = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
    for arguments in found:
        jsonschema.validate(arguments, STRICT_TOOL["function"]["parameters"], jsonschema.Draft202012Validator)
    return found


def test_chat_a_required_tool_is_called(client: openai.OpenAI) -> None:
    found = chat(client, tools=[STRICT_TOOL], tool_choice="required", max_tokens=400, **{**CALLS, "seed": 1})
    assert arguments_of(found.choices[0])
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = chat(client, tools=[STRICT_TOOL], tool_choice=named, max_tokens=40, stream=True, **{**CALLS, "seed": 1})
    text = "".join(
        call.function.arguments or "" for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()
    )
    assert text.startswith('{"city": "')


def test_chat_a_tool_that_is_not_strict_may_have_any_values(client: openai.OpenAI) -> None:
    found = chat(client, tools=[TOOL], tool_choice="required", max_tokens=12)
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].message.tool_calls[0].function.name == "weather"


def test_response_calls_a_required_tool(client: openai.OpenAI) -> None:
    tool = {"type": "function", **STRICT_TOOL["function"]}
    found = respond(
        client, tools=[tool], tool_choice="required", temperature=1, max_output_tokens=400, extra_body=CALLS
    )
    calls = [item for item in found.output if item.type == "function_call"]
    assert calls and found.status == "completed"
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), STRICT_TOOL["function"]["parameters"])


def test_response_tools_and_their_results(client: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "weather", "parameters": TOOL_PARAMETERS}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "It is sunny."}
    found = respond(client, input=[question, call, result], tools=[tool], max_output_tokens=8)
    assert found.output_text and found.usage.input_tokens > respond(client, tools=[tool]).usage.input_tokens + 20


def test_message_calls_a_named_tool(claude: anthropic.Anthropic) -> None:
    """Its arguments are as those of Chat Completions; here it is enough that it is called."""
    tool = {"name": "weather", "input_schema": STRICT_TOOL["function"]["parameters"], "strict": True}
    choice = {"type": "tool", "name": "weather"}
    found = message(claude, tools=[tool], tool_choice=choice, max_tokens=12)
    assert found.content[-1].type == "tool_use" and found.content[-1].name == "weather"
    events = list(message(claude, tools=[tool], tool_choice=choice, max_tokens=12, stream=True))
    [block] = [event.content_block for event in events if event.type == "content_block_start"]
    assert (block.type, block.name) == ("tool_use", "weather")


def test_chat_in_a_schema_or_calls(client: openai.OpenAI) -> None:
    """Tools that may be called beside a form: what is no call has it."""
    for seed in range(2):
        found = chat(client, tools=[TOOL], response_format=form(PERSON, strict=False), **{**FORCED, "seed": seed})
        [choice] = found.choices
        if choice.finish_reason == "stop":
            validated(choice.message.content)
        else:
            assert choice.finish_reason == "length" or choice.message.tool_calls


def test_chat_more_sampling(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_tokens": 6, "repetition_penalty": 1.1}
    found = chat(client, temperature=1, max_tokens=6, extra_body=extra, presence_penalty=0.5, frequency_penalty=0.5)
    assert found.usage.completion_tokens == 6


def test_chat_logit_bias(client: openai.OpenAI, url: str) -> None:
    word = client.post("/../tokenize", cast_to=object, body={"prompt": " sea"})
    assert isinstance(word, dict)
    found = chat(client, logit_bias={str(word["tokens"][0]): 100}, max_tokens=4)
    assert found.choices[0].message.content == " sea" * 4


def test_chat_cached_tokens(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "Tell me of the sea and the moon and the garden. " * 40}]
    chat(client, messages=long, max_tokens=1)
    assert chat(client, messages=long, max_tokens=1).usage.prompt_tokens_details.cached_tokens > 0


def num_running(url: str) -> int:
    text = httpx.get(f"{url}/metrics").text
    [found] = re.findall(r"^deepinfer:num_requests_running\{.*\} (\d+)", text, re.M)
    return int(found)


def is_idle(url: str) -> bool:
    """Within a time that 2000 tokens would not take."""
    end_s = time.monotonic() + 2
    while num_running(url):
        if time.monotonic() > end_s:
            return False
    return True


FOREVER: Final[dict[str, Any]] = {"ignore_eos": True, "temperature": 0}


def test_chat_cancelled(client: openai.OpenAI, url: str) -> None:
    stream = chat(client, stream=True, max_tokens=2000, extra_body=FOREVER)
    next(iter(stream))
    assert num_running(url) == 1
    stream.close()
    assert is_idle(url) and chat(client, max_tokens=2).usage.completion_tokens == 2


def test_response_cancelled(client: openai.OpenAI, url: str) -> None:
    stream = respond(client, stream=True, max_output_tokens=2000, extra_body=FOREVER)
    while next(stream).type != "response.output_text.delta":
        pass
    assert num_running(url) == 1
    stream.close()
    assert is_idle(url)


def test_message_cancelled(claude: anthropic.Anthropic, url: str) -> None:
    asked: Any = {"model": NAME, "messages": HELLO, "max_tokens": 2000, "extra_body": FOREVER}
    with claude.messages.stream(**asked) as stream:
        next(stream.text_stream)
        assert num_running(url) == 1
    assert is_idle(url)


def test_a_whole_answer_given_up(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(client, max_tokens=3000, extra_body=FOREVER, timeout=0.3)
    assert is_idle(url)


# ---- answers of a given form


def form(schema: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Of a strict one the recipe takes no more than OpenAI's API does."""
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": strict}}


def validated(text: str) -> Any:
    found = json.loads(text)
    jsonschema.validate(found, PERSON, jsonschema.Draft202012Validator)
    return found


FORCED: Final[dict[str, Any]] = {"temperature": 1, "max_tokens": 400, "logit_bias": NEWLINES}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chat_in_a_schema(client: openai.OpenAI, seed: int) -> None:
    found = chat(client, response_format=form(PERSON), seed=seed, **FORCED)
    assert found.choices[0].finish_reason == "stop"
    validated(found.choices[0].message.content)


def test_chat_in_a_schema_streamed(client: openai.OpenAI) -> None:
    chunks = list(chat(client, response_format=form(PERSON), seed=4, stream=True, **FORCED))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop" and validated(text) and len(chunks) > 5


def test_chat_in_a_schema_samples(client: openai.OpenAI) -> None:
    found = chat(client, response_format=form(PERSON), seed=5, n=3, **FORCED)
    assert len([validated(choice.message.content) for choice in found.choices if choice.finish_reason == "stop"]) >= 2


def test_chat_in_a_schema_after_thinking(client: openai.OpenAI) -> None:
    """A model as small as this one has to be told to come to an end of it."""
    thinking = {"thinking": {"type": "enabled"}}
    bias = NEWLINES | {str(VOCAB["</think>"]): 23}
    found = chat(client, response_format=form(PERSON), seed=1, extra_body=thinking, **FORCED | {"logit_bias": bias})
    assert found.choices[0].message.reasoning_content and found.choices[0].finish_reason == "stop"
    validated(found.choices[0].message.content)


def test_chat_in_a_model_of_the_sdk(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": HELLO, "seed": 1, **FORCED}
    found = client.chat.completions.parse(response_format=Person, **asked)
    assert isinstance(found.choices[0].message.parsed, Person)


def test_chat_in_any_object(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "Answer in json."}]
    found = chat(client, messages=asked, response_format={"type": "json_object"}, seed=1, **FORCED)
    assert found.choices[0].finish_reason == "length" or isinstance(json.loads(found.choices[0].message.content), dict)


def test_chat_in_a_pattern(client: openai.OpenAI) -> None:
    found = chat(client, response_format={"type": "regex", "regex": r"[A-Z][a-z]{3,8} \d{2}\."}, temperature=1, seed=1)
    assert re.fullmatch(r"[A-Z][a-z]{3,8} \d{2}\.", found.choices[0].message.content)


def test_response_in_a_schema(client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    extra = {"logit_bias": NEWLINES}
    found = respond(client, text=text, temperature=1, max_output_tokens=400, extra_body=extra)
    assert found.status == "completed" and validated(found.output_text)
    events = list(respond(client, text=text, temperature=1, max_output_tokens=400, extra_body=extra, stream=True))
    assert events[-1].type == "response.completed" and validated(events[-1].response.output_text)


def test_response_in_a_model_of_the_sdk(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "input": HELLO[0]["content"], "extra_body": {"logit_bias": NEWLINES}}
    found = client.responses.parse(text_format=Person, max_output_tokens=400, **asked)
    assert isinstance(found.output_parsed, Person)


def test_response_errors_name_the_format(client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_schema", "name": "person", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, text=text)
    assert (caught.value.param, caught.value.code) == ("text.format", "grammar")


def test_message_in_a_schema(claude: anthropic.Anthropic) -> None:
    create: Any = claude.messages.create
    found = create(
        model=NAME,
        messages=HELLO,
        max_tokens=400,
        output_config={"format": {"type": "json_schema", "schema": PERSON}},
        extra_body={"temperature": 1, "logit_bias": NEWLINES},
    )
    assert found.stop_reason == "end_turn" and validated(found.content[0].text)


# ---- Completions


def test_completion_whole(client: openai.OpenAI) -> None:
    found = complete(client)
    assert found.object == "text_completion" and found.choices[0].text and found.usage.prompt_tokens > 0


def test_completion_streamed_is_whole(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    whole = complete(client)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completion_of_token_ids(client: openai.OpenAI) -> None:
    ids = client.post("/../tokenize", cast_to=object, body={"prompt": "The sea is"})
    assert isinstance(ids, dict)
    assert complete(client, prompt=ids["tokens"]).choices[0].text == complete(client).choices[0].text


def test_completion_of_several_prompts(client: openai.OpenAI) -> None:
    found = complete(client, prompt=["The sea is", "The moon is"])
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].text == complete(client).choices[0].text
    assert found.choices[1].text == complete(client, prompt="The moon is").choices[0].text


def test_completion_echo_stop_and_samples(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == "The sea is" + text
    assert complete(client, stop=text[4:7]).choices[0].text == text[: text.index(text[4:7])]
    assert len(complete(client, n=2, temperature=1).choices) == 2


def test_completion_logprobs(client: openai.OpenAI) -> None:
    found = complete(client, logprobs=2, max_tokens=4).choices[0]
    assert "".join(found.logprobs.tokens) == found.text and len(found.logprobs.top_logprobs[0]) == 2
    assert found.logprobs.text_offset[1] == len(found.logprobs.tokens[0])


def test_completion_echo_has_the_prompts_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "The sea is deep and", "logprobs": 2, "max_tokens": 4}
    found = complete(client, echo=True, **asked).choices[0]
    known, plain = found.logprobs, complete(client, **asked).choices[0].logprobs
    assert "".join(known.tokens) == found.text and found.text.startswith(asked["prompt"])
    assert [found.text[at:].startswith(token) for at, token in zip(known.text_offset, known.tokens, strict=True)]
    num_prompt = len(known.tokens) - 4
    assert num_prompt > 3 and known.tokens[num_prompt:] == plain.tokens
    assert known.token_logprobs[0] is None and known.top_logprobs[0] is None
    assert known.token_logprobs[num_prompt:] == pytest.approx(plain.token_logprobs, abs=1e-4)
    ids = client.post("/../tokenize", cast_to=object, body={"prompt": asked["prompt"]})
    assert isinstance(ids, dict) and ids["count"] == num_prompt
    for place in range(1, num_prompt):  # each as if it had been drawn
        bias = {str(ids["tokens"][place]): 100}
        drawn = complete(client, **asked | {"prompt": ids["tokens"][:place], "max_tokens": 1}, logit_bias=bias)
        assert known.token_logprobs[place] == pytest.approx(drawn.choices[0].logprobs.token_logprobs[0], abs=1e-3)


def test_completion_echo_streamed_is_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "n": 2, "seed": 1}
    found = complete(client, **asked).choices
    for choice in found:
        parts = [
            part
            for chunk in complete(client, stream=True, **asked)
            for part in chunk.choices
            if part.index == choice.index
        ]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for part in parts for one in getattr(part.logprobs, name)] == getattr(choice.logprobs, name)


# ---- Responses


def test_response_whole(client: openai.OpenAI) -> None:
    found = respond(client)
    assert found.output_text == chat(client).choices[0].message.content
    assert found.id.startswith("resp_") and found.usage.output_tokens > 0
    assert found.status == ("completed" if chat(client).choices[0].finish_reason == "stop" else "incomplete")


def test_response_streamed(client: openai.OpenAI) -> None:
    events = list(respond(client, stream=True))
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == respond(client).output_text


def test_response_instructions_and_items(client: openai.OpenAI) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": HELLO[0]["content"]}]}]
    assert respond(client, input=items).output_text == respond(client).output_text
    assert respond(client, instructions="Be brief.").instructions == "Be brief."


def test_response_reasoning(client: openai.OpenAI) -> None:
    found = respond(client, reasoning={"effort": "low"})
    assert found.output[0].type == "reasoning" and found.usage.output_tokens_details.reasoning_tokens > 0


# ---- Messages


def test_message_whole(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    found = message(claude)
    assert found.type == "message" and found.role == "assistant" and found.id.startswith("msg_")
    assert found.content[0].text == chat(client).choices[0].message.content
    assert found.stop_reason in ("end_turn", "max_tokens") and found.usage.output_tokens > 0


def test_message_streamed(claude: anthropic.Anthropic) -> None:
    extra: Any = {"temperature": 0}
    with claude.messages.stream(model=NAME, messages=HELLO, max_tokens=16, extra_body=extra) as stream:
        text = "".join(stream.text_stream)
        final: Any = stream.get_final_message()
    assert text == final.content[0].text == message(claude).content[0].text
    assert final.usage.output_tokens == message(claude).usage.output_tokens


def test_message_events(claude: anthropic.Anthropic) -> None:
    kinds = [event.type for event in message(claude, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]


def test_message_stop_sequence(claude: anthropic.Anthropic) -> None:
    text = message(claude).content[0].text
    found = message(claude, stop_sequences=[text[8:12]])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[8:12])
    assert found.content[0].text == text[: text.index(text[8:12])]


def test_message_system_and_length(claude: anthropic.Anthropic) -> None:
    found = message(claude, system="Answer at length.", max_tokens=3)
    assert (found.stop_reason, found.usage.output_tokens) == ("max_tokens", 3)


def test_message_thinking(claude: anthropic.Anthropic) -> None:
    found = message(claude, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=30)
    assert found.content[0].type == "thinking" and found.content[0].thinking


def test_message_thinking_streamed(claude: anthropic.Anthropic) -> None:
    events = message(claude, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=30, stream=True)
    assert "".join(
        event.delta.thinking
        for event in events
        if getattr(event, "delta", None) is not None and (getattr(event.delta, "type", "") == "thinking_delta")
    )


def test_message_tools_and_their_results(claude: anthropic.Anthropic) -> None:
    tools = [{"name": "weather", "description": "Of a city.", "input_schema": TOOL_PARAMETERS}]
    turns = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "It is sunny."}]},
    ]
    assert message(claude, messages=turns, tools=tools, max_tokens=8).usage.input_tokens > 50


def test_message_tokens_are_counted(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    found = claude.messages.count_tokens(model=NAME, messages=HELLO)
    ids = client.post("/../tokenize", cast_to=object, body={"messages": HELLO})
    assert isinstance(ids, dict) and ids["count"] == found.input_tokens
    usage = message(claude).usage
    assert found.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


# ---- the rest


async def test_asynchronous_clients(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        create: Any = client.chat.completions.create
        asked = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 8}
        whole, stream = await asyncio.gather(create(**asked), create(**asked, stream=True))
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == whole.choices[0].message.content
    async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as claude:
        extra: Any = {"temperature": 0}
        async with claude.messages.stream(model=NAME, messages=HELLO, max_tokens=8, extra_body=extra) as messages:
            assert "".join([text async for text in messages.text_stream]) == whole.choices[0].message.content


def test_models(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "deepinfer"
    assert [model.id for model in claude.models.list()] == [NAME]


@pytest.mark.parametrize(
    ("error", "param", "fields"),
    [
        (openai.NotFoundError, "model", {"model": "gpt-7"}),
        (openai.BadRequestError, "temperature", {"temperature": 9}),
        (openai.BadRequestError, "messages", {"messages": []}),
        (openai.BadRequestError, "messages", {"messages": [{"role": "wizard", "content": "x"}]}),
        (openai.BadRequestError, "max_tokens", {"max_tokens": 0}),
        (openai.BadRequestError, "n", {"n": 1000}),
        (openai.BadRequestError, "logit_bias", {"logit_bias": {"900000": 1}}),
        (openai.BadRequestError, "response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        (openai.BadRequestError, "response_format", {"response_format": {"type": "regex", "regex": "(?=a)"}}),
        (
            openai.BadRequestError,
            "response_format",
            {"response_format": form({"not": {"type": "string"}}, strict=False)},
        ),
        (openai.BadRequestError, "messages", {"messages": [{"role": "user", "content": "word " * 5000}]}),
        (
            openai.BadRequestError,
            "messages[0]",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}
                ]
            },
        ),
    ],
)
def test_chat_errors_are_typed_and_name_the_field(
    error: type[openai.APIStatusError], param: str, fields: dict[str, Any], client: openai.OpenAI
) -> None:
    for stream in (False, True):
        with pytest.raises(error) as caught:
            chat(client, stream=stream, **fields)
        assert str(caught.value.param or "").startswith(param), caught.value.body
        assert caught.value.code and caught.value.request_id


def test_message_errors_are_anthropics(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        message(claude, model="claude")
    assert json.loads(missing.value.response.text)["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as bad:
        message(claude, messages=[])
    assert json.loads(bad.value.response.text)["error"]["type"] == "invalid_request_error"
