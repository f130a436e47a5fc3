"""`deepinfer models`: what can be served by name, and what is here."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from deepinfer.catalog import list_models, pull, remove
from deepinfer.cli.common import in_words, say
from deepinfer.config import resolve_config

models = typer.Typer(help="Models that are known or here; pull and remove them.")

Name = Annotated[str, typer.Argument(help="A known name, or org/name of a hub.")]


@models.callback(invoke_without_command=True)
def show(context: typer.Context) -> None:
    """Known names, models pulled from a hub, and those in DEEPINFER_HF_MODEL_DIR and in the cache."""
    if context.invoked_subcommand is not None:
        return
    with in_words("models"):
        config = resolve_config({})
        table = Table(caption=f"Pulled models are kept in {escape(str(config.model_cache_dir))}.")
        for column in ("name", "size", "state", "where"):
            table.add_column(column, overflow="fold")
        for model in list_models(cache_dir=config.model_cache_dir, local=config.model):
            where = "" if model.path is None or str(model.path) == model.name else str(model.path)
            cells = model.name, f"{model.size_bytes / 1e6:.0f} MB", model.state, where or model.summary
            table.add_row(*map(escape, cells))  # a path may look like markup
        Console().print(table)


@models.command("pull")
def pull_one(name: Name) -> None:
    """Fetch a model, check it, and print where it is."""
    with in_words("models pull"), _bar() as bar:
        task = bar.add_task(name, total=None)
        path = pull(
            name,
            cache_dir=resolve_config({}).model_cache_dir,
            report=say,
            on_bytes=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(path)


@models.command("rm")
def remove_one(name: Name) -> None:
    """Delete a model that was pulled."""
    with in_words("models rm"):
        say(f"removed {remove(name, cache_dir=resolve_config({}).model_cache_dir)}")


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
