"""`deepinfer costs`: what steps of several sizes take on this device, as a file for scheduled drafts."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer.cli.common import Model, Settings, engine_settings, in_words, run_async, say, starting
from deepinfer.costs import CostFile
from deepinfer.engine import Engine
from deepinfer.errors import ConfigError


def costs(
    model: Model,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The file to write; without it a table.")] = None,
    settings: Settings = None,
) -> None:
    """Measure what steps cost. `--set cost_table=FILE` and `--set scheduled_drafts=1` then start without measuring."""
    with in_words("costs"):
        engine = Engine(model, **engine_settings(settings) | {"scheduled_drafts": True, "cost_table": ""})
        file = run_async(_measure(engine))
        if out is None:
            Console().print(_table(file))
        else:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(file)) + b"\n")
            say(f"{len(file.positions)} sizes of steps, {len(file.draft_rows)} of drafts: {out}")


async def _measure(engine: Engine) -> CostFile:
    with starting() as tell:
        await engine.open(tell)
    try:
        if engine.costs is None:
            raise ConfigError("num_drafts", "this engine makes no drafts: what steps cost is asked by nobody")
        config = engine.config
        return engine.costs.file(accelerator=config.accelerator, device=engine.device, model=config.model)
    finally:
        await engine.aclose()


def _table(file: CostFile) -> Table:
    table = Table(title=f"{escape(file.model)} on {escape(file.device)}", title_justify="left")
    for column in ("positions", "ms a step", "rows", "ms to draft"):
        table.add_column(column, justify="right")
    forwards = [(str(size), f"{us / 1e3:.2f}") for size, us in zip(file.positions, file.forward_us, strict=True)]
    drafts = [(str(rows), f"{us / 1e3:.2f}") for rows, us in zip(file.draft_rows, file.draft_us, strict=True)]
    for forward, draft in zip_longest(forwards, drafts, fillvalue=("", "")):
        table.add_row(*forward, *draft)
    return table
