"""From a folder and a configuration to a model that runs. Knows no formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from deepinfer_kernels import Ops
from deepinfer_workers.checkpoint import Checkpoint, unsupported
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.model import Deepseek
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors
from deepinfer_workers.models.model import ModelOptions, check_max_len
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.safetensors_folder import SafetensorsFolder
from deepinfer_workers.truncation import check_keep

SMALL_HIDDEN: Final = 1024


def load_deepseek(
    checkpoint: Checkpoint,
    ops: Ops,
    options: ModelOptions,
    report: Callable[[int, int], None],
    *,
    num_ranks: int = 1,
    rank: int = 0,
) -> Deepseek:
    """V4.1 or V4, as config.json says. Draft stages are there if `options` ask for them; vision is
    left out.

    With the routed experts of expert-parallel rank `rank` of `num_ranks`; all else is on every rank. Raises
    `WorkerFault`.
    """
    if not isinstance(checkpoint, SafetensorsFolder):
        raise unsupported(checkpoint.name, "random weights of this architecture are written as a checkpoint")
    config = DeepseekConfig.read(checkpoint.metadata, "config.json")
    check_max_len(checkpoint.name, options.max_len, config.max_len)
    drafts = check_drafts(options.num_drafts, config)
    if config.family == "v4.1":
        check_keep(options.keep_tokens, config.window, drafts)
    check_block_size(options.block_size, config)
    tensors = RankTensors(checkpoint, config, num_ranks, rank, has_drafts=drafts > 0, report=report)
    return Deepseek(tensors, config, ops, options)


def check_drafts(num_drafts: int, config: DeepseekConfig) -> int:
    """The longest draft: `num_drafts`, or for -1 the block that the checkpoint has. Raises `WorkerFault`."""
    block_size = 0 if config.dspark is None else config.dspark.block_size
    if num_drafts > 0 and config.dspark is None:
        why = f"num_nextn_predict_layers is {config.num_stages}"
        raise WorkerFault("setting", f"num_drafts: the checkpoint has no DSpark stages ({why})")
    if num_drafts > block_size:
        raise WorkerFault("setting", f"num_drafts: the checkpoint's block is {block_size}, {num_drafts} came")
    return block_size if num_drafts < 0 else num_drafts


def num_threads_for(checkpoint: Checkpoint) -> int:
    """CPU threads that such a model is fastest with; 0: as many as there are. Raises `WorkerFault`.

    A step of a small one is thousands of products, each done before a second thread has woken up: where anything else
    wants that thread's core, they wait for it thousands of times.
    """
    config = DeepseekConfig.read(checkpoint.metadata, "config.json")
    return 1 if config.hidden_size < SMALL_HIDDEN else 0


def check_block_size(block_size: int, config: DeepseekConfig) -> None:
    """A block holds whole compressed rows of every layer. Raises `WorkerFault`."""
    if block_size % config.block_multiple:
        words = f"{block_size} is no multiple of {config.block_multiple}, and compressed rows stand for as many tokens"
        raise WorkerFault("setting", f"block_size: {words}")
