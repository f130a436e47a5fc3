"""A runner on random small weights: right tokens, in any company the same bits, and no plan that is silently wrong."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
import torch

from deepinfer_protocol import MaskBatch, ProtocolError, RowFlag, SlotSampling, pack_int32, split_columns, unpack_int32
from deepinfer_workers import capacity
from deepinfer_workers.model_runner import ModelRunner
from deepinfer_workers.runner import StepOutput, WorkerFault
from deepinfer_workers.sampler import ROWS_AT_ONCE
from deepinfer_workers.slots import slot_bytes
from doubles.driver import DEFAULTS, Driver, Row, admit, plan
from doubles.tiny_llama import TinyLlama

TINY = TinyLlama()
NUM_LOGPROBS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def driver(folder: Path) -> Driver:
    return Driver(folder)


def random_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(TINY.vocab), k=count)


def test_workers_of_one_machine_share_its_threads(folder: Path) -> None:
    """More threads than cores wait for each other at every product."""
    before = torch.get_num_threads()
    for num_ranks, chosen, expected in ((1, 0, 6), (2, 0, 3), (4, 0, 1), (8, 0, 1), (2, 5, 5)):
        torch.set_num_threads(6)
        driver = Driver(folder, num_ranks=num_ranks, num_threads=chosen)
        assert f" {expected} threads" in driver.ready.device
        driver.close()
    torch.set_num_threads(before)


def trace(output: StepOutput) -> tuple[bytes, bytes, bytes]:
    """Everything of a step that a row's logits decide, to the bit."""
    return output.tokens, output.logprob_ids, output.logprobs


WATCHED = SlotSampling(num_logprobs=NUM_LOGPROBS)


def run_alone(driver: Driver, tokens: list[int], chunks: list[int], num_new: int) -> list[tuple[bytes, bytes, bytes]]:
    """The prompt in `chunks` of positions (the last one repeats), then decode steps."""
    driver.admit(0, tokens, WATCHED)
    start, traces = 0, []
    while start < len(tokens):
        count = min(chunks.pop(0) if len(chunks) > 1 else chunks[0], len(tokens) - start)
        start += count
        output = driver.step(Row(0, count, int(RowFlag.SAMPLE) if start == len(tokens) else 0))
    traces.append(trace(output))
    traces += [trace(driver.step(Row(0, 1))) for _ in range(num_new)]
    driver.retire(0)
    return traces


def prompt_entries(output: StepOutput, num_best: int) -> list[tuple[bytes, bytes, bytes]]:
    """Ids, log probabilities and rank of each prompt token of a step, to the bit."""
    width = 1 + num_best
    columns = (output.prompt_logprob_ids, width), (output.prompt_logprobs, width), (output.prompt_logprob_ranks, 1)
    count = len(output.prompt_logprob_ranks) // 4
    split = [[data[4 * width * i : 4 * width * (i + 1)] for i in range(count)] for data, width in columns]
    return list(zip(*split, strict=True))


def _counted(logits: Callable[[torch.Tensor], torch.Tensor], num_rows: list[int]) -> Callable[..., torch.Tensor]:
    """`logits`, which also notes how many rows it is asked for."""

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return logits(hidden)

    return counted


def test_prompt_logprobs_are_those_of_the_definition(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(90, seed=11)
    num_rows: list[int] = []
    monkeypatch.setattr(driver.runner._model, "logits", _counted(driver.runner._model.logits, num_rows))
    logits = TINY.logits(tokens)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    driver.admit(0, tokens, SlotSampling(num_prompt=90, num_prompt_logprobs=3))
    entries = prompt_entries(driver.step(Row(0, 90)), 3)
    assert len(entries) == 89
    assert max(num_rows) <= ROWS_AT_ONCE  # the logits of a long prompt are not there all at once
    for place, (ids, values, rank) in enumerate(entries):
        best = np.argsort(-expected[place], kind="stable")
        assert list(unpack_int32(ids)) == [tokens[place + 1], *best[:3]]
        assert list(best).index(tokens[place + 1]) + 1 == unpack_int32(rank)[0]
        np.testing.assert_allclose(np.frombuffer(values, "<f4"), expected[place][list(unpack_int32(ids))], atol=5e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 65])
