"""Results in a file, one JSON object a line, in the order in which they come; what is there already is kept.

A line is there or not: each is one write to the system, so that no end of the process loses a finished one. What a
write that was cut off has left is dropped by the next run. Knows nothing of what a result holds beside `line` and `id`.
"""

from __future__ import annotations

import fcntl
from array import array
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self
from zlib import crc32

import msgspec

from deepinfer.errors import ConfigError


class _Written(msgspec.Struct):
    """What is read of a line that is there."""

    line: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    id: str | int | None = None


class ResultFile:
    """Open for one process at a time. Costs a machine word a line."""

    def __init__(self, path: Path) -> None:
        """Reads which lines are there. Raises `ConfigError` when it is no such file, or another process has it."""
        self.path = path
        self.num_written = 0
        """Lines there were when it was opened."""
        self._marks = array("Q")  # by line: 0, or 1 and a checksum of the id
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

    def has(self, line: int, line_id: str | int | None) -> bool:
        """Is the result of this line there? Raises `ConfigError` when there is one of another id."""
        mark = self._marks[line] if line < len(self._marks) else 0
        if mark and mark != _mark(line_id):
            raise ConfigError("out", f"{self.path}: its result of line {line} is not of id {line_id!r}: other prompts?")
        return bool(mark)

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
        """Learn what is there, and drop a torn last line."""
        size = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    self._file.truncate(size)
                    return
                size += len(raw)
                self._note(number, raw)

    def _note(self, number: int, raw: bytes) -> None:
        try:
            written = msgspec.json.decode(raw, type=_Written)
        except msgspec.MsgspecError:
            raise ConfigError("out", f"{self.path}: its line {number} is no result of ours") from None
        missing = written.line + 1 - len(self._marks)
        if missing > 0:
            self._marks.extend([0] * missing)
        self._marks[written.line] = _mark(written.id)
        self.num_written += 1


def _mark(line_id: str | int | None) -> int:
    return 1 + crc32(repr(line_id).encode(errors="surrogatepass"))
