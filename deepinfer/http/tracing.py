"""A span of every request, as OpenTelemetry's conventions for generative AI have it. Needs the `tracing` extra.

A span has names, settings, counts and times: never what was asked or answered. It is made when its request has ended,
so nothing is to be done for it before; a `traceparent` header says what it belongs to. Knows nothing of where spans go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from deepinfer.http.metrics import NO_HANDLER
from deepinfer.http.note import Asked, Note

_PARENT: Final = TraceContextTextMapPropagator()
_SETTINGS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seq_seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Fields of `SamplingParams`, and what `gen_ai.request.` has for them."""


class Spans:
    """Of one server, through `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("deepinfer.http")

    def record(self, note: Note, headers: Headers) -> None:
        """The span of a request that has ended."""
        end_ns = time.time_ns()
        start_ns = end_ns - int(1e9 * note.progress.took_s)
        span = self._tracer.start_span(
            _name(note),
            _PARENT.extract(headers),
            SpanKind.SERVER,
            dict(_attributes(note)),
            start_time=start_ns,
        )
        if note.error:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


def _name(note: Note) -> str:
    """Of few kinds: nothing in it but what is served here."""
    if note.asked is not None:
        return f"{note.asked.operation} {note.asked.model}"
    handler = note.progress.handler
    return note.method if handler == NO_HANDLER else f"{note.method} {handler}"


def _attributes(note: Note) -> Iterator[tuple[str, AttributeValue]]:
    yield "http.request.method", note.method
    yield "url.path", note.told_path
    yield "http.response.status_code", note.status
    if note.error:
        yield "error.type", note.error
    if note.asked is not None:
        yield from _asked(note.asked)
        yield from _answered(note)


def _asked(asked: Asked) -> Iterator[tuple[str, AttributeValue]]:
    params = asked.params
    yield "gen_ai.operation.name", asked.operation
    yield "gen_ai.provider.name", "deepinfer"
    yield "gen_ai.request.model", asked.model
    yield "gen_ai.request.stream", asked.is_stream
    yield "gen_ai.output.type", "text" if params.json_schema is None else "json"
    for field, name in _SETTINGS.items():
        if (value := getattr(params, field)) is not None:
            yield f"gen_ai.request.{name}", value
    if params.n != 1:
        yield "gen_ai.request.choice.count", params.n


def _answered(note: Note) -> Iterator[tuple[str, AttributeValue]]:
    if note.first_token_s is None or note.asked is None:
        return
    yield "gen_ai.response.id", note.asked.response_id
    yield "gen_ai.response.model", note.asked.model
    yield "gen_ai.response.time_to_first_chunk", note.first_token_s - note.progress.started_s
    yield "gen_ai.usage.input_tokens", note.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", note.num_completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", note.num_cached_tokens
    if note.finish_reasons:
        yield "gen_ai.response.finish_reasons", note.finish_reasons
