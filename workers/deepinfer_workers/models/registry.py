"""Which class runs which checkpoint. Knows file kinds and architecture names only.

Code in a model's folder is never imported: an architecture is in this table or it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from deepinfer_kernels import Ops
from deepinfer_workers.checkpoint import Checkpoint, bad_file, unsupported
from deepinfer_workers.config_file import config_architecture, read_config
from deepinfer_workers.gguf_file import GGUFFile
from deepinfer_workers.models.deepseek import loading
from deepinfer_workers.models.deepseek.loading import load_deepseek
from deepinfer_workers.models.llama import Llama
from deepinfer_workers.models.llama_weights import random_shapes
from deepinfer_workers.models.model import Model, ModelOptions
from deepinfer_workers.random_weights import RandomWeights
from deepinfer_workers.safetensors_folder import SafetensorsFolder

Report = Callable[[int, int], None]
Loader = Callable[[Checkpoint, Ops, ModelOptions, Report], Model]

MODELS: Final[Mapping[str, Loader]] = {
    "gguf:llama": Llama,
    "hf:LlamaForCausalLM": Llama,
    "hf:MistralForCausalLM": Llama,
    "hf:DeepseekV41ForCausalLM": load_deepseek,
    "hf:DeepseekV4ForCausalLM": load_deepseek,
}


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """The weights at `path`: a GGUF file, a folder with config.json, or a folder with a single GGUF file.

    `dummy`: random ones in the shapes of the folder's config.json. Raises `WorkerFault`.
    """
    if load_format == "dummy":
        if MODELS.get(config_architecture(read_config(path))) is load_deepseek:
            text = "load_format dummy is not for this model: deepinfer_workers.random_checkpoint writes one at random"
            raise unsupported(path.name, text)
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


def load_model(checkpoint: Checkpoint, ops: Ops, options: ModelOptions, report: Report) -> Model:
    """The model of `checkpoint`. Raises `WorkerFault`."""
    load = MODELS.get(checkpoint.architecture)
    if load is None:
        text = f"architecture {checkpoint.architecture!r} is not one of {', '.join(sorted(MODELS))}"
        raise unsupported(checkpoint.name, text)
    return load(checkpoint, ops, options, report)


def num_threads_for(checkpoint: Checkpoint) -> int:
    """CPU threads, where nobody has chosen; 0: as many as there are. Raises `WorkerFault`."""
    is_deepseek = MODELS.get(checkpoint.architecture) is load_deepseek
    return loading.num_threads_for(checkpoint) if is_deepseek else 0
