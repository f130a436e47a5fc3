"""The model's own answers to what it was trained on, as rows to train draft stages on.

    python -m examples.train_nano.continue_text MODEL DATA OUT [--parts N] [--answers N] [--most-tokens N]

Drafts are judged by what the model itself says, which is not quite what it has read. MODEL is a folder that `export`
wrote. OUT gets own_LENGTH_NN.npy, in the form of `prepare`, with rows as long as the short ones of DATA; half of the
answers of each part are greedy, half are sampled at a temperature between 0.6 and 1. Parts that are there already are
not made again: another call makes those that are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from deepinfer import Engine, SamplingParams
from examples.train_nano.chat import UNLEARNT, Ids, TextEncoder
from examples.train_nano.figures import Figures
from examples.train_nano.held_out import documents_of
from examples.train_nano.packing import RowPacker

_COOLEST, _HOTTEST = 0.6, 1.0
_GREEDY = 0.5
"""The share of answers that are; the others are sampled, at temperatures between those."""
_LEAST_ROOM = 32
"""Tokens of a row that a prompt must leave for its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=500, help="of a part")
    parser.add_argument("--most-tokens", type=int, default=256, help="of an answer")
    arguments = parser.parse_args()
    continue_text(
        arguments.model, arguments.data, arguments.out, arguments.parts, arguments.answers, arguments.most_tokens
    )


def continue_text(
    model: Path,
    data: Path,
    out: Path,
    num_parts: int,
    num_answers: int,
    most: int,
    *,
    greedy: float = _GREEDY,
    first: int = 0,
) -> None:
    """Writes the parts from `first` on that are missing in `out`; of the answers, a share of `greedy` is."""
    out.mkdir(parents=True, exist_ok=True)
    length = min(int(path.stem.split("_")[1]) for path in data.glob("train_*.npy"))
    paths = {part: out / f"own_{length}_{part:02}.npy" for part in range(first, first + num_parts)}
    missing = {part: path for part, path in paths.items() if not path.exists()}
    if missing:
        figures = Figures.of_file(data / "config.json")
        prompts = _Prompts(data, figures, length)
        asyncio.run(_write(model, missing, prompts, figures, num_answers, most, greedy))


async def _write(
    model: Path,
    paths: Mapping[int, Path],
    prompts: _Prompts,
    figures: Figures,
    num_answers: int,
    most: int,
    greedy: float,
) -> None:
    async with Engine(model) as engine:
        for part, path in paths.items():
            asked = prompts.some(part, num_answers)
            rooms = [min(most, prompts.length - len(prompt)) for prompt in asked]
            params = [_params(part, index, room, greedy) for index, room in enumerate(rooms)]
            plain = [[token % UNLEARNT for token in prompt] for prompt in asked]
            answers = await engine.generate_many(plain, params, progress=False)
            packer = RowPacker(prompts.length, figures.pad + UNLEARNT)
            for prompt, answer in zip(asked, answers, strict=True):
                packer.add(document(prompt, answer.token_ids, figures.eos, ends=answer.finish_reason == "stop"))
            draft = path.with_suffix(".draft.npy")
            np.save(draft, packer.rows())
            draft.replace(path)
            print(f"{path.name}: {sum(len(answer.token_ids) for answer in answers)} tokens", flush=True)


def document(prompt: Sequence[int], answer: Sequence[int], eos: int, *, ends: bool) -> Ids:
    """Only the answer, and its end where it has one, is to be learnt."""
    said = [*answer, *([eos] if ends and (not answer or answer[-1] != eos) else [])]
    return [*(token % UNLEARNT + UNLEARNT for token in prompt), *said]


class _Prompts:
    """Documents of the rows to train on, up to where a random one of their answers begins."""

    def __init__(self, data: Path, figures: Figures, length: int) -> None:
        paths = sorted(data.glob(f"train_{length}_*.npy"))
        self._parts = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
        self._figures, self.length = figures, length
        self._marker = TextEncoder(data / "tokenizer.json").chat.end_of_thinking

    def some(self, seed: int, most: int) -> list[Ids]:
        """`most` of them; the same for the same seed."""
        source, found = random.Random(seed), list[Ids]()
        while len(found) < most:
            rows = source.choice(self._parts)
            for each in documents_of(rows[source.randrange(len(rows))].tolist(), self._figures):
                ends = [place + 1 for place, token in enumerate(each) if token % UNLEARNT == self._marker]
                ends = [end for end in ends if end <= self.length - _LEAST_ROOM]
                if ends:
                    found.append(each[: source.choice(ends)])
        return found[:most]


def _params(part: int, index: int, most: int, greedy: float) -> SamplingParams:
    source = random.Random(f"{part}.{index}")
    temperature = 0.0 if index * greedy % 1.0 < greedy else source.uniform(_COOLEST, _HOTTEST)
    return SamplingParams(temperature=temperature, max_tokens=most, seq_seed=source.getrandbits(31))


if __name__ == "__main__":
    main()
