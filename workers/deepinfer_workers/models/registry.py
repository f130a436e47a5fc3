"""Which class runs which checkpoint. Knows file kinds and architecture names only.

Code in a model's folder is never imported: an architecture is in this table or it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from deepinfer_kernels import Ops
from deepinfer_workers.checkpoint import Checkpoint, bad_file, unsupported
from deepinfer_workers.gguf_file import GGUFFile
from deepinfer_workers.models.llama import Llama
from deepinfer_workers.models.llama_config import LlamaConfig
from deepinfer_workers.models.llama_weights import random_shapes
from deepinfer_workers.models.model import Model
from deepinfer_workers.random_weights import RandomWeights
from deepinfer_workers.safetensors_folder import SafetensorsFolder

MODELS: Final = {
    "gguf:llama": Llama,
    "hf:LlamaForCausalLM": Llama,
    "hf:MistralForCausalLM": Llama,
}


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """The weights at `path`: a GGUF file, a folder with config.json, or a folder with a single GGUF file.

    `dummy`: random ones in the shapes of the folder's config.json. Raises `WorkerFault`.
    """
    if load_format == "dummy":
        return RandomWeights(path, random_shapes)
    if path.is_file():
        if path.suffix != ".gguf":
            raise bad_file(path.name, "a .gguf file or a folder was expected")
        return GGUFFile(path)
    if not path.is_dir():
        raise bad_file(path.name, "there is no such file or folder")
    if (path / "config.json").is_file():
        return SafetensorsFolder(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise bad_file(
            path.name, f"config.json or a single .gguf file was expected, {len(files)} .gguf files are there"
        )
    return GGUFFile(files[0])


def load_model(checkpoint: Checkpoint, ops: Ops, max_len: int, report: Callable[[int, int], None]) -> Model:
    """The model of `checkpoint` for at most `max_len` positions (0: its own limit). Raises `WorkerFault`."""
    model = MODELS.get(checkpoint.architecture)
    if model is None:
        text = f"architecture {checkpoint.architecture!r} is not one of {', '.join(sorted(MODELS))}"
        raise unsupported(checkpoint.name, text)
    own_limit = LlamaConfig.read(checkpoint).max_len
    if max_len > own_limit:
        raise unsupported(checkpoint.name, f"max_model_len {max_len} is above the model's own {own_limit}")
    return model(checkpoint, ops, max_len, report)