def test_prompt_logprobs_do_not_depend_on_chunks_or_company(driver: Driver, chunk: int) -> None:
    """Each prompt token once; none for what follows the prompt; and the tokens are those of a prompt without."""
    tokens = random_tokens(90, seed=12)
    sampling = SlotSampling(num_prompt=80, num_prompt_logprobs=2, num_logprobs=NUM_LOGPROBS)
    driver.admit(0, tokens, sampling)
    whole = driver.step(Row(0, 90))
    wanted = prompt_entries(whole, 2)
    assert len(wanted) == 79
    driver.retire(0)
    driver.admit(3, random_tokens(300, seed=13), SlotSampling(num_prompt=300))
    driver.admit(5, tokens, sampling)
    entries, start = [], 0
    while start < 90:
        count = min(chunk, 90 - start)
        start += count
        output = driver.step(Row(3, 2, 0), Row(5, count, int(RowFlag.SAMPLE) if start == 90 else 0))
        entries += prompt_entries(output, 2)
    assert entries == wanted and trace(output) == trace(whole)
    assert driver.step(Row(5, 1)).prompt_logprob_ids == b""


@pytest.mark.parametrize("is_tied", [False, True])
def test_logprobs_are_those_of_the_definition(tmp_path: Path, is_tied: bool) -> None:
    tiny = TinyLlama(is_tied=is_tied)
    driver = Driver(tiny.write(tmp_path / "model"))
    tokens = random_tokens(150, seed=1)
    logits = tiny.logits(tokens)[-1]
    expected = logits - np.log(np.exp(logits).sum())
    driver.admit(0, tokens, WATCHED)
    output = driver.step(Row(0, len(tokens)))
    ids = unpack_int32(output.logprob_ids)
    best = np.argsort(-expected, kind="stable")[:NUM_LOGPROBS]
    assert list(ids) == [best[0], *best]
    np.testing.assert_allclose(np.frombuffer(output.logprobs, "<f4"), expected[list(ids)], atol=2e-5)


def test_llama3_scaling_turns_by_its_frequencies(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    tiny = TinyLlama(extra={"rope_scaling": scaling | {"original_max_position_embeddings": 64}})
    base = tiny.theta ** -(np.arange(0, tiny.head_dim, 2) / tiny.head_dim)
    inv_freq = []
    for frequency in base:
        wavelength = 2 * np.pi / frequency
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        blended = (1 - smooth) * frequency / 8.0 + smooth * frequency
        inv_freq.append(frequency / 8.0 if wavelength > 64 else frequency if wavelength < 16 else blended)
    tokens = random_tokens(90, seed=2)
    logits = tiny.logits(tokens, np.array(inv_freq))[-1]
    driver = Driver(tiny.write(tmp_path / "model"))
    driver.admit(0, tokens, WATCHED)
    logprobs = np.frombuffer(driver.step(Row(0, 90)).logprobs, "<f4")
    assert logprobs[0] == pytest.approx(logits.max() - np.log(np.exp(logits).sum()), abs=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 65])
def test_chunks_do_not_change_a_bit(driver: Driver, chunk: int) -> None:
    tokens = random_tokens(150, seed=3)
    assert run_alone(driver, tokens, [chunk], 6) == run_alone(driver, tokens, [150], 6)


