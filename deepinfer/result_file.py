"""Results in a file, one JSON object a line, in the order in which they come; what is there already is kept.

A line is there or not: each is one write to the system, so that no end of the process loses a finished one. What a
write that was cut off has left is dropped by the next run. Knows nothing of what a result holds beside `line`, `id` and
`crc`.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Self

import msgspec

from deepinfer.errors import ConfigError

_START: Final = b'{"line":'
"""Of every line."""


class _Written(msgspec.Struct):
    """What is read of a line that is there."""

    line: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    crc: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class ResultFile:
    """Open for one process at a time. Costs about 150 bytes a line."""

    def __init__(self, path: Path) -> None:
        """Reads which lines are there. Raises `ConfigError` when it is no such file, or another process has it."""
        self.path = path
        self._line_to_crc: dict[int, int] = {}  # what there was when it was opened
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError("out", f"{path} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def has(self, line: int, crc: int) -> bool:
        """Was the result of this line there? Raises `ConfigError` when there was one of another `crc`."""
        written = self._line_to_crc.get(line)
        if written is not None and written != crc:
            raise ConfigError("out", f"{self.path}: its result of line {line} is of another prompt or other parameters")
        return written is not None

    def write(self, record: Any) -> None:
        """Add one line, whole when this returns. Raises `OSError`."""
        text = memoryview(msgspec.json.encode(record) + b"\n")
        while text:
            text = text[self._file.write(text) :]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("out", f"{self.path} is being written by another process") from None

    def _scan(self) -> None:
        """Learn what is there, and drop a torn last line of ours."""
        size = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    if not _START.startswith(raw[: len(_START)]):
                        raise self._refusal(number)
                    self._file.truncate(size)
                    return
                size += len(raw)
                self._note(number, raw)

    def _note(self, number: int, raw: bytes) -> None:
        try:
            written = msgspec.json.decode(raw, type=_Written)
        except msgspec.MsgspecError:
            raise self._refusal(number) from None
        self._line_to_crc[written.line] = written.crc

    def _refusal(self, number: int) -> ConfigError:
        return ConfigError("out", f"{self.path}: its line {number} is no result of ours")
