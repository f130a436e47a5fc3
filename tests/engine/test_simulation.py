"""Losslessness in simulation: whatever the schedule, every request gets the tokens of its own prompt and no others."""

from __future__ import annotations

import itertools
import random
from array import array
from math import inf
from typing import Final, Literal, NamedTuple

import pytest
from msgspec.structs import replace

from deepinfer.budget import DraftPlan, DraftPolicy, FixedDrafts, NoDrafts, ScheduledDrafts
from deepinfer.core import CoreConfig, EngineCore
from deepinfer.costs import CostTable
from deepinfer.draft_counts import DraftCounts
from deepinfer.observer import Observers, StepReport
from deepinfer.output import OutputText
from deepinfer.rank import CacheShape
from deepinfer.request import Request
from deepinfer.scheduler import Scheduler, SchedulerConfig
from deepinfer.stops import StopMatcher
from deepinfer.stream import Mailbox, TokenChunk
from deepinfer_protocol import LogitShaping, SlotSampling, StepCosts, pack_float32, pack_int32
from doubles.clock import VirtualClock
from doubles.group import SimulatedGroup, with_window
from doubles.oracle import completion
from doubles.published import Published, check_published

VOCAB_SIZE = 97
Drafting = Literal["fixed", "scheduled", "random"]
WHOLE = 1 << 20


class Case(NamedTuple):
    overlap: bool
    chunk: int
    prefix_cache: bool
    batch: int
    preempted: bool
    seeded: bool
    num_ranks: int
    window: int = 0
    """What slots keep for themselves; hits are exact."""
    longest_draft: int = 0
    drafting: Drafting = "fixed"
    """What is verified, and made: all, by a table of costs, or anything."""


AXES = list(
    itertools.starmap(
        Case,
        itertools.product(
            (False, True), (1, 7, 64, WHOLE), (False, True), (1, 16), (False, True), (False, True), (1, 2)
        ),
    )
)


class RandomDrafts(FixedDrafts):
    """Any budget, and any length of drafts."""

    def __init__(self, longest: int, seed: int) -> None:
        super().__init__(longest)
        self._random = random.Random(seed)

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        everything = super().plan(survivals, num_rows, num_other, room).verify_budget
        num_drafts = self._random.choice((0, self.longest, self._random.randint(0, self.longest)))
        return DraftPlan(self._random.randint(0, everything), num_drafts)


