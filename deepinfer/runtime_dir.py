"""A private folder for an engine's socket: mode 0700, locked while its engine lives, swept when it does not.

Two engines that bind one path would steal each other's workers without an error, so each has a folder of its own.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from pathlib import Path
from typing import Final

from deepinfer.env import runtime_homes
from deepinfer.errors import ConfigError

MAX_SOCKET_PATH_BYTES: Final = 107
_PREFIX: Final = "deepinfer-"
_SOCKET_NAME: Final = "w.sock"


class RuntimeDir:
    """Exists until `close`, the end of the process, or the next engine's start after a crash."""

    def __init__(self, parent: str = "") -> None:
        """Raises `ConfigError` when no folder is short and private enough for a socket."""
        home = _choose_home([parent] if parent else runtime_homes())
        _sweep(home)
        self.path = home / f"{_PREFIX}{secrets.token_hex(6)}"
        self._lock = _make_locked(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.path / _SOCKET_NAME}"

    def close(self) -> None:
        self._finalizer()


def _choose_home(candidates: list[str]) -> Path:
    longest = len(f"/{_PREFIX}{'0' * 12}/{_SOCKET_NAME}")
    for candidate in candidates:
        if len(os.fsencode(candidate)) + longest <= MAX_SOCKET_PATH_BYTES and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise ConfigError("runtime_dir", f"none of {candidates} is writable and short enough for a socket's path")


def _make_locked(folder: Path) -> int:
    """`folder`, with a lock file that was locked before it could be seen there."""
    folder.mkdir(mode=0o700)
    unseen = folder / "lock.new"
    lock = os.open(unseen, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unseen.rename(folder / "lock")
    return lock


def _sweep(home: Path) -> None:
    """Remove the folders of engines that ended without doing so: nobody holds their lock."""
    for folder in home.glob(f"{_PREFIX}{'[0-9a-f]' * 12}"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or not complete yet
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its engine lives
        finally:
            os.close(lock)


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves its parent's folder alone
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
