"""The scheduler against fake workers, without a loop or a clock: who runs when, who gives way, what is shared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import msgspec
import pytest

from deepinfer.budget import DraftPlan, FixedDrafts
from deepinfer.errors import DuplicateRequestId, Overloaded, WorkerLost
from deepinfer.request import Request, State
from deepinfer.scheduler import Scheduler
from deepinfer_protocol import LogitShaping, SlotSampling, StepPlan, StepResult, pack_int32, split_columns, unpack_int32
from doubles.bench import VOCAB_SIZE, Bench
from doubles.oracle import completion

# ---- who runs when


def test_higher_priority_starts_first() -> None:
    bench = Bench(slots=1)
    bench.add([1], 10)
    bench.step()
    low, high = bench.add([2], priority=1), bench.add([3], priority=0)
    bench.run()
    assert high.started_s is not None and low.started_s is not None
    assert high.started_s < low.started_s


def test_a_constant_stream_of_high_priority_lets_a_low_one_through_within_its_ageing() -> None:
    bench = Bench(slots=1, ageing_s=10.0)
    first = bench.add([1], 2)
    bench.step()
    low = bench.add([1], 3, priority=3)  # counts as one of priority 0 that came 30 s later
    stream = []
    for index in range(60):
        stream.append(bench.add([2, index], 1))
        bench.step()
    bench.run()
    assert first.num_preemptions == low.num_preemptions == 0
    assert low.started_s is not None and low.started_s < 100
    for high in stream:
        assert high.started_s is not None
        assert (high.started_s < low.started_s) == (high.arrival_s < low.arrival_s + 30)


def test_a_slot_is_taken_from_a_lower_priority_and_given_back() -> None:
    bench = Bench(slots=2)
    low = [bench.add([index], 20, priority=1) for index in range(2)]
    bench.step(4)
    high = bench.add([9], 3)
    bench.step(7)
    assert high.num_unfinished == 0 and all(request.num_unfinished for request in low)
    assert [request.num_preemptions for request in low] == [0, 1]  # the later one gave way
    bench.run()


def test_a_plan_takes_no_more_admissions_than_its_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.rank.MAX_ADMITTED_BYTES", 1000)
    bench = Bench(slots=8)
    bench.add(list(range(90)), 3, n=4)
    bench.add([1] * 400, 3, priority=-1)  # more than all of it: by itself
    bench.add([2] * 90, 3, sampling=SlotSampling(shaping=LogitShaping(allowed_bits=bytes(600))))
    sizes = []
    while bench.scheduler.requests:
        bench.send()
        admits = bench.in_flight[-1][0].ranks[0].plan.admits
        sizes.append([len(msgspec.msgpack.encode(admit)) for admit in admits])
        bench.step()
    bench.run()
    assert max(len(each) for each in sizes) > 1
    assert all(sum(each) < 1400 for each in sizes if len(each) > 1)


def test_equals_wait_for_each_other() -> None:
    bench = Bench(slots=1)
    first, second = bench.add([1], 20), bench.add([2], 2)
    bench.run()
    assert first.num_preemptions == second.num_preemptions == 0


def test_a_row_that_loses_its_slot_to_priority_in_the_step_that_completes_its_prompt_keeps_its_token() -> None:
    bench = Bench(slots=1, prefill_chunk=4)
    low = bench.add(list(range(8)), 5, priority=1)
    bench.send()
    bench.add([9], 2)
    bench.run()
    assert low.num_preemptions == 1


def test_many_that_nobody_reads_may_have_to_give_way_for_one() -> None:
    bench = Bench(slots=2000, blocks=2000, max_batch_tokens=8192, prefill_chunk=8192)
    unread = [bench.add([index % 97], 3) for index in range(2000)]
    bench.step()
    for request in unread:
        bench.scheduler.pause(request)
    bench.step(3)
    big = bench.add([index % 97 for index in range(7900)], 2)
    bench.step(2)
    assert big.started_s is not None
    assert bench.scheduler.stats().num_preempted > 1000


def test_a_long_prompt_starves_neither_short_ones_nor_decoders() -> None:
    bench = Bench(max_batch_tokens=32, prefill_chunk=16)
    decoding = bench.add([1], 60)
    bench.step(3)
    long = bench.add([index % 97 for index in range(600)], 2)
    bench.step(3)
    short = bench.add([3, 4], 2)
    before = len(decoding.samples[0].tokens)
    bench.step(10)
    assert short.num_unfinished == 0
    assert len(decoding.samples[0].tokens) == before + 10
    assert long.samples[0].state is State.PREFILL
    bench.run()


def test_ranks_share_the_work_evenly() -> None:
    bench = Bench(num_ranks=2, slots=4)
    for index in range(8):
        bench.add([index], 6)
    bench.step(3)
    assert [rank.num_running for rank in bench.scheduler.ranks] == [4, 4]
    bench.run()


# ---- readers that are too slow


def test_a_paused_request_gives_its_slot_to_whoever_waits_and_goes_on_later() -> None:
    bench = Bench(slots=1)
    paused = bench.add([1], 10)
    bench.step(3)
    bench.scheduler.pause(paused)
    waiting = bench.add([2], 3)
    bench.step(8)
    assert waiting.num_unfinished == 0
    assert paused.num_preemptions == 1 and paused.num_unfinished == 1
    bench.scheduler.resume(paused)
    bench.run()


def test_a_paused_request_in_the_queue_lets_others_pass() -> None:
    bench = Bench(slots=1)
    bench.add([1], 5)
    bench.step()
    paused, behind = bench.add([2], 3), bench.add([3], 3)
    bench.scheduler.pause(paused)
    bench.step(14)
    assert behind.num_unfinished == 0 and paused.started_s is None
    bench.scheduler.resume(paused)
    bench.run()


# ---- blocks


def test_three_that_cannot_all_fit_make_progress_without_preempting_each_other_for_ever() -> None:
    bench = Bench(blocks=6)
    for index in range(3):
        bench.add([index] * 8, 12)  # five blocks each, at the end
    assert bench.run() < 100
    assert bench.scheduler.stats().num_preempted <= 4


def test_a_slot_that_a_step_in_flight_names_is_not_given_away() -> None:
    bench = Bench(slots=1)
    first = bench.add([1], 50)
    bench.step(2)
    bench.send()
    second = bench.add([2], 2)
    bench.scheduler.finish_request(first, "abort", bench.now)
    rank = bench.scheduler.ranks[0]
    assert (rank.num_free_slots, rank.release.num_slots) == (0, 1)
    bench.scheduler.check_integrity()
    bench.step()
    assert rank.num_running == 0
    bench.step(2)
    assert second.started_s is not None
    bench.run()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(("num_prompt", "num_shared"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_samples_share_the_full_blocks_of_their_prompt(prefix_cache: bool, num_prompt: int, num_shared: int) -> None:
    bench = Bench(prefix_cache=prefix_cache)
    bench.add(list(range(num_prompt)), 3, n=3)
    bench.step(2)
    assert bench.scheduler.stats().num_running == 3
    num_own = -(-(num_prompt + 2) // 4) - num_shared
    assert num_shared + 3 <= bench.scheduler.stats().num_blocks_used <= num_shared + 3 * num_own
    bench.run()


@pytest.mark.parametrize("num_common", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_a_prefix_hit_covers_whole_blocks_and_never_the_last_token(num_common: int) -> None:
    bench = Bench()
    prompt = list(range(20, 40))
    bench.add(prompt, 2)
    bench.run()
    same, longer = bench.add(prompt[:num_common], 2), bench.add([*prompt[:num_common], 1, 2], 2)
    bench.run()
    assert same.num_cached_tokens == (num_common - 1) // 4 * 4
    assert longer.num_cached_tokens == num_common // 4 * 4


# ---- log probabilities of prompts


def known_places(request: Request) -> list[float]:
    """A fake worker's value is the place of its token."""
    return [-entry.values[0] for entry in request.prompt_logprobs]


