"""Every JSON Schema of a folder through an engine: refused with a reason, or every finished output validates.

    python benchmarks/structured.py FOLDER... [--model v41-nano] [--num-drafts -1 0] [--every 1] [--json]
    python benchmarks/structured.py --throughput [--scheduled] [--rows 64] [--max-tokens 64] [--json]

A folder holds files of the JSON Schema Test Suite (.json: lists of groups with a `schema`), or of JSONSchemaBench
(.jsonl: a line a `schema`). At temperature 100 a model's logits are as good as random; the model `fake` has none, and
its tokens are as good as that, too. Every other schema's outputs are seeded, so that drafts are accepted in both forms.
Judge: `jsonschema`, which takes `format` for a remark, as draft 2020-12 does. Ends with 1 where an output does not
validate, or where a seeded one is not the same with and without drafts.

The throughput is that of the same requests free, forced into any text at all, and forced into a schema, by turns in one
engine. Any text is what the free ones say, as long as the model says nothing special: what it lacks is what forcing
costs. Outputs in a schema are others, and other shares of their drafts are accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from deepinfer import Completion, Engine, GrammarError, SamplingParams
from deepinfer.draft_counts import DraftCounts
from deepinfer.shipped import SHIPPED, shipped_folder

NUM_AT_ONCE: Final = 64
URL: Final = r"https?://[^\s']*"
FAKE: Final[dict[str, Any]] = {
    "tokenizer": str(shipped_folder(SHIPPED[0])), "fake_vocab_size": 8192, "fake_num_drafts": 5, "fake_step_s": 0.0,
}  # fmt: skip
"""What a model without weights is told, to speak as `v41-nano` does."""
STORY: Final = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 30}, "story": {"type": "string", "minLength": 400}},
    "required": ["title", "story"],
    "additionalProperties": False,
}
FORMS: Final[dict[str, dict[str, Any]]] = {
    "free": {}, "any text": {"regex": r"(.|\n)*"}, "a schema": {"json_schema": STORY},
}  # fmt: skip


class Case(NamedTuple):
    name: str
    schema: Any


class Verdict(NamedTuple):
    """What became of one case."""

    case: Case
    refusal: str = ""
    num_finished: int = 0
    num_cut: int = 0
    num_unjudged: int = 0
    """The judge cannot read the schema."""
    wrong: str = ""
    """An output that does not validate."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """The token ids of seeded samples."""


def read_cases(folder: Path) -> Iterator[Case]:
    for file in sorted(folder.rglob("*.json*")):
        text = file.read_text(encoding="utf-8")
        entries = map(json.loads, text.splitlines()) if file.suffix == ".jsonl" else json.loads(text)
        for index, entry in enumerate(entries):
            schema = entry["schema"]
            yield Case(f"{file.name}[{index}]", json.loads(schema) if isinstance(schema, str) else schema)


async def try_case(engine: Engine, case: Case, params: SamplingParams, turn: asyncio.Semaphore) -> Verdict:
    async with turn:
        try:
            done = await engine.generate("Answer in JSON: ", params)
        except GrammarError as error:
            return Verdict(case, str(error))
    return judge(case, done)


def _multiple_of(validator: Any, factor: float, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """In decimals, as the numbers are written: of 1510.301 and 0.0001 the library's floats say that it is none."""
    if validator.is_type(instance, "number") and Decimal(str(instance)) % Decimal(str(factor)):
        yield ValidationError(f"{instance} is not a multiple of {factor}")


_Judge: Final = extend(Draft202012Validator, {"multipleOf": _multiple_of})


def judge(case: Case, done: Completion) -> Verdict:
    finished = [sample.text for sample in done.samples if sample.finish_reason == "stop"]
    outputs = tuple(tuple(sample.token_ids) for sample in done.samples)
    verdict = Verdict(case, num_finished=len(finished), num_cut=len(done.samples) - len(finished), outputs=outputs)
    for text in finished:
        try:
            _Judge(case.schema).validate(json.loads(text))
        except (ValidationError, json.JSONDecodeError) as error:
            return verdict._replace(wrong=f"{text[:200]!r}: {str(error).splitlines()[0]}")
        except Exception:
            verdict = verdict._replace(num_unjudged=verdict.num_unjudged + 1)
    return verdict


def open_engine(options: argparse.Namespace, num_drafts: int) -> Engine:
    fake = FAKE if options.model == "fake" else {}
    return Engine(options.model, num_drafts=num_drafts, scheduled_drafts=options.scheduled and num_drafts != 0, **fake)


def params_of(case: Case, index: int, options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        json_schema=case.schema,
        temperature=options.temperature,
        seq_seed=index if is_seeded(index) else None,
        max_tokens=options.max_tokens,
        n=options.samples,
    )


def is_seeded(index: int) -> bool:
    return index % 2 == 0