class Simulation:
    """One engine core over simulated workers, and the requests that were sent to it."""

    def __init__(self, case: Case, seed: int, *, is_exact: bool = True) -> None:
        self.case = case
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.block_size = self.random.choice((4, 16))
        shape = with_window(self._shape(), case.window, is_exact=is_exact)
        config = SchedulerConfig(
            max_batch_tokens=max(self.random.choice((32, 128, 512)), shape.num_slots),
            prefill_chunk=case.chunk,
            prefix_cache=case.prefix_cache,
        )
        policies = [self._policy() for _ in range(case.num_ranks)]
        self.scheduler = Scheduler(config, [shape] * case.num_ranks, drafts=policies)
        self.group = SimulatedGroup(
            self.clock, shape, case.num_ranks, seed, VOCAB_SIZE, case.window, case.longest_draft
        )
        self.core = EngineCore(self.scheduler, self.group, self.clock, CoreConfig(overlap=case.overlap))
        self.requests: list[Request] = []
        self.chunks: dict[str, list[TokenChunk]] = {}

    def _shape(self) -> CacheShape:
        """Preempted: slots or blocks for a fraction of what is asked."""
        if not self.case.preempted:
            return CacheShape(num_slots=24, num_blocks=1024, block_size=self.block_size)
        if self.case.batch == 1:
            return CacheShape(num_slots=1, num_blocks=1024, block_size=self.block_size)
        return CacheShape(num_slots=24, num_blocks=160 // self.block_size, block_size=self.block_size)

    def _policy(self) -> DraftPolicy:
        """Scheduled: a step takes a little, and then more with every 8 positions."""
        longest = self.case.longest_draft
        if not longest:
            return NoDrafts()
        if self.case.drafting == "fixed":
            return FixedDrafts(longest)
        if self.case.drafting == "random":
            return RandomDrafts(longest, self.random.randrange(1 << 32))
        sizes = list(range(8, 512, 8))
        forward_us = [100.0 + self.random.choice((0.5, 5.0, 50.0)) * size for size in sizes]
        costs = StepCosts(
            pack_int32(sizes), pack_float32(sorted(forward_us)), pack_int32([1, 24]), pack_float32([1.0, 40.0])
        )
        return ScheduledDrafts(longest, CostTable.of(costs))

    def request(self, *, priority: int = 0, n: int = 1) -> Request:
        rand = self.random
        shared = [7] * rand.choice((0, 0, 9, 33))
        prompt = array("i", shared + [rand.randrange(VOCAB_SIZE) for _ in range(rand.randint(1, 60))])
        sampling = [self._sampling(len(prompt)) for _ in range(n)]
        if rand.random() < 0.3:
            sampling[0] = replace(sampling[0], num_prompt_logprobs=rand.choice((0, 2)))
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            sampling,
            max_length=len(prompt) + rand.randint(1, 40),
            stop_ids=frozenset(rand.sample(range(VOCAB_SIZE), rand.choice((0, 2)))),
            priority=priority,
            skips_prefix_cache=rand.random() < 0.1,
            user=Mailbox(None, n),
        )
        self.requests.append(request)
        return request

    def _sampling(self, num_prompt: int) -> SlotSampling:
        """A quarter of them with words and bans that depend on where the prompt ends."""
        rand = self.random
        plain = SlotSampling(num_prompt=num_prompt)
        if self.case.seeded:
            plain = replace(plain, temperature=1.0, seed=rand.randrange(1 << 62))
        if rand.random() < 0.75:
            return plain
        words = [[rand.randrange(VOCAB_SIZE), rand.randrange(VOCAB_SIZE)] for _ in range(rand.choice((0, 40)))]
        bans = sorted(rand.sample(range(VOCAB_SIZE), rand.choice((0, 20))))
        shaping = LogitShaping(
            presence_penalty=rand.choice((0.0, 1.0)),
            bias_ids=pack_int32(bans),
            bias_values=pack_float32([-inf] * len(bans)),
            bad_words=pack_int32([number for word in words for number in (len(word), *word)]),
        )
        return replace(plain, shaping=shaping)

    def submit_at(self, when_s: float, request: Request) -> None:
        def submit() -> None:
            request.arrival_s = self.clock.time()
            self.core.post(self.core.submit, request)
            self.core.wake()

        self.clock.call_at(when_s, submit)

    def run(self) -> None:
        integrity_every = self.random.choice((1, 5, 25))
        for step in itertools.count():
            if step % integrity_every == 0:
                self.core.check_integrity()
            if not self.clock.run_one():
                break
        assert self.core.failure is None, self.core.failure
        assert self.core.is_idle
        self.core.check_integrity()
        assert self.scheduler.stats().num_blocks_used == 0
        assert all(rank.num_free_slots == rank.shape.num_slots for rank in self.scheduler.ranks)

    def outputs(self, request: Request) -> list[tuple[list[int], str | None]]:
        """Tokens and finish reason of each sample, from the chunks that its reader gets."""
        tokens: list[list[int]] = [[] for _ in request.samples]
        reasons: list[str | None] = [None] * len(tokens)
        while (chunk := request.user.take()) is not None:
            assert chunk.first_index == len(tokens[chunk.sample_index])
            tokens[chunk.sample_index] += chunk.token_ids
            reasons[chunk.sample_index] = chunk.finish_reason
        return list(zip(tokens, reasons, strict=True))

    def check_prompt_logprobs(self, request: Request) -> None:
        """Each position once, in order, whatever was cut, cached or computed again. A fake one's value is its place."""
        num_best = request.sampling[0].num_prompt_logprobs
        told = request.user.prompt_logprobs
        if num_best < 0 or len(request.prompt) == 1:
            assert told is None
            return
        prompt = request.prompt
        entries = [(entry.token_id, len(entry.top), entry.logprob, entry.rank) for entry in told[1:]]
        assert entries == [(prompt[place], num_best, -place, place) for place in range(1, len(prompt))]

    def check_published(self) -> Published:
        return check_published(self.scheduler.ranks, self.group.runners, self.requests, self.case.window)

    def wanted(self, request: Request) -> list[tuple[list[int], str]]:
        return [
            completion(request.prompt, sampling, request.max_length, request.stop_ids, VOCAB_SIZE, self.case.window)
            for sampling in request.sampling
        ]


