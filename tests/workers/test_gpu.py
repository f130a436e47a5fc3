"""The runner on a GPU: the CPU's tokens, with and without graphs, and no wait inside a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_protocol import (
    LogitShaping,
    MaskBatch,
    RowFlag,
    SlotSampling,
    pack_float32,
    pack_int32,
    split_columns,
    unpack_float32,
    unpack_int32,
)
from deepinfer_workers.runner import StepOutput
from doubles.drafter import drafting
from doubles.driver import Driver, Row, admit, no_masks, plan
from doubles.tiny_llama import TinyLlama
from doubles.waiting import no_waits

pytestmark = pytest.mark.gpu

TINY = TinyLlama(num_layers=3, hidden=96, num_heads=6, num_kv_heads=2, head_dim=16)
PROMPTS = [(np.random.default_rng(seed).integers(0, TINY.vocab, 1 + 37 * seed % 150)).tolist() for seed in range(12)]
NUM_TOKENS = 24
SHAPED = LogitShaping(
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    bias_ids=pack_int32([1, 9]),
    bias_values=pack_float32([2.0, -float("inf")]),
    bad_words=pack_int32([2, 5, 6, 1, 7]),
)
WATCHED = SlotSampling(num_logprobs=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("tiny"))


def gpu(folder: Path, **changes: Any) -> Driver:
    return Driver(folder, accelerator="nvidia", **{"dtype": "float32"} | changes)


def one_token(token: int) -> SlotSampling:
    """Whose log probability is asked for, whatever the model prefers."""
    bits = bytearray(4 * -(-TINY.vocab // 32))
    bits[token // 8] |= 1 << token % 8
    return SlotSampling(num_logprobs=0, shaping=LogitShaping(allowed_bits=bytes(bits)))


def run_together(driver: Driver, sampling: SlotSampling) -> tuple[list[list[int]], bytes]:
    """Prompts that join one after another; tokens by prompt, and all log probabilities."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    logprobs = b""
    for step in range(len(PROMPTS) + NUM_TOKENS):
        rows = [Row(slot, 1) for slot in range(min(step, len(PROMPTS)))]
        if step < len(PROMPTS):
            driver.admit(step, PROMPTS[step], sampling)
            rows.append(Row(step, len(PROMPTS[step])))
        output = driver.step(*rows)
        for row, token in zip(rows, unpack_int32(output.tokens), strict=True):
            tokens[row.slot].append(token)
        logprobs += output.logprobs
    return [row[:NUM_TOKENS] for row in tokens], logprobs


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "seed": 3},
        {"temperature": 0.8, "min_p": 0.05, "top_p": 0.95, "seed": 5, "shaping": SHAPED},
    ],
)
def test_the_tokens_are_those_of_the_cpu(folder: Path, params: dict[str, Any]) -> None:
    cpu, device = Driver(folder), gpu(folder)
    for prompt in PROMPTS:
        expected = cpu.generate(0, prompt, NUM_TOKENS, **params)
        assert device.generate(0, prompt, NUM_TOKENS, **params) == expected
        assert device.generate(3, prompt, NUM_TOKENS, chunk=40, **params) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit(folder: Path, dtype: str) -> None:
    with_graphs, without = gpu(folder, dtype=dtype), gpu(folder, dtype=dtype, cuda_graphs=False)
    assert "no graphs" not in with_graphs.ready.device
    assert "no graphs" in without.ready.device
    assert run_together(with_graphs, WATCHED) == run_together(without, WATCHED)


