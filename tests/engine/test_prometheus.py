"""What a scrape shows, read back by Prometheus' own parser."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer import Engine, InvalidRequest
from deepinfer.prometheus import EngineCollector
from doubles.reading import FAKE, PROMPT, VOCAB_SIZE, greedy

pytestmark = pytest.mark.usefixtures("no_tasks_left")

Samples = dict[tuple[str, tuple[str, ...]], float]


def scrape(registry: CollectorRegistry) -> Samples:
    """Values by name and the values of the labels: model, engine, and the metric's own."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found: Samples = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        found[sample.name, (labels.pop("model_name"), labels.pop("engine"), *labels.values())] = sample.value
    return found


async def test_a_scrape_shows_what_was_done() -> None:
    registry = CollectorRegistry()
    async with Engine("fake", **FAKE) as engine:
        registry.register(EngineCollector(engine))
        await engine.generate_many([[index, 1, 2] for index in range(10)], greedy(6), progress=False)
        with pytest.raises(InvalidRequest):
            await engine.generate([VOCAB_SIZE])
        with pytest.raises(InvalidRequest):
            await engine.generate(PROMPT, lora_request="adapter")
        await engine.generate(PROMPT, greedy(1))  # behind the refusal
        found = scrape(registry)
    mine = ("fake", "0")
    assert found["deepinfer:generation_tokens_total", mine] == 61
    assert found["deepinfer:prompt_tokens_total", mine] == 33
    assert found["deepinfer:num_requests_running", mine] == 0
    assert found["deepinfer:request_success_total", (*mine, "length")] == 11
    assert found["deepinfer:admission_rejections_total", (*mine, "invalid_param")] == 2
    assert found["deepinfer:time_to_first_token_seconds_count", mine] == 11
    assert found["deepinfer:inter_token_latency_seconds_bucket", (*mine, "+Inf")] == 50
    assert found["deepinfer:iteration_tokens_total_sum", mine] == 33 + 50
    assert 0 < found["deepinfer:step_device_seconds_sum", mine] < 60


async def test_buckets_only_grow() -> None:
    registry = CollectorRegistry()
    async with Engine("fake", **FAKE) as engine:
        registry.register(EngineCollector(engine))
        await engine.generate_many([[index] for index in range(20)], greedy(9), progress=False)
        found = scrape(registry)
    counts = [value for (name, _), value in found.items() if name == "deepinfer:request_prompt_tokens_bucket"]
    assert counts == sorted(counts) and counts[0] == counts[-1] == 20


async def test_two_engines_share_a_registry() -> None:
    registry = CollectorRegistry()
    async with Engine("fake", **FAKE) as one, Engine("fake", **FAKE) as two:
        registry.register(EngineCollector(one, two))
        await one.generate(PROMPT, greedy(3))
        await two.generate(PROMPT, greedy(5))
        found = scrape(registry)
    assert found["deepinfer:generation_tokens_total", ("fake", "0")] == 3
    assert found["deepinfer:generation_tokens_total", ("fake", "1")] == 5


async def test_an_engine_that_is_not_open_is_left_out() -> None:
    registry = CollectorRegistry()
    async with Engine("fake", **FAKE) as two:
        registry.register(EngineCollector(Engine("fake"), two))
        registry.register(EngineCollector(Engine("fake")))
        await two.generate(PROMPT, greedy(5))
        found = scrape(registry)
    assert {labels[1] for _, labels in found} == {"1"}
    assert found["deepinfer:generation_tokens_total", ("fake", "1")] == 5