def simulate(case: Case, seed: int, *, is_exact: bool = True) -> Simulation:
    simulation = Simulation(case, seed, is_exact=is_exact)
    for _ in range(case.batch):
        n = simulation.random.choice((1, 1, 1, 3)) if case.batch > 1 else 1
        simulation.submit_at(simulation.random.uniform(0, 0.1), simulation.request(n=n))
    if case.preempted and case.batch == 1:
        for _ in range(4 * case.num_ranks):
            simulation.submit_at(simulation.random.uniform(0, 0.2), simulation.request(priority=-100))
    simulation.run()
    return simulation


def check(case: Case, seed: int) -> int:
    """Run one case. Returns how many preemptions it saw."""
    simulation = simulate(case, seed)
    for request in simulation.requests:
        assert simulation.outputs(request) == simulation.wanted(request), f"{case=} {seed=} {request.request_id=}"
        simulation.check_prompt_logprobs(request)
    assert all(len(sizes) == 1 for sizes in simulation.group.padded_positions.values())
    assert simulation.check_published().num_marked == 0
    return simulation.scheduler.stats().num_preempted


CASES_PER_POINT = 8


@pytest.mark.parametrize("part", range(16))
def test_every_schedule_gives_the_same_tokens(part: int) -> None:
    """256 points of the matrix, eight seeds each: 2,048 cases."""
    num_preempted = 0
    for index, case in enumerate(AXES):
        if index // 16 == part:
            for seed in range(CASES_PER_POINT):
                count = check(case, seed=1000 * index + seed)
                assert case.preempted or count == 0
                num_preempted += count
    assert num_preempted > 50, "the preempted cases hardly preempt"


WINDOWED: Final = [case._replace(window=window) for case in AXES if case.prefix_cache for window in (2, 5)]
"""256 points: a window reaches 3 or 12 positions back, further than some hits and less far than others."""


@pytest.mark.parametrize("part", range(4))
def test_every_schedule_gives_the_same_tokens_where_slots_have_a_state(part: int) -> None:
    """A hit that is exact gives the tokens of a run without it."""
    num_preempted = sum(check(case, seed=2_000_000 + index) for index, case in enumerate(WINDOWED[part::4]))
    assert num_preempted > 20, "the preempted cases hardly preempt"


@pytest.mark.parametrize("part", range(4))
def test_whatever_the_schedule_a_bounded_hit_leaves_its_mark(part: int) -> None:
    """No block without a mark is an approximation; and nobody has one who was not given it by a hit."""
    seen = [check_bounded(case, seed=3_000_000 + index) for index, case in enumerate(WINDOWED[part::4])]
    assert sum(published.num_exact for published in seen) > 100
    assert sum(published.num_off for published in seen) > 10, "the marks are there for nothing"


def check_bounded(case: Case, seed: int) -> Published:
    simulation = simulate(case, seed, is_exact=False)
    for request in simulation.requests:
        outputs, wanted = simulation.outputs(request), simulation.wanted(request)
        if request.num_cached_tokens == request.num_preemptions == 0:
            assert outputs[0] == wanted[0], f"{case=} {seed=} {request.request_id=}"
        assert all(reason in ("stop", "length") for _, reason in outputs)
        simulation.check_prompt_logprobs(request)
    return simulation.check_published()


DRAFTING: Final[tuple[Drafting, ...]] = ("fixed", "scheduled", "random")
DRAFTED: Final = [
    case._replace(longest_draft=1 + index % 5, drafting=drafting, window=(0, 0, 2, 5)[index % 4])
    for index, case in enumerate(AXES)
    for drafting in DRAFTING
]
"""768 points."""


