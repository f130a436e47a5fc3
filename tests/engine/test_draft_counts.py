"""Counts of drafts against a list of what became of each."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.draft_counts import DraftCounts, by_place


class Row(NamedTuple):
    num_verified: int
    num_accepted: int


rows = st.lists(st.integers(0, 6).flatmap(lambda v: st.builds(Row, st.just(v), st.integers(0, v))), max_size=40)


def counted(given: list[Row]) -> DraftCounts:
    counts = DraftCounts()
    for row in given:
        counts.add(*row)
    return counts


@given(rows)
def test_figures_are_those_of_the_rows(given: list[Row]) -> None:
    counts = counted(given)
    assert counts.num_steps == len(given)
    assert counts.num_verified == sum(row.num_verified for row in given)
    assert counts.num_accepted == sum(row.num_accepted for row in given)
    assert counts.num_tokens == sum(1 + row.num_accepted for row in given)
    assert counts.tokens_per_step == (counts.num_tokens / len(given) if given else 0)
    width = max((row.num_verified for row in given), default=0)
    lengths = [sum(row.num_verified == length for row in given) for length in range(width + 1)]
    assert counts.verify_lengths == (lengths if given else [])
    for place in range(width):
        verified = [row for row in given if row.num_verified > place]
        reached = [row for row in verified if row.num_accepted >= place]
        accepted = [row for row in verified if row.num_accepted > place]
        assert counts.verified_by_place[place] == len(verified)
        assert counts.accepted_by_place[place] == len(accepted)
        assert counts.cumulative_acceptance[place] == len(accepted) / len(verified)
        assert counts.acceptance[place] == (len(accepted) / len(reached) if reached else 0)
    for figures in (counts.acceptance, counts.cumulative_acceptance, counts.accepted_by_place):
        assert len(figures) == width


@given(rows, rows)
def test_counts_add_up_and_come_apart(one: list[Row], other: list[Row]) -> None:
    both = counted(one)
    before = both.copy()
    both.merge(counted(other))
    assert both == counted(one + other)
    assert before == counted(one), "a copy of its own"
    assert both.since(before).num_tokens == counted(other).num_tokens
    assert both.since(before).num_accepted == counted(other).num_accepted


@given(rows, st.lists(st.floats(0, 40, width=32), min_size=6, max_size=6))
def test_what_was_foreseen_is_held_against_what_came(given: list[Row], predicted: list[float]) -> None:
    counts = DraftCounts()
    counts.add_predicted(predicted, *by_place(given[:20], 6))
    counts.add_predicted(predicted, *by_place(given[20:], 6))
    for place, found in enumerate(counts.calibration):
        verified = [row for row in given if row.num_verified > place]
        assert found.num_verified == len(verified)
        if verified:
            assert found.predicted == pytest.approx(2 * predicted[place] / len(verified))
            assert found.accepted == sum(row.num_accepted > place for row in verified) / len(verified)
            assert found.error == abs(found.predicted - found.accepted)
    assert not counts.num_steps, "whose rows they are is another matter"


def test_predictions_merge_and_come_apart() -> None:
    counts, other = DraftCounts(), DraftCounts()
    counts.add_predicted([1.5, 0.5], [2, 1], [2, 0])
    other.add_predicted([0.75], [1], [0])
    before = counts.copy()
    counts.merge(other)
    assert [(place.predicted, place.accepted, place.num_verified) for place in counts.calibration] == [
        (0.75, pytest.approx(2 / 3), 3),
        (0.5, 0.0, 1),
    ]
    assert [place.num_verified for place in counts.since(before).calibration] == [1, 0]


def test_counts_encode_and_come_back() -> None:
    counts = counted([Row(5, 2), Row(0, 0), Row(3, 3)])
    counts.add_predicted([2.0, 1.5, 1.0], [2, 2, 2], [2, 2, 1])
    for module in (msgspec.json, msgspec.msgpack):
        assert module.decode(module.encode(counts), type=DraftCounts) == counts


def test_lines_are_for_people() -> None:
    assert list(DraftCounts().lines()) == []
    assert list(counted([Row(0, 0)] * 3).lines()) == ["1.00 tokens a forward (3 in 3)"]
    counts = counted([Row(2, 1), Row(2, 2), Row(1, 0), Row(0, 0)])
    counts.add_predicted([2.4, 1.0], [3, 2], [2, 1])
    assert list(counts.lines()) == [
        "1.75 tokens a forward (7 in 4)",
        "drafts: 3 of 5 accepted; by place 0.67 0.50",
        "verified at once: 0: 1, 1: 1, 2: 2",
        "reached, by place: predicted 0.80 0.50; accepted 0.67 0.50",
    ]
