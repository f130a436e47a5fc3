"""Reads the small files of a model folder: JSON, a tokenizer. Bounded, and knows nothing of what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deepinfer.errors import ModelFileError

MAX_BYTES: Final = 64 << 20


def read_model_file(file: Path) -> bytes | None:
    """What is in it; `None` where there is no such file. Raises `ModelFileError`.

    Only a regular file is opened: a pipe would have us wait for who writes to it.
    """
    try:
        if not file.exists():
            return None
        if not file.is_file():
            raise ModelFileError(str(file), "a regular file was expected, and it is none")
        size_bytes = file.stat().st_size
        if size_bytes > MAX_BYTES:
            raise ModelFileError(str(file), f"at most {MAX_BYTES} bytes were expected, {size_bytes} came")
        return file.read_bytes()
    except OSError as error:
        raise ModelFileError(str(file), f"cannot be read: {error}") from None
