"""Prefix hits where slots keep a state of their own: what is replayed, what is left alone, and what gets a mark.

Blocks have 4 tokens. A window of 5 positions in 3 layers: 5 positions are replayed where hits are bounded, and 12 where
they are exact.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from deepinfer.prefix import chain_root
from deepinfer.request import Request, Sequence
from deepinfer_protocol import SlotAdmit, SlotSampling, StepPlan, unpack_int32
from doubles.bench import Bench

WINDOW: Final = 5
BOUNDED, EXACT = 5, 12
PROMPT: Final = list(range(20, 60))
both = pytest.mark.parametrize(("is_exact", "replay"), [(False, BOUNDED), (True, EXACT)], ids=["bounded", "exact"])


class Recorder(Bench):
    """A bench that keeps its plans."""

    def __init__(self, *, is_exact: bool, **options: Any) -> None:
        super().__init__(window=WINDOW, is_exact=is_exact, **options)
        self.plans: list[StepPlan] = []

    def send(self) -> None:
        before = len(self.in_flight)
        super().send()
        self.plans += [step.ranks[0].plan for step, _ in list(self.in_flight)[before:]]

    @property
    def admits(self) -> list[SlotAdmit]:
        return [admit for plan in self.plans for admit in plan.admits]

    def num_computed(self) -> int:
        """Positions of all plans."""
        return sum(sum(unpack_int32(plan.rows[len(plan.rows) // 2 : len(plan.rows) // 4 * 3])) for plan in self.plans)


def bounds(admit: SlotAdmit) -> tuple[int, int]:
    return admit.length, admit.floor


# ---- what is computed


@both
@pytest.mark.parametrize("num_common", [4, 5, 7, 8, 12, 13, 16, 17, 30, 39])
def test_a_hit_is_replayed_as_far_as_its_setting_says_and_no_row_of_it_is_written(
    is_exact: bool, replay: int, num_common: int
) -> None:
    bench = Recorder(is_exact=is_exact)
    bench.add(PROMPT, 2)
    bench.run()
    first_blocks = list(unpack_int32(bench.admits[0].block_ids))
    num_before = bench.num_computed()
    second = bench.add([*PROMPT[:num_common], 1, 2], 3)
    bench.run()
    floor = num_common // 4 * 4
    start = floor - replay
    wanted = (start, floor) if start > 0 else (0, 0)
    assert bounds(bench.admits[1]) == wanted
    shared = [block for block in unpack_int32(bench.admits[1].block_ids) if block in first_blocks[:10]]
    assert shared == first_blocks[: wanted[1] // 4]
    assert second.num_cached_tokens == wanted[0]
    assert bench.num_computed() - num_before == num_common + 2 + 3 - 1 - wanted[0]


@both
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64])
def test_a_replay_counts_as_work_and_is_cut_like_any_other(is_exact: bool, replay: int, chunk: int) -> None:
    bench = Recorder(is_exact=is_exact, prefill_chunk=chunk, max_batch_tokens=8)
    bench.add(PROMPT, 2)
    bench.run()
    num_plans = len(bench.plans)
    bench.add([*PROMPT[:32], 1, 2], 1)
    bench.run()
    assert bounds(bench.admits[1]) == (32 - replay, 32)
    assert len(bench.plans) - num_plans == -(-(replay + 2) // min(chunk, 8))


def test_slots_without_a_state_of_their_own_start_where_the_hit_ends() -> None:
    for is_exact in (False, True):
        bench = Bench(window=0, is_exact=is_exact)
        bench.add(PROMPT, 2)
        bench.run()
        again = bench.add([*PROMPT[:8], 1], 2)
        bench.run()
        assert again.num_cached_tokens == 8
        assert bench.check_published().num_marked == 0


# ---- marks


def rank_of(bench: Bench) -> Any:
    return bench.scheduler.ranks[0]


def found(bench: Bench, seq: Sequence) -> tuple[list[bool], list[bool]]:
    """Which blocks of a sequence can be adopted, without a mark and with one."""
    find = rank_of(bench).pool.find
    exact = [find(block_hash) is not None for block_hash in seq.block_hashes]
    return exact, [find(block_hash) is not None for block_hash in seq.marked_hashes]


def test_blocks_behind_a_bounded_hit_are_marked_and_so_are_those_of_whoever_adopts_them() -> None:
    bench = Recorder(is_exact=False)
    bench.add(PROMPT[:17], 1)
    bench.run()
    second = bench.add([*PROMPT[:16], *range(17)], 1).samples[0]
    bench.run()
    assert second.is_marked
    assert found(bench, second) == ([True] * 4 + [False] * 4, [False] * 4 + [True] * 4)
    third = bench.add([*PROMPT[:16], *range(16), 70, 71, 72, 73, 74], 1).samples[0]
    bench.run()
    assert bounds(bench.admits[2]) == (32 - BOUNDED, 32), "exact blocks first, then marked ones"
    assert bench.admits[2].block_ids[:32] == bench.admits[1].block_ids[:32]
    assert found(bench, third)[1] == [False] * 4 + [True] * 5
    assert bench.check_published().num_off > 0, "the marks are there for nothing"


def test_exact_hits_mark_nothing_and_find_no_mark() -> None:
    bench = Recorder(is_exact=True)
    bench.add(PROMPT[:17], 1)
    bench.run()
    second = bench.add([*PROMPT[:16], *range(17)], 1).samples[0]
    bench.run()
    assert not second.is_marked and second.marked_hashes == []
    assert found(bench, second) == ([True] * 8, [])


def test_a_marked_block_is_nothing_to_a_run_that_wants_exact_ones() -> None:
    """The same rank, asked for exact hits after bounded ones."""
    bench = Recorder(is_exact=False)
    bench.add(PROMPT[:17], 1)
    bench.run()
    bench.add([*PROMPT[:16], *range(17)], 1)
    bench.run()
    rank = rank_of(bench)
    tokens = [*PROMPT[:16], *range(16), 70]
    waiting = bench.add(tokens, 1).samples[0]
    assert len(rank.match(waiting)) == 8
    rank.shape = msgspec.structs.replace(rank.shape, is_replay_bounded=False, replay_tokens=EXACT)
    assert len(rank.match(waiting)) == 4
    bench.is_exact = True  # for the check of the tokens
    bench.requests = [waiting.request]
    bench.run()


def test_a_hit_too_short_to_be_adopted_leaves_no_mark() -> None:
    bench = Recorder(is_exact=False)
    bench.add(PROMPT[:5], 1)
    bench.run()
    second = bench.add([*PROMPT[:4], *range(9)], 1).samples[0]
    bench.run()
    assert not second.is_marked
    assert found(bench, second) == ([True] * 3, [False] * 3)


def test_the_two_chains_share_no_key() -> None:
    roots = [chain_root(version, is_marked=mark) for version in ("", "a") for mark in (False, True)]
    assert len(set(roots)) == 4


# ---- samples of one prompt


@both
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("num_prompt", [4, 5, 9, 13, 17, 40])
def test_samples_share_their_prompt_where_that_saves_work(
    is_exact: bool, replay: int, prefix_cache: bool, num_prompt: int
) -> None:
    bench = Recorder(is_exact=is_exact, prefix_cache=prefix_cache)
    request = bench.add(PROMPT[:num_prompt], 3, n=3)
    bench.run()
    floor = (num_prompt - 1) // 4 * 4
    wanted = (floor - replay, floor) if floor > replay else (0, 0)
    assert [bounds(admit) for admit in bench.admits] == [(0, 0), wanted, wanted]
    assert [seq.is_marked for seq in request.samples] == [False] + [not is_exact and floor > replay] * 2
    assert request.num_cached_tokens == 0


# ---- sequences that come back


@both
@pytest.mark.parametrize("num_steps", range(1, 10))
def test_a_sequence_that_gives_way_in_its_replay_or_after_it_starts_anew(
    is_exact: bool, replay: int, num_steps: int
) -> None:
    bench = Recorder(is_exact=is_exact, slots=1, prefill_chunk=2)
    bench.add(PROMPT, 2)
    bench.run()
    low = bench.add([*PROMPT[:24], 1, 2, 3, 4], 9, priority=1)
    bench.step(num_steps)
    bench.add([9], 2)
    bench.run()
    assert low.num_preemptions == 1
    assert bounds(bench.admits[1]) == (24 - replay, 24)
    length, floor = bounds(bench.admits[3])
    assert floor >= 24 and length == floor - replay
    assert low.num_cached_tokens == 24 - replay, "of its first admission"


def test_a_sequence_that_comes_back_without_a_hit_is_no_longer_marked() -> None:
    bench = Recorder(is_exact=False, slots=1, blocks=13)
    bench.add(PROMPT[:17], 1)
    bench.run()
    low = bench.add([*PROMPT[:16], *range(10)], 9, priority=1)
    bench.step(3)
    assert [seq.is_marked for seq in low.samples] == [True]
    bench.add(list(range(30, 80)), 1)  # takes every block that was cached
    bench.run()
    assert low.num_preemptions == 1
    assert [seq.is_marked for seq in low.samples] == [False]
    assert bounds(bench.admits[-1]) == (0, 0)


@both
@pytest.mark.parametrize("num_steps", [2, 6, 10, 14])
def test_log_probabilities_of_a_prompt_come_once_although_it_is_replayed(
    is_exact: bool, replay: int, num_steps: int
) -> None:
    bench = Recorder(is_exact=is_exact, slots=1, prefill_chunk=4)
    sampling = SlotSampling(num_prompt=34, num_prompt_logprobs=0)
    low = bench.add(PROMPT[:34], 6, priority=1, sampling=sampling)
    bench.step(num_steps)
    bench.add([9], 2)
    bench.run()
    assert [-entry.values[0] for entry in low.prompt_logprobs] == list(range(1, 34))
    assert [entry.token_ids[0] for entry in low.prompt_logprobs] == PROMPT[1:34]


def test_a_request_that_ends_in_its_replay_leaves_the_shared_blocks_to_others() -> None:
    bench = Recorder(is_exact=True, prefill_chunk=3)
    bench.add(PROMPT, 2)
    bench.run()
    gone, stays = (bench.add([*PROMPT[:32], token], 3) for token in (1, 2))
    bench.step()
    assert gone.samples[0] in rank_of(bench).prefill
    bench.scheduler.finish_request(gone, "abort", bench.now)
    bench.scheduler.check_integrity()
    bench.run()
    assert finished(stays) == ["length"] and finished(gone) == ["abort"]


def finished(request: Request) -> list[str | None]:
    return [seq.finish_reason for seq in request.samples]
