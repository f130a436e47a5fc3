"""The record of deepseek-recipe through the HTTP server: what its engine is handed is what the record has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from deepinfer import Engine, SamplingParams
from deepinfer.deepseek_chat import DeepseekFormat
from deepinfer.http.codec import Codec
from deepinfer.stream import TokenStream
from doubles.deepseek import v4_tokenizer, write_v41_tokenizer
from doubles.recipe_record import CASES, NAMES, NUM_IN_SHORT_CONTEXT, SHORTENED, body_of, check_options, limit_of
from doubles.serving import Reply, Served, serving

VOCAB_SIZE: Final = 129_280
PATHS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
PICTURED: Final = tuple(name for name, case in CASES.items() if case.get("images"))
OTHERS: Final = tuple(name for name in CASES if name not in PICTURED)


class Recorded(Engine):
    """Remembers what it was asked, and answers with one token."""

    asked: tuple[Any, SamplingParams] | None = None

    def stream(  # type: ignore[override]
        self, prompt: Any = None, params: SamplingParams | None = None, **options: Any
    ) -> TokenStream:
        assert params is not None
        self.asked = prompt, params
        return super().stream(prompt, replace(params, max_tokens=1), **options)


class Watch:
    """What the server made of the last body, on its way to the engine."""

    rendered: str | None = None
    converted: Any = None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    rendered, convert = DeepseekFormat.rendered, Codec.convert

    def watched_rendering(self: DeepseekFormat, conversation: Any) -> Any:
        found = rendered(self, conversation)
        watch.rendered = found.prompt
        return found

    def watched_conversion(self: Codec, api: Any, body: bytes) -> Any:
        found = convert(self, api, body)
        watch.converted = found.request
        return found

    monkeypatch.setattr(DeepseekFormat, "rendered", watched_rendering)
    monkeypatch.setattr(Codec, "convert", watched_conversion)
    return watch


@asynccontextmanager
async def recorded(folder: Path, version: str, max_model_len: int) -> AsyncIterator[tuple[Recorded, Served]]:
    """A model of `version` whose weights are nobody's."""
    if version == "v4.1":
        write_v41_tokenizer(folder)
    else:
        (folder / "tokenizer.json").write_bytes(v4_tokenizer().read_bytes())
    kind = {"v4.1": "deepseek_v41", "v4": "deepseek_v4"}[version]
    (folder / "config.json").write_text(f'{{"model_type": "{kind}", "bos_token_id": 0, "eos_token_id": 1}}')
    settings: dict[str, Any] = {"block_size": 256, "num_blocks": 5000, "fake_check_stamps": False}
    async with (
        Recorded(
            "fake", tokenizer=str(folder), fake_vocab_size=VOCAB_SIZE, max_model_len=max_model_len, **settings
        ) as engine,
        serving(engine, served_names=NAMES) as served,
    ):
        yield engine, served


Check = Callable[[dict[str, Any], Reply, Recorded, Watch], None]


def as_recorded(case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch) -> None:
    """The prompt, the ids and the options; or the error, in the same words where it is one of the body."""
    if "error" in case:
        error = reply.json()["error"]
        assert reply.status == 400 and engine.asked is None
        if case["error"]["stage"] == "resolve":
            assert error["code"] == "context_length_exceeded"
        elif case["error"]["stage"] == "images":
            assert error["message"] == "unsupported: image" and watch.rendered == case["prompt"]
        else:
            assert error["message"] == case["error"]["message"][:500]
        return
    assert reply.status == 200, reply
    handed_as_recorded(case, engine, watch)


def handed_as_recorded(case: dict[str, Any], engine: Recorded, watch: Watch) -> None:
    check_options(watch.converted, case)
    assert engine.asked is not None
    ids, params = engine.asked
    assert len(ids) == case["n_tokens"]
    if case["name"] not in SHORTENED:
        assert watch.rendered == case["prompt"] and ids == case["token_ids"]
        assert engine.text is not None
        assert engine.text.tokenizer.decode(ids, skip_special_tokens=False) == case["prompt"]
    options = case["inference_options"]
    assert params.max_tokens == case["max_tokens_resolved"] and params.n == 1
    assert math.isclose(params.temperature, options["temperature"] or 1.0, rel_tol=1e-6)
    assert math.isclose(params.top_p, options["top_p"] or 1.0, rel_tol=1e-6)
    assert params.seq_seed == options["seed"]
    assert params.logprobs == ((options["top_logprobs"] or 0) if options["logprobs"] else None)


