"""The figures of a trained model, as JSON: held-out loss, answers, what drafts bring, and what truncation changes.

    python -m examples.train_nano.evaluate DATA CHECKPOINT SERVED [--drafts CHECKPOINT ...] [--json FILE]

CHECKPOINT holds what `train` wrote, SERVED what `export` made of it, `--drafts` what `train_drafts` wrote. All but one
loss is the engine's doing. The two losses differ by what rounding does to sums: in training whole documents are
computed at once, in the engine step by step. A number of 0 leaves its part out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer import Engine, SamplingParams
from examples.train_nano import agreement, drafting
from examples.train_nano.chat import TextEncoder
from examples.train_nano.figures import Figures
from examples.train_nano.held_out import Ids, as_prompts, conversations, held_out, questions
from examples.train_nano.layers import Switches
from examples.train_nano.model import Model
from examples.train_nano.packed import UNLEARNT, Packer
from examples.train_nano.packing import RowPacker
from examples.train_nano.parameters import Weights, draft_parameters, parameters
from examples.train_nano.tensor_parts import read_parts

_TOKENS_AT_ONCE = 4096
_MOST_TOKENS = 300
"""Of a sampled answer."""
_DRAFTED_TOKENS = 128
"""Of an answer that is drafted."""
_SAMPLED_ANSWERS = 2
"""To each question: fewer drafts are accepted, and those far back in a block must be many, too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "checkpoint", "served"):
        parser.add_argument(name, type=Path)
    add_options(parser)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = evaluate(arguments)
    show(report)
    if arguments.json:
        write(report, arguments.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafts", type=Path, nargs="*", default=[], help="in the order of their training")
    parser.add_argument("--documents", type=int, default=100, help="to compute the loss of")
    parser.add_argument("--samples", type=int, default=12, help="of answers, as they come")
    parser.add_argument("--questions", type=int, default=250, help="to answer with drafts")
    parser.add_argument("--prompts", type=int, default=500, help="whose next token truncation may change")
    parser.add_argument("--cuts", type=int, default=200, help="the same of prompts that end anywhere")


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    data, served_folder = arguments.data, arguments.served
    report: dict[str, Any] = {"model": size(served_folder)}
    report["training"] = {
        "model": last_line(arguments.checkpoint / "log.jsonl"),
        "drafts": [last_line(folder / "log.jsonl") for folder in arguments.drafts],
    }
    documents = held_out(data, arguments.documents)
    asked = questions(data, max(arguments.samples, arguments.questions))
    answered = asyncio.run(served(served_folder, documents, asked[: arguments.samples], _MOST_TOKENS))
    if documents:
        loss = trained_loss(data, read_parts(arguments.checkpoint, "model"), documents)
        report["loss"] = {"documents": len(documents), "trained": loss, "served": answered["served_loss"]}
    if arguments.questions and report["model"]["longest_draft"]:
        for name, temperature, num_answers in (("greedy", 0.0, 1), ("sampled", 1.0, _SAMPLED_ANSWERS)):
            measured = drafting.measure(
                served_folder,
                asked[: arguments.questions],
                _DRAFTED_TOKENS,
                temperature,
                num_answers=num_answers,
            )
            report.setdefault("drafts", {})[name] = asyncio.run(measured)
    if arguments.prompts or arguments.cuts:
        talks = conversations(data)
        end_of_prompt = TextEncoder(data / "tokenizer.json").chat.end_of_thinking
        kinds = {
            "prompts": agreement.prompts(talks, end_of_prompt, arguments.prompts),
            "cuts": agreement.cuts(talks, end_of_prompt, arguments.cuts),
        }
        report["agreement"] = asyncio.run(agreement.measure(served_folder, talks, kinds))
    if arguments.samples:
        report["samples"] = answered["samples"]
    return report


def show(report: dict[str, Any]) -> None:
    for answer in report.get("samples", []):
        print(f"\n> {answer['prompt']}\n{answer['text']}")
    for name, part in report.items():
        if name != "samples":
            print(f"\n{name}: {json.dumps(part)}")


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def size(served_folder: Path) -> dict[str, Any]:
    """What is trained, and what is stored."""
    figures = Figures.of_file(served_folder / "config.json")
    stages = draft_parameters(figures) if figures.drafts is not None else {}
    numbers = [sum(prod(one.shape) for one in part.values()) for part in (parameters(figures), stages)]
    return {
        "parameters": numbers[0],
        "draft_parameters": numbers[1],
        "longest_draft": figures.drafts.block_size if figures.drafts is not None else 0,
        "bytes": sum(file.stat().st_size for file in served_folder.glob("*.safetensors")),
    }


def last_line(log: Path) -> dict[str, Any]:
    """What a training says of itself at its end: the last step, and, where there is one, the word on held-out rows."""
    if not log.is_file():
        return {}
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "rate" in line]
    return (steps[-1] if steps else {}) | (lines[-1] if lines else {})


@torch.no_grad()
def trained_loss(data: Path, weights: Weights, documents: Sequence[Ids]) -> float:
    """Nats per token of answers, with everything rounded as inference does."""
    figures, device = Figures.of_file(data / "config.json"), torch.device("cpu")
    length = -(-max(map(len, documents)) // figures.window) * figures.window
    packer = RowPacker(length, figures.pad + UNLEARNT)
    for document in documents:
        packer.add(document)
    rows = torch.from_numpy(packer.rows().astype(np.int64))
    model = Model(figures, torch.from_numpy(np.load(data / "compressed.npy", allow_pickle=False)), torch.float32)
    weights = {name: weight.float() for name, weight in weights.items()}
    total, count = 0.0, 0
    for part in rows.split(max(_TOKENS_AT_ONCE // length, 1)):
        packed = Packer(figures, length, device)(part)
        num_learnt = int((packed.targets >= 0).sum())
        switches = Switches(torch.tensor(True), torch.tensor(True))
        total += model.losses(weights, packed, switches).text.item() * num_learnt if num_learnt else 0.0
        count += num_learnt
    return total / max(count, 1)


async def served(folder: Path, documents: Sequence[Ids], prompts: Sequence[str], most: int) -> dict[str, Any]:
    """The loss, and answers of at most `most` tokens, by the engine."""
    async with Engine(folder) as engine:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        read = await engine.generate_many(as_prompts(documents), params, progress=False)
        sampling = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=most, seq_seed=1)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        answers = await engine.generate_many(chats, sampling, thinking=False, progress=False)
    learnt = [
        entry.logprob
        for document, completion in zip(documents, read, strict=True)
        for token, entry in zip(document, completion.prompt_token_logprobs or (), strict=True)
        if token < UNLEARNT and entry is not None
    ]
    samples = [
        {"prompt": prompt, "text": answer.text, "finish_reason": answer.samples[0].finish_reason}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return {"served_loss": -sum(learnt) / max(len(learnt), 1), "samples": samples}


if __name__ == "__main__":
    main()
