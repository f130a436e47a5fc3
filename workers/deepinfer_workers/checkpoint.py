"""The seam between weight files and models. Knows no file format and no architecture.

A file is never trusted: what does not fit is refused with a `WorkerFault` that names the file, what was expected and
what came. Names in a file may be anything: text for people is short and printable.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor

from deepinfer_workers.runner import WorkerFault

MAX_TENSORS: Final = 1 << 18
"""Of a checkpoint. The release of DeepSeek-V4.1-Flash has 96,085; a header of as many as this is checked in seconds."""
MAX_TEXT: Final = 2000
"""Characters of a fault."""


class TensorInfo(NamedTuple):
    """What a file says about one of its tensors."""

    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it."""
    num_bytes: int
    """In the file."""
    dtype: str
    """As the file's format names it: `BF16` in safetensors files, `Q4_K` in GGUF files."""


class Checkpoint(Protocol):
    """An open file or folder of weights. Nothing of it has been read but its tables."""

    @property
    def name(self) -> str:
        """For messages: the name of the file or folder, without its path."""

    @property
    def architecture(self) -> str:
        """As the file calls it, behind the kind of file: `gguf:llama`, `hf:LlamaForCausalLM`."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The format's own keys: GGUF fields, or what config.json holds."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def version(self) -> str:
        """Differs when the name, the size or the tables of the weights differ."""

    def read(self, name: str) -> Tensor:
        """The tensor in float32, with a shape that was checked."""


def bad_file(name: str, text: str) -> WorkerFault:
    """The file is not what it should be."""
    return WorkerFault("model_file", _printable(f"{name}: {text}"))


def unsupported(name: str, text: str) -> WorkerFault:
    """The file is fine, but nothing here can run it."""
    return WorkerFault("unsupported_model", _printable(f"{name}: {text}"))


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """What a regular file of at most `max_bytes` holds: opening a pipe would wait for who writes to it.

    Raises `WorkerFault`, and `OSError` for a file that cannot be read.
    """
    check_regular(path)
    size = path.stat().st_size
    if size > max_bytes:
        raise bad_file(path.name, f"at most {max_bytes} bytes were expected, {size} came")
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raises `WorkerFault` for a pipe, a device or a folder, `OSError` where there is nothing."""
    if not S_ISREG(path.stat().st_mode):
        raise bad_file(path.name, "a regular file was expected, and it is none")


def _printable(text: str) -> str:
    """On one line, without what a terminal obeys; of a long text the middle is left out."""
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
