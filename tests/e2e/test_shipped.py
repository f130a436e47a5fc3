"""The model that comes with the workers: whole, served like any other, and as good as its card says."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from deepinfer import Engine, SamplingParams
from deepinfer.shipped import SHIPPED, shipped_folder
from doubles.command import run_command
from doubles.program import REPO
from examples.train_nano.agreement import SHORTEST, Place, cuts, prompts
from examples.train_nano.agreement import measure as measure_agreement
from examples.train_nano.card import CARD, FIGURES, LOADS, card
from examples.train_nano.drafting import Judged, calibration
from examples.train_nano.drafting import measure as measure_drafts
from examples.train_nano.expert_loads import Routed, count_loads, read_loads, route

NAME: Final = "v41-nano"
QUESTIONS: Final = (
    "Why do people like music?",
    "Write one sentence about the sea.",
    "Tell me something interesting about the moon.",
    "What happens in the garden in the morning?",
)
MOST_BYTES: Final = 32 << 20
"""Of a checkout: it is copied about."""


def folder() -> Path:
    found = shipped_folder(SHIPPED[0])
    assert found is not None and found.name == NAME
    return found


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder() / FIGURES).read_text(encoding="utf-8"))
    return found


async def answers(**settings: Any) -> tuple[list[str], list[list[int]], Counter[str], float]:
    """Greedy texts and tokens, how they ended, and the tokens that a forward committed."""
    async with Engine(NAME, **settings) as engine:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        params = SamplingParams(temperature=0, max_tokens=48)
        completions = await engine.generate_many(chats, params, progress=False)
        drafts = engine.stats().core.drafts
    endings = Counter(str(completion.finish_reason) for completion in completions)
    texts = [completion.text for completion in completions]
    return texts, [completion.token_ids for completion in completions], endings, drafts.tokens_per_step


async def test_it_answers_in_english_and_drafts_change_nothing_but_the_speed(tmp_path: Path) -> None:
    texts, tokens, endings, per_step = await answers(cache_dir=str(tmp_path / "none"))
    for text in texts:
        assert re.match(r"[A-Z][a-z]+[ ,]", text) and text.isascii() and len(text.split()) > 5, text
    assert "sea" in texts[1] and "moon" in texts[2].lower() and "morning" in texts[3].lower()
    assert endings["stop"] >= 2 and per_step > 1.5
    assert not (tmp_path / "none").exists()
    _, alone, _, per_step = await answers(num_drafts=0)
    assert alone == tokens and per_step <= 1.0


async def test_it_does_not_think_unless_asked_to() -> None:
    async with Engine(NAME) as engine:
        messages = [{"role": "user", "content": "Hello <｜User｜> there"}]
        params = SamplingParams(max_tokens=1)
        plain = await engine.generate(messages=messages, params=params)
        thinking = await engine.generate(messages=messages, params=params, thinking=True)
    assert plain.prompt == "<｜begin▁of▁sentence｜><｜User｜>Hello <｜User｜> there<｜Assistant｜></think>"
    user = plain.prompt_token_ids[1]
    assert plain.prompt_token_ids.count(user) == 1, "text is never read as a special token"
    assert thinking.prompt is not None and thinking.prompt.endswith("<think>")


def test_it_is_inspected_by_its_name() -> None:
    done = run_command("inspect", NAME, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["files"], told["family"]) == (0, "match", "v4.1")
    listed = run_command("models").stdout
    assert NAME in listed and "shipped" in listed


def test_the_checkout_stays_small() -> None:
    if not (REPO / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True).stdout
    files = [REPO / name for name in listed.decode().split("\0") if name]
    assert 0 < sum(file.stat().st_size for file in files if file.is_file()) < MOST_BYTES


# The card


def test_the_card_says_what_was_measured(report: dict[str, Any]) -> None:
    config = json.loads((folder() / "config.json").read_text())["text_config"]
    text = (folder() / CARD).read_text(encoding="utf-8")
    assert text == card(report, config)
    for words in ("Apache-2.0", "SmolLM2-135M-Instruct", "wonderwords", "## Limits", f"| {config['vocab_size']},"):
        assert words in text
    (per_forward,) = re.findall(r"^\| tokens a forward, greedy .* \| ([\d.]+) \|$", text, re.M)
    assert float(per_forward) == pytest.approx(report["drafts"]["greedy"]["tokens_per_forward"], abs=0.006)


def test_the_measured_figures_hold_together(report: dict[str, Any]) -> None:
    assert report["model"]["bytes"] == sum(file.stat().st_size for file in folder().glob("*.safetensors"))
    assert report["loss"]["served"] == pytest.approx(report["loss"]["trained"], abs=0.02)
    assert report["loss"]["served"] < 1.7
    greedy = report["drafts"]["greedy"]
    assert greedy["tokens_per_forward"] == pytest.approx(1 + sum(np.cumprod(greedy["acceptance"])), abs=0.05)
    assert len(greedy["calibration"]) == report["model"]["longest_draft"] == 5
    for place in greedy["calibration"]:
        assert place["gap"] <= 0.05 and place["drafts"] >= 1000
    assert report["agreement"]["prompts"]["places"] >= 500
    assert len(report["samples"]) >= 12 and all(len(sample["text"].split()) > 3 for sample in report["samples"])


async def test_a_small_measurement_finds_the_drafts_of_the_card(report: dict[str, Any]) -> None:
    found = await measure_drafts(NAME, QUESTIONS, 24, 0.0)
    assert found["tokens_per_forward"] == pytest.approx(report["drafts"]["greedy"]["tokens_per_forward"], abs=1.0)
    first = found["calibration"][0]
    assert first["drafts"] <= found["forwards"] and first["acceptance"] == pytest.approx(
        found["acceptance"][0], abs=0.1
    )


def test_calibration_tells_a_gap_and_an_error_that_cancels() -> None:
    honest = [Judged(0, 0.25, index % 4 == 0) for index in range(8)]
    opposite = [Judged(1, confidence, confidence < 0.5) for confidence in (0.05, 0.95)]
    first, second = calibration(honest + opposite)
    assert (first["gap"], first["ece"]) == (0.0, 0.0)
    assert second["gap"] == pytest.approx(0.0) and second["ece"] == pytest.approx(0.95)


# Truncation


async def test_agreement_is_counted_place_by_place() -> None:
    end = 7
    talk = [0, *[100 + index % 50 for index in range(400)]]
    talk[320] = end
    assert prompts([talk], end, 5) == [Place(0, 321)]
    others = cuts([talk], end, 3)
    assert len(others) == 3 and all(SHORTEST <= place.length < 401 and place.length != 321 for place in others)
    found = await measure_agreement(NAME, [talk], {"all": [Place(0, 321)], "none": []}, keep_tokens=400)
    assert (found["all"]["places"], found["all"]["share"]) == (1, 1.0), "nothing is left out"
    assert found["none"]["places"] == 0


# The trace of the experts


def test_the_trace_counts_every_choice(report: dict[str, Any]) -> None:
    loads = read_loads(folder() / LOADS)
    config = json.loads((folder() / "config.json").read_text())["text_config"]
    num_steps, num_layers, num_experts = loads.shape
    assert num_steps >= 100
    assert (num_layers, num_experts) == (config["num_hidden_layers"], config["n_routed_experts"])
    per_layer = loads.sum(2)
    assert (per_layer == per_layer[0, 0]).all() and per_layer[0, 0] % config["num_experts_per_tok"] == 0
    assert loads.std(0).min() > 0 and (folder() / LOADS).stat().st_size < 200_000


def test_a_trace_is_of_the_gates_own_choices() -> None:
    before = torch.get_num_threads()
    routed = route(folder(), [list(range(3, 35)), list(range(40, 56))])
    torch.set_num_threads(before)
    assert routed.choices.shape == (48, 12, 3) and routed.num_experts == 16
    assert all(len(set(row.tolist())) == 3 for row in routed.choices.reshape(-1, 3))
    loads = count_loads(routed, 16)
    assert loads.shape == (3, 12, 16) and (loads.sum(2) == 48).all()
    some = Routed(np.array([[[0, 1]], [[1, 2]], [[3, 0]]]), 4)
    assert count_loads(some, 2).tolist() == [[[1, 2, 1, 0]]]