async def try_all(cases: list[Case], num_drafts: int, options: argparse.Namespace) -> tuple[list[Verdict], DraftCounts]:
    """What became of each, and of the drafts of all."""
    turn = asyncio.Semaphore(NUM_AT_ONCE)
    async with open_engine(options, num_drafts) as engine:
        tries = (try_case(engine, case, params_of(case, index, options), turn) for index, case in enumerate(cases))
        verdicts = await asyncio.gather(*tries)
        return verdicts, engine.stats().core.drafts


def differing(some: list[Verdict], others: list[Verdict]) -> list[str]:
    """Seeded cases that ended in other tokens."""
    pairs = enumerate(zip(some, others, strict=True))
    return [one.case.name for index, (one, other) in pairs if is_seeded(index) and one.outputs != other.outputs]


async def try_suites(cases: list[Case], options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    runs = []
    for num_drafts in options.num_drafts:
        verdicts, drafts = await try_all(cases, num_drafts, options)
        found[f"num_drafts {num_drafts}"] = summary(verdicts) | summary_of_drafts(drafts)
        runs.append(verdicts)
    found["differing"] = sorted({name for run in runs[1:] for name in differing(runs[0], run)})
    return found


def summary_of_drafts(drafts: DraftCounts) -> dict[str, Any]:
    return {
        "tokens_per_step": round(drafts.tokens_per_step, 3),
        "drafts_verified": drafts.num_verified,
        "drafts_accepted": drafts.num_accepted,
    }


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    refusals = Counter(re.sub(URL, "URL", verdict.refusal)[:80] for verdict in verdicts if verdict.refusal)
    return {
        "schemas": len(verdicts),
        "accepted": len(verdicts) - refusals.total(),
        "accepted_share": round(1 - refusals.total() / max(len(verdicts), 1), 3),
        "finished": sum(verdict.num_finished for verdict in verdicts),
        "cut": sum(verdict.num_cut for verdict in verdicts),
        "unjudged": sum(verdict.num_unjudged for verdict in verdicts),
        "wrong": {verdict.case.name: verdict.wrong for verdict in verdicts if verdict.wrong},
        "refusals": dict(refusals.most_common()),
    }


# ---- throughput


class Round(NamedTuple):
    """One batch of one form."""

    tokens_per_s: float
    step_ms: float
    drafts: DraftCounts
    outputs: list[list[int]]


async def run_batch(engine: Engine, form: str, options: argparse.Namespace) -> Round:
    """Half of the requests are greedy, half have a seed."""
    core = engine.stats().core
    before, num_steps = core.drafts.copy(), core.num_steps
    started_s = time.perf_counter()
    done = await asyncio.gather(
        *(
            engine.generate(
                f"Story {index}: Once upon a time",
                SamplingParams(
                    temperature=float(index % 2), seq_seed=index, max_tokens=options.max_tokens, **FORMS[form]
                ),
            )
            for index in range(options.rows)
        )
    )
    took_s = time.perf_counter() - started_s
    core = engine.stats().core
    outputs = [list(completion.token_ids) for completion in done]
    step_ms = 1000 * took_s / max(core.num_steps - num_steps, 1)
    return Round(sum(map(len, outputs)) / took_s, step_ms, core.drafts.since(before), outputs)


async def measure(num_drafts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all forms by turns; the first, in which caches fill, is not counted."""
    rounds: dict[str, list[Round]] = {form: [] for form in FORMS}
    async with open_engine(options, num_drafts) as engine:
        for _ in range(1 + options.rounds):
            for form, found in rounds.items():
                found.append(await run_batch(engine, form, options))
    free = rounds["free"]
    return {
        form: {
            "tokens_per_s": round(median(one.tokens_per_s for one in found[1:]), 1),
            "of_free": round(
                median(one.tokens_per_s / other.tokens_per_s for one, other in zip(found[1:], free[1:], strict=True)), 3
            ),
            "step_ms": round(median(one.step_ms for one in found[1:]), 2),
            "as_free": sum(one == other for one, other in zip(found[0].outputs, free[0].outputs, strict=True)),
        }
        | summary_of_drafts(found[-1].drafts)
        for form, found in rounds.items()
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    cases = [case for folder in options.folders for case in read_cases(folder)][:: options.every]
    found = await try_suites(cases, options) if cases else {}
    for num_drafts in options.num_drafts if options.throughput else ():
        found[f"throughput, num_drafts {num_drafts}"] = await measure(num_drafts, options)
    return found


def is_right(found: dict[str, Any]) -> bool:
    return not (found.get("differing") or any(one.get("wrong") for one in found.values() if isinstance(one, dict)))


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Of the command line, unless given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--model", default="v41-nano")
    parser.add_argument("--temperature", type=float, default=100.0)
    parser.add_argument("--samples", type=int, default=2, help="outputs of each schema")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="one schema of so many")
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[-1, 0], help="settings of the engine")
    parser.add_argument("--scheduled", action="store_true", help="verify as many drafts as pay off, and not all")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--rows", type=int, default=64, help="requests at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not (options.folders or options.throughput):
        parser.error("give folders, or --throughput")
    return options


def main() -> int:
    options = read_options()
    found = asyncio.run(run(options))
    print(json.dumps(found, indent=None if options.json else 1, ensure_ascii=False))
    return 0 if is_right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