@pytest.mark.parametrize("seed", range(6))
def test_company_does_not_change_a_bit(driver: Driver, seed: int) -> None:
    """Sixteen sequences, joined at random, prefilled in random chunks in random order: each as if alone."""
    rng = random.Random(seed)
    prompts = [random_tokens(rng.randint(1, 130), seed=100 * seed + slot) for slot in range(16)]
    expected = [run_alone(driver, tokens, [4096], 5) for tokens in prompts]
    for slot, tokens in enumerate(prompts):
        driver.admit(slot, tokens, WATCHED)
    left = {slot: len(tokens) for slot, tokens in enumerate(prompts)}
    traces: dict[int, list[tuple[bytes, bytes, bytes]]] = {slot: [] for slot in left}
    while unfinished := [slot for slot in left if len(traces[slot]) < 6]:
        slots = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        counts = [rng.randint(1, left[slot]) if left[slot] else 1 for slot in slots]
        flags = [int(RowFlag.SAMPLE) if count >= left[slot] else 0 for slot, count in zip(slots, counts, strict=True)]
        output = driver.step(*map(Row, slots, counts, flags))
        sampled = [slot for slot, flag in zip(slots, flags, strict=True) if flag]
        for slot, count in zip(slots, counts, strict=True):
            left[slot] = max(left[slot] - count, 0)
        width = 4 * (1 + NUM_LOGPROBS)
        for index, slot in enumerate(sampled):
            parts = (output.tokens, 4), (output.logprob_ids, width), (output.logprobs, width)
            token, ids, values = (data[index * size : (index + 1) * size] for data, size in parts)
            traces[slot].append((token, ids, values))
    assert [traces[slot] for slot in range(16)] == expected


