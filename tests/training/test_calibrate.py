"""The fit of a tiny model's confidence head to its own answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_nano.blocks import choose_blocks
from examples.train_nano.calibrate import Observed, by_place, calibrate, fit, is_drafted
from examples.train_nano.chat import UNLEARNT
from examples.train_nano.continue_text import continue_text
from examples.train_nano.export import export
from examples.train_nano.figures import Figures
from examples.train_nano.packed import Packer
from examples.train_nano.parameters import Weights, draft_parameters, initial
from examples.train_nano.tensor_parts import read_parts, write_parts
from training.nano import CPU, VOCAB_SIZE, prepared, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = "mtp.2.confidence_head.proj.weight"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"), has_drafts=True)


@pytest.fixture(scope="module")
def figures(data: Path) -> Figures:
    return Figures.of_file(data / "config.json")


@pytest.fixture(scope="module")
def base(figures: Figures) -> Weights:
    return initial(figures, 1, CPU)


@pytest.fixture(scope="module")
def stages(figures: Figures) -> Weights:
    return initial(figures, 2, CPU, draft_parameters(figures))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, data: Path, base: Weights, stages: Weights) -> Path:
    """Nobody trained it."""
    folder = tmp_path_factory.mktemp("served")
    export(base | stages, data, folder)
    return folder


def test_the_fit_finds_the_head_that_fates_were_drawn_from() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20_000, 6, generator=generator, dtype=torch.float64)
    head = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, 0.2], dtype=torch.float64)
    is_accepted = (torch.rand(len(inputs), generator=generator) < (inputs @ head).sigmoid()).double()
    observed = Observed(inputs, is_accepted, torch.arange(len(inputs)) % 2)
    found = fit(torch.zeros_like(head), observed)
    torch.testing.assert_close(found, head, rtol=0.05, atol=0.08)
    few = fit(torch.zeros_like(head), Observed(*(part[:5] for part in observed)))
    assert few.norm() < 0.3 * head.norm(), "too few to say much: it stays near what it was"
    for place in by_place(observed, found):
        assert place.confidence == pytest.approx(place.acceptance, abs=0.01) and place.num_drafts == 10_000


def test_the_next_block_stands_behind_what_one_brought(tmp_path: Path) -> None:
    figures = Figures.of(tiny_config(tmp_path, has_drafts=True))
    row = torch.randint(3, VOCAB_SIZE - 20, (1, 96), generator=torch.Generator().manual_seed(3))
    row[:, [0, 40]] = figures.bos
    row[:, :10] += UNLEARNT
    row[:, 40:52] += UNLEARNT
    packer = Packer(figures, 96, CPU)
    blocks = choose_blocks(figures, packer(row), packer, seed=1, places_per_block=1)
    chosen = is_drafted(blocks, torch.full((1, 96), 2))
    places = sorted((blocks.before[..., 0] - 1)[chosen].tolist())
    assert places == [*range(9, 38, 3), *range(51, 94, 3)]
    assert blocks.is_asked[..., 0][chosen].all()


def test_only_the_confidence_head_is_fitted(
    tmp_path: Path, data: Path, base: Weights, stages: Weights, served: Path
) -> None:
    write_parts(tmp_path / "base", "model", base)
    write_parts(tmp_path / "drafts", "drafts", stages)
    answers, out = tmp_path / "answers", tmp_path / "out"
    continue_text(served, data, answers, 1, 6, 16, greedy=1.0)
    calibrate(data, tmp_path / "base", tmp_path / "drafts", answers, out)
    fitted = read_parts(out, "drafts")
    assert fitted.keys() == stages.keys()
    kept = read_parts(tmp_path / "drafts", "drafts")
    assert [name for name in fitted if not torch.equal(fitted[name], kept[name])] == [HEAD]
    log = json.loads((out / "log.jsonl").read_text())
    assert log["fitted"] == sum(place["num_drafts"] for place in log["after"]) > 0

    def gap(when: str) -> float:
        return float(sum(each["num_drafts"] * abs(each["confidence"] - each["acceptance"]) for each in log[when]))

    assert gap("after") < gap("before")


def test_answers_can_all_be_greedy(tmp_path: Path, data: Path, served: Path) -> None:
    for kind, share in (("greedy", 1.0), ("again", 1.0), ("sampled", 0.0)):
        continue_text(served, data, tmp_path / kind, 1, 4, 16, greedy=share, first=3)
    greedy, again, sampled = (np.load(tmp_path / kind / "own_64_03.npy") for kind in ("greedy", "again", "sampled"))
    assert np.array_equal(greedy, again)
    assert (greedy < UNLEARNT).any() and not np.array_equal(greedy, sampled)
