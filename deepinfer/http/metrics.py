"""What an HTTP server has done, by handler: requests, bytes, and when tokens were on their way to the client.

The names are those of common instrumentations of HTTP and of the engine's own metrics, behind `http_`. A handler is a
path as the routes have it, and "none" for all that no route has: nothing that a client writes becomes a label. Plain
objects of one server, read by `snapshots` for `deepinfer.prometheus`, which this module does not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from deepinfer.metrics import LATENCY_S, Histogram, Kind, Metric

NO_HANDLER: Final = "none"
_BYTES: Final = tuple(float(1 << power) for power in range(6, 27, 2))  # 64 bytes to 64 MiB


class HandlerMetrics:
    """Of one handler; an attribute each, by its name behind `http_`."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.requests: dict[str, int] = {}
        self.requests_inprogress = 0
        self.request_duration_seconds = Histogram(LATENCY_S)
        self.request_size_bytes = Histogram(_BYTES)
        self.response_size_bytes = Histogram(_BYTES)
        self.time_to_first_token_seconds = Histogram(LATENCY_S)
        self.inter_token_latency_seconds = Histogram(LATENCY_S)

    def snapshot(self) -> dict[str, Metric]:
        """Every metric by its name; of tokens once there were any, since most handlers have none."""
        found = [self._metric(attribute, *described) for attribute, described in _METRICS.items()]
        return {each.name: each for each in found if "token" not in each.name or each.distribution.count}

    def _metric(self, attribute: str, kind: Kind, description: str, label: str) -> Metric:
        name, value = f"http_{attribute}", getattr(self, attribute)
        if isinstance(value, dict):
            return Metric(name, kind, description, dict(value), label)
        return Metric(name, kind, description, {"": value.snapshot() if isinstance(value, Histogram) else value})


_METRICS: Final[Mapping[str, tuple[Kind, str, str]]] = {
    "requests": ("counter", "Requests ended; 499 is a client that went before it had an answer.", "status"),
    "requests_inprogress": ("gauge", "Requests under way.", ""),
    "request_duration_seconds": ("histogram", "From a request's head to the end of its response.", ""),
    "request_size_bytes": ("histogram", "Bodies of requests, as far as they were read.", ""),
    "response_size_bytes": ("histogram", "Bodies of responses.", ""),
    "time_to_first_token_seconds": (
        "histogram",
        "Of streams: from the head until a first token was sent.",
        "",
    ),
    "inter_token_latency_seconds": ("histogram", "Of streams: between the sending of two tokens of a sample.", ""),
}
"""Attribute to kind, description and label."""


class Progress:
    """One request on its way through its handler, counted as it goes and once more when it has ended."""

    def __init__(self, metrics: HandlerMetrics) -> None:
        self._metrics = metrics
        self.started_s: Final = time.monotonic()
        self._latest_s: dict[int, float] = {}  # by sample: when its latest tokens were sent
        self.num_received_bytes = 0
        self.num_sent_bytes = 0
        metrics.requests_inprogress += 1

    @property
    def took_s(self) -> float:
        """So far."""
        return time.monotonic() - self.started_s

    @property
    def handler(self) -> str:
        """Its name; `NO_HANDLER` where no route has the path."""
        return self._metrics.name

    def sent_tokens(self, sample_index: int, count: int) -> None:
        """So many tokens of a sample are on their way, or held back where they may become a stop string or a tag.

        Several at once count as evenly spaced.
        """
        if not count:
            return
        now_s = time.monotonic()
        if not self._latest_s:
            self._metrics.time_to_first_token_seconds.observe(now_s - self.started_s)
        if sample_index in self._latest_s:
            gap_s = now_s - self._latest_s[sample_index]
            self._metrics.inter_token_latency_seconds.observe(gap_s / count, count)
        self._latest_s[sample_index] = now_s

    def end(self, status: int) -> None:
        metrics, key = self._metrics, str(status)
        metrics.requests_inprogress -= 1
        metrics.requests[key] = metrics.requests.get(key, 0) + 1
        metrics.request_duration_seconds.observe(self.took_s)
        metrics.request_size_bytes.observe(self.num_received_bytes)
        metrics.response_size_bytes.observe(self.num_sent_bytes)


class HttpMetrics:
    """Of one server."""

    def __init__(self, handlers: Iterable[str]) -> None:
        """`handlers` are the paths of routes; a parameter is the last part of its path."""
        self._by_name: Final = {name: HandlerMetrics(name) for name in (*handlers, NO_HANDLER)}
        self._by_prefix: Final = {name.partition("{")[0]: each for name, each in self._by_name.items() if "{" in name}

    def begin(self, path: str) -> Progress:
        """A request for `path` has come."""
        return Progress(self._by_name.get(path) or self._of_others(path))

    def _of_others(self, path: str) -> HandlerMetrics:
        found = (each for prefix, each in self._by_prefix.items() if path.startswith(prefix))
        return next(found, self._by_name[NO_HANDLER])

    def snapshots(self) -> dict[str, dict[str, Metric]]:
        """By the handlers that were asked for."""
        asked = {name: each for name, each in self._by_name.items() if each.requests or each.requests_inprogress}
        return {name: each.snapshot() for name, each in asked.items()}
