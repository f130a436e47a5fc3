"""Steps that a device lays out by itself, as a GPU goes about them, against those that the host lays out.

Without a GPU: layers run eagerly where a graph would be replayed, and what draws and judges at once is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_kernels import Ops, select_ops
from deepinfer_protocol import LogitShaping, SlotSampling, pack_int32, unpack_float32, unpack_int32
from deepinfer_workers import model_runner
from deepinfer_workers.device_layout import DeviceLayout, best_lengths
from deepinfer_workers.drafts import DraftState, _Layout
from deepinfer_workers.graphs import Shape
from deepinfer_workers.models.deepseek import engram_layers
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.runner import StepOutput
from deepinfer_workers.sampling_state import SamplingState
from doubles import draws
from doubles.deepseek_sequences import random_tokens
from doubles.driver import Driver, Row
from doubles.tiny_deepseek import tiny_v4, tiny_v41
from doubles.waiting import no_waits

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB: Final = 512
FAMILIES: Final = {"v4.1": (tiny_v41, 256, 16), "v4": (tiny_v4, 384, 128)}
LONGEST: Final = 5


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(1, 6), st.integers(0, 60))
def test_the_device_finds_the_lengths_that_sorting_finds(seed: int, num_rows: int, longest: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    sampling = SamplingState(torch.zeros(num_rows + 1, 4, dtype=torch.int32), 7)
    state = DraftState(num_rows + 1, longest, 7, sampling, torch.device("cpu"))
    survivals = torch.from_numpy((rng.integers(1, 4, (num_rows, longest)) / 4).cumprod(1)).float()  # many equals
    if seed % 3 == 0:
        survivals[rng.integers(num_rows), rng.integers(longest) :] = float("nan")
    state._survivals[:num_rows] = survivals
    slots, most = rng.permutation(num_rows), rng.integers(0, longest + 1, num_rows)
    budget = min(budget, int(most.sum()))
    known = survivals[slots].nan_to_num(nan=0.0)
    entries = [(-float(known[row, place]), place, row) for row in range(num_rows) for place in range(int(most[row]))]
    wanted = np.bincount([row for _, _, row in sorted(entries)[:budget]], minlength=num_rows)
    found = best_lengths(survivals[slots], torch.from_numpy(most), budget)
    assert found.tolist() == wanted.tolist() == state.lengths(slots, most, budget).tolist()

    layout = DeviceLayout.of(torch.from_numpy(slots), found, num_rows + budget)
    by_host = _Layout.of(wanted)
    assert layout.firsts.tolist() == by_host.firsts.tolist()
    assert layout.owners.tolist() == by_host.owners.tolist()
    assert layout.offsets.tolist() == by_host.offsets.tolist()
    assert layout.padded(longest).tolist() == by_host.padded(np.arange(num_rows), longest).tolist()
    padded = layout.positions(num_rows + budget + 3, null_slot=99)
    assert padded[0].tolist() == [*slots[by_host.owners].tolist(), 99, 99, 99]
    assert padded[1].tolist() == [*by_host.offsets.tolist(), 0, 0, 0]


class EagerGraphs:
    """In the place of a `GraphLadder`."""

    def __init__(self, forward: Callable[[Tensor, int], Tensor], most_positions: int) -> None:
        self.num_replayed = 0
        self._forward, self._most = forward, most_positions

    def find(self, num_positions: int, longest: int) -> Shape:
        return Shape(num_positions, self._most)

    def replay(self, shape: Shape, inputs: Tensor) -> Tensor:
        self.num_replayed += 1
        return self._forward(inputs, shape.most_positions)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Runners that are loaded inside have what draws at once, and all tables of the model."""

    def select(*arguments: object, **named: object) -> Ops:
        return replace(
            select_ops(*arguments, **named),  # type: ignore[arg-type]
            draw=draws.draw,
            verify=draws.verify,
            is_flat=lambda counts: bool(counts.max() <= 8),
        )

    with (
        mock.patch.object(model_runner, "select_ops", select),
        mock.patch.object(engram_layers, "fits", return_value=1),
    ):
        yield


def load(folder: Path, max_len: int, block_size: int, **more: object) -> Driver:
    return Driver(
        folder, num_threads=1, quantize_activations=False, quantize_cache=False,
        num_drafts=-1, max_model_len=max_len, block_size=block_size, **more,
    )  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def drivers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, ...]]:
    """Two of the same model: the host of one lays out its steps, the other does it as a GPU."""
    config, max_len, block_size = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("model")
    write_model(config(vocab_size=VOCAB), folder)
    by_host = load(folder, max_len, block_size)
    with like_a_gpu():
        by_device = load(folder, max_len, block_size)
    runner = by_device.runner
    runner._graphs = EagerGraphs(runner._run_flat, max_len)  # type: ignore[assignment]
    yield by_host, by_device
    by_host.close()
    by_device.close()


