"""Every JSON Schema of a folder through an engine: refused with a reason, or every finished output validates.

    python benchmarks/structured.py FOLDER... [--model v41-nano] [--temperature 100] [--samples 2] [--json]

A folder holds files of the JSON Schema Test Suite (.json: lists of groups with a `schema`), or of JSONSchemaBench
(.jsonl: a line a `schema`). At temperature 100 a model's logits are as good as random. Judge: `jsonschema`, which takes
`format` for a remark, as draft 2020-12 does. Ends with 1 where an output does not validate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator, ValidationError

from deepinfer import Completion, Engine, GrammarError, SamplingParams

NUM_AT_ONCE = 64


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


def judge(case: Case, done: Completion) -> Verdict:
    finished = [sample.text for sample in done.samples if sample.finish_reason == "stop"]
    verdict = Verdict(case, num_finished=len(finished), num_cut=len(done.samples) - len(finished))
    for text in finished:
        try:
            Draft202012Validator(case.schema).validate(json.loads(text))
        except (ValidationError, json.JSONDecodeError) as error:
            return verdict._replace(wrong=f"{text[:200]!r}: {str(error).splitlines()[0]}")
        except Exception:
            verdict = verdict._replace(num_unjudged=verdict.num_unjudged + 1)
    return verdict


async def run(cases: list[Case], options: argparse.Namespace) -> list[Verdict]:
    turn = asyncio.Semaphore(NUM_AT_ONCE)
    async with Engine(options.model) as engine:
        return await asyncio.gather(
            *(
                try_case(
                    engine,
                    case,
                    SamplingParams(
                        json_schema=case.schema,
                        temperature=options.temperature,
                        seq_seed=index,
                        max_tokens=options.max_tokens,
                        n=options.samples,
                    ),
                    turn,
                )
                for index, case in enumerate(cases)
            )
        )


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    refusals = Counter(verdict.refusal[:80] for verdict in verdicts if verdict.refusal)
    return {
        "schemas": len(verdicts),
        "accepted": len(verdicts) - refusals.total(),
        "finished": sum(verdict.num_finished for verdict in verdicts),
        "cut": sum(verdict.num_cut for verdict in verdicts),
        "unjudged": sum(verdict.num_unjudged for verdict in verdicts),
        "wrong": {verdict.case.name: verdict.wrong for verdict in verdicts if verdict.wrong},
        "refusals": dict(refusals.most_common()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--model", default="v41-nano")
    parser.add_argument("--temperature", type=float, default=100.0)
    parser.add_argument("--samples", type=int, default=2, help="outputs of each schema")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--limit", type=int, help="schemas of each folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [case for folder in options.folders for case in list(read_cases(folder))[: options.limit]]
    found = summary(asyncio.run(run(cases, options)))
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        for name, value in found.items():
            print(f"{name}: {json.dumps(value, indent=1, ensure_ascii=False) if isinstance(value, dict) else value}")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
