"""The training of V4.1-Nano: its model against the one that is served, its formats, and a few steps of each command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest
import torch
from torch import Tensor

from deepinfer_kernels import fake_index_row, fake_main_row, fake_quantize_activation
from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary
from doubles.deepseek_probe import Probe
from examples.train_nano.calls import Plan, Progress, run
from examples.train_nano.chat import UNLEARNT, TextEncoder, Turn
from examples.train_nano.evaluate import served, trained_loss
from examples.train_nano.export import export, released
from examples.train_nano.figures import Figures
from examples.train_nano.held_out import held_out
from examples.train_nano.layers import Switches
from examples.train_nano.model import Model
from examples.train_nano.packed import Packer
from examples.train_nano.rounding import fp8_rows, index_rows, main_rows
from examples.train_nano.tensor_parts import read_parts
from examples.train_nano.train import Trainer
from training.nano import CPU, OFF, ON, VOCAB_SIZE, prepared, random_weights, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(2))
def test_the_trained_model_is_the_served_one(tmp_path: Path, seed: int) -> None:
    """Two documents in a row, of which the second is longer than what selection and candidates leave out."""
    config = tiny_config(tmp_path)
    figures = Figures.of(config)
    weights = random_weights(figures, seed)
    export(weights, tmp_path, tmp_path / "out")
    ids = torch.randint(3, VOCAB_SIZE - 20, (160,), generator=torch.Generator().manual_seed(seed))
    ids[[0, 24]] = figures.bos
    compressed = torch.from_numpy(compressed_vocabulary(tmp_path / "tokenizer.json", VOCAB_SIZE))
    packed = Packer(figures, 1024, CPU)(ids[None])
    logits = Model(figures, compressed, torch.float32).logits(weights, packed, Switches(OFF, ON))[0]
    probe = Probe(tmp_path / "out")
    try:
        for part in (slice(0, 24), slice(24, 160)):
            served, _ = probe.run(ids[part].tolist())
            torch.testing.assert_close(logits[part], served, rtol=0, atol=1e-4)
    finally:
        probe.close()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(fp8_rows, fake_quantize_activation), (main_rows, fake_main_row), (index_rows, fake_index_row)]
)
def test_rounding_is_that_of_the_kernels(ours: Any, theirs: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.randn(512, 1, generator=generator).mul(8).exp2()
    x = torch.randn(512, 64, generator=generator) * scale
    x[0] = 0.0
    x[1, ::2] = torch.tensor([448.0, 6.0]).repeat(16)
    x[2] = torch.arange(64) / 4  # ties
    torch.testing.assert_close(ours(x, ON), theirs(x), rtol=0, atol=0)
    assert torch.equal(ours(x, OFF), x)


def test_rounding_passes_gradients() -> None:
    x: Tensor = torch.randn(4, 32, requires_grad=True)
    main_rows(x, ON).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


# The commands


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def test_training_goes_on_where_it_stopped_and_ends_in_a_model_that_can_be_served(tmp_path: Path, data: Path) -> None:
    plan = Plan(0.0, steps=10, peak=4e-3)
    whole = Trainer(data, CPU, 128, compiles=False)
    for step in range(2):
        whole.step(Progress(step), plan)
    for _ in range(2):  # a call makes at least one step
        trainer = Trainer(data, CPU, 128, compiles=False)
        run(trainer, plan, tmp_path / "state", tmp_path / "out", 0.0)
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in trainer.weights.items())
    assert run(trainer, plan, tmp_path / "state", tmp_path / "out", float("inf")).step == 10
    log = (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert 5 < json.loads(log[0])["loss"] < 8
    kept = read_parts(tmp_path / "out", "model")
    with trainer.as_stored(True):
        for (name, saved), (_, trained) in zip(
            released(trainer.figures, kept), released(trainer.figures, trainer.weights), strict=True
        ):
            assert torch.equal(saved.view(torch.uint8), trained.view(torch.uint8)), name
    export(kept, data, tmp_path / "served")
    documents = held_out(data, 4)
    report = asyncio.run(served(tmp_path / "served", documents, ["Say cat."], 4))
    assert report["served_loss"] == pytest.approx(trained_loss(data, kept, documents), abs=0.05)
    assert len(report["samples"]) == 1


def test_conversations_are_written_as_they_are_asked(data: Path) -> None:
    encoder = TextEncoder(data / "tokenizer.json")
    texts = ["Be <｜User｜> kind.", "A cat?", "the  cat\n", "And\n\n a dog?", "dog.", "More?"]
    system, first, answer, second, reply, third = encoder.encode(texts)
    turns = [Turn(first, answer, False), Turn(second, reply, True), Turn(third, [], False)]
    rendered = encoder.chat.render(turns, system)
    names = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(names, texts, strict=True)]
    body = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
    options = deepseek_recipe.ConversionOptions(default_thinking_mode=False)
    conversation = deepseek_recipe.ChatCompletionRequest(body).convert(options).conversation
    tokenizer = deepseek_recipe.Tokenizer.from_file(str(data / "tokenizer.json"))
    asked = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer).encode(conversation)
    assert [token % UNLEARNT for token in rendered[:-1]] == asked
    learnt = [token for token in rendered if token < UNLEARNT]
    assert learnt == [*answer, encoder.chat.eos, *reply, encoder.chat.eos]
