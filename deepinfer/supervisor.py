"""Starts the workers of one engine, hears them die, and leaves nothing behind. Knows nothing of models or requests.

Workers are plain subprocesses: no fork, no multiprocessing, no re-import of the user's main module. Each inherits one
end of a socket pair: it brings the configuration and is the death pipe afterwards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from deepinfer.env import worker_environment
from deepinfer.errors import WorkerStartError
from deepinfer_protocol import WorkerConfig, encode_config

FAULT_GRACE_S: Final = 0.03
"""A worker that ends by itself has said why: its last message gets this long to arrive."""


class WorkerProcess:
    """One worker. Made on the loop that hears of its end."""

    def __init__(self, config: WorkerConfig, on_exit: Callable[[int, str], None]) -> None:
        """Starts it. `on_exit(rank, words)` is called once, when it has ended without being asked to."""
        self.rank = config.rank
        self._loop = asyncio.get_running_loop()
        self._on_exit: Callable[[int, str], None] | None = on_exit
        self._exited = asyncio.Event()
        self._pipe, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "deepinfer_workers", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=worker_environment(module_folders()),
            )
        except OSError as error:
            self._pipe.close()
            raise WorkerStartError(f"{sys.executable} cannot be started: {error}") from error
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        self._watched = self._pipe.fileno() if self._pidfd is None else self._pidfd
        try:
            self._pipe.sendall(encode_config(config))
        except OSError:
            pass  # it is over already, which is heard of like every end
        self._pipe.setblocking(False)
        self._loop.add_reader(self._watched, self._on_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._exited.is_set()

    def _on_end(self) -> None:
        """The process is over (or, without pidfd, has closed its end of the pipe)."""
        self._loop.remove_reader(self._watched)
        self._reap()
        on_exit, self._on_exit = self._on_exit, None
        if on_exit is not None:
            delay_s = FAULT_GRACE_S if self._process.returncode == 1 else 0.0
            self._loop.call_later(delay_s, on_exit, self.rank, _describe_exit(self._process.returncode))

    def _reap(self) -> None:
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._exited.set()

    def expect_exit(self) -> None:
        """From here on its end is no news."""
        self._on_exit = None

    async def stop(self, grace_s: float) -> None:
        """Wait for its end, and after `grace_s` bring it about."""
        self.expect_exit()
        try:
            async with asyncio.timeout(grace_s):
                await self._exited.wait()
        except TimeoutError:
            self.kill()
            await self._exited.wait()

    def kill(self) -> None:
        self.expect_exit()
        if not self.has_exited:
            self._process.kill()

    def kill_now(self) -> None:
        """`kill` and reap, without a loop."""
        self.kill()
        if not self.has_exited:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._watched)
            self._reap()


class Supervisor:
    """The worker processes of one group."""

    def __init__(self) -> None:
        self._workers: list[WorkerProcess] = []

    def start(self, configs: list[WorkerConfig], on_exit: Callable[[int, str], None]) -> None:
        """One process a configuration."""
        for config in configs:
            self._workers.append(WorkerProcess(config, on_exit))

    @property
    def pids(self) -> list[int]:
        """Processes that live."""
        return [worker.pid for worker in self._workers if not worker.has_exited]

    def expect_exit(self) -> None:
        """From here on their ends are no news."""
        for worker in self._workers:
            worker.expect_exit()

    async def stop(self, grace_s: float) -> None:
        """Every worker ends: by itself within `grace_s`, or by force."""
        await asyncio.gather(*[worker.stop(grace_s) for worker in self._workers])

    def kill(self) -> None:
        """Every worker ends, now; their ends are no news."""
        for worker in self._workers:
            worker.kill()

    def kill_now(self) -> None:
        """As `kill`, when there is no loop any more to hear of it."""
        for worker in self._workers:
            worker.kill_now()


def module_folders() -> list[str]:
    """Where this installation's packages are: both ends of the wire come from one place."""
    folders: dict[str, None] = {}
    for module in ("deepinfer_workers", "deepinfer_protocol", "deepinfer_kernels"):
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise WorkerStartError(f"{module} is not installed beside deepinfer")
        folders[str(Path(spec.origin).parents[1])] = None
    return list(folders)


def _describe_exit(returncode: int) -> str:
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"ended with exit code {returncode}"
