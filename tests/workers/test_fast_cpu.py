"""The fast arithmetic of the CPU: close to float32 on real text, and the same bits in any company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.quality_gate import MAX_DELTA_NLL, MAX_KL, MIN_TOP1, measure_quality
from deepinfer_protocol import RowFlag, SlotSampling
from doubles.driver import Driver, Row
from doubles.smollm2 import build_tokenizer, model_path
from doubles.tiny_llama import TinyLlama

TEXT = Path(__file__).resolve().parents[1] / "data/english.txt"
WATCHED = SlotSampling(num_logprobs=3)
ROW_BYTES = 4 * 4
"""Of a row's log probabilities: its token's and the three best."""
NUM_SEQUENCES = 64
NUM_STEPS = 3
TINY = TinyLlama()


@pytest.mark.model
def test_the_fast_path_is_close_to_float32_on_real_text() -> None:
    path = model_path()
    quality = measure_quality(path, build_tokenizer(path).encode(TEXT.read_text()).ids, "fast")
    assert quality.num_tokens >= 1000, quality
    assert quality.mean_kl <= MAX_KL and quality.delta_nll <= MAX_DELTA_NLL, quality
    assert quality.top1_agreement >= MIN_TOP1, quality
    # What falls back to float32 says so; what does not is not float32.
    assert (quality.mean_kl > 0) == quality.arithmetic.startswith("fast"), quality


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = TINY.write(tmp_path_factory.mktemp("tiny"))
    return Driver(folder, dtype="fast", num_slots=NUM_SEQUENCES, num_blocks=1024, max_batch_positions=8192)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    chance = random.Random(0)
    return [chance.choices(range(TINY.vocab), k=chance.randrange(1, 90)) for _ in range(NUM_SEQUENCES)]


def run_together(driver: Driver, texts: list[list[int]], chunk: int) -> list[list[bytes]]:
    """For each text the log probabilities, to the bit, of what follows its prompt and of the next steps."""
    for slot, text in enumerate(texts):
        driver.admit(slot, text, WATCHED)
    traces: list[list[bytes]] = [[] for _ in texts]
    starts = [0] * len(texts)
    while rows := [
        Row(slot, min(chunk, len(text) - starts[slot]), 0)
        for slot, text in enumerate(texts)
        if starts[slot] < len(text)
    ]:
        for index, row in enumerate(rows):
            starts[row.slot] += row.num_positions
            if starts[row.slot] == len(texts[row.slot]):
                rows[index] = row._replace(flags=int(RowFlag.SAMPLE))
        collect(driver, rows, traces)
    for _ in range(NUM_STEPS):
        collect(driver, [Row(slot, 1) for slot in range(len(texts))], traces)
    for slot in range(len(texts)):
        driver.retire(slot)
    return traces


def collect(driver: Driver, rows: list[Row], traces: list[list[bytes]]) -> None:
    logprobs = driver.step(*rows).logprobs
    for index, row in enumerate(row for row in rows if row.flags):
        traces[row.slot].append(logprobs[ROW_BYTES * index : ROW_BYTES * (index + 1)])


@pytest.fixture(scope="module")
def alone(driver: Driver, texts: list[list[int]]) -> list[list[bytes]]:
    return [run_together(driver, [text], 4096)[0] for text in texts]


@pytest.mark.parametrize(
    ("num_together", "chunk"), [(1, 7), (2, 4096), (7, 16), (16, 1), (17, 64), (64, 4096), (64, 5)]
)
def test_company_and_chunks_do_not_change_a_bit(
    driver: Driver, texts: list[list[int]], alone: list[list[bytes]], num_together: int, chunk: int
) -> None:
    order = random.Random(num_together).sample(range(NUM_SEQUENCES), NUM_SEQUENCES)
    for start in range(0, NUM_SEQUENCES, num_together):
        part = order[start : start + num_together]
        found = run_together(driver, [texts[index] for index in part], chunk)
        for index, trace in zip(part, found, strict=True):
            assert len(trace) == 1 + NUM_STEPS
            assert trace == alone[index], f"{index=} {num_together=} {chunk=}"


def test_steps_are_not_padded(driver: Driver) -> None:
    """One row is one row of work: the linear operations take any height."""
    assert driver.ready.device.startswith("CPU") and "row-invariant" in driver.ready.device
    if "fast" in driver.ready.device:
        assert driver.runner._limits.row_multiple == 1
