"""What an engine has done, in numbers: counters, gauges and histograms, by the names that dashboards know.

Plain objects of one engine: no registry, no listener, nothing global. `deepinfer.prometheus` exposes a snapshot; this
module does not know it. Counting costs a little for each step and, while the same samples decode step after step,
next to nothing for each token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from deepinfer.draft_counts import DraftCounts
from deepinfer.observer import StepReport
from deepinfer.request import Request, Sequence
from deepinfer.scheduler import SchedulerStats

PREFIX: Final = "deepinfer:"
"""Before every name, where names of several programs meet."""

LATENCY_S: Final = tuple(factor * 10.0**power for power in range(-3, 3) for factor in (1.0, 2.0, 5.0))  # 1 ms to 500 s
_STEP_S: Final = tuple(factor * 10.0**power for power in range(-6, 2) for factor in (1.0, 2.0, 5.0))  # 1 us to 50 s
_TOKENS: Final = tuple(float(1 << power) for power in range(21))  # 1 to a million

Kind = Literal["counter", "gauge", "histogram"]


class Distribution(Struct, frozen=True):
    """A histogram as it stood: how many values were at most each bound, and above the bound before it."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """One more than `bounds`: the last is of what is above all of them."""
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value that `share` (0 to 1) of the values do not exceed, by a straight line within its bucket.

        At most the last bound; 0 of nothing.
        """
        rank, below, low = share * self.count, 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return low + (bound - low) * (rank - below) / count
            below, low = below + count, bound
        return low if self.count else 0.0