@pytest.mark.parametrize("prefill_chunk", [1, 3, 64])
def test_a_prompt_whose_log_probabilities_are_asked_for_is_computed_whole(prefill_chunk: int) -> None:
    bench = Bench(prefill_chunk=prefill_chunk)
    prompt = list(range(20, 40))
    bench.add(prompt, 2)
    bench.run()
    asked = bench.add(prompt, 2, sampling=SlotSampling(num_prompt=20, num_prompt_logprobs=1))
    bench.run()
    assert asked.num_cached_tokens == 0
    assert known_places(asked) == list(range(1, 20))
    assert [entry.token_ids[0] for entry in asked.prompt_logprobs] == prompt[1:]
    assert bench.add(prompt, 2, skips_prefix_cache=True).skips_prefix_cache
    bench.run()
    assert [request.num_cached_tokens for request in bench.requests] == [0, 0, 0]


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_log_probabilities_come_once_whenever_a_prompt_gives_way(num_steps: int) -> None:
    """Before, in the middle of, and after its prompt. Once they are all here, a prefix may be adopted again."""
    bench = Bench(slots=1, prefill_chunk=4)
    sampling = SlotSampling(num_prompt=18, num_prompt_logprobs=0)
    low = bench.add(list(range(18)), 6, priority=1, sampling=sampling)
    bench.step(num_steps)
    bench.add([9], 2)
    bench.run()
    assert low.num_preemptions == 1
    assert known_places(low) == list(range(1, 18))