def test_bfloat16_is_near_float32(folder: Path) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        driver = gpu(folder, dtype=dtype)
        for slot, prompt in enumerate(PROMPTS):
            driver.admit(slot, prompt, one_token(slot))
        output = driver.step(*(Row(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)))
        found[dtype] = np.frombuffer(output.logprobs, "<f4")
    assert np.abs(found["bfloat16"] - found["float32"]).mean() < 0.15


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_launch_waits_for_nothing(folder: Path, cuda_graphs: bool) -> None:
    """Prompts, decoding, chunks, mixed sampling, log probabilities, masks: queued, and collected afterwards."""
    driver = gpu(folder, cuda_graphs=cuda_graphs)
    samplings = [
        SlotSampling(), SlotSampling(temperature=0.7, seed=1), SlotSampling(temperature=1.0, top_p=0.8, seed=2),
        SlotSampling(temperature=1.0, top_k=9, seed=3, num_logprobs=4),
        SlotSampling(min_length=200, stop_ids=pack_int32([3, 4])),
        SlotSampling(temperature=1.0, min_p=0.1, seed=4, num_prompt=70, num_prompt_logprobs=2, shaping=SHAPED),
    ]  # fmt: skip
    admits = [
        admit(slot, [5 + slot] * 70, range(8 * slot, 8 * slot + 8), sampling=sampling)
        for slot, sampling in enumerate(samplings)
    ]
    waits = int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)
    words = -(-TINY.vocab // 32)
    masks = MaskBatch(epoch=1, step_id=1, rank=0, slots=pack_int32([0]), bits=b"\x0f" * 4 * words)
    plans = [
        plan([(slot, 1, 30, 0) for slot in range(6)], admits),
        plan([(slot, 1, 40, 1) for slot in range(6)]),
        plan([(slot, 1, 1, 1) for slot in range(6)]),
        plan([(0, 1, 1, waits), (1, 1, 1, 1)]),
        plan(retired=list(range(6))),
    ]
    with no_waits():
        pending = [driver.runner.launch(driver.runner.build(step), lambda: masks) for step in plans]
    outputs = [step.wait() for step in pending]
    assert [len(unpack_int32(output.tokens)) for output, _ in outputs] == [0, 6, 6, 2, 0]
    assert unpack_int32(outputs[3][0].tokens)[0] % 8 < 4  # what the mask allows
    assert all(times is not None and times.device_us > 0 for _, times in outputs[:4])


def test_steps_that_are_queued_ahead_give_the_same_tokens(folder: Path) -> None:
    device = gpu(folder)
    expected = gpu(folder).generate(0, PROMPTS[5], NUM_TOKENS)
    blocks = range(-(-(len(PROMPTS[5]) + NUM_TOKENS) // 16))
    steps = [plan([(0, 1, len(PROMPTS[5]), 1)], [admit(0, PROMPTS[5], blocks)])]
    steps += [plan([(0, 1, 1, 1)])] * (NUM_TOKENS - 1)
    pending = [device.runner.launch(device.runner.build(step), no_masks) for step in steps]
    outputs: list[StepOutput] = [step.wait()[0] for step in pending]
    assert [unpack_int32(output.tokens)[0] for output in outputs] == expected


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_context_shorter_than_a_tile_is_served(folder: Path, block_size: int) -> None:
    changes = {"max_model_len": 20, "block_size": block_size}
    expected = Driver(folder, **changes).generate(0, PROMPTS[0], 12)
    assert gpu(folder, **changes).generate(0, PROMPTS[0], 12) == expected


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    TINY.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    driver = gpu(tmp_path, load_format="dummy", dtype="bfloat16")
    assert len(driver.generate(0, PROMPTS[2], 5)) == 5


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7}])
@pytest.mark.parametrize("budget", [None, 7])
def test_drafts_change_no_token(folder: Path, params: dict[str, Any], budget: int | None) -> None:
    """Steps of rows that verify go by graphs as others do; times and costs are the device's."""
    plain = gpu(folder)
    expected = [plain.generate(0, prompt, NUM_TOKENS, **params) for prompt in PROMPTS]
    with drafting(5, TINY.vocab) as drafter:
        driver = gpu(folder, measure_costs=True)
    costs = driver.ready.costs
    assert costs is not None and min(*unpack_float32(costs.forward_us), *unpack_float32(costs.draft_us)) > 0
    found: list[list[int]] = [[] for _ in PROMPTS]
    rows = [Row(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)]
    for slot, prompt in enumerate(PROMPTS):
        drafter.scripts[slot] = prompt + expected[slot]
        driver.admit(slot, prompt, SlotSampling(**params))
    num_steps = 0
    while min(map(len, found)) < NUM_TOKENS:
        output = driver.step(*rows, verify_budget=budget, num_drafts=5)
        assert output.draft_us > 0
        tokens = iter(unpack_int32(output.tokens))
        for row, count in zip(rows, split_columns(output.rows, 4)[3], strict=True):
            found[row.slot] += [next(tokens) for _ in range(count)]
        rows = [Row(slot, 1, most_drafts=5) for slot in range(len(PROMPTS))]
        num_steps += 1
    assert [tokens[:NUM_TOKENS] for tokens in found] == expected
    assert num_steps < NUM_TOKENS