def test_block_size_does_not_change_a_bit(folder: Path) -> None:
    tokens = random_tokens(150, seed=4)
    traces = [
        run_alone(Driver(folder, block_size=size, num_blocks=4096 // size), tokens, [40], 4)
        for size in (1, 16, 48, 256)
    ]
    assert all(other == traces[0] for other in traces)


def test_a_prefix_hit_does_not_change_a_bit(driver: Driver) -> None:
    """A second sequence adopts the first one's blocks and starts behind them."""
    tokens = random_tokens(70, seed=5)
    run = driver.run
    first = [admit(0, tokens, [], sampling=WATCHED)]
    whole = run(plan([(0, 1, 70, 1)], first, [(0, block) for block in range(5)]))
    hit = [admit(1, tokens, [0, 1, 2, 3], length=64, sampling=WATCHED)]
    rest = run(plan([(1, 1, 6, 1)], hit, [(1, 9)]))
    assert trace(rest) == trace(whole)


def test_a_seeded_sample_does_not_depend_on_its_company(driver: Driver) -> None:
    tokens = random_tokens(40, seed=6)
    params = SlotSampling(temperature=0.9, top_p=0.95, top_k=50, seed=1234)
    driver.admit(0, tokens, params)
    alone = [driver.prefill(0, 40, 40), *(unpack_int32(driver.step(Row(0, 1)).tokens)[0] for _ in range(8))]
    driver.retire(0)
    driver.admit(5, tokens, params)
    driver.admit(3, random_tokens(90, seed=7), SlotSampling(temperature=1.5, seed=9))
    first = driver.step(Row(3, 90), Row(5, 40))
    together = [unpack_int32(first.tokens)[1]]
    together += [unpack_int32(driver.step(Row(3, 1), Row(5, 1)).tokens)[1] for _ in range(8)]
    assert together == alone


def test_what_an_earlier_owner_left_in_a_block_has_no_effect(driver: Driver) -> None:
    tokens = random_tokens(20, seed=8)
    expected = run_alone(driver, tokens, [20], 3)
    model: Any = driver.runner._model
    with torch.inference_mode():
        model._cache._store.fill_(float("nan"))
    assert run_alone(driver, tokens, [20], 3) == expected


def test_a_row_waiting_for_its_mask_is_sampled_from_it(driver: Driver) -> None:
    tokens = random_tokens(10, seed=9)
    driver.admit(0, tokens)
    driver.admit(1, tokens)
    words = [0] * -(-TINY.vocab // 32)
    words[77 // 32] |= 1 << 77 % 32
    masks = MaskBatch(epoch=1, step_id=1, rank=0, slots=pack_int32([1]), bits=pack_int32(words))
    both = int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)
    output = driver.step(Row(0, 10), Row(1, 10, both), masks=masks)
    free = int(TINY.logits(tokens)[-1].argmax())
    assert list(unpack_int32(output.tokens)) == [free, 77]


def test_result_rows_come_in_the_order_of_the_plan(driver: Driver) -> None:
    driver.admit(2, random_tokens(9, seed=1))
    driver.admit(7, random_tokens(9, seed=2))
    output = driver.step(Row(7, 4, 0), Row(2, 9))
    slots, _, lengths, num_tokens = split_columns(output.rows, 4)
    assert (list(slots), list(lengths), list(num_tokens)) == ([7, 2], [4, 9], [0, 1])


def test_an_empty_plan_is_legal(driver: Driver) -> None:
    assert driver.step() == StepOutput(b"", b"")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (plan([(0, 2, 1, 1)]), "generation"),
        (plan([(3, 1, 1, 1)]), "generation"),
        (plan([(16, 1, 1, 1)]), "slot 16"),
        (plan([(0, 1, 9, 1)]), "known tokens"),
        (plan([(0, 1, 7, 1)]), "sampled before its last known token; known tokens: 8"),
        (plan([(0, 1, 1, 2)]), "mask"),
        (plan([(0, 1, 4096, 1)]), "positions"),
        (plan([(1, 1, 5, 1)]), "blocks"),
        (plan(appends=[(0, 256)]), "block 256"),
        (plan(appends=[(5, 0)]), "empty"),
        (plan(appends=[(0, block) for block in range(40)]), "full"),
        (plan(retired=[99]), "slot 99"),
        (plan(admits=[admit(0, [1], [])]), "not retired"),
        (plan(admits=[admit(16, [1], [])]), "slot 16"),
        (plan(admits=[admit(4, [TINY.vocab], [])]), "token 199"),
        (plan(admits=[admit(4, [1], [256])]), "block 256"),
        (plan(admits=[admit(4, [1] * 600, [])]), "600 tokens"),
        (plan(admits=[admit(4, [1] * 40, [1], length=20)]), "1 blocks"),
    ],
)
def test_a_contradictory_plan_is_refused_by_name(driver: Driver, bad: object, words: str) -> None:
    start = plan(admits=[admit(0, [1] * 8, [0]), admit(1, [1] * 8, [])])
    driver.run(start)
    with pytest.raises(ProtocolError, match=words):
        driver.run(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slots", "bits", "words"),
    [([1], b"\xff" * 28, "slots"), ([0], b"\xff" * 24, "28 bytes"), ([0], b"\0" * 28, "allows no token")],
)
def test_a_wrong_mask_is_refused(driver: Driver, slots: list[int], bits: bytes, words: str) -> None:
    driver.admit(0, [1, 2, 3])
    masks = MaskBatch(epoch=1, step_id=1, rank=0, slots=pack_int32(slots), bits=bits)
    with pytest.raises(ProtocolError, match=words):
        driver.step(Row(0, 3, int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)), masks=masks)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError("a big one"),
    ],
)
def test_a_step_that_runs_out_of_memory_is_a_fault(
    driver: Driver, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.runner._model, "forward", _raiser(error))
    driver.admit(0, [1, 2, 3])
    with pytest.raises(WorkerFault, match=re.escape(str(error))) as caught:
        driver.step(Row(0, 3))
    assert caught.value.code == "out_of_memory"


def test_another_error_of_a_step_stays_what_it_is(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.runner._model, "forward", _raiser(RuntimeError("sizes do not match")))
    driver.admit(0, [1, 2, 3])
    with pytest.raises(RuntimeError, match="sizes do not match"):
        driver.step(Row(0, 3))


