"""The JSON Schema Test Suite and real schemas over HTTP: refused with a reason, or every finished answer validates.

Each API gets every third of them. The files are not part of the project.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from benchmarks.structured import Case, Verdict, judge, read_cases
from deepinfer import Engine
from deepinfer.shipped import SHIPPED, shipped_folder
from doubles.serving import Reply, Served, serving

DATA: Final = Path(__file__).parents[3] / "shared/data"
FOLDERS: Final = [DATA / "json_schema_test_suite/draft2020-12", DATA / "jsonschemabench"]
MODEL: Final = shipped_folder(SHIPPED[0])
NUM_AT_ONCE: Final = 32
RANDOM: Final[dict[str, Any]] = {"model": "fake", "tokenizer": str(MODEL), "fake_vocab_size": 8192}
"""Tokens that mean nothing, within the vocabulary of a real model."""
TALK: Final = [{"role": "user", "content": "Answer in JSON."}]

pytestmark = pytest.mark.skipif(not all(map(Path.is_dir, FOLDERS)), reason="the schemas are not here")


def breaks() -> list[int]:
    """Tokens with a line break: a model that draws at random likes to indent more than it likes to end."""
    vocab = Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab() if MODEL is not None else {}
    return [token_id for token, token_id in vocab.items() if "\u010a" in token]  # as byte-level vocabularies spell it


BREAKS: Final = {str(token_id): -100 for token_id in breaks()}


async def ask(served: Served, api: int, schema: Any, seed: int, max_tokens: int) -> Reply:
    fields: dict[str, Any] = {"model": "m", "logit_bias": BREAKS, "temperature": 1}
    if api == 0:
        form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
        body = {"messages": TALK, "response_format": form, "seed": seed, "n": 2, "max_tokens": max_tokens}
        return await served.post("/v1/chat/completions", fields | body)
    if api == 1:
        form = {"type": "json_schema", "name": "f", "schema": schema}
        body = {"input": "Answer in JSON.", "text": {"format": form}, "max_output_tokens": max_tokens}
        return await served.post("/v1/responses", fields | body)
    form = {"type": "json_schema", "schema": schema}
    body = {"messages": TALK, "output_config": {"format": form}, "max_tokens": max_tokens}
    return await served.post("/v1/messages", fields | body)


def samples(api: int, answer: Any) -> list[tuple[str, bool]]:
    """Texts, and which have come to their end."""
    if api == 0:
        return [(choice["message"]["content"] or "", choice["finish_reason"] == "stop") for choice in answer["choices"]]
    if api == 1:
        items = [item for item in answer["output"] if item["type"] == "message"]
        text = "".join(part["text"] for item in items for part in item["content"])
        return [(text, answer["status"] == "completed")]
    text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
    return [(text, answer["stop_reason"] == "end_turn")]


def verdict_on(case: Case, api: int, reply: Reply) -> Verdict:
    """Where it was refused, with the reason. Fails for anything that is neither."""
    answer = reply.json()
    if reply.status == 400:
        error = answer["error"]
        named = ("response_format", "text.format", "output_config.format")[api]
        assert error["message"] and error["code"] in ("grammar", "invalid_param"), (case.name, error)
        assert str(error["param"]).startswith(named.partition(".")[0]), (case.name, error)
        return Verdict(case, error["message"])
    assert reply.status == 200, (case.name, reply)
    done: Any = SimpleNamespace(
        samples=[
            SimpleNamespace(text=text, finish_reason="stop" if is_whole else "length", token_ids=())
            for text, is_whole in samples(api, answer)
        ]
    )
    return judge(case, done)


async def verdicts(every: int, max_tokens: int, **model: Any) -> list[Verdict]:
    """On every so manieth schema, each by one API in its turn."""
    cases = [case for folder in FOLDERS for case in read_cases(folder)][::every]
    turn = asyncio.Semaphore(NUM_AT_ONCE)

    async def check(index: int, case: Case, api: int) -> Verdict:
        async with turn:
            return verdict_on(case, api, await ask(served, api, case.schema, index, max_tokens))

    async with Engine(**model) as engine, serving(engine, served_names=("m",)) as served:
        found = await asyncio.gather(*(check(index, case, index % 3) for index, case in enumerate(cases)))
        engine.check_integrity()
    wrong = {verdict.case.name: verdict.wrong for verdict in found if verdict.wrong}
    assert not wrong, wrong
    return found


def shares(found: list[Verdict]) -> tuple[float, int]:
    """The part that was accepted, and how many answers came to their end; told with the reasons."""
    refusals = Counter(verdict.refusal[:60] for verdict in found if verdict.refusal)
    accepted, finished = 1 - refusals.total() / len(found), sum(verdict.num_finished for verdict in found)
    print(f"{len(found)} schemas, {accepted:.0%} accepted, {finished} answers finished; {refusals.most_common(12)}")
    return accepted, finished


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_some_are_refused_or_validate(no_tasks_left: None) -> None:
    accepted, finished = shares(await verdicts(3, 100, **RANDOM))
    assert accepted > 0.5 and finished > 40


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_all_are_refused_or_validate(no_tasks_left: None) -> None:
    accepted, finished = shares(await verdicts(1, 150, **RANDOM))
    assert accepted > 0.5 and finished > 150


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_what_a_real_model_writes_validates(no_tasks_left: None) -> None:
    accepted, finished = shares(await verdicts(1, 120, model="v41-nano", num_threads=1))
    assert accepted > 0.5 and finished > 150
