"""The fake worker says what the oracle says, and finds every row of KV that is not the one it ought to be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import pytest
from msgspec.structs import replace

from deepinfer.rank import CacheShape
from deepinfer_protocol import (
    LogitShaping,
    MaskBatch,
    ProtocolError,
    RowFlag,
    SlotAdmit,
    SlotSampling,
    StepPlan,
    pack_float32,
    pack_int32,
    split_columns,
    unpack_float32,
    unpack_int32,
)
from deepinfer_workers.fake import FakeKV, FakeRunner
from deepinfer_workers.runner import StepOutput
from doubles.group import fake_config, no_masks
from doubles.oracle import completion, next_token

VOCAB_SIZE: Final = 97
BLOCK_SIZE: Final = 4
SAMPLE, WAITS = int(RowFlag.SAMPLE), int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)
GREEDY: Final = SlotSampling()


class Device:
    """A fake runner that is told each step in plain lists."""

    def __init__(self, window: int = 0, num_drafts: int = 0) -> None:
        shape = CacheShape(8, 64, BLOCK_SIZE, "fake")
        config = fake_config(shape, vocab_size=VOCAB_SIZE, window=window, num_drafts=num_drafts)
        self.runner = FakeRunner(config)

    def step(
        self,
        *rows: tuple[int, int, int, int],
        admits: Sequence[SlotAdmit] = (),
        appends: Sequence[tuple[int, int]] = (),
        retired: Sequence[int] = (),
        masks: MaskBatch | None = None,
        most_drafts: Sequence[int] = (),
        verify_budget: int = 0,
        num_drafts: int = 0,
    ) -> StepOutput:
        """`rows` are (slot, generation, positions, flags); `appends` are (slot, block)."""
        plan = StepPlan(
            epoch=0,
            step_id=1,
            rank=0,
            padded_positions=sum(row[2] for row in rows),
            retired=pack_int32(list(retired)),
            admits=list(admits),
            appends=pack_int32([pair[column] for column in range(2) for pair in appends]),
            rows=pack_int32([row[column] for column in range(4) for row in rows]),
            most_drafts=pack_int32(list(most_drafts)),
            verify_budget=verify_budget,
            num_drafts=num_drafts,
        )
        return self.runner.compute(self.runner.build(plan), no_masks if masks is None else lambda: masks)


def admit(
    slot: int,
    tokens: Sequence[int],
    *,
    generation: int = 1,
    length: int = 0,
    floor: int | None = None,
    blocks: Sequence[int] = (),
    sampling: SlotSampling = GREEDY,
) -> SlotAdmit:
    floor = length if floor is None else floor
    return SlotAdmit(slot, generation, length, floor, pack_int32(list(tokens)), pack_int32(list(blocks)), sampling)


def blocks_for(slot: int, first: int, num_tokens: int) -> list[tuple[int, int]]:
    return [(slot, first + index) for index in range(-(-num_tokens // BLOCK_SIZE))]


def tokens_of(output: StepOutput) -> list[int]:
    return list(unpack_int32(output.tokens))


def tokens_after(device: Device, slot: int, count: int, generation: int = 1) -> list[int]:
    return [tokens_of(device.step((slot, generation, 1, SAMPLE)))[0] for _ in range(count)]


PROMPT: Final = [5, 6, 7, 8, 9, 10]


def started(device: Device, sampling: SlotSampling = GREEDY, first_block: int = 0) -> int:
    """The first token of `PROMPT` in slot 0, which has room for twenty."""
    output = device.step(
        (0, 1, len(PROMPT), SAMPLE),
        admits=[admit(0, PROMPT, sampling=sampling)],
        appends=blocks_for(0, first_block, 20),
    )
    return tokens_of(output)[0]


# It says what the oracle says


@pytest.mark.parametrize("seed", range(8))
def test_sequences_in_one_batch_say_what_the_oracle_says(seed: int) -> None:
    rng = random.Random(seed)
    device = Device()
    samplings = [SlotSampling(temperature=rng.choice((0.0, 1.0)), seed=rng.getrandbits(63)) for _ in range(4)]
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 15))] for _ in samplings]
    got: list[list[int]] = [[] for _ in prompts]
    left = [len(prompt) for prompt in prompts]
    device.step(
        admits=[admit(slot, prompts[slot], sampling=samplings[slot]) for slot in range(4)],
        appends=[pair for slot in range(4) for pair in blocks_for(slot, 16 * slot, 40)],
    )
    while min(len(tokens) for tokens in got) < 12:
        slots = [slot for slot in rng.sample(range(4), rng.randint(1, 4)) if len(got[slot]) < 12]
        sizes = {slot: rng.randint(1, left[slot]) if left[slot] else 1 for slot in slots}
        sampled = [slot for slot in slots if sizes[slot] >= left[slot]]
        output = device.step(*[(slot, 1, sizes[slot], SAMPLE if slot in sampled else 0) for slot in slots])
        assert list(split_columns(output.rows, 4)[3]) == [int(slot in sampled) for slot in slots]
        for slot, token in zip(sampled, tokens_of(output), strict=True):
            got[slot].append(token)
        left = [max(count - sizes.get(slot, 0), 0) for slot, count in enumerate(left)]
    for prompt, sampling, tokens in zip(prompts, samplings, got, strict=True):
        wanted, _ = completion(prompt, sampling, len(prompt) + 12, frozenset(), VOCAB_SIZE)
        assert tokens == wanted, (prompt, sampling)


def test_a_sequence_that_comes_back_after_a_preemption_goes_on() -> None:
    device = Device()
    known = [*PROMPT, started(device), *tokens_after(device, 0, 3)]
    output = device.step(
        (0, 2, len(known), SAMPLE),
        retired=[0],
        admits=[admit(0, known, generation=2)],
        appends=blocks_for(0, 8, 20),
    )
    assert tokens_of(output) == [next_token(known, GREEDY, VOCAB_SIZE)]


def test_a_prefix_hit_starts_from_the_blocks_of_another_sequence() -> None:
    device = Device()
    started(device)
    prompt = [*PROMPT[:4], 50, 51]
    output = device.step((1, 1, 2, SAMPLE), admits=[admit(1, prompt, length=4, blocks=[0])], appends=[(1, 20)])
    assert tokens_of(output) == [next_token(prompt, GREEDY, VOCAB_SIZE)]
    assert list(split_columns(output.rows, 4)[2]) == [6]


def test_a_token_that_may_not_end_it_yet_is_passed_over() -> None:
    free = started(Device())
    held = SlotSampling(min_length=len(PROMPT) + 1, stop_ids=pack_int32([free]))
    device = Device()
    assert started(device, held) == (free + 1) % VOCAB_SIZE


@pytest.mark.parametrize("allowed", [0, 31, 32, 96])
def test_a_row_that_waits_takes_what_its_mask_allows(allowed: int) -> None:
    device = Device()
    started(device)
    bits = (1 << allowed).to_bytes(16, "little")
    output = device.step((0, 1, 1, WAITS), masks=MaskBatch(0, 1, 0, pack_int32([0]), bits))
    assert tokens_of(output) == [allowed]


def test_logprobs_come_for_the_token_and_as_many_as_were_asked() -> None:
    device = Device()
    output = device.step(
        (0, 1, 1, SAMPLE), admits=[admit(0, [3], sampling=SlotSampling(num_logprobs=2))], appends=[(0, 0)]
    )
    assert list(unpack_int32(output.logprob_ids)) == tokens_of(output) * 3
    assert len(output.logprobs) == len(output.logprob_ids)
    assert list(unpack_int32(output.logprob_ranks)) == [1]


def test_log_probabilities_of_a_prompt_come_once_for_each_of_its_tokens_but_the_first() -> None:
    device = Device()
    sampling = SlotSampling(num_prompt=4, num_prompt_logprobs=1)
    known = [*PROMPT[:4], 50, 51]  # it had two tokens when it was preempted
    first = device.step((0, 1, 2, 0), admits=[admit(0, known, sampling=sampling)], appends=blocks_for(0, 0, 20))
    second = device.step((0, 1, 4, SAMPLE))
    assert list(unpack_int32(first.prompt_logprob_ids)) == [6, 6, 7, 7]
    assert list(unpack_int32(second.prompt_logprob_ids)) == [8, 8]
    assert list(unpack_int32(first.prompt_logprob_ranks + second.prompt_logprob_ranks)) == [1, 2, 3]
    assert len(second.prompt_logprobs) == len(second.prompt_logprob_ids)


def test_bad_words_and_bans_are_passed_over() -> None:
    free = started(Device())
    banned = LogitShaping(bias_ids=pack_int32([free]), bias_values=pack_float32([float("-inf")]))
    assert started(Device(), SlotSampling(shaping=banned)) == (free + 1) % VOCAB_SIZE
    only = LogitShaping(allowed_bits=(1 << 5).to_bytes(16, "little"))
    assert started(Device(), SlotSampling(shaping=only)) == 5
    second = next_token([*PROMPT, free], GREEDY, VOCAB_SIZE)
    for num_prompt, wanted in ((len(PROMPT), (second + 1) % VOCAB_SIZE), (len(PROMPT) + 1, second)):
        device = Device()
        words = LogitShaping(bad_words=pack_int32([2, free, second]))
        assert started(device, SlotSampling(num_prompt=num_prompt, shaping=words)) == free
        assert tokens_after(device, 0, 1) == [wanted]


# Slots with a state of their own


WINDOW: Final = 3
LONG: Final = list(range(30, 54))


def replayed(device: Device, length: int, floor: int, chunk: int = 99) -> int:
    """The first token of 20 of `LONG` and one of its own, whose first `floor` rows are those of slot 0."""
    device.step((0, 1, 24, SAMPLE), admits=[admit(0, LONG)], appends=blocks_for(0, 0, 25))
    joined = admit(1, [*LONG[:20], 7], length=length, floor=floor, blocks=range(floor // BLOCK_SIZE))
    device.step(admits=[joined], appends=blocks_for(1, 20, 24 - floor))
    while length + chunk < 21:
        device.step((1, 1, chunk, 0))
        length += chunk
    return tokens_of(device.step((1, 1, 21 - length, SAMPLE)))[0]


def test_a_window_is_part_of_what_a_sequence_says() -> None:
    device = Device(WINDOW)
    first = tokens_of(device.step((0, 1, 6, SAMPLE), admits=[admit(0, PROMPT)], appends=blocks_for(0, 0, 20)))
    tokens = [*first, *tokens_after(device, 0, 5)]
    assert tokens == completion(PROMPT, GREEDY, 12, frozenset(), VOCAB_SIZE, WINDOW)[0]
    assert tokens != completion(PROMPT, GREEDY, 12, frozenset(), VOCAB_SIZE)[0]


@pytest.mark.parametrize("chunk", [1, 4, 5, 99])
@pytest.mark.parametrize("floor", [8, 16, 20])
def test_a_replay_that_is_long_enough_says_what_a_run_without_a_hit_says(floor: int, chunk: int) -> None:
    ready = Device(WINDOW).runner.load(lambda done, total: None)
    bounded, exact = ready.bounded_replay_tokens, ready.exact_replay_tokens
    wanted = next_token([*LONG[:20], 7], GREEDY, VOCAB_SIZE, WINDOW)
    assert replayed(Device(WINDOW), floor - exact, floor, chunk) == wanted
    assert replayed(Device(WINDOW), floor - exact + 1, floor, chunk) != wanted
    assert replayed(Device(WINDOW), floor - bounded, floor, chunk) != wanted


def test_a_replay_writes_no_row_below_its_floor() -> None:
    device = Device(WINDOW)
    device.step((0, 1, 24, SAMPLE), admits=[admit(0, LONG)], appends=blocks_for(0, 0, 25))
    before = [device.runner.kv.hash_at(range(6), length) for length in range(25)]
    device.step(
        (1, 1, 7, 0), admits=[admit(1, [*LONG[:16], 7, 7], length=10, floor=16, blocks=range(4))], appends=[(1, 9)]
    )
    assert [device.runner.kv.hash_at(range(6), length) for length in range(25)] == before


def test_a_window_that_was_not_rebuilt_is_found() -> None:
    with pytest.raises(AssertionError, match="the window of position 16 begins at 14, the replay at 15"):
        replayed(Device(WINDOW), 15, 16)


def test_rows_below_the_floor_that_are_not_there_are_found_before_they_are_reached() -> None:
    device = Device(WINDOW)
    device.step((0, 1, 8, 0), admits=[admit(0, LONG)], appends=blocks_for(0, 0, 8))
    hollow = admit(1, LONG, length=1, floor=12, blocks=range(3))
    with pytest.raises(AssertionError, match=r"block 2 holds \[\]"):
        device.step((1, 1, 2, 0), admits=[hollow])


# It drafts


def drafting(num_slots: int, num_drafts: int, window: int = 0, sampling: SlotSampling = GREEDY) -> Device:
    """Slots that hold a prompt of six tokens each, and have drafted behind it; blocks for 32."""
    device = Device(window, num_drafts)
    output = device.step(
        *[(slot, 1, 6, SAMPLE) for slot in range(num_slots)],
        admits=[admit(slot, [slot, *PROMPT[1:]], sampling=sampling) for slot in range(num_slots)],
        appends=[pair for slot in range(num_slots) for pair in blocks_for(slot, 8 * slot, 32)],
        num_drafts=num_drafts,
    )
    assert len(output.survivals) == num_slots * num_drafts and output.num_verified == b""
    return device


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_with_drafts_it_says_what_it_says_without_and_now_and_then_more_at_once(num_drafts: int, window: int) -> None:
    seen: set[int] = set()
    for first in range(12):
        device = Device(window, num_drafts)
        prompt = [first, *PROMPT[1:]]
        output = device.step(
            (0, 1, 6, SAMPLE), admits=[admit(0, prompt)], appends=blocks_for(0, 0, 64), num_drafts=num_drafts
        )
        tokens = tokens_of(output)
        while len(tokens) < 30:
            output = device.step(
                (0, 1, 1, SAMPLE), most_drafts=[num_drafts], verify_budget=num_drafts, num_drafts=num_drafts
            )
            _, _, lengths, counts = split_columns(output.rows, 4)
            tokens += tokens_of(output)
            assert counts[0] == len(tokens_of(output)) and lengths[0] == 5 + len(tokens)
            assert list(unpack_int32(output.num_verified)) == [num_drafts]
            seen.add(counts[0])
        wanted, _ = completion(prompt, GREEDY, 6 + len(tokens), frozenset(), VOCAB_SIZE, window)
        assert tokens == wanted
    assert seen == set(range(1, num_drafts + 2))


@pytest.mark.parametrize("num_masks", [1, 2, 4])
def test_a_row_that_waits_tells_its_drafts_and_takes_no_more_tokens_than_it_has_masks(num_masks: int) -> None:
    device, seen, everything = Device(0, 5), set(), (1 << VOCAB_SIZE) - 1
    masks = MaskBatch(0, 1, 0, pack_int32([0]), everything.to_bytes(16, "little"))
    output = device.step(
        (0, 1, 6, WAITS), masks=masks, admits=[admit(0, PROMPT)], appends=blocks_for(0, 0, 64), num_drafts=5
    )
    tokens = tokens_of(output)
    while len(tokens) < 30:
        drafts = list(unpack_int32(output.draft_ids))
        assert drafts == device.runner._slots[0].drafts and len(drafts) == 5
        bits = b"".join((everything & ~(1 << place)).to_bytes(16, "little") for place in range(num_masks))
        masks = MaskBatch(0, 1, 0, pack_int32([0]), bits, pack_int32([num_masks]))
        output = device.step((0, 1, 1, WAITS), masks=masks, most_drafts=[5], verify_budget=5, num_drafts=5)
        new = tokens_of(output)
        assert all(token != place for place, token in enumerate(new))
        assert new[:-1] == drafts[: len(new) - 1]
        seen.add(len(new))
        tokens += new
    assert max(seen) == num_masks


def test_rejected_rows_are_written_over() -> None:
    device = drafting(1, 5)
    kv, num_tokens = device.runner.kv, 1
    while num_tokens < 20:
        output = device.step((0, 1, 1, SAMPLE), most_drafts=[5], verify_budget=5, num_drafts=5)
        num_tokens += len(tokens_of(output))
    tokens = [0, *PROMPT[1:], *completion([0, *PROMPT[1:]], GREEDY, 26, frozenset(), VOCAB_SIZE)[0]]
    kv.check(list(range(8)), tokens, 5 + num_tokens)


@pytest.mark.parametrize("most", [[5, 5, 5], [1, 0, 5], [2, 2, 2]])
@pytest.mark.parametrize("budget", [1, 4, 7, 99])
def test_a_budget_goes_to_the_drafts_that_are_most_likely_reached(budget: int, most: list[int]) -> None:
    device = drafting(3, 5)
    survivals = [device.runner._slots[slot].survivals for slot in range(3)]
    ranked = sorted(
        (value for column, end in zip(survivals, most, strict=True) for value in column[:end]), reverse=True
    )
    output = device.step(*[(slot, 1, 1, SAMPLE) for slot in range(3)], most_drafts=most, verify_budget=budget)
    verified = list(unpack_int32(output.num_verified))
    taken = sorted((v for column, end in zip(survivals, verified, strict=True) for v in column[:end]), reverse=True)
    assert taken == ranked[:budget]
    sums = [
        sum(column[place] for column, end in zip(survivals, verified, strict=True) if place < end) for place in range(5)
    ]
    assert list(unpack_float32(output.predicted)) == pytest.approx(sums[: max(verified)])
    assert output.survivals == b""


def test_drafts_are_void_once_their_row_has_run_without_new_ones() -> None:
    device = drafting(1, 3)
    device.step((0, 1, 1, SAMPLE))
    output = device.step((0, 1, 1, SAMPLE), most_drafts=[3], verify_budget=3)
    assert list(unpack_int32(output.num_verified)) == [0]


def test_every_token_of_a_row_has_its_log_probabilities() -> None:
    device = drafting(1, 5, sampling=SlotSampling(num_logprobs=2))
    for _ in range(6):
        output = device.step((0, 1, 1, SAMPLE), most_drafts=[5], verify_budget=5, num_drafts=5)
        tokens = tokens_of(output)
        assert list(unpack_int32(output.logprob_ids)) == [token for token in tokens for _ in range(3)]
        assert list(unpack_int32(output.logprob_ranks)) == [1] * len(tokens)


def test_it_tells_its_longest_draft_and_what_steps_cost() -> None:
    config = fake_config(CacheShape(8, 64, BLOCK_SIZE), num_drafts=5)
    told = {
        wanted: FakeRunner(replace(config, num_drafts=wanted)).load(lambda done, total: None) for wanted in (-1, 0, 3)
    }
    assert {wanted: ready.num_drafts for wanted, ready in told.items()} == {-1: 5, 0: 0, 3: 3}
    assert told[-1].costs is None
    costs = FakeRunner(replace(config, measure_costs=True, fake_step_s=0.5)).load(lambda done, total: None).costs
    assert costs is not None and list(unpack_float32(costs.forward_us)) == [500_000.0] * 2


def test_a_draft_beyond_the_blocks_of_a_slot_is_refused() -> None:
    device = Device(0, 5)
    device.step((0, 1, 6, SAMPLE), admits=[admit(0, PROMPT)], appends=blocks_for(0, 0, 8), num_drafts=5)
    with pytest.raises(ProtocolError, match="a draft at position 8, 2 blocks"):
        device.step((0, 1, 1, SAMPLE), most_drafts=[5], verify_budget=5)


# It finds what is wrong


def test_a_block_of_another_sequence_is_found() -> None:
    device = Device()
    started(device)
    other = [20, 21, 22, 23, 24]
    device.step((1, 1, 5, SAMPLE), admits=[admit(1, other)], appends=[(1, 10), (1, 11)])
    stolen = admit(2, [*PROMPT, 1], length=6, blocks=[10, 1])  # block 10 has slot 1's tokens, not these
    with pytest.raises(AssertionError, match="block 10 holds"):
        device.step((2, 1, 1, SAMPLE), admits=[stolen])


def test_blocks_in_the_wrong_order_are_found() -> None:
    device = Device()
    device.step((0, 1, 8, 0), admits=[admit(0, range(10, 19))], appends=[(0, 0), (0, 1)])
    swapped = admit(1, range(10, 19), length=8, blocks=[1, 0])
    with pytest.raises(AssertionError, match="block 1 holds"):
        device.step((1, 1, 1, SAMPLE), admits=[swapped], appends=[(1, 2)])


def test_a_block_given_to_another_under_its_reader_is_found() -> None:
    device = Device()
    started(device)
    device.step((1, 1, 3, SAMPLE), admits=[admit(1, [40, 41, 42])], appends=[(1, 0)])  # slot 0 still reads block 0
    with pytest.raises(AssertionError, match="block 0 holds"):
        device.step((0, 1, 1, SAMPLE))


def test_a_prefix_that_was_never_computed_is_found() -> None:
    device = Device()
    with pytest.raises(AssertionError, match=r"block 3 holds \[\]"):
        device.step((0, 1, 1, SAMPLE), admits=[admit(0, PROMPT, length=4, blocks=[3])], appends=[(0, 4)])


def test_a_prefix_of_other_tokens_is_found() -> None:
    device = Device()
    started(device)
    with pytest.raises(AssertionError, match="block 0 holds"):
        device.step((1, 1, 1, SAMPLE), admits=[admit(1, [5, 6, 7, 99, 1], length=4, blocks=[0])], appends=[(1, 9)])


def test_a_block_that_is_written_from_its_middle_is_found() -> None:
    kv = FakeKV(BLOCK_SIZE, check_stamps=False)
    with pytest.raises(AssertionError, match="block 30: offset 2 written after 0 rows"):
        kv.write(30, 2, (5, 2), 0)


@pytest.mark.parametrize(("slot", "generation"), [(0, 0), (0, 2), (1, 1)])
def test_a_row_for_an_old_generation_or_an_empty_slot_is_refused(slot: int, generation: int) -> None:
    device = Device()
    started(device)
    with pytest.raises(ProtocolError, match=f"slot {slot} does not hold generation {generation}"):
        device.step((slot, generation, 1, SAMPLE))


def test_a_retired_slot_holds_nothing() -> None:
    device = Device()
    started(device)
    device.step(retired=[0])
    with pytest.raises(ProtocolError, match="slot 0 does not hold generation 1"):
        device.step((0, 1, 1, SAMPLE))


def test_a_slot_that_is_taken_is_not_admitted_again() -> None:
    device = Device()
    started(device)
    with pytest.raises(ProtocolError, match="slot 0 is admitted twice"):
        device.step(admits=[admit(0, [1], generation=2)])


def test_a_row_that_is_sampled_before_its_last_known_token_is_refused() -> None:
    with pytest.raises(ProtocolError, match="slot 0 is sampled at 5 of 6 tokens"):
        Device().step((0, 1, 5, SAMPLE), admits=[admit(0, PROMPT)], appends=blocks_for(0, 0, 6))