def test_missing_log_probabilities_are_a_lost_worker() -> None:
    for field in ("prompt_logprob_ids", "prompt_logprob_ranks"):
        bench = Bench()
        bench.add([1, 2, 3], 2, sampling=SlotSampling(num_prompt=3, num_prompt_logprobs=1))
        bench.send()
        step, results = bench.in_flight.popleft()
        spoiled = msgspec.structs.replace(results[0], **{field: getattr(results[0], field)[:-4]})
        with pytest.raises(WorkerLost, match="step 0, rank 0: 4 logprobs of 2 tokens expected"):
            bench.scheduler.apply(step, [spoiled], 0.0)


# ---- deadlines and limits


def test_deadlines_end_what_waits_and_what_runs_in_time() -> None:
    bench = Bench(slots=1)
    running = bench.add([1], 50, deadline_s=5.0)
    queued = bench.add([2], 2, queue_deadline_s=3.0)
    bench.step(3)
    assert bench.scheduler.next_deadline() == 3.0
    assert [reason for _, _, reason, _ in bench.scheduler.expire(3.0)] == ["queue_timeout"]
    assert queued.samples[0].num_output == 0
    bench.step(2)
    assert [reason for _, _, reason, _ in bench.scheduler.expire(5.0)] == ["timeout"]
    assert running.samples[0].finish_reason == "timeout"
    bench.run()
    assert bench.scheduler.next_deadline() == float("inf")


def test_a_queue_time_does_not_end_what_has_started() -> None:
    bench = Bench()
    bench.add([1], 5, queue_deadline_s=1.0)
    bench.step()
    assert bench.scheduler.expire(2.0) == []
    bench.run()


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    bench = Bench(slots=1, max_queued_requests=2, max_queued_tokens=10)
    bench.add([1] * 50, 2)  # longer than the limit, but alone
    with pytest.raises(Overloaded, match="50 prompt tokens wait"):
        bench.add([1], 1)
    bench.step()
    bench.add([2] * 5, 2, n=8)
    with pytest.raises(Overloaded, match="5 prompt tokens wait") as refusal:
        bench.add([3] * 6, 1)
    assert refusal.value.retry_after_s > 0
    bench.add([4], 1)
    with pytest.raises(Overloaded, match="2 requests wait"):
        bench.add([5], 1)
    bench.scheduler.check_integrity()
    bench.run()


def test_samples_that_wait_do_not_fill_the_queue_for_requests() -> None:
    bench = Bench(slots=1, max_queued_requests=2)
    bench.add([1], 3, n=16)
    bench.step(2)
    assert bench.scheduler.stats().num_waiting == 15
    bench.add([2], 1)
    bench.run()


def test_an_open_id_is_refused() -> None:
    bench = Bench()
    request = bench.add([1], 5)
    with pytest.raises(DuplicateRequestId):
        bench.scheduler.add(request, 0.0)
    bench.run()


