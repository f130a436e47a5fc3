"""The `deepinfer` command as a process of its own, where its signals and its death are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

ON_A_TERMINAL: Final = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""A Python program that runs its arguments on a terminal, and passes standard input and output through."""


def environment(**more: str) -> dict[str, str]:
    """This process's, also where nothing is installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"} | more


def run_command(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """To its end; `more` are environment variables."""
    command = [sys.executable, "-m", "deepinfer", *arguments]
    return subprocess.run(
        command, input=stdin, env=environment(**more), capture_output=True, text=True, timeout=60, check=False
    )


class Running:
    """One that runs: what it writes, both streams as one, and what it is told."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.written = ""

    def read_until(self, text: str, *, times: int = 1) -> str:
        """What was written up to here, once it holds `text` so many times. Fails when it ends before that."""
        assert self.process.stdout is not None
        while self.written.count(text) < times:
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, f"{text!r} never came: {self.written!r}"
            self.written += part.decode(errors="replace")
        return self.written

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def press_until_it_ends(self, key: str) -> None:
        """More than once where need be: a signal between readline's prompt and its wait shows at the next one only."""
        for _ in range(60):
            self.write(key)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.5)
                return

    def end(self) -> int:
        """No more input; the exit code."""
        rest, _ = self.process.communicate(timeout=30)
        self.written += rest.decode(errors="replace")
        return self.process.returncode


@contextmanager
def running(*arguments: str, on_terminal: bool = False) -> Iterator[Running]:
    """The command with its standard streams as pipes, or on a terminal."""
    command = [sys.executable, "-m", "deepinfer", *arguments]
    if on_terminal:
        command = [sys.executable, "-c", ON_A_TERMINAL, *command]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield Running(process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
