"""Structured output through an engine: what comes out validates, alone or in company, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import llguidance
import pytest
from tokenizers import Tokenizer

from deepinfer import Completion, Engine, EngineClosed, GrammarError, InvalidRequest, SamplingParams
from deepinfer.shipped import SHIPPED, shipped_folder
from doubles.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer

NAME: Final = "v41-nano"
PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "old", "wise"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 8},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["town", "zip"],
            "additionalProperties": False,
        }
    },
}
REGEX: Final = r"[A-Z][a-z]{2,8} is \d{1,3} years? old\."
CHOICE: Final = ["yes", "no", "maybe", "may be"]
LARK: Final = """
start: greeting " " name "!"
greeting: "Hello" | "Good " part
part: "morning" | "evening"
name: /[A-Z][a-z]{1,8}/
"""
LARK_AS_REGEX: Final = r"(Hello|Good (morning|evening)) [A-Z][a-z]{1,8}!"
ASKED: Final[list[dict[str, Any]]] = [{"json_schema": PERSON}, {"regex": REGEX}, {"choice": CHOICE}, {"grammar": LARK}]


def check(asked: dict[str, Any], text: str) -> None:
    if "json_schema" in asked:
        jsonschema.validate(json.loads(text), PERSON, jsonschema.Draft202012Validator)
    elif "choice" in asked:
        assert text in CHOICE
    else:
        assert re.fullmatch(REGEX if "regex" in asked else LARK_AS_REGEX, text), text


def params(asked: dict[str, Any], seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seq_seed": seed, "max_tokens": 160, **asked, **options})


def newlines() -> list[int]:
    folder = shipped_folder(SHIPPED[0])
    assert folder is not None
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    return [token_id for token, token_id in vocab.items() if "\u010a" in token]  # as byte-level vocabularies spell it


NEWLINES: Final = newlines()
MESSAGES: Final = [{"role": "user", "content": "Tell me about a person."}]


# ---- a real model


SCARCE: Final[dict[str, Any]] = {"num_blocks": 12, "prefix_hits": "exact", "prefill_truncation": "off"}
"""Blocks for one request that takes all it may, and for few of those that take less."""


def on_a_line(asked: dict[str, Any], seed: int) -> SamplingParams:
    """A model as small as this one likes to indent more than it likes to end."""
    return params(asked, seed, banned_token_ids=NEWLINES)


async def answers(batch: list[tuple[dict[str, Any], int]], **settings: Any) -> tuple[list[Completion], int]:
    """All at once, beside others that are free. Returns how often somebody gave way, too."""
    async with Engine(NAME, **settings) as engine:
        forced = [engine.generate(messages=MESSAGES, params=on_a_line(asked, seed)) for asked, seed in batch]
        free = [engine.generate(messages=MESSAGES, params=params({}, seed, max_tokens=30)) for seed in range(3)]
        done = await asyncio.gather(*forced, *free)
        num_preempted = engine.stats().scheduler.num_preempted
        engine.check_integrity()
    return done, num_preempted


@pytest.mark.timeout(240)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_outputs_validate_and_are_the_same_alone_in_company_and_after_giving_way(no_tasks_left: None) -> None:
    batch = [(asked, 1) for asked in ASKED] + [({"json_schema": PERSON}, 2), ({"regex": REGEX, "temperature": 0.0}, 3)]
    together, _ = await answers(batch)
    for (asked, _), completion in zip(batch, together, strict=False):
        assert completion.finish_reason == "stop", (asked, completion.text)
        check(asked, completion.text)
    tokens = [completion.token_ids for completion in together]
    assert tokens[0] != tokens[4]
    drafts = [completion.drafts for completion in together[: len(batch)]]
    assert all(one.num_verified for one in drafts) and sum(one.num_accepted for one in drafts) > 10
    alone, _ = await answers(batch[:1])
    assert alone[0].token_ids == tokens[0]
    others, _ = await answers(batch, overlap=False, num_drafts=0)
    assert [completion.token_ids for completion in others] == tokens
    others, num_preempted = await answers(batch, **SCARCE)
    assert [completion.token_ids for completion in others] == tokens and num_preempted > 0


@pytest.mark.gpu
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("settings", [{}, {"scheduled_drafts": True}, {"num_drafts": 0}, {"cuda_graphs": False}])
async def test_outputs_validate_on_a_gpu(settings: dict[str, Any], no_tasks_left: None) -> None:
    """Rows with masks and without in one step; its twin on a CPU is the test before."""
    batch = [(asked, seed) for seed in range(8) for asked in ASKED]
    done, _ = await answers(batch, accelerator="nvidia", **settings)
    for (asked, _), completion in zip(batch, done, strict=False):
        assert completion.finish_reason == "stop", (asked, completion.text)
        check(asked, completion.text)
    if settings.get("num_drafts", -1):
        assert sum(completion.drafts.num_accepted for completion in done[: len(batch)]) > 0


async def test_where_the_model_thinks_the_grammar_begins_with_the_answer() -> None:
    async with Engine(NAME) as engine:
        for seed in range(3):
            asked = params({"choice": CHOICE}, seed, logit_bias={ANSWER_ID: 100.0}, logprobs=0)
            done = await engine.generate(messages=MESSAGES, params=asked, thinking=True)
            assert done.finish_reason == "stop"
            reasoning, closing, answer = done.text.partition("</think>")
            assert closing and answer in CHOICE and reasoning not in CHOICE
        greedy = SamplingParams(temperature=0, max_tokens=12, choice=CHOICE)
        done = await engine.generate(messages=MESSAGES, params=greedy, thinking=True)
        assert "</think>" in done.text or done.finish_reason == "length"


ANSWER_ID: Final = 8181
"""`</think>` in the vocabulary of v41-nano."""


# ---- a fake worker, whose tokens are as good as random


@pytest.fixture
async def engine(no_tasks_left: None, tmp_path: Path) -> AsyncIterator[Engine]:
    tokenizer = save_byte_tokenizer(tmp_path)
    async with Engine(
        "fake", tokenizer=tokenizer, fake_vocab_size=VOCAB_SIZE, fake_step_s=0.001, block_size=4, max_num_seqs=16
    ) as engine:
        yield engine
        engine.check_integrity()


def small(index: int) -> dict[str, Any]:
    """Grammars that even random tokens come to an end of."""
    grammars: list[dict[str, Any]] = [
        {"json_schema": {"type": "object", "properties": {"a": {"enum": [index, "x", None]}}, "required": ["a"],
                         "additionalProperties": False}},
        {"regex": "[a-f]{1,6}"},
        {"choice": [f"c{index}", "no", f"c{index}!"]},
        {"grammar": 'start: ("a" | "b")~1..5 "."'},
    ]  # fmt: skip
    return grammars[index % 4]


async def test_random_tokens_become_what_was_asked(engine: Engine) -> None:
    asked = [small(index) for index in range(24)]
    prompts = [[1, 2, index] for index in range(24)]
    done = await asyncio.gather(
        *(engine.generate(prompt, params(fields, 5, n=2)) for prompt, fields in zip(prompts, asked, strict=True))
    )
    for fields, completion in zip(asked, done, strict=True):
        for sample in completion.samples:
            text = sample.text
            if sample.finish_reason == "length":
                assert "json_schema" in fields and len(sample.token_ids) == 160  # spaces
            elif "json_schema" in fields:
                jsonschema.validate(json.loads(text), fields["json_schema"])
            elif "choice" in fields:
                assert text in fields["choice"]
            else:
                assert re.fullmatch(fields.get("regex", r"[ab]{1,5}\."), text)
    assert sum(sample.finish_reason == "stop" for completion in done for sample in completion.samples) >= 36
    assert engine.stats().scheduler.num_running == 0


async def test_stops_lengths_and_penalties_work_beside_it(engine: Engine) -> None:
    long = {"regex": "[a-f]{40}z"}
    done = await engine.generate([3], params(long, 1))
    assert done.finish_reason == "stop" and re.fullmatch(long["regex"], done.text)
    cut = await engine.generate([3], params(long, 1, stop=[done.text[5:8]]))
    assert cut.finish_reason == "stop" and done.text.startswith(cut.text) and len(cut.text) <= 5
    short = await engine.generate([3], params(long, 1, max_tokens=7))
    assert (short.finish_reason, short.text) == ("length", done.text[:7])
    penalised = await engine.generate([3], params(long, 1, presence_penalty=1.0, logit_bias={0: 3.0}, logprobs=2))
    assert re.fullmatch(long["regex"], penalised.text)
    least = await engine.generate([3], params({"regex": "[a-f]{1,40}"}, 1, min_tokens=20))
    assert least.finish_reason == "stop" and 20 <= len(least.text) <= 40


async def test_what_cannot_be_fails_that_request_alone(engine: Engine) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"grammar": "start: start"}, "no output satisfies it"),
        ({"choice": ["a"], "min_tokens": 9}, "taken out by min_tokens"),
        ({"choice": ["abc"], "bad_words": ["b"]}, "taken out by min_tokens, bad_words"),
        ({"regex": "a{1000000000}"}, "lexer"),
    ]
    free = [asyncio.ensure_future(engine.generate([index], params({}, 4, max_tokens=60))) for index in range(8)]
    for fields, words in refused:
        with pytest.raises(GrammarError, match=words):
            await engine.generate([1, 2], params(fields, 3))
    with pytest.raises(InvalidRequest, match="regex came, too"):
        await engine.generate([1, 2], params({"regex": "a", "choice": ["a"]}, 3))
    assert {completion.finish_reason for completion in await asyncio.gather(*free)} <= {"length", "stop"}


async def test_ends_that_come_meanwhile_leave_nothing(engine: Engine) -> None:
    streams = [engine.stream([index], params({"regex": "[a-f]{200}"}, 2)) for index in range(12)]
    for index, stream in enumerate(streams):
        for _ in range(index % 5):
            await anext(stream)
        stream.abort()
    done = await engine.generate([1], params({"regex": "[a-f]{9}"}, 2))
    assert re.fullmatch("[a-f]{9}", done.text)


async def test_what_grammars_need_is_made_once_and_before_the_first_where_that_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = llguidance.LLTokenizer

    def tokenizer(*arguments: Any, **options: Any) -> llguidance.LLTokenizer:
        made.append(threading.current_thread().name.rpartition("_")[0])
        return make(*arguments, **options)

    monkeypatch.setattr(llguidance, "LLTokenizer", tokenizer)
    await engine.generate([1], params({}, 1, max_tokens=2))
    assert not made
    for _ in range(2):
        await engine.prepare_grammars()
        await engine.generate([1], params({"regex": "[a-f]{9}"}, 2))
    assert made == ["deepinfer-grammar"]
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await engine.prepare_grammars()


async def test_an_engine_closes_with_masks_under_way(tmp_path: Path, no_tasks_left: None) -> None:
    for pause in (0.0, 0.003, 0.01, 0.02):
        async with Engine("fake", tokenizer=save_byte_tokenizer(tmp_path), fake_vocab_size=VOCAB_SIZE) as engine:
            streams = [engine.stream([index], params({"regex": "[a-f]{200}"}, 2)) for index in range(8)]
            await anext(streams[0])
            await asyncio.sleep(pause)
        for stream in streams:
            stream.abort()


async def test_a_model_without_a_tokenizer_refuses_them() -> None:
    async with Engine("fake") as engine:
        with pytest.raises(GrammarError, match="regex: this engine has no tokenizer"):
            await engine.generate([1], SamplingParams(regex="a"))


# ---- nobody waits for the grammars of others

HOSTILE: Final[list[dict[str, Any]]] = [
    {"json_schema": {"type": "array", "minItems": 10**9}},
    {"json_schema": {"type": "string", "minLength": 10**9}},
    {
        "json_schema": {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(999)},
        }
    },
    {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
    {"json_schema": {"anyOf": [{"allOf": [{"not": {}}]}] * 500}},
    {"regex": "(?:a{1,1000}){1,1000}"},
    {"regex": "(x+x+)+y" * 50},
    {"regex": r"(\w+\s?){1,200}@" * 20},
    {"regex": "(" * 4000},
    {"regex": "a" * 8000},
    {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(12_000))},
    {"grammar": "start: " + "(" * 60_000},
    {"grammar": "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"\nstart: T0'},
    {"grammar": "\n".join(f"a{i}: a{i + 1}" for i in range(8000)) + '\na8000: "a"\nstart: a0'},
    {"choice": [f"{i}" * 20 for i in range(1000)]},
]


async def test_the_loop_goes_on_while_hostile_grammars_are_compiled(engine: Engine) -> None:
    """Ends of any kind, each its own; and no turn of the loop waits for one of them."""
    await engine.generate([1], SamplingParams(regex="a", max_tokens=3))
    worst_s, is_done = 0.0, False

    async def watch() -> None:
        nonlocal worst_s
        last = time.perf_counter()
        while not is_done:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            worst_s, last = max(worst_s, now - last), now

    async def ask(index: int) -> str:
        fields = HOSTILE[index % len(HOSTILE)]
        try:
            done = await engine.generate([index], SamplingParams(**fields, max_tokens=5, seq_seed=index))
        except GrammarError as error:
            assert error.field in fields
            return "refused"
        return str(done.finish_reason)

    watching = asyncio.create_task(watch())
    ends = await asyncio.gather(*map(ask, range(50)))
    is_done = True
    await watching
    assert {"refused", "length"} <= set(ends) <= {"refused", "length", "stop"}
    assert worst_s < 0.021, f"{1000 * worst_s:.1f} ms"