class Histogram:
    """Counts values by buckets."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`value` came, so many `times`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._sum)


class Metric(Struct, frozen=True):
    """One metric as it stood. `values` is by the value of `label`, and has the one key "" where there is no label."""

    name: str
    kind: Kind
    description: str
    values: Mapping[str, float | Distribution]
    label: str = ""

    @property
    def value(self) -> float:
        """Of a counter or a gauge; the sum over its labels."""
        return sum(value for value in self.values.values() if not isinstance(value, Distribution))

    @property
    def distribution(self) -> Distribution:
        """Of a histogram. Raises `TypeError` for anything else."""
        value = self.values.get("")
        if not isinstance(value, Distribution):
            raise TypeError(f"{self.name} is a {self.kind}")
        return value


class EngineMetrics:
    """Counts what one core reports. Implements `Observer`; read from any thread by `snapshot`."""

    def __init__(self, *, has_prefix_cache: bool = True) -> None:
        self._has_prefix_cache = has_prefix_cache
        self.prefix_cache_queries = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.request_success: dict[str, int] = {}
        self.admission_rejections: dict[str, int] = {}
        self.iteration_tokens_total = Histogram(_TOKENS)
        self.iteration_sequences = Histogram(_TOKENS)
        self.time_to_first_token_seconds = Histogram(LATENCY_S)
        self.inter_token_latency_seconds = Histogram(LATENCY_S)
        self.e2e_request_latency_seconds = Histogram(LATENCY_S)
        self.request_queue_time_seconds = Histogram(LATENCY_S)
        self.request_prefill_time_seconds = Histogram(LATENCY_S)
        self.request_decode_time_seconds = Histogram(LATENCY_S)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.step_scheduler_seconds = Histogram(_STEP_S)
        self.step_host_seconds = Histogram(_STEP_S)
        self.step_device_seconds = Histogram(_STEP_S)
        self.step_draft_seconds = Histogram(_STEP_S)
        self.step_idle_seconds = Histogram(_STEP_S)
        self._latest: set[Sequence] = set()  # the samples that got a token in the latest step, and when
        self._latest_in_order: list[Sequence] = []  # the same, to see at a glance that nothing has changed
        self._latest_s = 0.0

    # ---- Observer

    def step_done(self, report: StepReport) -> None:
        self.iteration_tokens_total.observe(report.num_positions)
        self.iteration_sequences.observe(report.num_rows)
        planning_s = report.planned_s - report.planning_s
        self.step_scheduler_seconds.observe(planning_s + report.applied_s - report.received_s)
        self.step_host_seconds.observe(1e-6 * max([result.host_us for result in report.results]))
        self.step_device_seconds.observe(1e-6 * max([result.device_us for result in report.results]))
        self.step_draft_seconds.observe(1e-6 * max([result.draft_us for result in report.results]))
        self.step_idle_seconds.observe(1e-6 * min([result.idle_us for result in report.results]))
        self._count_tokens([emission[0] for emission in report.emissions if emission[1] is not None], report.emitted_s)

    def _count_tokens(self, samples: list[Sequence], now_s: float) -> None:
        """Samples that also got a token in the step before have one gap in common; the others are looked at.

        Several tokens of one step count as evenly spaced.
        """
        if not samples:
            return
        self.generation_tokens += len(samples)
        gap_s = now_s - self._latest_s
        if samples == self._latest_in_order:
            self.inter_token_latency_seconds.observe(gap_s, len(samples))
        else:
            counts = Counter(samples)
            stayed = counts.keys() & self._latest
            for count, times in Counter([counts[seq] for seq in stayed]).items():
                self.inter_token_latency_seconds.observe(gap_s / count, count * times)
            for seq in self._latest - stayed:
                seq.last_token_s = self._latest_s
            for seq in counts.keys() - stayed:
                self._count_first(seq, counts[seq], now_s)
            self._latest, self._latest_in_order = set(counts), list(counts)
        self._latest_s = now_s

    def _count_first(self, seq: Sequence, count: int, now_s: float) -> None:
        """So many tokens came, and none in the step before."""
        if seq.last_token_s is not None:
            self.inter_token_latency_seconds.observe((now_s - seq.last_token_s) / count, count)
        elif seq.request.first_token_s is None:
            self._count_start(seq.request, now_s)

    def _count_start(self, request: Request, now_s: float) -> None:
        """The first token of a request: its prompt has been computed."""
        request.first_token_s = now_s
        self.prompt_tokens += len(request.prompt)
        if self._has_prefix_cache and not request.skips_prefix_cache and request.sampling[0].num_prompt_logprobs < 0:
            self.prefix_cache_queries += len(request.prompt)
        self.prompt_tokens_cached += request.num_cached_tokens
        self.time_to_first_token_seconds.observe(max(now_s - request.arrival_s, 0.0))

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        self.request_success[reason] = self.request_success.get(reason, 0) + 1
        self.e2e_request_latency_seconds.observe(max(now_s - request.arrival_s, 0.0))
        started_s, first_s = request.started_s, request.first_token_s
        self.request_queue_time_seconds.observe(request.queued_s(now_s))
        if started_s is not None and first_s is not None:
            self.request_prefill_time_seconds.observe(max(first_s - started_s, 0.0))
            self.request_decode_time_seconds.observe(now_s - first_s)
        self.request_prompt_tokens.observe(len(request.prompt))
        self.request_generation_tokens.observe(sum([seq.num_output for seq in request.samples]))
        self._latest.difference_update(request.samples)  # what has ended is not kept alive by its last step
        self._latest_in_order = []

    def request_refused(self, code: str) -> None:
        self.admission_rejections[code] = self.admission_rejections.get(code, 0) + 1

    # ---- reading

    def snapshot(self, scheduler: SchedulerStats, drafts: DraftCounts) -> dict[str, Metric]:
        """Every metric by its name, with the gauges that `scheduler` knows, and what became of `drafts`."""
        now: dict[str, Any] = {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting,
            "kv_cache_usage_perc": scheduler.num_blocks_used / scheduler.num_blocks,
            "num_preemptions": scheduler.num_preempted,
            "prefix_cache_hits": self.prompt_tokens_cached,
            "spec_decode_num_drafts": sum(drafts.verify_lengths[1:]),
            "spec_decode_num_draft_tokens": drafts.num_verified,
            "spec_decode_num_accepted_tokens": drafts.num_accepted,
            "spec_decode_num_accepted_tokens_per_pos": _by_number(drafts.accepted_by_place),
            "spec_decode_num_draft_tokens_per_pos": _by_number(drafts.verified_by_place),
            "spec_decode_forwards": _by_number(drafts.verify_lengths),
        }
        return {name: self._metric(name, *described, now) for name, described in _METRICS.items()}

    def _metric(self, name: str, kind: Kind, description: str, label: str, now: Mapping[str, Any]) -> Metric:
        value = now[name] if name in now else getattr(self, name)
        if isinstance(value, dict):
            return Metric(name, kind, description, dict(value), label)
        return Metric(name, kind, description, {"": value.snapshot() if isinstance(value, Histogram) else value})


def _by_number(counts: list[int]) -> dict[str, int]:
    return {str(number): count for number, count in enumerate(counts)}


_METRICS: Final[Mapping[str, tuple[Kind, str, str]]] = {
    "num_requests_running": ("gauge", "Samples that hold a slot.", ""),
    "num_requests_waiting": ("gauge", "Samples that wait for a slot.", ""),
    "kv_cache_usage_perc": ("gauge", "Share of KV blocks in use; 1 is all of them.", ""),
    "num_preemptions": ("counter", "Samples that gave way and were computed again.", ""),
    "prefix_cache_queries": ("counter", "Prompt tokens looked up in the prefix cache.", ""),
    "prefix_cache_hits": ("counter", "Prompt tokens found in the prefix cache.", ""),
    "prompt_tokens": ("counter", "Prompt tokens of requests that got a first token.", ""),
    "prompt_tokens_cached": ("counter", "Those of them that a prefix hit spared.", ""),
    "generation_tokens": ("counter", "Tokens generated.", ""),
    "spec_decode_num_drafts": ("counter", "Forwards of a sample that verified drafts.", ""),
    "spec_decode_num_draft_tokens": ("counter", "Drafts verified.", ""),
    "spec_decode_num_accepted_tokens": ("counter", "Drafts accepted.", ""),
    "spec_decode_num_draft_tokens_per_pos": ("counter", "Drafts verified, by place in the block.", "position"),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", "Drafts accepted, by place in the block.", "position"),
    "spec_decode_forwards": ("counter", "Forwards of decoding samples, by how many drafts they verified.", "verified"),
    "request_success": ("counter", "Requests ended, by finish reason or by the code of an error.", "finished_reason"),
    "admission_rejections": ("counter", "Requests refused, by the code of the error.", "reason"),
    "iteration_tokens_total": ("histogram", "Positions a step computed, prompts and new tokens.", ""),
    "iteration_sequences": ("histogram", "Sequences in a step's batch.", ""),
    "time_to_first_token_seconds": ("histogram", "From arrival to the first token.", ""),
    "inter_token_latency_seconds": ("histogram", "Between two tokens of a sample.", ""),
    "e2e_request_latency_seconds": ("histogram", "From arrival to the end.", ""),
    "request_queue_time_seconds": ("histogram", "From arrival to the first step.", ""),
    "request_prefill_time_seconds": ("histogram", "From the first step to the first token.", ""),
    "request_decode_time_seconds": ("histogram", "From the first token to the end.", ""),
    "request_prompt_tokens": ("histogram", "Prompt tokens of ended requests.", ""),
    "request_generation_tokens": ("histogram", "Tokens of ended requests, all samples.", ""),
    "step_scheduler_seconds": ("histogram", "Planning a step and applying its results.", ""),
    "step_host_seconds": ("histogram", "Decoding a plan and building its tensors, slowest rank.", ""),
    "step_device_seconds": ("histogram", "Forward and sampling, slowest rank.", ""),
    "step_draft_seconds": ("histogram", "Of that: making drafts, slowest rank.", ""),
    "step_idle_seconds": ("histogram", "The device's queue was empty before a step, least idle rank.", ""),
}
"""Name to kind, description and label."""
