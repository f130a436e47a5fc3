"""`deepinfer env`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer.cli.common import in_words, pair
from deepinfer.config import Setting, explain_config


def env(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Constructor arguments to try.")
    ] = None,
) -> None:
    """Every setting: constructor argument, environment variable, default, and which of them wins."""
    with in_words("env"):
        settings = explain_config(dict(pair(argument) for argument in arguments or []), strict=False)
    Console().print(_table(settings))


def _table(settings: list[Setting]) -> Table:
    table = Table(caption="An argument beats the environment, the environment beats the default; * marks the winner.")
    for column in ("argument", "environment", "default", "what it is"):
        table.add_column(column, overflow="fold")
    for setting in settings:
        has_argument = setting.argument is not msgspec.UNSET
        has_environment = setting.environment is not None
        cells = (
            _cell(setting.field, setting.argument if has_argument else None, has_argument),
            _cell(setting.variable or "-", setting.environment, has_environment and not has_argument),
            f"{_text(setting.default)}{'' if has_argument or has_environment else ' *'}",
            setting.description,
        )
        table.add_row(*map(escape, cells))  # a path may look like markup
    return table


def _cell(name: str, value: Any, is_winner: bool) -> str:
    return name if value is None else f"{name}={_text(value)}{' *' if is_winner else ''}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value) if value != "" else '""'