def test_what_has_ended_is_not_kept_for_a_late_deadline_or_a_place_in_the_queue() -> None:
    bench = Bench(slots=1)
    bench.add([1], 2000, deadline_s=1e6)
    bench.step()
    bench.add([2], 1)
    for _ in range(2000):
        ended = bench.add([3], 1, deadline_s=2e6)
        bench.scheduler.finish_request(ended, "abort", bench.now)
    assert len(bench.scheduler._deadlines) < 200
    assert bench.scheduler._queue.num_entries < 200
    bench.scheduler.check_integrity()


# ---- wrong answers, wrong books


def changed(result: StepResult, row: int, column: int, change: int = 1) -> StepResult:
    rows = unpack_int32(result.rows)
    rows[column * len(rows) // 4 + row] += change
    return msgspec.structs.replace(result, rows=pack_int32(rows))


@pytest.mark.parametrize(("column", "word"), [(0, "slot 1 expected, 2 came"), (1, "generation 1 expected, 2 came")])
def test_drift_is_named_by_row_and_field(column: int, word: str) -> None:
    bench = Bench()
    for index in range(3):
        bench.add([index, index], 3)
    bench.send()
    step, results = bench.in_flight.popleft()
    with pytest.raises(WorkerLost, match=rf"step 0, rank 0, row 1: the worker's state has drifted: {word}"):
        bench.scheduler.apply(step, [changed(results[0], 1, column)], 0.0)


def free_a_slot_twice(scheduler: Scheduler) -> None:
    scheduler.ranks[0]._free_slots.append(0)


def share_a_block(scheduler: Scheduler) -> None:
    scheduler.ranks[0].pool._num_owners[0] += 1


def miscount_the_queue(scheduler: Scheduler) -> None:
    scheduler._num_queued_tokens += 1


def miscount_the_waiting(scheduler: Scheduler) -> None:
    scheduler._queue.num_waiting -= 1


def forget_a_capacity(scheduler: Scheduler) -> None:
    next(iter(scheduler.ranks[0].decode)).capacity += 4


def finish_without_telling(scheduler: Scheduler) -> None:
    next(iter(scheduler.requests.values())).num_unfinished -= 1


@pytest.mark.parametrize(
    "corrupt",
    [
        free_a_slot_twice,
        share_a_block,
        miscount_the_queue,
        miscount_the_waiting,
        forget_a_capacity,
        finish_without_telling,
    ],
)
def test_corrupt_books_are_found(corrupt: Callable[[Scheduler], None]) -> None:
    bench = Bench(slots=3)
    for index in range(5):
        bench.add([index], 20)
    bench.step(3)
    corrupt(bench.scheduler)
    with pytest.raises(AssertionError):
        bench.scheduler.check_integrity()


# ---- drafts


class Recorded(FixedDrafts):
    """Verifies all it may, and keeps what it was told."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self.told: list[tuple[list[bytes], int, int, int]] = []

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        self.told.append((survivals, num_rows, num_other, room))
        return super().plan(survivals, num_rows, num_other, room)


class Chosen(FixedDrafts):
    """Plans what it is told to."""

    def __init__(self, longest: int, plans: list[DraftPlan]) -> None:
        super().__init__(longest)
        self._plans = cycle(plans)

    def plan(self, survivals: list[bytes], num_rows: int, num_other: int, room: int) -> DraftPlan:
        return next(self._plans)


def fixed(longest: int) -> Callable[[], FixedDrafts]:
    return lambda: FixedDrafts(longest)


def plans_of(bench: Bench) -> list[StepPlan]:
    """Runs to the end."""
    plans: list[StepPlan] = []
    while bench.scheduler.requests or bench.in_flight:
        before = len(bench.in_flight)
        bench.send()
        plans += [step.ranks[0].plan for step, _ in list(bench.in_flight)[before:]]
        bench.step()
    return plans


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("longest", range(1, 6))
def test_a_length_that_ends_within_a_row_is_met_exactly(longest: int, depth: int) -> None:
    bench = Bench(depth=depth, slots=24, drafts=fixed(longest))
    requests = [bench.add([num_new, 1, 2], num_new) for num_new in range(1, 25)]
    num_steps = bench.run()
    assert [request.samples[0].num_output for request in requests] == list(range(1, 25))
    assert num_steps < 24 + depth - 1
    assert bench.scheduler.drafts.num_accepted > 50


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_row_brings_behind_a_stop_token_is_dropped(depth: int) -> None:
    num_cut = 0
    for prompt in range(40):
        wanted, _ = completion([prompt, 1], SlotSampling(), 12, frozenset(), VOCAB_SIZE)
        bench = Bench(depth=depth, drafts=fixed(5))
        request = bench.add([prompt, 1], 10, stop_ids=frozenset([wanted[4]]))
        while bench.scheduler.requests or bench.in_flight:
            bench.send()
            _, results = bench.in_flight[0]
            num_before = len(bench.emissions)
            bench.step()
            num_cut += 0 < len(bench.emissions) - num_before < len(results[0].tokens) // 4
        end = wanted.index(wanted[4]) + 1
        assert [token for _, token, _, _ in bench.emissions] == wanted[:end]
        assert [reason for *_, reason, _ in bench.emissions] == [None] * (end - 1) + ["stop"]
        assert list(request.samples[0].tokens[2:]) == wanted[:end]
    assert num_cut > 5


def test_a_stop_token_before_the_minimum_length_ends_nothing() -> None:
    wanted, _ = completion([3, 1], SlotSampling(), 12, frozenset(), VOCAB_SIZE)
    bench = Bench(drafts=fixed(5))
    request = bench.add([3, 1], 10, stop_ids=frozenset(wanted), sampling=SlotSampling(min_length=9))
    bench.run()
    assert list(request.samples[0].tokens[2:]) == wanted[:8]


def test_samples_of_one_prompt_draft_each_for_itself() -> None:
    bench = Bench(drafts=fixed(4))
    request = bench.add(list(range(9)), 12, n=4)
    bench.run()
    assert len({tuple(seq.tokens) for seq in request.samples}) == 4
    assert 0 < request.drafts.num_accepted == bench.scheduler.drafts.num_accepted < request.drafts.num_verified


@pytest.mark.parametrize("num_steps", range(2, 8))
def test_an_end_while_drafts_are_in_flight_gives_everything_back(num_steps: int) -> None:
    bench = Bench(slots=2, drafts=fixed(5))
    gone, stays = bench.add([1, 2, 3], 40), bench.add([4, 5, 6], 40)
    bench.step(num_steps)
    bench.send()
    known = list(gone.samples[0].tokens)
    bench.scheduler.finish_request(gone, "abort", bench.now)
    bench.scheduler.check_integrity()
    late = bench.add([7, 8], 9)
    bench.run()
    assert list(gone.samples[0].tokens) == known
    assert (stays.samples[0].num_output, late.samples[0].num_output) == (40, 9)


def test_a_slot_that_is_taken_while_drafts_are_in_flight_brings_its_tokens_first() -> None:
    for num_steps in range(2, 8):
        bench = Bench(slots=1, drafts=fixed(5))
        low = bench.add([1, 2, 3], 30, priority=1)
        bench.step(num_steps)
        bench.add([9], 8)
        bench.run()
        assert low.num_preemptions == 1


def test_a_paused_reader_leaves_its_drafts_where_they_are() -> None:
    bench = Bench(drafts=fixed(5))
    paused, other = bench.add([1, 2, 3], 30), bench.add([4, 5, 6], 30)
    bench.step(4)
    bench.scheduler.pause(paused)
    bench.step(3)
    known = len(paused.samples[0].tokens)
    bench.step(2)
    assert len(paused.samples[0].tokens) == known
    bench.scheduler.resume(paused)
    bench.run()
    assert other.samples[0].num_output == 30


def test_drafts_and_prompts_share_what_decoding_leaves() -> None:
    bench = Bench(max_batch_tokens=32, prefill_chunk=64, drafts=fixed(5), blocks=1024)
    for index in range(6):
        bench.add([index, 1], 60)
    bench.step(4)
    bench.add([index % 97 for index in range(500)], 2)
    num_shared = 0
    for plan in plans_of(bench):
        _, _, positions, _ = split_columns(plan.rows, 4)
        num_prompt = sum(count for count in positions if count > 1)
        assert sum(positions) + plan.verify_budget == plan.padded_positions <= 32
        if num_prompt > 6 and plan.verify_budget:
            num_shared += 1
            half = (32 - positions.count(1)) // 2
            assert num_prompt >= half and plan.verify_budget >= min(sum(unpack_int32(plan.most_drafts)), half)
    assert num_shared > 10
    bench.run()


def test_drafts_take_no_block_that_others_will_need_soon() -> None:
    bench = Bench(blocks=12, drafts=fixed(5))
    for index in range(3):
        bench.add([index] * 4, 8)  # three blocks each, at the end
    bench.run()
    assert bench.scheduler.stats().num_preempted == 0


def test_a_policy_hears_of_rows_prompts_and_room() -> None:
    policy = Recorded(3)
    bench = Bench(depth=1, max_batch_tokens=64, prefill_chunk=8, drafts=lambda: policy)
    bench.add([1, 2], 30)
    bench.step(2)
    bench.add(list(range(20)), 3)
    bench.step(1)
    assert policy.told[0] == ([], 0, 2, 62)
    assert policy.told[1] == ([b"\xff" * 3], 1, 0, 63)
    assert policy.told[2][1:] == (1, 8, 55)
    assert policy.told[2][0] != [b"\xff" * 3]  # what was said of the drafts before


@pytest.mark.parametrize("depth", [1, 2])
def test_any_budget_and_any_length_of_drafts_give_the_same_tokens(depth: int) -> None:
    plans = [DraftPlan(budget, num_drafts) for num_drafts in (0, 1, 3, 5, 5) for budget in (0, 1, 4, 9, 99)]
    for start in range(len(plans)):
        bench = Bench(depth=depth, slots=5, drafts=lambda: Chosen(5, plans[start:] + plans[:start]))  # noqa: B023
        for index in range(7):
            bench.add([index, start], 20)
        bench.run()


def test_without_drafts_a_plan_says_nothing_of_them() -> None:
    bench = Bench()
    bench.add([1, 2, 3], 9)
    plans = plans_of(bench)
    assert {(plan.most_drafts, plan.verify_budget, plan.num_drafts) for plan in plans} == {(b"", 0, 0)}
    assert bench.scheduler.drafts.num_verified == 0


def spoiled(column: str, row: int, change: int) -> Callable[[StepResult], StepResult]:
    """A result whose `column` says something else of a row; a token more or less comes along."""

    def spoil(result: StepResult) -> StepResult:
        if column == "verified":
            verified = unpack_int32(result.num_verified)
            verified[row] += change
            return msgspec.structs.replace(result, num_verified=pack_int32(verified))
        return changed(result, row, {"length": 2, "tokens": 3}[column], change)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (spoiled("length", 1, 1), r"row 1: the worker's state has drifted: length \d+ expected, \d+ came"),
        (spoiled("tokens", 1, 9), r"row 1: the worker's state has drifted: 1 to 4 tokens expected, 1\d came"),
        (spoiled("tokens", 0, -9), r"row 0: the worker's state has drifted: 1 to 4 tokens expected, -\d came"),
        (spoiled("verified", 0, 1), "10 drafts were verified, 9 were planned"),
        (spoiled("verified", 0, -3), r"row 0: the worker's state has drifted: 1 to 1 tokens expected, \d came"),
        (lambda result: msgspec.structs.replace(result, num_verified=b"\0" * 8), "drafts of 2 rows were verified, 3"),
        (lambda result: msgspec.structs.replace(result, survivals=b"1"), "3 drafts of 3 rows were due, 1 survivals"),
        (lambda result: changed(result, 2, 1), r"row 2: the worker's state has drifted: generation 1 expected, 2 came"),
    ],
)
def test_what_drafts_cannot_bring_is_a_lost_worker(spoil: Callable[[StepResult], StepResult], word: str) -> None:
    bench = Bench(depth=1, drafts=fixed(3))
    for index in range(3):
        bench.add([index, index], 30)
    while not bench.in_flight or min(split_columns(bench.in_flight[0][1][0].rows, 4)[3]) < 2:
        bench.step()
        bench.send()
    step, results = bench.in_flight.popleft()
    with pytest.raises(WorkerLost, match=word):
        bench.scheduler.apply(step, [spoil(results[0])], 0.0)
