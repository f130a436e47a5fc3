"""Fits the confidence head of trained draft stages to what greedy decoding accepts of their drafts.

    python -m examples.train_nano.calibrate DATA BASE DRAFTS MODEL OUT [--parts N] [--answers N] [--most-tokens N]

DATA holds what `prepare` wrote, BASE the weights that `train` wrote, DRAFTS those of `train_drafts`, MODEL what
`export` made of both. OUT gets the stages with another confidence head and nothing else changed, a log of what the fit
found, and the model's own greedy answers to prompts that were trained on, which another call finds again.

The head is one linear layer: a logistic regression, and its best weights are found at once, by Newton's steps. It
observes what an engine would: behind an answer's first token the stages draft a block, the answer accepts some of it,
and the next block stands behind what it says instead. An observation is a draft behind accepted ones, and its fate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from examples.train_nano.blocks import Blocks, choose_blocks
from examples.train_nano.continue_text import continue_text
from examples.train_nano.drafts import DraftModel, Target
from examples.train_nano.figures import Figures
from examples.train_nano.layers import Switches
from examples.train_nano.model import Model
from examples.train_nano.packed import Packer
from examples.train_nano.parameters import Weights
from examples.train_nano.rows import Mixture
from examples.train_nano.tensor_parts import read_parts, write_parts

_PRIOR = 30.0
"""So many observations weigh as much as what the head was before."""
_STEPS = 12
_FIRST_PART = 50
"""Of answers: the stages may have learnt from earlier ones, and know those better than others."""


class Observed(NamedTuple):
    """Drafts whose fate was decided: all before them in their blocks were accepted."""

    inputs: Tensor
    """[N, C + rank] float64: what the head reads."""
    is_accepted: Tensor
    """[N] float64"""
    place: Tensor
    """[N]: in the block."""


class Place(NamedTuple):
    """Of all drafts at one place of a block whose fate was decided."""

    confidence: float
    acceptance: float
    num_drafts: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "base", "drafts", "model", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--answers", type=int, default=200, help="of a part")
    parser.add_argument("--most-tokens", type=int, default=128, help="of an answer")
    arguments = parser.parse_args()
    answers = arguments.out / "answers"
    continue_text(
        arguments.model,
        arguments.data,
        answers,
        arguments.parts,
        arguments.answers,
        arguments.most_tokens,
        greedy=1.0,
        first=_FIRST_PART,
    )
    calibrate(arguments.data, arguments.base, arguments.drafts, answers, arguments.out)


def calibrate(data: Path, base: Path, drafts: Path, answers: Path, out: Path) -> None:
    figures = Figures.of_file(data / "config.json")
    assert figures.drafts is not None
    name = f"mtp.{figures.drafts.num_stages - 1}.confidence_head.proj.weight"
    stages = read_parts(drafts, "drafts")
    observed = observe(data, base, stages, answers)
    before = stages[name]
    after = fit(before[0].double(), observed)[None].to(before.dtype)
    write_parts(out, "drafts", stages | {name: after})
    log = {
        "fitted": len(observed.place),
        **{
            when: [place._asdict() for place in by_place(observed, head[0].double())]
            for when, head in (("before", before), ("after", after))
        },
    }
    (out / "log.jsonl").write_text(json.dumps(log) + "\n", encoding="utf-8")
    print(json.dumps(log, indent=1))


@torch.no_grad()
def observe(data: Path, base: Path, stages: Weights, answers: Path) -> Observed:
    """All drafts that greedy decoding decides on as it writes `answers`, as they are served."""
    cpu, on = torch.device("cpu"), torch.tensor(True)
    figures, switches = Figures.of_file(data / "config.json"), Switches(on, on)
    assert figures.drafts is not None
    rows = Mixture(answers, "own", 1, cpu)
    packer = Packer(figures, max(rows.lengths), cpu)
    compressed = torch.from_numpy(np.load(data / "compressed.npy", allow_pickle=False))
    model, drafter = Model(figures, compressed, torch.float32), DraftModel(figures, torch.float32)
    weights, stages = _exact(read_parts(base, "model")), _exact(stages)
    known = stages[f"mtp.{figures.drafts.num_stages - 1}.markov_head.embed.weight"]

    def parts() -> Iterator[Observed]:
        for row in rows.in_order():
            packed = packer(row)
            passed = model(weights, packed, switches, figures.drafts.target_layers if figures.drafts else ())
            assert passed.taps is not None
            target = Target(passed.taps, passed.hidden, weights["embed.weight"], weights["head.weight"])
            blocks = choose_blocks(figures, packed, packer, seed=0, places_per_block=1)
            hidden, _ = drafter.hidden(stages, target, packed, blocks, switches)
            guesses = drafter.guesses(stages, target, hidden, blocks.previous)
            is_accepted = ((guesses.logits.argmax(-1) == blocks.wanted) & blocks.is_asked).cumprod(-1)
            is_decided = torch.cat((torch.ones_like(is_accepted[..., :1]), is_accepted[..., :-1]), -1).bool()
            chosen = is_decided & blocks.is_asked & is_drafted(blocks, is_accepted.sum(-1))[..., None]
            inputs = torch.cat((hidden, known[blocks.previous]), -1)[chosen]
            yield Observed(inputs.double(), is_accepted[chosen].double(), chosen.nonzero()[:, -1])

    return Observed(*(torch.cat(each) for each in zip(*parts(), strict=True)))


def is_drafted(blocks: Blocks, num_accepted: Tensor) -> Tensor:
    """[B, A]: of blocks at every place, those that decoding drafts. The next one stands behind the tokens that one
    brings: its accepted drafts, `num_accepted` [B, A], and one more."""
    chosen = torch.zeros_like(num_accepted, dtype=torch.bool)
    places = blocks.before[..., 0].where(blocks.is_asked[..., 0], -1)
    for row, (of_row, accepted) in enumerate(zip(places.tolist(), num_accepted.tolist(), strict=True)):
        due = 0
        for place, block in sorted((place, block) for block, place in enumerate(of_row)):
            if place >= due:
                chosen[row, block] = True
                due = place + accepted[block] + 1
    return chosen


def fit(before: Tensor, observed: Observed) -> Tensor:
    """[D]: the head that makes what was observed likeliest, float64, drawn to `before` [D]."""
    inputs, is_accepted, _ = observed
    pull = 0.25 * _PRIOR * (inputs**2).mean(0) + 1e-9  # [D]; a quarter: what an observation at even odds weighs
    head = before.clone()
    for _ in range(_STEPS):
        guessed = (inputs @ head).sigmoid()
        slope = inputs.T @ (guessed - is_accepted) + pull * (head - before)
        bend = inputs.T @ (inputs * (guessed * (1 - guessed))[:, None]) + pull.diag()
        step = torch.linalg.solve(bend, slope)
        head = head - step * min(1.0, 4.0 / float((inputs @ step).abs().max().clamp(min=1e-9)))
    return head


def by_place(observed: Observed, head: Tensor) -> list[Place]:
    counts = observed.place.bincount()
    confidence, acceptance = (
        observed.place.bincount(values) / counts.clamp(min=1)
        for values in ((observed.inputs @ head).sigmoid(), observed.is_accepted)
    )
    return [Place(*each) for each in zip(confidence.tolist(), acceptance.tolist(), counts.tolist(), strict=True)]


def _exact(weights: Weights) -> Weights:
    return {name: weight.float() for name, weight in weights.items()}


if __name__ == "__main__":
    main()
