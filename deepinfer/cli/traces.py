"""Spans on their way to an OpenTelemetry collector, by its own SDK. Needs the `tracing` extra.

The SDK reads what it knows of the environment by itself (OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and so on).
Knows nothing of what spans are about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from deepinfer.errors import ConfigError

TIMEOUT_S: Final = 5
"""How long a collector may take for a batch; at the end, too."""


@contextmanager
def exported(url: str) -> Iterator[TracerProvider]:
    """Spans of it go to the collector at `url` in batches, the last when the block is left. Raises `ConfigError`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError("traces", f"{url!r}: an http(s) URL is expected, as http://localhost:4318/v1/traces")
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)))
    try:
        yield provider
    finally:
        provider.shutdown()


def _resource() -> Resource:
    """As the environment has it; the name of the service is ours where it has none."""
    found = Resource.create()
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found if is_named else found.merge(Resource({SERVICE_NAME: "deepinfer"}))
