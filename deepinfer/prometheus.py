"""An engine's metrics for Prometheus: a collector that you register where you like. Needs the `metrics` extra.

    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))

Registers nothing and listens nowhere by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from deepinfer.config import EngineConfig
from deepinfer.errors import EngineClosed
from deepinfer.metrics import PREFIX, Distribution, Metric

_LABELS: Final = ("model_name", "engine")
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


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
        snapshots = {index: snapshot for index, engine in enumerate(self._engines) if (snapshot := _read(engine))}
        for name in next(iter(snapshots.values()), ()):
            metrics = {index: snapshot[name] for index, snapshot in snapshots.items()}
            family = _family(next(iter(metrics.values())))
            for index, metric in metrics.items():
                _fill(family, metric, [self._engines[index].config.model, str(index)])
            yield family


def exposition(*engines: Measured) -> bytes:
    """All metrics of `engines`, as a scrape of `CONTENT_TYPE` gets them."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(*engines))
    return generate_latest(registry)


def _read(engine: Measured) -> dict[str, Metric]:
    try:
        return engine.metrics()
    except EngineClosed:
        return {}


def _family(metric: Metric) -> Family:
    name, description = PREFIX + metric.name, metric.description
    labels = [*_LABELS, metric.label] if metric.label else [*_LABELS]
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
