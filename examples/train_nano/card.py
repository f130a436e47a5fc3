"""Writes MODEL_CARD.md from what `evaluate` found.

    python -m examples.train_nano.card SERVED

SERVED is a model folder with evaluation.json in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CARD, FIGURES, LOADS = "MODEL_CARD.md", "evaluation.json", "expert_loads.jsonl.xz"

_ABOUT = """\
# V4.1-Nano

A small language model with every part of DeepSeek-V4.1-Flash, in its checkpoint format: {parameters:.1f} million
parameters and {draft_parameters:.1f} million of draft stages, {megabytes:.1f} MB. It chats in simple English and
answers on one CPU core. It is made to run, test and measure an engine with, not to be asked for facts.

| | |
| --- | --- |
| layers | {num_hidden_layers}, half of them encoder, half decoder; compressed by 2, by 1, or a window alone |
| channels, heads | {hidden_size}; {num_attention_heads} of {head_dim} |
| experts | {n_routed_experts} of width {moe_intermediate_size}, {num_experts_per_tok} a token; one shared |
| sparse attention | a window of {sliding_window}, and the best {index_topk} rows |
| candidates, in the decoder | the best {candidate_topk_blocks} blocks of {candidate_block_size} rows |
| residual streams | {hc_mult} |
| Engram tables | before layers {engram_layer_ids} |
| drafts | {stages} |
| vocabulary | {vocab_size}, byte-level BPE, with DeepSeek's special tokens by their names |
| context | {max_position_embeddings} positions; trained on rows of 640 and 2,048 |
| stored as | FP8 with scales of 32x32, experts FP4 with scales of 1x32, the rest BF16 and F32 |

## Data and licence

The weights are Apache-2.0. They were trained on answers that SmolLM2-135M-Instruct (Apache-2.0) wrote at temperatures
of 0.6 to 0.65 and top-p 0.95 to 182,431 prompts made from templates: stories, explanations, small talk, tips, letters,
poems, definitions; 465,762 answers, about 55 million tokens. The words in the prompts come from the lists of
`wonderwords` (MIT). Prompts are rendered as `deepseek-recipe` does it, without thinking. All figures below are of text
that was held out.
"""
_LIMITS = """\
## Limits

It knows what its teacher of 135 million parameters made up: names, numbers and facts are often wrong, arithmetic is,
and so is anything recent. English only. It was not taught to think before it answers, to call tools, or to refuse, and
has had no safety training. Long answers lose their thread.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("served", type=Path)
    write_card(parser.parse_args().served)


def write_card(served: Path) -> None:
    report = json.loads((served / FIGURES).read_text(encoding="utf-8"))
    config = json.loads((served / "config.json").read_text(encoding="utf-8"))["text_config"]
    (served / CARD).write_text(card(report, config), encoding="utf-8")


def card(report: dict[str, Any], config: dict[str, Any]) -> str:
    """`report` may leave parts out; those of `config` that are shown must be there."""
    model = report["model"]
    block, num_stages = model["longest_draft"], config.get("num_nextn_predict_layers", 0)
    about = config | {
        "parameters": model["parameters"] / 1e6,
        "draft_parameters": model["draft_parameters"] / 1e6,
        "megabytes": model["bytes"] / 1e6,
        "stages": f"{num_stages} DSpark stages that draft {block} tokens" if block else "no draft stages",
        "engram_layer_ids": " and ".join(map(str, config["engram_layer_ids"])),
    }
    parts = [_ABOUT.format_map(about), *_training(report), *_figures(report), _LIMITS, *_samples(report)]
    return "\n".join(parts)


def _training(report: dict[str, Any]) -> Iterator[str]:
    found = report["training"]
    logs = [
        ("The model", found["model"]),
        *(("The draft stages, beside the frozen model,", log) for log in found["drafts"]),
    ]
    told = [_lesson(who, log) for who, log in logs if log]
    if told:
        what = "The last steps compute with weights, activations and cached rows in their stored formats."
        yield "\n".join(["## Training", "", *told, what, "The programs are those of `examples/train_nano`.", ""])


def _lesson(who: str, log: dict[str, Any]) -> str:
    if num_drafts := log.get("fitted"):
        return f"Their confidence head alone was fitted to {num_drafts:,} drafts of the model's own greedy answers."
    return f"{who} saw {log['tokens'] / 1e6:.1f} million tokens in {log['step']:,} steps."


def _figures(report: dict[str, Any]) -> Iterator[str]:
    rows = list(_rows(report))
    if rows:
        yield "\n".join(["## Figures", "", "| what | value |", "| --- | --- |", *rows, ""])
    for name, drafts in report.get("drafts", {}).items():
        yield "\n".join(_drafts(name, drafts))


def _rows(report: dict[str, Any]) -> Iterator[str]:
    if loss := report.get("loss"):
        yield _row(f"loss, nats per token of answers ({loss['documents']} documents)", f"{loss['served']:.3f}")
        yield _row("the same, by the training's own model", f"{loss['trained']:.3f}")
    for name, drafts in report.get("drafts", {}).items():
        asked = f"{drafts['questions']} questions, temperature {drafts['temperature']:g}, drafts of a fixed length"
        yield _row(f"tokens a forward, {name} ({asked})", f"{drafts['tokens_per_forward']:.2f}")
    names = {"prompts": "that ask for an answer", "cuts": "cut anywhere"}
    for kind, found in report.get("agreement", {}).items():
        if not found["places"]:
            continue  # not measured
        texts = f"{found['places']} prompts of 300 to 2,000 tokens {names[kind]}, {found['keep_tokens']} kept"
        yield _row(f"greedy next tokens that truncation leaves the same ({texts})", f"{100 * found['share']:.1f} %")


def _row(what: str, value: str) -> str:
    return f"| {what} | {value} |"


def _drafts(name: str, drafts: dict[str, Any]) -> Iterator[str]:
    """By place in the block: of the drafts before which all were accepted."""
    places = drafts["calibration"]
    yield f"Drafts by place in the block, {name}, where all before were accepted:"
    yield ""
    yield "| place | " + " | ".join(str(1 + place) for place in range(len(places))) + " |"
    yield "| --- |" + " --- |" * len(places)
    for label, key in (
        ("accepted", "acceptance"),
        ("confidence", "confidence"),
        ("gap between them", "gap"),
        ("expected calibration error, 10 bins", "ece"),
    ):
        yield f"| {label} | " + " | ".join(f"{place[key]:.3f}" for place in places) + " |"
    yield f"| drafts | {' | '.join(str(place['drafts']) for place in places)} |"
    yield ""


def _samples(report: dict[str, Any]) -> Iterator[str]:
    samples: Sequence[dict[str, str]] = report.get("samples", [])
    if samples:
        yield "## Samples\n\nTemperature 0.6, top-p 0.95, at most 300 tokens, one seed, none left out or edited.\n"
    for sample in samples:
        text = "\n".join(f"> {line}".rstrip() for line in sample["text"].strip().splitlines())
        yield f"**{sample['prompt']}**\n\n{text}\n"


if __name__ == "__main__":
    main()
