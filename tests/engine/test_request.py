"""Requests and their samples: which moves are legal, and what the counters of a sample mean."""

from __future__ import annotations

import itertools
from array import array

import pytest

from deepinfer.admission import Admitted
from deepinfer.prefix import chain_root, extend_chain
from deepinfer.request import TRANSITIONS, Request, Sequence, State
from deepinfer_protocol import SlotSampling
from doubles.bench import Bench


def request(prompt: list[int], n: int = 1) -> Request:
    return Request("r", array("i", prompt), [SlotSampling()] * n, max_length=len(prompt) + 8, stop_ids=frozenset())


def in_state(state: State) -> Sequence:
    seq = request([1, 2, 3]).samples[0]
    seq.state = state
    return seq


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)), ids=lambda state: str(state.value))
def test_only_the_moves_of_the_table_are_made(old: State, new: State) -> None:
    seq = in_state(old)
    if new in TRANSITIONS[old]:
        seq.move(new)
        assert seq.state is new
    else:
        with pytest.raises(AssertionError):
            seq.move(new)


def test_every_state_leads_to_the_end_and_nothing_leads_out_of_it() -> None:
    assert set(TRANSITIONS) == set(State)
    assert all(State.FINISHED in TRANSITIONS[state] for state in State if state is not State.FINISHED)
    assert TRANSITIONS[State.FINISHED] == set()


def test_further_samples_wait_for_the_prompt_of_the_first() -> None:
    samples = request([1, 2, 3], n=3).samples
    assert [seq.state for seq in samples] == [State.WAITING, State.HELD, State.HELD]


def test_samples_share_the_prompt_until_they_have_a_slot_and_leave_it_alone() -> None:
    bench = Bench()
    whole = bench.add([1, 2, 3], n=2)
    assert all(sample.tokens is whole.prompt for sample in whole.samples)
    bench.run()
    assert list(whole.prompt) == [1, 2, 3]
    assert [len(sample.tokens) for sample in whole.samples] == [7, 7]


def test_a_request_of_text_waits_once_it_is_encoded() -> None:
    bench = Bench()
    late = Request.unencoded("late", 2, 100, arrival_s=0.0)
    bench.scheduler.add(late, 0.0)
    bench.scheduler.check_integrity()
    assert late.samples[0].state is State.ENCODING and bench.scheduler.stats().num_queued_tokens == 100
    assert bench.scheduler.schedule(0.0) is None
    prompt = array("i", [4, 5])
    admitted = Admitted(max_length=5, sampling=[SlotSampling()] * 2, stop_ids=frozenset(), stop_strings=())
    bench.scheduler.encode(late, prompt, admitted)
    bench.requests.append(late)
    assert bench.scheduler.stats().num_queued_tokens == 2
    bench.run()


def test_a_request_of_text_can_end_before_it_is_encoded() -> None:
    bench = Bench()
    late = Request.unencoded("late", 1, 100, arrival_s=0.0, deadline_s=1.0)
    bench.scheduler.add(late, 0.0)
    assert [(seq, reason) for seq, _, reason, _ in bench.scheduler.expire(1.0)] == [(late.samples[0], "timeout")]
    bench.scheduler.check_integrity()
    assert bench.scheduler.stats().num_queued_tokens == 0 and not bench.scheduler.requests


@pytest.mark.parametrize("state", State)
def test_the_states_with_a_slot_are_prefill_and_decode(state: State) -> None:
    assert in_state(state).has_slot == (state in (State.PREFILL, State.DECODE))


def test_pending_tokens_are_those_of_steps_in_flight() -> None:
    seq = in_state(State.DECODE)
    seq.num_planned = 3
    assert seq.num_pending == 1  # the prompt is computed: its token is on its way
    seq.num_planned = 4
    assert seq.num_pending == 2
    seq.tokens.extend([7, 8])
    assert seq.num_pending == 0


# ---- what is known of drafts


def decoding(num_tokens: int) -> Sequence:
    seq = in_state(State.DECODE)
    seq.tokens = array("i", range(num_tokens))
    seq.num_planned = num_tokens - 1
    return seq


def test_a_budget_is_never_chosen_by_what_is_said_of_the_drafts_that_it_is_for() -> None:
    seq = decoding(8)
    seq.older_survivals, seq.survivals = bytes([90, 80, 70]), bytes([200, 100, 50])
    assert seq.foresee(3) == bytes([90, 80, 70])  # nothing in flight: the newest are of these drafts
    seq.num_planned += 1
    assert seq.foresee(3) == bytes([200, 100, 50])  # the row in flight will make these drafts
    seq.num_planned += 3
    assert seq.foresee(2) == bytes([200, 100])


@pytest.mark.parametrize("known", [b"", bytes([9])])
def test_what_is_not_known_of_drafts_counts_as_certain(known: bytes) -> None:
    seq = decoding(8)
    seq.older_survivals, seq.survivals = known, bytes([1, 1, 1])
    assert seq.foresee(3) == (known + b"\xff\xff\xff")[:3]


def test_a_slot_that_is_given_up_takes_what_was_known_along() -> None:
    seq = decoding(8)
    seq.older_survivals = seq.survivals = bytes([1])
    seq.num_unsure = seq.num_drafts = seq.num_computed = 2
    seq.forget_slot()
    assert (seq.lowest_length, seq.num_computed, seq.num_drafts) == (0, 0, 0)
    assert seq.foresee(1) == b"\xff"


# ---- keys of prefix blocks


def keys(tokens: list[int], version: str = "v1", block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, chain_root(version), array("i", tokens), block_size, len(tokens) // block_size)
    return hashes


def test_a_key_stands_for_every_token_before_it() -> None:
    assert keys([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert keys([1, 2, 3, 4, 5, 6, 7, 8])[0] == keys([1, 2, 3, 4, 0, 0, 0, 0])[0]


def test_another_version_of_the_weights_never_matches() -> None:
    assert not set(keys(list(range(8)), "v1")) & set(keys(list(range(8)), "v2"))


def test_a_chain_can_be_extended_bit_by_bit() -> None:
    tokens = array("i", range(40))
    hashes: list[bytes] = []
    for num_blocks in (1, 1, 3, 10):
        extend_chain(hashes, chain_root("v1"), tokens, 4, num_blocks)
    assert hashes == keys(list(range(40)))
