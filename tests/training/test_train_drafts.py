"""The training of draft stages: their model against the one that is served, and a few steps of each command."""

from __future__ import annotations

import asyncio
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary
from doubles.deepseek_sequences import PLAIN, Sequences
from examples.train_nano.blocks import choose_blocks
from examples.train_nano.calls import Plan, Progress, run
from examples.train_nano.chat import UNLEARNT
from examples.train_nano.continue_text import continue_text, document
from examples.train_nano.corpus import read_answers
from examples.train_nano.drafts import DraftModel, Target
from examples.train_nano.export import export
from examples.train_nano.figures import Figures
from examples.train_nano.layers import Switches
from examples.train_nano.model import Model
from examples.train_nano.packed import Packer
from examples.train_nano.parameters import draft_parameters, initial, parameters
from examples.train_nano.tensor_parts import read_parts, write_parts
from examples.train_nano.train_drafts import DraftTrainer
from examples.train_nano.write_text import line, prompts, write_text
from training.nano import CPU, OFF, ON, VOCAB_SIZE, prepared, random_weights, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"), has_drafts=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Weights that nobody trained."""
    folder = tmp_path_factory.mktemp("base")
    figures = Figures.of_file(data / "config.json")
    write_parts(folder, "model", initial(figures, 1, CPU))
    return folder


def test_blocks_ask_for_what_the_text_says_and_see_their_own_document(tmp_path: Path) -> None:
    figures = Figures.of(tiny_config(tmp_path, has_drafts=True))
    assert figures.drafts is not None
    rows = torch.randint(3, VOCAB_SIZE - 20, (2, 96), generator=torch.Generator().manual_seed(3))
    rows[:, [0, 40]] = figures.bos + UNLEARNT
    rows[1, 60:] += UNLEARNT  # nothing is learnt there
    packer = Packer(figures, 96, CPU)
    is_replayed = torch.zeros_like(rows, dtype=torch.bool)
    is_replayed[0, 50] = True
    packed = packer(rows, is_replayed)
    blocks = choose_blocks(figures, packed, packer, seed=1)
    assert blocks.is_asked.any(2).all()
    for row in range(2):
        for block, before in enumerate(blocks.before[row].tolist()):
            asked = int(blocks.is_asked[row, block].sum())
            place = before[0] - 1
            assert blocks.previous[row, block].tolist() == (rows[row, before] % UNLEARNT).tolist()
            assert blocks.wanted[row, block, :asked].tolist() == rows[row, place + 2 : place + 2 + asked].tolist()
            end = 40 if place < 40 else 96 if row == 0 else 60
            assert asked == min(figures.drafts.block_size, end - place - 2)
            start = 0 if place < 40 else 50 if row == 0 and place >= 50 else 40
            seen = blocks.context[row, block].nonzero()[:, 0].tolist()
            assert seen == list(range(max(start, place - figures.window + 1), place + 1))


@pytest.mark.parametrize("seed", range(2))
def test_the_trained_stages_are_the_served_ones(tmp_path: Path, seed: int) -> None:
    figures = Figures.of(tiny_config(tmp_path, has_drafts=True))
    assert figures.drafts is not None
    found = draft_parameters(figures)
    base, stages = random_weights(figures, seed), random_weights(figures, seed, found)
    stages["mtp.2.confidence_head.proj.weight"] *= 128.0  # all the same otherwise
    export(base | stages, tmp_path, tmp_path / "out")
    ids = torch.randint(3, VOCAB_SIZE - 20, (160,), generator=torch.Generator().manual_seed(seed))
    ids[[0, 24]] = figures.bos
    compressed = torch.from_numpy(compressed_vocabulary(tmp_path / "tokenizer.json", VOCAB_SIZE))
    packer = Packer(figures, 160, CPU)
    packed = packer(ids[None])
    switches = Switches(OFF, ON)
    passed = Model(figures, compressed, torch.float32)(base, packed, switches, figures.drafts.target_layers)
    assert passed.taps is not None
    target = Target(passed.taps, passed.hidden, base["embed.weight"], base["head.weight"])
    model = DraftModel(figures, torch.float32)
    blocks = choose_blocks(figures, packed, packer, seed)
    hidden, _ = model.hidden(stages, target, packed, blocks, switches)
    sequences = Sequences(tmp_path / "out", PLAIN._replace(num_drafts=-1))
    try:
        for block in range(6):
            anchor = int(blocks.before[0, block, 0])
            start = 24 if anchor > 24 else 0
            sequences.full(0, ids[start:anchor].tolist())
            served = sequences.draft((0, int(ids[anchor])))[0]
            previous = torch.cat((ids[anchor : anchor + 1], served.tokens[:-1]))
            ours = model.guesses(stages, target, hidden[:, block : block + 1], previous[None, None])
            torch.testing.assert_close(ours.logits[0, 0], served.logits, rtol=0, atol=1e-4)
            confidences = ours.confidences[0, 0].sigmoid()
            torch.testing.assert_close(confidences, served.confidences, rtol=0, atol=1e-4)
            assert confidences.std() > 1e-3
    finally:
        sequences.close()