@pytest.mark.parametrize("part", range(8))
def test_every_schedule_gives_the_same_tokens_with_drafts(part: int) -> None:
    num_preempted = sum(check(case, seed=6_000_000 + index) for index, case in enumerate(DRAFTED[part::8]))
    assert num_preempted > 10, "the preempted cases hardly preempt"


@pytest.mark.parametrize("drafting", DRAFTING)
def test_drafts_are_accepted_and_rejected_and_hang_on_their_budget(drafting: Drafting) -> None:
    counts = DraftCounts()
    for index, case in enumerate(DRAFTED):
        if case.drafting == drafting and case.batch == 16 and index % 5 == 0:
            simulation = simulate(case, seed=index)
            counts.merge(simulation.scheduler.drafts)
            of_requests = DraftCounts()
            for request in simulation.requests:
                of_requests.merge(request.drafts)
            assert of_requests.outcomes == simulation.scheduler.drafts.outcomes
    assert all(times for row in counts.outcomes for times in row), "an outcome that never came"
    assert all(place.error < 0.05 for place in counts.calibration)


@pytest.mark.parametrize(("longest", "stop"), [(0, "ab"), (5, "ab"), (5, "b"), (3, "aab"), (5, "bbbbbbbbbb")])
def test_what_a_row_brings_behind_a_stop_string_is_neither_told_nor_counted(longest: int, stop: str) -> None:
    num_cut = 0
    for seed in range(40):
        simulation = Simulation(Case(True, WHOLE, True, 1, False, False, 1, 0, longest), seed)
        prompt = array("i", [seed, 1, 2])
        request = Request("r", prompt, [SlotSampling()], max_length=33, stop_ids=frozenset(), user=Mailbox(None))
        request.samples[0].user = OutputText(Letters(), StopMatcher((stop,)))
        ends: list[str] = []
        reports: list[StepReport] = []
        simulation.core.observer = Listener(ends, reports)
        simulation.requests.append(request)
        simulation.submit_at(0.0, request)
        simulation.run()
        whole, _ = completion(prompt, SlotSampling(), 33, frozenset(), VOCAB_SIZE)
        text = "".join(map(Letters().push_one, whole))
        end = text.find(stop)
        wanted = whole if end < 0 else whole[: end + len(stop)]
        assert simulation.outputs(request) == [(wanted, "length" if end < 0 else "stop")]
        assert list(request.samples[0].tokens[3:]) == wanted
        assert [token for report in reports for _, token, _, _ in report.emissions] == wanted
        assert simulation.core.stats.num_tokens == len(wanted)
        assert ends == ["length" if end < 0 else "stop"]
        num_cut += sum(len(report.results[0].tokens) // 4 > max(len(report.emissions), 1) for report in reports)
    assert (num_cut > 0) == (longest > 0 and len(stop) < 9)


class Letters:
    """A character a token."""

    def push_one(self, token_id: int) -> str:
        return "ab"[token_id % 2]

    def flush(self) -> str:
        return ""


class Listener(Observers):
    def __init__(self, ends: list[str], reports: list[StepReport]) -> None:
        super().__init__(())
        self._ends, self._reports = ends, reports

    def step_done(self, report: StepReport) -> None:
        self._reports.append(report)

    def request_done(self, request: Request, reason: str, now_s: float) -> None:
        self._ends.append(reason)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(16))
def test_every_schedule_gives_the_same_tokens_with_drafts_at_length(part: int) -> None:
    for index, case in enumerate(DRAFTED[part::16]):
        for seed in range(40):
            check(case, seed=7_000_000 + 1000 * index + seed)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(16))
def test_every_schedule_gives_the_same_tokens_at_length(part: int) -> None:
    for index, case in enumerate(AXES):
        if index // 16 == part:
            for seed in range(80):
                check(case, seed=1_000_000 + 1000 * index + seed)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(16))
def test_every_schedule_keeps_the_state_of_slots_at_length(part: int) -> None:
    for index, case in enumerate(WINDOWED[part::16]):
        for seed in range(15):
            check(case, seed=4_000_000 + 1000 * index + seed)
            check_bounded(case, seed=5_000_000 + 1000 * index + seed)
