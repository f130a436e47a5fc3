"""Counters against what was done: a core over simulated workers, whose clock the test turns."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from deepinfer.budget import FixedDrafts, NoDrafts
from deepinfer.core import CoreConfig, EngineCore
from deepinfer.errors import WorkerLost
from deepinfer.metrics import EngineMetrics, Histogram, Metric
from deepinfer.rank import CacheShape
from deepinfer.request import Request
from deepinfer.scheduler import Scheduler, SchedulerConfig
from deepinfer.stream import Mailbox
from deepinfer_protocol import SlotSampling
from doubles.clock import VirtualClock
from doubles.group import SimulatedGroup


class Driven:
    """A core whose steps are simulated, with its metrics."""

    def __init__(
        self, *, slots: int = 8, blocks: int = 256, num_ranks: int = 1, longest_draft: int = 0, **config: Any
    ) -> None:
        self.clock = VirtualClock()
        shape = CacheShape(slots, blocks, 4)
        config = {"max_batch_tokens": 64, "prefill_chunk": 16, **config}
        policies = [FixedDrafts(longest_draft) if longest_draft else NoDrafts() for _ in range(num_ranks)]
        self.scheduler = Scheduler(SchedulerConfig(**config), [shape] * num_ranks, drafts=policies)
        self.metrics = EngineMetrics(has_prefix_cache=self.scheduler.config.prefix_cache)
        group = SimulatedGroup(self.clock, shape, num_ranks, seed=1, num_drafts=longest_draft)
        self.core = EngineCore(
            self.scheduler, group, self.clock, CoreConfig(), [self.metrics], stopwatch=self.clock.time
        )

    def submit(self, request_id: str, prompt: list[int], num_new: int, n: int = 1, **options: Any) -> Request:
        request = Request(
            request_id,
            array("i", prompt),
            [SlotSampling(temperature=1.0, seed=index) for index in range(n)],
            max_length=len(prompt) + num_new,
            stop_ids=frozenset(),
            arrival_s=self.clock.time(),
            user=Mailbox(None, n),
            **options,
        )
        self.core.submit(request)
        self.core.wake()
        return request

    def run(self) -> None:
        while self.clock.run_one():
            pass

    def read(self) -> dict[str, Metric]:
        return self.metrics.snapshot(self.scheduler.stats(), self.scheduler.drafts)

    def value(self, name: str) -> float:
        return self.read()[name].value


def test_every_token_and_every_end_is_counted_once() -> None:
    driven = Driven()
    for index in range(20):
        driven.submit(f"r{index}", [index] * (5 + index), 1 + index)
    driven.run()
    metrics = driven.read()
    assert metrics["generation_tokens"].value == sum(range(1, 21))
    assert metrics["prompt_tokens"].value == sum(range(5, 25))
    assert metrics["request_success"].values == {"length": 20}
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert metrics[name].distribution.count == 20, name
    assert metrics["inter_token_latency_seconds"].distribution.count == sum(range(20))
    assert metrics["request_prompt_tokens"].distribution.sum == sum(range(5, 25))
    assert metrics["request_generation_tokens"].distribution.sum == sum(range(1, 21))
    # The last token of a request is never fed back.
    assert metrics["iteration_tokens_total"].distribution.sum == sum(range(5, 25)) + sum(range(20))
    assert metrics["num_requests_running"].value == metrics["kv_cache_usage_perc"].value == 0


def test_the_times_of_a_request_add_up() -> None:
    driven = Driven(slots=1)
    driven.submit("first", [1, 2, 3], 40)
    driven.submit("second", [4, 5, 6], 40)
    driven.run()
    sums = {
        name: driven.read()[f"{name}_seconds"].distribution.sum
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "e2e_request_latency",
            "time_to_first_token",
            "inter_token_latency",
        )
    }
    assert sums["request_queue_time"] > 0.05, "the second waits for the only slot"
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert sum(sums[part] for part in parts) == pytest.approx(sums["e2e_request_latency"])
    assert sums["time_to_first_token"] + sums["inter_token_latency"] == pytest.approx(sums["e2e_request_latency"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gaps_between_tokens_are_the_same_by_batch_and_one_by_one(num_ranks: int) -> None:
    """Requests that come and go change the batch; the gaps of each still sum up to its decode time."""
    driven = Driven(slots=16, num_ranks=num_ranks)
    for index in range(12):
        driven.submit(f"r{index}", [index, 1, 2], 3 + 7 * index)
        for _ in range(index):
            driven.clock.run_one()
    driven.run()
    metrics = driven.read()
    gaps = metrics["inter_token_latency_seconds"].distribution
    assert gaps.sum == pytest.approx(metrics["request_decode_time_seconds"].distribution.sum)
    assert gaps.count == sum(2 + 7 * index for index in range(12))


def test_samples_share_one_prompt_and_one_first_token() -> None:
    driven = Driven()
    driven.submit("three", [1, 2, 3, 4, 5], 6, n=3)
    driven.run()
    metrics = driven.read()
    assert metrics["prompt_tokens"].value == 5 and metrics["generation_tokens"].value == 18
    assert metrics["time_to_first_token_seconds"].distribution.count == 1
    assert metrics["inter_token_latency_seconds"].distribution.count == 15
    assert metrics["request_success"].values == {"length": 1}


def test_a_prefix_hit_is_counted_in_tokens() -> None:
    driven = Driven()
    prompt = list(range(21))
    for request_id in ("cold", "warm"):
        driven.submit(request_id, prompt, 2)
        driven.run()
    assert driven.value("prefix_cache_queries") == driven.value("prompt_tokens") == 42
    assert driven.value("prefix_cache_hits") == driven.value("prompt_tokens_cached") == 20


def test_what_looks_for_no_prefix_is_no_query() -> None:
    driven = Driven(prefix_cache=False)
    driven.submit("r", [1, 2, 3], 2)
    driven.run()
    assert (driven.value("prompt_tokens"), driven.value("prefix_cache_queries")) == (3, 0)
    driven = Driven()
    driven.submit("r", [1, 2, 3], 2, skips_prefix_cache=True)
    driven.run()
    assert (driven.value("prompt_tokens"), driven.value("prefix_cache_queries")) == (3, 0)


def test_preemptions_are_counted_and_lose_no_token() -> None:
    driven = Driven(blocks=10)
    for index in range(4):
        driven.submit(f"r{index}", [index] * 4, 24)
    driven.run()
    assert driven.value("num_preemptions") == driven.scheduler.stats().num_preempted > 0
    assert driven.value("generation_tokens") == 4 * 24


def test_refusals_and_ends_of_every_kind_have_a_label() -> None:
    driven = Driven(slots=1, max_queued_requests=2)
    running = driven.submit("running", [1], 500)
    while not running.samples[0].num_output:
        driven.clock.run_one()
    driven.submit("late", [2], 5, queue_deadline_s=driven.clock.time() + 0.01)
    driven.submit("running", [3], 5)
    driven.submit("waits", [3], 5)
    driven.submit("too many", [4], 5)
    assert driven.read()["admission_rejections"].values == {"duplicate": 1, "overloaded": 1}
    while "late" in driven.scheduler.requests:
        driven.clock.run_one()
    assert driven.read()["num_requests_running"].value == driven.read()["num_requests_waiting"].value == 1
    driven.core.abort(running)
    while driven.scheduler.requests:
        driven.clock.run_one()
    assert driven.read()["request_success"].values == {"queue_timeout": 1, "abort": 1, "length": 1}
    driven.submit("lost", [1], 5)
    driven.core.fail(WorkerLost("gone"))
    assert driven.read()["request_success"].values["worker_lost"] == 1


def test_a_request_that_ended_is_not_held() -> None:
    driven = Driven()
    driven.submit("r", [1, 2], 3)
    driven.run()
    assert driven.metrics._latest == set() and driven.metrics._latest_in_order == []


def test_quantiles_lie_in_the_bucket_of_their_rank() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 3.0, 3.0, 100.0):
        histogram.observe(value)
    histogram.observe(2.0, times=4)
    taken = histogram.snapshot()
    assert taken.counts == (2, 5, 2, 1) and taken.count == 10
    assert taken.sum == pytest.approx(117.0) and taken.mean == pytest.approx(11.7)
    assert taken.quantile(0.1) == pytest.approx(0.5)
    assert 1.0 < taken.quantile(0.5) <= 2.0 < taken.quantile(0.8) <= 4.0
    assert taken.quantile(1.0) == 4.0, "nothing is known beyond the last bound"
    assert Histogram((1.0,)).snapshot().quantile(0.5) == 0.0


def test_reading_a_value_as_a_distribution_is_refused() -> None:
    with pytest.raises(TypeError, match="generation_tokens is a counter"):
        _ = Driven().read()["generation_tokens"].distribution


def test_drafts_are_counted_under_the_names_that_dashboards_know() -> None:
    driven = Driven()
    counts = driven.scheduler.drafts
    for num_verified, num_accepted in ((3, 1), (3, 3), (2, 0), (0, 0)):
        counts.add(num_verified, num_accepted)
    metrics = driven.read()
    assert metrics["spec_decode_num_drafts"].value == 3
    assert metrics["spec_decode_num_draft_tokens"].value == 8
    assert metrics["spec_decode_num_accepted_tokens"].value == 4
    assert metrics["spec_decode_num_draft_tokens_per_pos"].values == {"0": 3, "1": 3, "2": 2}
    assert metrics["spec_decode_num_accepted_tokens_per_pos"].values == {"0": 2, "1": 1, "2": 1}
    assert metrics["spec_decode_forwards"].values == {"0": 1, "1": 0, "2": 1, "3": 2}
    assert metrics["spec_decode_forwards"].label == "verified"
    assert Driven().read()["spec_decode_num_accepted_tokens_per_pos"].values == {}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gaps_of_samples_that_get_several_tokens_a_step_sum_up_to_their_decode_times(num_ranks: int) -> None:
    driven = Driven(slots=16, num_ranks=num_ranks, longest_draft=4)
    for index in range(12):
        driven.submit(f"r{index}", [index, 1, 2], 3 + 7 * index)
        for _ in range(index):
            driven.clock.run_one()
    driven.run()
    metrics = driven.read()
    assert metrics["generation_tokens"].value == sum(3 + 7 * index for index in range(12))
    assert metrics["spec_decode_num_accepted_tokens"].value > 0
    gaps = metrics["inter_token_latency_seconds"].distribution
    assert gaps.sum == pytest.approx(metrics["request_decode_time_seconds"].distribution.sum)
    assert gaps.count == sum(2 + 7 * index for index in range(12))