PLAIN: Final = [
    SlotSampling(),
    SlotSampling(temperature=0.8, seed=1),
    SlotSampling(temperature=0.8, seed=2, rejects=True),
    SlotSampling(temperature=1.2, seed=3, rejects=True),
    SlotSampling(),
]
LENGTHS: Final = (3, 60, 17, 130, 1)


def equals(found: StepOutput, wanted: StepOutput) -> None:
    assert found.rows == wanted.rows
    assert unpack_int32(found.tokens) == unpack_int32(wanted.tokens)
    assert found.num_verified == wanted.num_verified
    assert np.abs(np.frombuffer(found.survivals, np.uint8).astype(int) - list(wanted.survivals)).max(initial=0) <= 1
    if wanted.predicted:
        assert unpack_float32(found.predicted) == pytest.approx(unpack_float32(wanted.predicted), abs=1e-3)


def test_a_step_that_the_device_lays_out_says_what_the_hosts_says(drivers: tuple[Driver, ...]) -> None:
    """Rows that match and rows that reject, in one step, whose budget is for some of all drafts."""
    graphs: object = drivers[1].runner._graphs
    assert isinstance(graphs, EagerGraphs)
    for driver in drivers:
        for slot, (sampling, length) in enumerate(zip(PLAIN, LENGTHS, strict=True)):
            driver.admit(slot, random_tokens(length, length, VOCAB), sampling)
        driver.step(*(Row(slot, length) for slot, length in enumerate(LENGTHS)), num_drafts=LONGEST)
    taken = set()
    with mock.patch.object(drivers[1].runner, "_settle", side_effect=AssertionError("the host was asked")):
        for budget in (7, 1, 12, 20, 24, 3, 9, 16, 5):
            rows = [Row(slot, 1, most_drafts=LONGEST) for slot in range(len(PLAIN))]
            wanted, found = (driver.step(*rows, verify_budget=budget, num_drafts=LONGEST) for driver in drivers)
            equals(found, wanted)
            assert sum(unpack_int32(found.num_verified)) == budget
            taken |= set(unpack_int32(found.num_verified))
    assert graphs.num_replayed == 9 and len(taken) > 3
    for driver in drivers:
        for slot in range(len(PLAIN)):
            driver.retire(slot)
        driver.step()


@pytest.mark.parametrize(
    "other",
    [
        SlotSampling(temperature=0.7, seed=4, top_p=0.9),
        SlotSampling(shaping=LogitShaping(bias_ids=pack_int32([3]), bias_values=b"\0\0\x80\x3f")),
        SlotSampling(num_logprobs=2),
    ],
)
def test_what_the_device_cannot_do_alone_the_host_lays_out(drivers: tuple[Driver, ...], other: SlotSampling) -> None:
    for driver in drivers:
        for slot, sampling in enumerate((PLAIN[2], other)):
            driver.admit(slot, random_tokens(20, slot, VOCAB), sampling)
        driver.step(Row(0, 20), Row(1, 20), num_drafts=LONGEST)
    for budget in (3, 5, 8):
        rows = [Row(slot, 1, most_drafts=LONGEST) for slot in range(2)]
        wanted, found = (driver.step(*rows, verify_budget=budget, num_drafts=LONGEST) for driver in drivers)
        equals(found, wanted)
        assert found.logprobs == wanted.logprobs or other.num_logprobs >= 0
    for driver in drivers:
        for slot in range(2):
            driver.retire(slot)
        driver.step()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_that_lays_out_steps_is_not_waited_for_and_says_the_same(tmp_path: Path, family: str) -> None:
    config, max_len, block_size = FAMILIES[family]
    write_model(config(vocab_size=VOCAB), tmp_path)
    said = []
    for is_by_host in (True, False):
        driver = load(tmp_path, max_len, block_size, accelerator="nvidia", dtype="float32")
        for slot, (sampling, length) in enumerate(zip(PLAIN, LENGTHS, strict=True)):
            driver.admit(slot, random_tokens(length, length, VOCAB), sampling)
        driver.step(*(Row(slot, length) for slot, length in enumerate(LENGTHS)), num_drafts=LONGEST)
        outputs = []
        for budget in (7, 1, 12, 20, 24, 3, 9, 16, 5):
            rows = [Row(slot, 1, most_drafts=LONGEST) for slot in range(len(PLAIN))]
            with mock.patch.object(driver.runner, "_can_lay_out", return_value=False) if is_by_host else no_waits():
                outputs.append(driver.step(*rows, verify_budget=budget, num_drafts=LONGEST))
        said.append(outputs)
        driver.close()
    for found, wanted in zip(said[1], said[0], strict=True):
        equals(found, wanted)