def is_pictured(case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch) -> None:
    """Its images are in the prompt, and refused."""
    assert watch.rendered == case["prompt"]
    check_options(watch.converted, case)
    assert (reply.status, reply.json()["error"]["message"]) == (400, "unsupported: image")
    assert engine.asked is None


# ---- what the recipe by itself refuses or ignores, and a server may not


def serves_a_developer(case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch) -> None:
    said = case["request"]["messages"]
    assert reply.status == 200 and watch.rendered is not None
    assert all(message["content"] in watch.rendered for message in said)


def serves_two_samples(case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch) -> None:
    assert engine.asked is not None and engine.asked[1].n == 2
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]


def says_that_there_is_no_such_model(case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch) -> None:
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert case["error"]["status_code"] == 400 and engine.asked is None


def takes_the_newer_limit(case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch) -> None:
    limit = case["request"]["max_completion_tokens"]
    options = case["inference_options"] | {"max_tokens": limit}
    handed_as_recorded(case | {"inference_options": options, "max_tokens_resolved": limit}, engine, watch)


def says_that_nothing_is_kept(case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch) -> None:
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "unsupported", "previous_response_id")


def hands_on_a_pattern_that_the_engine_refuses(
    case: dict[str, Any], reply: Reply, engine: Recorded, watch: Watch
) -> None:
    handed_as_recorded(case, engine, watch)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "grammar", "response_format")


AS_RECORDED_BUT: Final[dict[str, Check]] = {"regex_invalid": hands_on_a_pattern_that_the_engine_refuses}
"""Prompt, ids and options are on record; the recipe does not look into the pattern."""
DECIDED: Final[dict[str, Check]] = {
    "developer_role": serves_a_developer,
    "n2": serves_two_samples,
    "unknown_model": says_that_there_is_no_such_model,
    "max_completion_tokens": takes_the_newer_limit,
    "responses_previous_id": says_that_nothing_is_kept,
}
"""OpenAI's clients mean something by it that the recipe does not know of: the record has its error, or its silence."""


SERVERS: Final = {("v4.1", 1 << 20): 88, ("v4", 1 << 20): 4, ("v4.1", NUM_IN_SHORT_CONTEXT): 3}
"""How many cases belong to each: to a model and a context."""


def server_of(case: dict[str, Any]) -> tuple[str, int]:
    return case.get("model_version", "v4.1"), limit_of(case)


def test_the_record_has_92_cases_and_three_with_images() -> None:
    assert len(OTHERS) == 92 and len(PICTURED) == 3
    assert len(OTHERS) - len(DECIDED) == 87
    assert Counter(map(server_of, CASES.values())) == SERVERS


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize(("version", "limit"), SERVERS, ids=str)
async def test_a_body_comes_to_the_engine_as_recorded(
    version: str, limit: int, tmp_path: Path, watch: Watch, no_tasks_left: None
) -> None:
    num_checked = 0
    async with recorded(tmp_path, version, limit) as (engine, served):
        for name, case in CASES.items():
            if server_of(case) != (version, limit):
                continue
            engine.asked, watch.rendered, watch.converted = None, None, None
            reply = await served.post(PATHS[case["protocol"]], body_of(case))
            check = DECIDED.get(name) or AS_RECORDED_BUT.get(name) or as_recorded
            try:
                (is_pictured if name in PICTURED else check)(case, reply, engine, watch)
            except Exception as error:
                error.add_note(f"{name}: {reply.status} {reply.body[:500]!r}")
                raise
            num_checked += 1
    assert num_checked == SERVERS[version, limit]
