"""An engine's metrics for Prometheus: a collector that you register where you like. Needs the `metrics` extra.

    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))

Registers nothing and listens nowhere by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from deepinfer.config import EngineConfig
from deepinfer.errors import EngineClosed
from deepinfer.metrics import PREFIX, Distribution, Metric

_ENGINE: Final = ("model_name", "engine")
_HANDLER: Final = ("handler",)
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Snapshot = Mapping[str, Metric]
"""Metrics by name."""


class Measured(Protocol):
    """What is asked of an `Engine`."""

    config: EngineConfig

    def metrics(self) -> dict[str, Metric]: ...


class EngineCollector(Collector):
    """Takes a snapshot of its engines at every scrape; callable from any thread.

    Labels are `model_name` and `engine`, the engine's place among those given. A name ends in `_total` where
    Prometheus wants a counter's to.
    """

    def __init__(self, *engines: Measured) -> None:
        self._engines = engines

    def describe(self) -> list[Family]:
        """Nothing: a registry need not ask for values to take the collector in."""
        return []

    def collect(self) -> Iterator[Family]:
        """One family a metric. An engine that is not open yet has none."""
        snapshots = [([each.config.model, str(index)], _read(each)) for index, each in enumerate(self._engines)]
        return _families(_ENGINE, snapshots)


class HandlerCollector(Collector):
    """What a server of HTTP has counted, by the `handler` that was asked: a path as its routes have it."""

    def __init__(self, snapshots: Mapping[str, Snapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Family]:
        return _families(_HANDLER, [([handler], snapshot) for handler, snapshot in self._snapshots.items()])


class SnapshotCollector(Collector):
    """Metrics without labels but their own."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        return _families((), [([], self._snapshot)])


def exposition(
    *engines: Measured, handlers: Mapping[str, Snapshot] | None = None, others: Snapshot | None = None
) -> bytes:
    """Metrics of `engines`, of the `handlers` of a server, and `others`, as a scrape of `CONTENT_TYPE` gets them."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(*engines))
    registry.register(HandlerCollector(handlers or {}))
    registry.register(SnapshotCollector(others or {}))
    return generate_latest(registry)


def _families(names: tuple[str, ...], snapshots: Sequence[tuple[list[str], Snapshot]]) -> Iterator[Family]:
    """One a metric; with each snapshot come its values of the labels `names`."""
    families: dict[str, Family] = {}
    for labels, snapshot in snapshots:
        for name, metric in snapshot.items():
            if name not in families:
                families[name] = _family(metric, names)
            _fill(families[name], metric, labels)
    return iter(families.values())


def _read(engine: Measured) -> dict[str, Metric]:
    try:
        return engine.metrics()
    except EngineClosed:
        return {}


def _family(metric: Metric, names: tuple[str, ...]) -> Family:
    name, description = PREFIX + metric.name, metric.description
    labels = [*names, metric.label] if metric.label else [*names]
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, description, labels=labels)
    if metric.kind == "gauge":
        return GaugeMetricFamily(name, description, labels=labels)
    return CounterMetricFamily(name, description, labels=labels)


def _fill(family: Family, metric: Metric, labels: list[str]) -> None:
    for label, value in metric.values.items():
        every = [*labels, label] if metric.label else labels
        if isinstance(value, Distribution):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(every, buckets=_buckets(value), sum_value=value.sum)
        else:
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(every, value)


def _buckets(value: Distribution) -> list[tuple[str, float]]:
    """Upper bounds and how many values are at most that, as Prometheus counts them."""
    bounds = [repr(bound) for bound in value.bounds] + ["+Inf"]
    return list(zip(bounds, map(float, accumulate(value.counts)), strict=True))
