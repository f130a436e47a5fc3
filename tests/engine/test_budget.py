"""Budgets against every budget tried one by one, and policies over long runs of steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.budget import (
    CERTAIN,
    FIRST_PROBE,
    LAST_PROBE,
    MAX_UNKNOWN,
    DraftPlan,
    FixedDrafts,
    NoDrafts,
    ScheduledDrafts,
    best_budget,
)
from deepinfer.costs import CostTable

LONGEST = 5

tables = st.builds(
    lambda gaps, times, rows_us: CostTable(
        [sum(gaps[: index + 1]) for index in range(len(gaps))],
        times[: len(gaps)],
        [1, 64],
        rows_us,
    ),
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.lists(st.floats(1.0, 1e4, allow_nan=False), min_size=8, max_size=8),
    st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)).map(sorted),
)


def flat(forward_us: float = 1000.0, draft_us: float = 100.0) -> CostTable:
    """A step takes the same, however large."""
    return CostTable([1, 4096], [forward_us, forward_us], [1, 4096], [draft_us, draft_us])


def rising(us: float = 100.0, draft_us: float = 100.0) -> CostTable:
    """Every position takes as long as the first."""
    return CostTable([1, 4096], [us, 4096 * us], [1, 4096], [draft_us, draft_us])


@given(st.binary(max_size=60), st.integers(1, 12), st.integers(0, 40), tables, st.integers(0, 80))
def test_a_budget_is_the_best_of_all(
    survivals: bytes, num_rows: int, num_other: int, costs: CostTable, most: int
) -> None:
    ranked = sorted(survivals, reverse=True)

    def rate(budget: int) -> float:
        expected = num_rows + sum(ranked[:budget]) / 255
        return expected / (costs.draft_us(num_rows) + costs.forward_us(num_rows + num_other + budget))

    rates = [rate(budget) for budget in range(min(len(survivals), most) + 1)]
    found = best_budget(survivals, num_rows, num_other, costs, most)
    assert 0 <= found < len(rates)
    assert rates[found] == pytest.approx(max(rates), rel=1e-12)


def test_a_budget_looks_behind_a_jag() -> None:
    """The step to the next size is dear, and then many drafts are free: the first that is no better is not the last."""
    costs = CostTable([1, 4, 5, 24], [100.0, 100.0, 130.0, 130.0])
    survivals = bytes([250] * 20)
    assert best_budget(survivals[:1], 4, 0, costs, 20) == 0
    assert best_budget(survivals, 4, 0, costs, 20) == 20


def test_the_smallest_of_equal_budgets_is_taken() -> None:
    assert best_budget(bytes(20), 4, 0, flat(), 20) == 0


def test_fixed_drafts_are_all_that_there_is_room_for() -> None:
    policy = FixedDrafts(3)
    assert policy.plan([b"\xff\x80\x01", b"\xff", b""], 5, 10, 100) == DraftPlan(4, 3)
    assert policy.plan([b"\xff\x80\x01", b"\xff"], 2, 0, 2) == DraftPlan(2, 3)
    assert NoDrafts().plan([], 5, 10, 100) == DraftPlan(0, 0)


def test_fresh_rows_count_as_certain() -> None:
    assert ScheduledDrafts(LONGEST, rising(us=1.0, draft_us=1.0)).plan([], 3, 0, 100) == DraftPlan(0, LONGEST)
    policy = ScheduledDrafts(LONGEST, flat())
    assert policy.plan([bytes([CERTAIN] * LONGEST)] * 3, 3, 0, 100) == DraftPlan(15, LONGEST)
    assert policy.plan([bytes([CERTAIN] * LONGEST)] * 3, 3, 0, 7) == DraftPlan(7, LONGEST)


def test_many_rows_get_the_budget_of_their_survivals() -> None:
    costs = CostTable([1, 64, 512], [900.0, 1000.0, 5000.0], [1, 512], [50.0, 100.0])
    drawn = random.Random(3)
    policy = ScheduledDrafts(LONGEST, costs)
    for num_rows in (32, 100, 256):
        rows = [falling(drawn) for _ in range(num_rows)]
        wanted = best_budget(b"".join(rows), num_rows, 7, costs, 4096)
        assert policy.plan(rows, num_rows, 7, 4096) == DraftPlan(wanted, LONGEST)
        assert 0 < wanted < 5 * num_rows


def test_the_room_bounds_a_budget() -> None:
    policy = ScheduledDrafts(LONGEST, flat())
    rows = [bytes([200, 150, 100, 50, 25])] * 40
    assert policy.plan(rows, 40, 0, 200).verify_budget == 200
    assert policy.plan(rows, 40, 0, 60).verify_budget == 60
    assert policy.plan(rows, 40, 0, 0).verify_budget == 0


def test_one_row_is_not_judged_by_its_latest_block() -> None:
    """Good and bad blocks take turns. The best fixed length is the best that may be done, as the next is not known."""
    costs = CostTable([1, 16], [100.0, 250.0], [1, 2], [10.0, 10.0])
    good, bad = bytes([240, 220, 200, 180, 160]), bytes([60, 10, 1, 0, 0])
    policy = ScheduledDrafts(LONGEST, costs)
    budgets = [policy.plan([(good, bad)[step % 2]], 1, 0, 5).verify_budget for step in range(200)][100:]
    mean = [(one + other) / 2 / 255 for one, other in zip(good, bad, strict=True)]
    rates = [(1 + sum(mean[:length])) / (10 + costs.forward_us(1 + length)) for length in range(6)]
    assert set(budgets) == {rates.index(max(rates))}


def falling(drawn: random.Random, quality: float = 0.8) -> bytes:
    """Survivals of one block."""
    values, survival = [], 1.0
    for _ in range(LONGEST):
        survival *= min(quality * (0.5 + drawn.random()), 0.99)
        values.append(int(255 * survival))
    return bytes(values)


class Steps:
    """Steps of a policy as the engine asks it: survivals come two steps late, and only of drafts that were made."""

    def __init__(self, policy: ScheduledDrafts, draw: Callable[[], bytes]) -> None:
        self.policy = policy
        self.draw = draw
        self.made: list[list[bytes] | None] = [None, None]  # by the step before, and the one before that

    def run(self, num_rows: int, num_steps: int) -> list[DraftPlan]:
        return [self.step(num_rows) for _ in range(num_steps)]

    def step(self, num_rows: int) -> DraftPlan:
        newest, older = self.made
        survivals: list[bytes] = []
        if newest is not None:
            unknown = [bytes([CERTAIN] * LONGEST)] * num_rows
            survivals = unknown if older is None else (older + unknown)[:num_rows]
        plan = self.policy.plan(survivals, num_rows, 0, 4096)
        assert plan.verify_budget <= sum(map(len, survivals))
        self.made = [[self.draw() for _ in range(num_rows)] if plan.num_drafts else None, newest]
        return plan


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_drafts_that_do_not_pay_off_are_left_out_but_for_a_probe(num_rows: int) -> None:
    drawn = random.Random(1)
    steps = Steps(ScheduledDrafts(LONGEST, rising(draft_us=50.0 * num_rows)), lambda: falling(drawn, 0.3))
    steps.run(num_rows, 200)
    made = [plan.num_drafts for plan in steps.run(num_rows, 4000)]
    assert 0 < sum(number > 0 for number in made) < 0.012 * len(made)
    starts = [index for index in range(1, len(made)) if made[index] and not made[index - 1]]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert max(gaps) <= LAST_PROBE + MAX_UNKNOWN + 1


@pytest.mark.parametrize("num_rows", [1, 64])
def test_a_probe_finds_that_drafts_have_become_good(num_rows: int) -> None:
    drawn, quality = random.Random(1), 0.2
    costs = CostTable([1, 4096], [1000.0, 40_000.0], [1, 4096], [300.0, 3000.0])
    steps = Steps(ScheduledDrafts(LONGEST, costs), lambda: falling(drawn, quality))
    assert not any(plan.num_drafts for plan in steps.run(num_rows, FIRST_PROBE - 5)[40:])
    quality = 1.5
    steps.run(num_rows, 20 * LAST_PROBE if num_rows == 1 else 2 * LAST_PROBE)
    plans = steps.run(num_rows, 100)
    assert all(plan.num_drafts == LONGEST and plan.verify_budget for plan in plans)


def test_a_batch_that_shrinks_drafts_again_at_once() -> None:
    """What is known of the drafts of many rows is known of those of a few."""
    costs = CostTable([1, 8, 64, 4096], [1000.0, 1000.0, 2000.0, 128_000.0], [1, 64], [20.0, 1500.0])
    drawn = random.Random(1)
    steps = Steps(ScheduledDrafts(LONGEST, costs), lambda: falling(drawn, 0.5))
    assert not any(plan.num_drafts for plan in steps.run(256, 50)[10:])
    assert all(plan.num_drafts for plan in steps.run(1, 20))


def test_a_choice_on_the_edge_does_not_flap() -> None:
    """Costs for which drafts are worth as much as no drafts: survivals that waver do not turn the choice each step."""
    drawn = random.Random(5)
    mean = sum(sum(falling(drawn)) for _ in range(2000)) / 2000 / 255  # drafts of a row
    costs = flat(1000.0, 1000.0 * mean)
    steps = Steps(ScheduledDrafts(LONGEST, costs), lambda: falling(drawn))
    made = [plan.num_drafts for plan in steps.run(256, 1000)]
    assert sum(one != other for one, other in pairwise(made)) < 60


def test_a_step_of_prompts_alone_goes_on_as_before() -> None:
    assert ScheduledDrafts(LONGEST, flat()).plan([], 0, 200, 10) == DraftPlan(0, LONGEST)


# ---- what became of drafts


def verified(policy: ScheduledDrafts, drawn: random.Random, shares: list[float], num_steps: int) -> list[int]:
    """Budgets of steps of one row whose drafts are all foreseen at 0.9, and accepted as often as `shares` says."""
    budgets = []
    block = bytes([230] * LONGEST)
    for _ in range(num_steps):
        budget = policy.plan([block], 1, 0, LONGEST).verify_budget
        budgets.append(budget)
        came = [float(drawn.random() < share) for share in shares]
        reached = [int(all(came[: place + 1])) for place in range(budget)]
        policy.learn([0.9] * budget, reached)
    return budgets


def test_guesses_that_were_too_high_are_corrected() -> None:
    """The best length for what comes, and not for what was foreseen; drafts that come as foreseen change nothing."""
    costs = CostTable([1, 16], [100.0, 250.0], [1, 2], [10.0, 10.0])
    shares = [0.6, 0.3, 0.1, 0.1, 0.1]
    reached = [0.6, 0.18, 0.018, 0.0018, 0.00018]
    rates = [(1 + sum(reached[:length])) / (10 + costs.forward_us(1 + length)) for length in range(6)]
    assert rates.index(max(rates)) == 2
    drawn = random.Random(1)
    budgets = verified(ScheduledDrafts(LONGEST, costs), drawn, shares, 400)
    assert budgets[0] == LONGEST
    assert sum(budgets[200:]) / 200 == pytest.approx(2, abs=0.25)
    assert set(verified(ScheduledDrafts(LONGEST, costs), drawn, [0.9, 1.0, 1.0, 1.0, 1.0], 400)) == {LONGEST}


def test_a_correction_forgets() -> None:
    costs = CostTable([1, 16], [100.0, 250.0], [1, 2], [10.0, 10.0])
    policy, drawn = ScheduledDrafts(LONGEST, costs), random.Random(2)
    assert verified(policy, drawn, [0.5] * LONGEST, 2000)[-1] < LONGEST
    assert verified(policy, drawn, [0.98] * LONGEST, 4000)[-1] == LONGEST


def test_blocks_of_all_lengths_are_corrected_alike() -> None:
    costs = CostTable([1, 64, 512], [900.0, 1000.0, 5000.0], [1, 512], [50.0, 100.0])
    policy = ScheduledDrafts(LONGEST, costs)
    for _ in range(50):
        policy.learn([40.0, 30.0, 20.0, 10.0, 5.0, 1.0], [20, 10, 5, 1, 0, 0])
    half = ScheduledDrafts(LONGEST, costs)
    rows = [bytes([200, 150, 100, 50, 25])[: 1 + number % LONGEST] for number in range(40)]
    worth = [bytes(round(value * share) for value, share in zip(row, (0.5, 1 / 3, 0.25, 0.1, 0.0), strict=False))
             for row in rows]  # fmt: skip
    unknown = [bytes([CERTAIN] * LONGEST)] * 3
    told, wanted = (
        one.plan(blocks + unknown, 43, 0, 215).verify_budget for one, blocks in ((policy, rows), (half, worth))
    )
    assert told == pytest.approx(wanted, abs=2) and wanted > 15
