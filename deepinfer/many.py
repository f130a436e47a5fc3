"""Many prompts through one engine, as many at once as it serves well, with a progress bar.

Knows only the engine's public face.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deepinfer.errors import InvalidRequest
from deepinfer.result import Completion
from deepinfer_protocol import SamplingParams

if TYPE_CHECKING:
    from deepinfer.engine import Engine


async def generate_many(
    engine: Engine,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    progress: bool,
    options: dict[str, Any],
) -> list[Completion]:
    """See `Engine.generate_many`."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"a {type(prompts).__name__} came, a list of prompts is expected")
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequest("params", f"{len(each)} came for {len(prompts)} prompts")
    completions: list[Completion | None] = [None] * len(prompts)
    places = iter(range(len(prompts)))

    with _Bar(len(prompts), progress) as bar:

        async def work() -> None:
            for place in places:
                completions[place] = await _generate_one(engine, prompts[place], each[place], options)
                bar.advance(completions[place])

        await _run_all([work() for _ in range(min(len(prompts), _num_at_once(engine)))])
    return [completion for completion in completions if completion is not None]


def _num_at_once(engine: Engine) -> int:
    """Enough to fill every slot twice over, and never more than the queue takes."""
    config = engine.config
    return min(2 * config.max_num_seqs * config.num_workers, config.max_queued_requests)


async def _generate_one(
    engine: Engine, prompt: Any, params: SamplingParams | None, options: dict[str, Any]
) -> Completion:
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        return await engine.generate(None, params, messages=prompt, **options)
    return await engine.generate(prompt, params, **options)


async def _run_all(works: list[Any]) -> None:
    """All of them, or the first error, with the rest ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


class _Bar:
    """Prompts done, and tokens a second, on standard error; silent where nobody looks."""

    def __init__(self, total: int, is_shown: bool) -> None:
        console = Console(stderr=True)
        is_watched = console.is_jupyter or (sys.stderr is not None and sys.stderr.isatty())
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
            redirect_stdout=False,  # the caller's streams are the caller's
            redirect_stderr=False,
            disable=not (is_shown and is_watched),
        )
        self._task = self._progress.add_task("generating", total=total, rate="")
        self._num_tokens = 0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, completion: Completion | None) -> None:
        if completion is not None:
            self._num_tokens += completion.num_generated_tokens
            elapsed_s = self._progress.tasks[0].elapsed or 1e-9
            self._progress.update(self._task, advance=1, rate=f"{self._num_tokens / elapsed_s:.0f} tok/s")
