"""Traces of the HTTP server, as OpenTelemetry's own SDK receives them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, http_attributes, url_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import SpanKind, StatusCode

from deepinfer import Engine
from doubles.serving import Served, post_head, serving

PARENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SAID: Final = "w5 w6 w7"
ASKED: Final[dict[str, Any]] = {"model": "fake", "prompt": SAID, "max_tokens": 8, "seed": 3}
TALK: Final[list[dict[str, Any]]] = [{"role": "user", "content": SAID}]
TEMPLATE: Final = "{% for message in messages %}{{ message.content }} {% endfor %}word"
KNOWN: Final = {
    value
    for module in (gen_ai_attributes, http_attributes, url_attributes, error_attributes)
    for name, value in vars(module).items()
    if name.isupper()
}
"""Names of attributes, as the SDK's own conventions have them."""


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def templated_model(word_model: str) -> str:
    Path(word_model, "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return word_model


@pytest.fixture
async def served(no_tasks_left: None, templated_model: str, exporter: InMemorySpanExporter) -> AsyncIterator[Served]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings: dict[str, Any] = {"fake_vocab_size": 97, "block_size": 1, "fake_step_s": 0.001}
    async with (
        Engine("fake", tokenizer=templated_model, **settings) as engine,
        serving(engine, tracer_provider=provider, timeout_s=3) as served,
    ):
        yield served


async def spans(exporter: InMemorySpanExporter, count: int = 1) -> list[ReadableSpan]:
    """Those of so many requests; each is made when its answer has been sent."""
    async with asyncio.timeout(10):
        while len(found := exporter.get_finished_spans()) < count:  # noqa: ASYNC110 (the exporter has no event)
            await asyncio.sleep(0.001)
    exporter.clear()
    for span in found:
        assert set(span.attributes or ()) <= KNOWN
        told = json.dumps([span.name, dict(span.attributes or {})])
        assert "w5" not in told and "w6" not in told, told
    return list(found)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_a_span(is_stream: bool, served: Served, exporter: InMemorySpanExporter) -> None:
    reply = await served.post(
        "/v1/completions", {**ASKED, "stream": is_stream, "n": 2, "temperature": 0.5, "top_k": 5, "stop": ["w5"]}
    )
    assert reply.status == 200
    [span] = await spans(exporter)
    assert (span.name, span.kind, span.parent) == ("text_completion fake", SpanKind.SERVER, None)
    found = dict(span.attributes or {})
    waited_s = found.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(waited_s, float) and span.start_time is not None and span.end_time is not None
    assert 0 < waited_s < 1e-9 * (span.end_time - span.start_time)
    assert str(found.pop("gen_ai.response.id")).startswith("cmpl-")
    assert set(found.pop("gen_ai.response.finish_reasons")) <= {"stop", "length"}  # type: ignore[arg-type]
    num_new = found.pop("gen_ai.usage.output_tokens")
    assert isinstance(num_new, int) and 0 < num_new <= 16
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "deepinfer",
        "gen_ai.request.model": "fake",
        "gen_ai.request.stream": is_stream,
        "gen_ai.output.type": "text",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": 3,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.model": "fake",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


async def test_every_api_has_spans_with_its_counts(served: Served, exporter: InMemorySpanExporter) -> None:
    limit = {"max_tokens": 5}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": TALK, **limit},
        "/v1/messages": {"messages": TALK, **limit},
        "/v1/responses": {"input": SAID, "max_output_tokens": 5},
    }
    for path, body in bodies.items():
        assert (await served.post(path, {"model": "fake", **body})).status == 200
        [span] = await spans(exporter)
        found = dict(span.attributes or {})
        assert (span.name, found["url.path"]) == ("chat fake", path)
        assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (4, 5)
        assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.usage.cache_read.input_tokens"] == 3


async def test_several_prompts_are_one_span(served: Served, exporter: InMemorySpanExporter) -> None:
    await served.post("/v1/completions", {**ASKED, "prompt": [SAID, SAID + " w8"], "ignore_eos": True})
    [span] = await spans(exporter)
    found = dict(span.attributes or {})
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (7, 16)
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")


async def test_it_belongs_to_what_its_header_says(served: Served, exporter: InMemorySpanExporter) -> None:
    await served.post("/v1/completions", ASKED, traceparent=PARENT)
    [span] = await spans(exporter)
    assert span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == PARENT[3:35] and f"{span.parent.span_id:016x}" == PARENT[36:52]
    unsampled = PARENT[:-1] + "0"
    await served.post("/v1/completions", ASKED, traceparent=unsampled)
    for garbage in ("x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 200, PARENT + "-", "ff" + PARENT[2:]):
        await served.post("/v1/completions", ASKED, traceparent=garbage)
        [span] = await spans(exporter)  # the one that its parent does not sample is none
        assert span.parent is None


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({**ASKED, "temperature": -1}, 400, "invalid_param"),
        ({**ASKED, "model": "w5"}, 404, "model_not_found"),
        (b"{w5", 400, "invalid_json"),
    ],
)
async def test_what_went_wrong_is_named(
    body: Any, status: int, error: str, served: Served, exporter: InMemorySpanExporter
) -> None:
    await check_error(served, exporter, body, status, error)


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize(("is_stream", "status"), [(False, 504), (True, 200)])
async def test_a_time_that_is_over_is_named(
    is_stream: bool, status: int, served: Served, exporter: InMemorySpanExporter
) -> None:
    endless = {**ASKED, "max_tokens": 10_000, "ignore_eos": True, "stream": is_stream}
    await check_error(served, exporter, endless, status, "timeout")


async def check_error(served: Served, exporter: InMemorySpanExporter, body: Any, status: int, error: str) -> None:
    await served.post("/v1/completions", body)
    [span] = await spans(exporter)
    found = dict(span.attributes or {})
    assert (found["http.response.status_code"], found["error.type"]) == (status, error)
    assert span.status.status_code is StatusCode.ERROR and span.status.description is None


async def test_a_client_that_goes_is_in_it(served: Served, exporter: InMemorySpanExporter) -> None:
    async with served.connected() as (reader, writer):
        body = json.dumps({**ASKED, "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
        writer.write(post_head("/v1/completions", len(body)).encode() + body)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
    [span] = await spans(exporter)
    found = dict(span.attributes or {})
    assert found["error.type"] == "client_gone"
    assert 0 < found["gen_ai.usage.output_tokens"] < 2000  # type: ignore[operator]


async def test_tokens_are_counted_without_a_model_in_it(served: Served, exporter: InMemorySpanExporter) -> None:
    await served.get("/health")
    await served.post("/tokenize", {"prompt": SAID})
    [span] = await spans(exporter)
    assert span.name == "POST /tokenize" and not any("gen_ai" in name for name in span.attributes or {})


async def test_nothing_that_a_stranger_asks_for_becomes_a_name(
    no_tasks_left: None, exporter: InMemorySpanExporter
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with (
        Engine("fake", fake_vocab_size=97) as engine,
        serving(engine, tracer_provider=provider, api_keys=("sk-0123456789abcdef",)) as served,
    ):
        for path, name in (
            ("/" + "x" * 2000, "POST"),
            ("/v1/models/" + "x" * 2000, "POST /v1/models/{name:path}"),
            ("/v1/completions", "POST /v1/completions"),
        ):
            assert (await served.post(path, ASKED)).status == 401
            [span] = await spans(exporter)
            assert span.name == name
            assert dict(span.attributes or {})["url.path"] == path[:128]


def test_without_it_nothing_of_it_is_imported() -> None:
    code = "import sys, deepinfer.http.app; sys.exit(any('opentelemetry' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
