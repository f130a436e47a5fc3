"""What the commands share: engine settings as options, errors in one line, progress of a start, a loop."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from deepinfer.config import explain_config
from deepinfer.errors import ConfigError, DeepInferError, UnknownModel
from deepinfer.home import new_loop

T = TypeVar("T")

SWITCH_INTERVAL_S: Final = 0.001

FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130  # as shells have it

Model = Annotated[str, typer.Argument(help="A known name, a .gguf file, a model folder, or org/name that was pulled.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of the engine, of those `deepinfer env` lists."),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens an answer may have.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the most probable token.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most probable tokens up to this sum.")]
Seed = Annotated[int | None, typer.Option(help="Makes the answers repeatable.")]


def pair(argument: str) -> tuple[str, str]:
    """`NAME=VALUE` in two."""
    name, equals, value = argument.partition("=")
    if not equals:
        raise typer.BadParameter(f"{argument!r}: NAME=VALUE is expected")
    return name, value


def engine_settings(arguments: list[str] | None) -> dict[str, Any]:
    """The values of `--set` options. Raises `ConfigError` by name."""
    texts = dict(pair(argument) for argument in arguments or [])
    if "model" in texts:
        raise ConfigError("model", "is the command's own argument, and no --set")
    values = {setting.field: setting.value for setting in explain_config(texts, strict=False)}
    return {name: values[name] for name in texts}


def sampling_fields(**options: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` whose option was given."""
    return {name: value for name, value in options.items() if value is not None}


def say(text: str) -> None:
    """On standard error, where it mixes with no result."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def starting(*, is_silent: bool = False) -> Iterator[Callable[[str], None]]:
    """Takes what an engine says while it opens: one line that changes on a terminal, else lines, or nothing."""
    if sys.stderr is not None and sys.stderr.isatty():
        with Console(stderr=True).status("starting") as status:
            yield lambda text: status.update(escape(text))
    else:
        yield _say_nothing if is_silent else say


def _say_nothing(text: str) -> None:
    """Whoever pipes prompts in wants answers."""


@contextmanager
def in_words(command: str) -> Iterator[None]:
    """Errors as one line and an exit code: 2 for what was asked, 1 for what went wrong, 130 for Ctrl-C."""
    try:
        yield
    except DeepInferError as error:
        say(f"deepinfer {command}: {' '.join(str(error).split())}")
        raise typer.Exit(MISUSED if isinstance(error, ConfigError | UnknownModel) else FAILED) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"deepinfer {command}: {error}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say(f"deepinfer {command}: interrupted")
        raise typer.Exit(INTERRUPTED) from None


def favour_the_loop() -> None:
    """In a process that serves, behind its start: threads and the garbage collector keep the loop for less time.

    A thread that computes gives the interpreter's lock away after a millisecond instead of five, and the collector does
    not walk over what the start has made, which stays.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """On a loop of its own, which Ctrl-C ends in order: tasks are cancelled, then `KeyboardInterrupt` is raised."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)
