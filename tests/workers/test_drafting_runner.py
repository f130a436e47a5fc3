"""Steps that verify drafts and make new ones: the tokens of a run without, whatever is guessed; and honest books."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepinfer_protocol import (
    LogitShaping,
    MaskBatch,
    ProtocolError,
    RowFlag,
    SlotSampling,
    StepPlan,
    pack_float32,
    pack_int32,
    split_columns,
    unpack_float32,
    unpack_int32,
)
from deepinfer_workers.drafts import draft_slot_bytes
from deepinfer_workers.model_runner import BuiltStep
from deepinfer_workers.runner import StepOutput
from deepinfer_workers.slots import slot_bytes
from doubles.drafter import ScriptedDrafter, drafting
from doubles.driver import Driver, Row, admit, no_masks, plan
from doubles.tiny_llama import TinyLlama

TINY: Final = TinyLlama()
BLOCK: Final = 5
NUM_NEW: Final = 30
GREEDY: Final = SlotSampling()
SAMPLINGS: Final = [
    GREEDY,
    SlotSampling(temperature=0.9, seed=5),
    SlotSampling(temperature=1.1, top_p=0.9, top_k=40, seed=6),
    SlotSampling(
        temperature=0.8,
        seed=7,
        num_prompt=20,
        shaping=LogitShaping(
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            bias_ids=pack_int32([3]),
            bias_values=pack_float32([1.5]),
            bad_words=pack_int32([2, 5, 6, 1, 7]),
        ),
    ),
]


def random_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(TINY.vocab), k=count)


PROMPTS: Final = [random_tokens(20 + 13 * slot, seed=slot) for slot in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return TINY.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    """By sampling, then by prompt: the new tokens, without drafts."""
    driver = Driver(folder, num_threads=1)
    return [[driver.generate_with(prompt, NUM_NEW, sampling) for prompt in PROMPTS] for sampling in SAMPLINGS]


def drafting_driver(folder: Path, error_rate: float = 0.3, **changes: object) -> tuple[Driver, ScriptedDrafter]:
    with drafting(BLOCK, TINY.vocab, error_rate) as drafter:
        return Driver(folder, **{"num_threads": 1} | changes), drafter


def tokens_of(output: StepOutput) -> list[list[int]]:
    """By row."""
    tokens = list(unpack_int32(output.tokens))
    found = []
    for count in split_columns(output.rows, 4)[3]:
        found.append(tokens[:count])
        tokens = tokens[count:]
    assert not tokens
    return found


@pytest.mark.parametrize("sampling", range(len(SAMPLINGS)))
@pytest.mark.parametrize(
    ("error_rate", "budget"), [(0.0, None), (0.4, None), (0.4, 6), (0.4, 1), (1.0, None), (1.0, 3)]
)
def test_tokens_are_those_of_a_run_without_drafts(
    folder: Path, expected: list[list[list[int]]], sampling: int, error_rate: float, budget: int | None
) -> None:
    driver, drafter = drafting_driver(folder, error_rate)
    found: list[list[int]] = [[] for _ in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        drafter.scripts[slot] = prompt + expected[sampling][slot]
        driver.admit(slot, prompt, SAMPLINGS[sampling])
    num_steps = 0
    for _ in PROMPTS:  # one joins after another, as the others go on
        output = driver.step(
            *(Row(slot, 1, most_drafts=BLOCK) for slot in range(num_steps)),
            Row(num_steps, len(PROMPTS[num_steps])),
            verify_budget=budget,
            num_drafts=BLOCK,
        )
        num_steps += 1
        for slot, tokens in enumerate(tokens_of(output)):
            found[slot] += tokens
    while min(map(len, found)) < NUM_NEW:
        rows = [Row(slot, 1, most_drafts=BLOCK) for slot in range(len(PROMPTS))]
        output = driver.step(*rows, verify_budget=budget, num_drafts=BLOCK)
        num_verified = list(unpack_int32(output.num_verified))
        assert sum(num_verified) == min(BLOCK * len(PROMPTS), BLOCK * len(PROMPTS) if budget is None else budget)
        assert all(1 <= len(row) <= 1 + num for row, num in zip(tokens_of(output), num_verified, strict=True))
        assert len(output.survivals) == BLOCK * len(PROMPTS)
        num_steps += 1
        for slot, tokens in enumerate(tokens_of(output)):
            found[slot] += tokens
    assert [tokens[:NUM_NEW] for tokens in found] == expected[sampling]
    if error_rate == 0.0:
        assert num_steps <= 4 + -(-NUM_NEW // (1 + BLOCK))
    if error_rate == 1.0 and sampling == 0:
        assert num_steps >= NUM_NEW // 2


def test_log_probabilities_are_those_without_drafts(folder: Path) -> None:
    watched = SlotSampling(num_logprobs=3, num_prompt=20, num_prompt_logprobs=1)
    plain = Driver(folder, num_threads=1)
    plain.admit(0, PROMPTS[0], watched)
    outputs = [plain.step(Row(0, 20)), *(plain.step(Row(0, 1)) for _ in range(NUM_NEW))]
    script = PROMPTS[0] + [token for output in outputs for token in unpack_int32(output.tokens)]
    driver, drafter = drafting_driver(folder)
    drafter.scripts[2] = script
    driver.admit(1, PROMPTS[1], SlotSampling(temperature=1.0, seed=3))
    driver.admit(2, PROMPTS[0], watched)
    found = [driver.step(Row(1, len(PROMPTS[1])), Row(2, 20), num_drafts=BLOCK)]
    while sum(len(output.logprob_ranks) for output in found) // 4 <= NUM_NEW:
        found.append(driver.step(Row(1, 1, most_drafts=3), Row(2, 1, most_drafts=4), num_drafts=BLOCK))
    assert len(found) < NUM_NEW
    for name in ("logprob_ids", "logprobs", "logprob_ranks"):
        wanted = b"".join(getattr(output, name) for output in outputs)
        assert b"".join(getattr(output, name) for output in found)[: len(wanted)] == wanted
    for name in ("prompt_logprob_ids", "prompt_logprobs", "prompt_logprob_ranks"):
        assert getattr(found[0], name) == getattr(outputs[0], name)
        assert not any(getattr(output, name) for output in found[1:])


def test_predictions_are_the_survivals_of_what_is_verified(folder: Path) -> None:
    driver, _ = drafting_driver(folder)
    for slot in range(3):
        driver.admit(slot, PROMPTS[slot])
    first = driver.step(*(Row(slot, len(PROMPTS[slot])) for slot in range(3)), num_drafts=BLOCK)
    assert (first.num_verified, first.predicted) == (b"", b"")
    survivals = np.frombuffer(first.survivals, np.uint8).reshape(3, BLOCK) / 255
    assert (np.diff(survivals, axis=1) <= 0).all() and survivals.min() > 0
    second = driver.step(*(Row(slot, 1, most_drafts=BLOCK) for slot in range(3)), verify_budget=7, num_drafts=2)
    num_verified = unpack_int32(second.num_verified)
    best = np.sort(survivals.ravel())[::-1][:7]
    is_verified = np.arange(BLOCK) < np.array(num_verified)[:, None]
    np.testing.assert_allclose(np.sort(survivals[is_verified])[::-1], best)  # the most probable, wherever they are
    np.testing.assert_allclose(unpack_float32(second.predicted), (survivals * is_verified).sum(0), atol=3 / 255)
    assert len(second.survivals) == 3 * 2


def test_a_draft_is_there_for_the_next_step_only(folder: Path) -> None:
    driver, drafter = drafting_driver(folder, 0.0)
    drafter.scripts[0] = PROMPTS[0] + Driver(folder).generate(0, PROMPTS[0], NUM_NEW)
    driver.admit(0, PROMPTS[0])
    driver.step(Row(0, 20), num_drafts=3)
    asked = Row(0, 1, most_drafts=BLOCK)
    counts = [unpack_int32(driver.step(asked, num_drafts=num).num_verified)[0] for num in (2, 0, 4)]
    assert counts == [3, 2, 0]  # what the step before drafted, whatever is asked for
    driver.step(Row(0, 1), num_drafts=0)  # the four are void
    assert unpack_int32(driver.step(asked).num_verified)[0] == 0
    assert drafter.num_calls == 3


def test_a_readmitted_sequence_has_no_drafts_and_goes_on(folder: Path, expected: list[list[list[int]]]) -> None:
    driver, drafter = drafting_driver(folder)
    prompt, script = PROMPTS[1], PROMPTS[1] + expected[1][1]
    drafter.scripts[0] = drafter.scripts[3] = script
    driver.admit(0, prompt, SAMPLINGS[1])
    found = tokens_of(driver.step(Row(0, len(prompt)), num_drafts=BLOCK))[0]
    for _ in range(3):
        found += tokens_of(driver.step(Row(0, 1, most_drafts=BLOCK), num_drafts=BLOCK))[0]
    driver.retire(0)
    driver.admit(0, PROMPTS[2])  # somebody else
    driver.admit(3, prompt + found, SAMPLINGS[1])
    output = driver.step(Row(0, len(PROMPTS[2])), Row(3, len(prompt + found)), num_drafts=BLOCK)
    found += tokens_of(output)[1]
    while len(found) < NUM_NEW:
        found += tokens_of(driver.step(Row(3, 1, most_drafts=BLOCK), num_drafts=BLOCK))[0]
    assert found[:NUM_NEW] == expected[1][1]


WAITS: Final = int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)


def allowed_after(output: Sequence[int]) -> list[bool]:
    """Two of three tokens, which ones hangs on all of `output`."""
    return [(token + 31 * sum(output) + len(output)) % 3 > 0 for token in range(TINY.vocab)]


def masks_of(places: dict[int, list[list[int]]]) -> MaskBatch:
    """By slot, the outputs behind which it has masks."""
    outputs = [output for some in places.values() for output in some]
    width = 32 * -(-TINY.vocab // 32)
    bits = b"".join(np.packbits(np.resize(allowed_after(o), width), bitorder="little").tobytes() for o in outputs)
    counts = pack_int32([len(some) for some in places.values()])
    return MaskBatch(1, 1, 0, pack_int32(list(places)), bits, counts)


@pytest.fixture(scope="module")
def masked(folder: Path) -> list[list[list[int]]]:
    """As `expected`, every token behind its mask."""
    driver, found = Driver(folder, num_threads=1), []
    for sampling in SAMPLINGS:
        for slot, prompt in enumerate(PROMPTS):
            driver.admit(slot, prompt, sampling)
        outputs: list[list[int]] = [[] for _ in PROMPTS]
        for step in range(NUM_NEW):
            rows = [Row(slot, 1 if step else len(prompt), WAITS) for slot, prompt in enumerate(PROMPTS)]
            masks = masks_of({slot: [output] for slot, output in enumerate(outputs)})
            for output, tokens in zip(outputs, tokens_of(driver.step(*rows, masks=masks)), strict=True):
                output += tokens
        for slot in range(len(PROMPTS)):
            driver.retire(slot)
        found.append(outputs)
    return found


@pytest.mark.parametrize("sampling", range(len(SAMPLINGS)))
@pytest.mark.parametrize(("budget", "most_masks"), [(None, 1 + BLOCK), (7, 1 + BLOCK), (None, 3), (None, 1)])
def test_masked_tokens_are_those_without_drafts_and_so_are_those_beside_them(
    folder: Path,
    expected: list[list[list[int]]],
    masked: list[list[list[int]]],
    sampling: int,
    budget: int | None,
    most_masks: int,
) -> None:
    """Slots 0 and 2 wait for masks, up to the first draft that theirs refuse; the others do not."""
    driver, drafter = drafting_driver(folder, 0.2)
    waiting = {0, 2}
    scripts = [(masked if slot in waiting else expected)[sampling][slot] for slot in range(len(PROMPTS))]
    for slot, prompt in enumerate(PROMPTS):
        drafter.scripts[slot] = prompt + scripts[slot]
        driver.admit(slot, prompt, SAMPLINGS[sampling])
    flags = [WAITS if slot in waiting else int(RowFlag.SAMPLE) for slot in range(len(PROMPTS))]
    found: list[list[int]] = [[] for _ in PROMPTS]
    drafts: dict[int, list[int]] = {slot: [] for slot in sorted(waiting)}
    num_steps = num_cut = 0
    while min(map(len, found)) < NUM_NEW:
        places: dict[int, list[list[int]]] = {}
        for slot in sorted(waiting, reverse=True):
            places[slot] = [found[slot]]
            for index, draft in enumerate(drafts[slot][: most_masks - 1]):
                if not allowed_after(places[slot][-1])[draft]:
                    num_cut += 1
                    break
                places[slot].append(found[slot] + drafts[slot][: index + 1])
        rows = [
            Row(slot, 1, flags[slot], most_drafts=BLOCK) if num_steps else Row(slot, len(prompt), flags[slot])
            for slot, prompt in enumerate(PROMPTS)
        ]
        output = driver.step(*rows, masks=masks_of(places), verify_budget=budget, num_drafts=BLOCK)
        told = list(unpack_int32(output.draft_ids))
        assert len(told) == BLOCK * len(waiting)
        for slot in sorted(waiting):
            drafts[slot], told = told[:BLOCK], told[BLOCK:]
        for slot, tokens in enumerate(tokens_of(output)):
            assert slot not in waiting or len(tokens) <= len(places[slot])
            found[slot] += tokens
        num_steps += 1
    assert [tokens[:NUM_NEW] for tokens in found] == scripts
    assert num_steps < NUM_NEW or most_masks == 1
    assert num_cut or most_masks == 1


def test_masks_behind_drafts_that_the_row_does_not_verify_are_not_looked_at(folder: Path) -> None:
    driver, _ = drafting_driver(folder)
    driver.admit(1, PROMPTS[1])
    outputs = [[5] * num for num in range(4)]
    output = driver.step(Row(1, len(PROMPTS[1]), WAITS), masks=masks_of({1: outputs}), num_drafts=2)
    [token] = tokens_of(output)[0]
    assert allowed_after([])[token] and len(output.draft_ids) == 8


@pytest.mark.parametrize("empty", [0, 2, 3])
def test_a_mask_that_allows_nothing_is_named_by_its_slot(folder: Path, empty: int) -> None:
    driver, _ = drafting_driver(folder)
    slots = (3, 0, 2)
    for slot in slots:
        driver.admit(slot, PROMPTS[slot])
    masks = masks_of({slot: [[]] for slot in (0, 2, 3)})
    width, at = len(masks.bits) // 3, (0, 2, 3).index(empty)
    masks = replace(masks, bits=masks.bits[: at * width] + bytes(width) + masks.bits[(at + 1) * width :])
    with pytest.raises(ProtocolError, match=f"a mask of slot {empty} allows no token"):
        driver.step(*(Row(slot, len(PROMPTS[slot]), WAITS) for slot in slots), masks=masks)


def test_steps_are_built_before_the_results_of_those_before_them(folder: Path) -> None:
    """Lengths are bounds on the host, and right on the device; what a step is told makes the bounds tight again."""
    driver, drafter = drafting_driver(folder)
    wanted = Driver(folder).generate(0, PROMPTS[0], NUM_NEW)
    drafter.scripts[0] = PROMPTS[0] + wanted
    driver.admit(0, PROMPTS[0])
    found = tokens_of(driver.step(Row(0, 20), num_drafts=BLOCK))[0]
    ahead: deque[BuiltStep] = deque()
    length = 20
    while len(found) < NUM_NEW:
        while len(ahead) < 3:
            driver.lengths[0] = length + len(ahead) * (1 + BLOCK)  # at most
            step = driver.plan(Row(0, 1, most_drafts=BLOCK), verify_budget=BLOCK, num_drafts=BLOCK)
            ahead.append(driver.runner.build(step))
        output, _ = driver.runner.launch(ahead.popleft(), no_masks).wait()
        found += tokens_of(output)[0]
        [length] = output.lengths
        assert length == 20 + len(found) - 1
        assert unpack_int32(output.num_verified)[0] == BLOCK
    assert found[:NUM_NEW] == wanted


def test_bounds_that_results_made_tight_allow_the_last_position(folder: Path) -> None:
    driver, _ = drafting_driver(folder, 1.0, max_model_len=32)
    driver.admit(0, PROMPTS[0])
    driver.step(Row(0, 20), num_drafts=BLOCK)
    while (left := 32 - driver.lengths[0]) > 0:
        driver.step(Row(0, 1, most_drafts=min(BLOCK, left - 1)), num_drafts=BLOCK)
    assert driver.lengths[0] == 32


def test_bounds_beyond_the_blocks_are_refused_until_results_say_otherwise(folder: Path) -> None:
    driver, _ = drafting_driver(folder, 1.0, max_model_len=32)
    steps = [plan([(0, 1, 20, 1)], [admit(0, PROMPTS[0], [0, 1])], num_drafts=BLOCK)]
    verify = plan([(0, 1, 1, 1)], most_drafts=[BLOCK], verify_budget=BLOCK, num_drafts=BLOCK)
    steps += [verify, verify]
    built = [driver.runner.build(step) for step in steps]  # 20, up to 26, up to 32
    with pytest.raises(ProtocolError, match="positions in its blocks: 32"):
        driver.runner.build(plan([(0, 1, 1, 1)]))
    outputs = [driver.runner.launch(step, no_masks).wait()[0] for step in built]
    assert outputs[-1].lengths[0] < 32
    driver.run(plan([(0, 1, 1, 1)]))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (plan([(0, 1, 1, 1)], num_drafts=BLOCK + 1), "num_drafts 6 came, the longest draft has 5"),
        (plan([(0, 1, 1, 1)], most_drafts=[BLOCK + 1], verify_budget=9), "most_drafts 6 came, 0 to 5"),
        (plan([(0, 1, 1, 1)], most_drafts=[-1], verify_budget=9), "most_drafts -1 came"),
        (plan([(0, 1, 1, 1)], most_drafts=[1, 1], verify_budget=9), "most_drafts of 2 rows came, the step has 1"),
        (plan([(0, 1, 1, 0)], most_drafts=[1], verify_budget=9), "row 0 verifies drafts behind 1 positions"),
        (plan([(1, 1, 7, 1)], most_drafts=[1], verify_budget=9), "row 0 verifies drafts behind 7 positions"),
        (plan([(0, 1, 1, 1)], most_drafts=[BLOCK], verify_budget=BLOCK), "positions in its blocks: 16"),
        (plan([(1, 1, 7, 0), (0, 1, 1, 1)], most_drafts=[0, 1], verify_budget=9), "9 positions with drafts in a step"),
    ],
)
def test_a_wrong_plan_is_refused(folder: Path, bad: StepPlan, words: str) -> None:
    driver, _ = drafting_driver(folder, max_batch_positions=8)
    admits = [admit(0, [1] * 12, [0]), admit(1, [1] * 8, [1])]
    driver.run(plan([(0, 1, 6, 0)], admits))
    driver.run(plan([(0, 1, 6, 1)], num_drafts=BLOCK))
    with pytest.raises(ProtocolError, match=words):
        driver.run(bad)


@pytest.mark.parametrize(("asked", "num_drafts"), [(-1, BLOCK), (2, 2), (64, BLOCK), (0, 0)])
def test_ready_tells_the_longest_draft_and_its_memory(folder: Path, asked: int, num_drafts: int) -> None:
    driver, _ = drafting_driver(folder, num_drafts=asked)
    plain = slot_bytes(TINY.max_len, driver.ready.block_size)
    assert driver.ready.num_drafts == num_drafts
    assert driver.ready.slot_bytes == plain + (draft_slot_bytes(num_drafts, TINY.vocab) if num_drafts else 0)
    assert Driver(folder).ready.num_drafts == 0


def test_costs_are_measured_and_leave_nothing(folder: Path, expected: list[list[list[int]]]) -> None:
    driver, drafter = drafting_driver(folder, measure_costs=True, max_batch_positions=600)
    costs = driver.ready.costs
    assert costs is not None
    positions, rows = list(unpack_int32(costs.positions)), list(unpack_int32(costs.draft_rows))
    forward, draft = unpack_float32(costs.forward_us), unpack_float32(costs.draft_us)
    rungs, padded = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600], driver.runner._limits.padded
    stretches = [below + 1 for below, rung in pairwise(rungs) if below + 1 < rung == padded(below + 1)]
    assert positions == sorted(rungs + stretches) and rows == [1, 2, 4, 8, 16]
    assert all(forward[positions.index(size)] == forward[positions.index(size) + 1] for size in stretches)
    assert (len(forward), len(draft)) == (len(positions), len(rows))
    for times in (forward, draft):
        assert min(times) > 0 and sorted(times) == list(times)
    assert not driver.runner._sampling._tables
    drafter.scripts.clear()
    assert driver.generate_with(PROMPTS[0], NUM_NEW, SAMPLINGS[0]) == expected[0][0]
    assert driver.ready.costs is not None and Driver(folder).ready.costs is None


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_plans_say_what_single_steps_say(
    folder: Path, expected: list[list[list[int]]], data: st.DataObject
) -> None:
    """Chunks, pauses, preemptions, budgets and drafts as they come."""
    driver, drafter = drafting_driver(folder, data.draw(st.sampled_from([0.0, 0.3, 0.8])))
    sampling = data.draw(st.integers(0, len(SAMPLINGS) - 1))
    found: list[list[int]] = [[] for _ in PROMPTS]
    left = [len(prompt) for prompt in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        drafter.scripts[slot] = prompt + expected[sampling][slot]
        driver.admit(slot, prompt, SAMPLINGS[sampling])
    for _ in range(data.draw(st.integers(1, 14))):
        slots = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        slots = [slot for slot in slots if len(found[slot]) < NUM_NEW]
        if slots and driver.lengths[slots[0]] and data.draw(st.integers(0, 5)) == 0:
            slot = slots[0]
            driver.retire(slot)
            driver.admit(slot, PROMPTS[slot] + found[slot], SAMPLINGS[sampling])
            left[slot] = len(PROMPTS[slot] + found[slot])
        rows = []
        for slot in slots:
            if left[slot]:
                count = data.draw(st.integers(1, left[slot]))
                left[slot] -= count
                rows.append(Row(slot, count, 0 if left[slot] else int(RowFlag.SAMPLE)))
            else:
                rows.append(Row(slot, 1, most_drafts=data.draw(st.integers(0, BLOCK))))
        budget = data.draw(st.one_of(st.none(), st.integers(0, 12)))
        output = driver.step(*rows, verify_budget=budget, num_drafts=data.draw(st.integers(0, BLOCK)))
        for row, tokens in zip(rows, tokens_of(output) if rows else [], strict=True):
            found[row.slot] += tokens
    for slot, tokens in enumerate(found):
        assert tokens[:NUM_NEW] == expected[sampling][slot][: len(tokens)]