@pytest.mark.parametrize(
    "sampling", [SlotSampling(), SlotSampling(temperature=0.7, top_p=0.9, top_k=9, num_logprobs=3)]
)
def test_logits_that_are_no_numbers_are_a_fault_and_never_a_token(
    driver: Driver, sampling: SlotSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = driver.runner._model
    logits = model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = logits(hidden)
        values[1, 5] = torch.nan
        return values

    monkeypatch.setattr(model, "logits", broken)
    driver.admit(3, [1, 2, 3])
    driver.admit(6, [1, 2, 3], sampling)
    with pytest.raises(WorkerFault, match="step 1: the logits of slot 6 are NaN"):
        driver.step(Row(3, 3), Row(6, 3))


def _raiser(error: Exception) -> Callable[..., NoReturn]:
    def raise_it(*arguments: object) -> NoReturn:
        raise error

    return raise_it


def test_memory_without_room_for_a_block_is_a_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots come first; what is left must hold a block."""
    config = msgspec.structs.replace(DEFAULTS, model=str(folder), num_blocks=0)
    per_slot = slot_bytes(TINY.max_len, config.block_size)
    num_slots_bytes = config.num_slots * per_slot
    block_bytes = Driver(folder).ready.block_bytes
    monkeypatch.setattr(capacity, "free_bytes", lambda device: num_slots_bytes + block_bytes)
    assert ModelRunner(config).load(lambda done, total: None).num_blocks == 1
    slots = f"max_num_seqs {config.num_slots} with max_model_len {TINY.max_len} takes {num_slots_bytes} bytes"
    for free, words in (
        (num_slots_bytes + block_bytes - 1, f"slots, {block_bytes - 1} bytes, holds no block of {block_bytes} bytes"),
        (num_slots_bytes - 1, f"{slots}, {per_slot} for each sequence, and {num_slots_bytes - 1} are free"),
    ):
        monkeypatch.setattr(capacity, "free_bytes", lambda device, free=free: free)
        with pytest.raises(WorkerFault, match=words) as caught:
            ModelRunner(config).load(lambda done, total: None)
        assert caught.value.code == "out_of_memory"


@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_short_sequences_have_block_tables_that_a_warm_up_stays_within(folder: Path, block_size: int) -> None:
    driver = Driver(folder, max_model_len=20, block_size=block_size, num_blocks=64)
    assert driver.runner._slots.tables.shape[1] * block_size >= 64  # the widest tile of the GPU's attention
    assert (
        driver.ready.slot_bytes
        == sum(state[0].nbytes for state in (driver.runner._slots.tokens, driver.runner._slots.tables))
        + driver.runner._slots.lengths.itemsize
    )


def test_ready_tells_what_fits(folder: Path) -> None:
    driver = Driver(folder, num_blocks=0, kv_cache_bytes=1 << 20, max_model_len=128)
    ready = driver.ready
    assert ready.block_bytes == 2 * 2 * 2 * 8 * 4 * 16
    assert (ready.num_blocks, ready.vocab_size, ready.max_model_len) == ((1 << 20) // ready.block_bytes, 199, 128)
    assert driver.reports[-1][0] == driver.reports[-1][1] > 0
    assert Driver(folder, num_blocks=0).ready.num_blocks == 16 * 512 // 16


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"max_model_len": 513}, "unsupported_model"),
        ({"accelerator": "abacus"}, "unsupported_model"),
        ({"num_blocks": 0, "kv_cache_bytes": 8}, "out_of_memory"),
        ({"model": "/nowhere/at/all"}, "model_file"),
    ],
)
def test_what_cannot_be_loaded_is_a_fault(folder: Path, changes: dict[str, object], code: str) -> None:
    config = msgspec.structs.replace(DEFAULTS, **({"model": str(folder)} | changes))
    with pytest.raises(WorkerFault) as caught:
        ModelRunner(config).load(lambda done, total: None)
    assert caught.value.code == code


def test_without_batch_invariance_the_tokens_are_right(folder: Path) -> None:
    tokens = random_tokens(33, seed=10)
    expected = int(TINY.logits(tokens)[-1].argmax())
    assert Driver(folder, batch_invariant=False).generate(0, tokens, 1) == [expected]