def test_training_goes_on_where_it_stopped_and_teaches_what_the_target_says(
    tmp_path: Path, data: Path, base: Path
) -> None:
    plan = Plan(0.0, steps=12, peak=4e-3)
    whole = DraftTrainer(data, base, CPU, 256, compiles=False)
    before = whole.held_out()["loss"]
    for step in range(2):
        whole.step(Progress(step), plan)
    for _ in range(2):  # a call makes at least one step
        trainer = DraftTrainer(data, base, CPU, 256, compiles=False)
        run(trainer, plan, tmp_path / "state", tmp_path / "out", 0.0)
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in trainer.weights.items())
    assert run(trainer, plan, tmp_path / "state", tmp_path / "out", float("inf")).step == 12
    after = trainer.held_out()
    assert after["loss"] < before
    assert len(after["greedy"]) == 5 and 1.0 <= after["committed_greedy"] <= 6.0
    kept = read_parts(tmp_path / "out", "drafts")
    assert kept.keys() == trainer.weights.keys()

    export(read_parts(base, "model") | kept, data, tmp_path / "served")
    with_drafts, drafts = asyncio.run(greedy(tmp_path / "served"))
    assert drafts > 0
    export(read_parts(base, "model"), data, tmp_path / "plain")
    assert asyncio.run(greedy(tmp_path / "plain")) == (with_drafts, 0)


async def greedy(folder: Path) -> tuple[list[int], int]:
    """Tokens, and how many drafts were verified for them."""
    async with Engine(folder) as engine:
        (done,) = await engine.generate_many([[0, 9, 8, 7]], SamplingParams(temperature=0, max_tokens=12))
        return done.token_ids, engine.stats().core.drafts.num_verified


def test_the_models_own_words_are_rows_to_go_on_with(tmp_path: Path, data: Path, base: Path) -> None:
    figures = Figures.of_file(data / "config.json")
    export(read_parts(base, "model"), data, tmp_path / "served")
    out = tmp_path / "own"
    continue_text(tmp_path / "served", data, out, 2, 6, 8)
    first, second = (np.load(out / f"own_64_0{part}.npy") for part in range(2))
    learnt = first[(first < UNLEARNT)]
    assert 6 <= len(learnt) <= 6 * 9
    assert ((first % UNLEARNT) < VOCAB_SIZE).all()
    (out / "own_64_00.npy").unlink()
    continue_text(tmp_path / "served", data, out, 2, 6, 8)
    assert np.array_equal(np.load(out / "own_64_00.npy"), first)
    assert not np.array_equal(first, second)

    start = tmp_path / "start"
    write_parts(start, "drafts", initial(figures, 2, CPU, draft_parameters(figures)))
    trainer = DraftTrainer(data, base, CPU, 256, compiles=False, start=start, own=out)
    run(trainer, Plan(0.0, steps=2, peak=1e-3), tmp_path / "state", tmp_path / "out", float("inf"))
    assert read_parts(tmp_path / "out", "drafts").keys() == trainer.weights.keys()


def test_of_a_continuation_only_the_answer_is_to_be_learnt() -> None:
    prompt = [UNLEARNT, 5, 6 + UNLEARNT]
    unlearnt = [UNLEARNT, 5 + UNLEARNT, 6 + UNLEARNT]
    assert document(prompt, [7, 8], 1, ends=True) == [*unlearnt, 7, 8, 1]
    assert document(prompt, [7, 1], 1, ends=True) == [*unlearnt, 7, 1]
    assert document(prompt, [7, 8], 1, ends=False) == [*unlearnt, 7, 8]


def test_more_text_is_written_for_the_corpus(tmp_path: Path, data: Path, base: Path) -> None:
    export(read_parts(base, "model"), data, tmp_path / "served")
    write_text(tmp_path / "served", tmp_path / "text", 1, 4, 6)
    path = tmp_path / "text" / "text_00.jsonl.xz"
    before = path.stat().st_mtime_ns
    write_text(tmp_path / "served", tmp_path / "text", 1, 4, 6)
    assert path.stat().st_mtime_ns == before
    with lzma.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(f"{line(prompt, 'Yes. And', is_cut=True)}\n" for prompt in prompts(0, 4))
    answers = read_answers([path], 1)
    assert sorted(answer.prompt for answer in answers) == sorted(prompts(0, 4))
    assert all(answer.text == "Yes." and answer.is_cut for answer in answers)


def test_an_answer_that_was_cut_ends_behind_a_sentence() -> None:
    assert json.loads(line("p", ' "One." Two', is_cut=True) or "") == {"p": "p", "a": '"One."', "cut": 1}
    assert json.loads(line("p", "One. Two", is_cut=False) or "") == {"p": "p", "a": "One. Two"}
    assert line("p", "One, two", is_cut=True) is None
    assert prompts(3, 20) == prompts(3, 20) != prompts(4, 20)


def test_a_model_without_stages_is_exported_as_one(data: Path, base: Path, tmp_path: Path) -> None:
    export(read_parts(base, "model"), data, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["text_config"]
    assert text["num_nextn_predict_layers"] == 0 and len(text["compress_ratios"]) == text["num_hidden_layers"]
    figures = Figures.of_file(tmp_path / "config.json")
    assert parameters(figures).keys() == read_parts(base, "model").keys()
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0"):
        draft_parameters(figures)
