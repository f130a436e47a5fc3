"""The `deepinfer` command: one module a command. The only place of the package that prints or handles signals."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from deepinfer.cli.bench import bench
from deepinfer.cli.costs import costs
from deepinfer.cli.env import env
from deepinfer.cli.generate import generate
from deepinfer.cli.inspect import inspect
from deepinfer.cli.models import models
from deepinfer.cli.run import run
from deepinfer.cli.serve import serve
from deepinfer_protocol import VERSION

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Large language models as async streams.")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(VERSION)
        raise typer.Exit


for command in (run, serve, generate, bench, costs, inspect, env):
    app.command()(command)
app.add_typer(models, name="models")


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    try:
        app()
    except BrokenPipeError:  # whoever read the output has gone: nothing is left to say, also not at the exit
        sys.stderr.close()
        sys.exit(1)
