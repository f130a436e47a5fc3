"""A progress bar for many requests: what is done, and tokens a second, on standard error. Knows nothing of requests."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressBar:
    """Silent where nobody looks."""

    def __init__(self, total: int, is_wanted: bool = True, num_done: int = 0) -> None:
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
            disable=not (is_wanted and is_watched),
        )
        self._task = self._progress.add_task("generating", total=total, completed=num_done, rate="")
        self._num_tokens = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, num_tokens: int) -> None:
        """One more is done, with so many tokens."""
        self._num_tokens += num_tokens
        elapsed_s = self._progress.tasks[0].elapsed or 1e-9
        self._progress.update(self._task, advance=1, rate=f"{self._num_tokens / elapsed_s:.0f} tok/s")
