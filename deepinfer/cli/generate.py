"""`deepinfer generate`: a file of prompts to a file of results."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from deepinfer.cli.common import (
    INTERRUPTED,
    MISUSED,
    MaxTokens,
    Model,
    Seed,
    Settings,
    Temperature,
    TopP,
    engine_settings,
    in_words,
    run_async,
    sampling_fields,
    say,
    starting,
)
from deepinfer.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.generate_file import Totals, generate_file
from deepinfer.progress import ProgressBar
from deepinfer.prompt_file import BadLine, PromptFile
from deepinfer.result_file import ResultFile
from deepinfer.trace import Trace

MAX_SHOWN_LINES = 20


def generate(
    model: Model,
    prompts: Annotated[
        Path,
        typer.Argument(help="Lines of JSON: prompt, prompt_token_ids or messages, and if you like id and params."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Lines of JSON; what is there already is not done again.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="A line that cannot be served becomes an error line.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace to this file.")] = None,
    settings: Settings = None,
) -> None:
    """Answer a file of prompts. Run again after an interruption to go on."""
    with in_words("generate"):
        fields = sampling_fields(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seq_seed=seed)
        lines = PromptFile(prompts, fields)
        num_lines = _check(lines, skip_bad)
        if out.exists() and out.samefile(prompts):
            raise ConfigError("out", f"{out} is the file of the prompts")
        with ResultFile(out) as results, ExitStack() as stack:
            num_before = sum(results.has(line.line, line.crc) for line in lines)
            if num_before == num_lines:
                say(f"all {num_lines} lines are in {out}")
                return
            observers = [stack.enter_context(Trace(trace))] if trace is not None else []
            engine = Engine(model, observers=observers, **engine_settings(settings))
            work = _generate(engine, lines, results, num_lines, num_before, skip_bad)
            try:
                run_async(work)
            except KeyboardInterrupt:
                say(f"deepinfer generate: interrupted; what is finished is in {out}, run again to go on")
                raise typer.Exit(INTERRUPTED) from None


def _check(lines: PromptFile, skip_bad: bool) -> int:
    """How many lines there are. Names those that cannot be asked, and leaves unless they may be skipped."""
    num_lines, bad = 0, 0
    for line in lines:
        num_lines += 1
        if isinstance(line, BadLine):
            bad += 1
            if bad <= MAX_SHOWN_LINES:
                say(f"{lines.path}: line {line.line}: {line.reason}")
    if bad > MAX_SHOWN_LINES:
        say(f"and {bad - MAX_SHOWN_LINES} more")
    if bad and not skip_bad:
        say(f"deepinfer generate: {bad} of {num_lines} lines cannot be asked; --skip-bad leaves them out")
        raise typer.Exit(MISUSED)
    return num_lines


async def _generate(
    engine: Engine, lines: PromptFile, results: ResultFile, num_lines: int, num_before: int, skip_bad: bool
) -> None:
    with starting() as tell:
        await engine.open(tell)
    try:
        begun_s = time.perf_counter()
        with ProgressBar(num_lines, num_done=num_before) as bar:
            totals = await generate_file(engine, lines, results, skip_bad=skip_bad, on_result=bar.advance)
        _summarize(totals, num_before, time.perf_counter() - begun_s)
        if engine.stats().core.drafts.num_verified:
            say("\n".join(engine.stats().core.drafts.lines()))
    finally:
        await engine.aclose()


def _summarize(totals: Totals, num_before: int, duration_s: float) -> None:
    before = f", {num_before} were there" if num_before else ""
    bad = f", {totals.num_bad} could not be asked" if totals.num_bad else ""
    rate = f"{totals.num_tokens} tokens in {duration_s:.1f} s, {totals.num_tokens / duration_s:.1f} tok/s"
    say(f"{totals.num_done} lines answered{before}{bad}: {rate}")
