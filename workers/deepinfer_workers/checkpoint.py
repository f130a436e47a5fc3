"""The seam between weight files and models. Knows no file format and no architecture.

A file is never trusted: what does not fit is refused with a `WorkerFault` that names the file, what was expected and
what came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from deepinfer_workers.runner import WorkerFault


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
    return WorkerFault("model_file", f"{name}: {text}")


def unsupported(name: str, text: str) -> WorkerFault:
    """The file is fine, but nothing here can run it."""
    return WorkerFault("unsupported_model", f"{name}: {text}")
