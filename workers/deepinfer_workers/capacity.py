"""How much fits into the device's memory, and what is said when something does not. Knows nothing of plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from deepinfer_kernels import Ops
from deepinfer_protocol import WorkerConfig
from deepinfer_workers.batch import Limits
from deepinfer_workers.device_memory import free_bytes
from deepinfer_workers.drafts import draft_slot_bytes
from deepinfer_workers.graphs import ladder
from deepinfer_workers.models.model import CacheNeeds, Model
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.slots import slot_bytes

DEFAULT_KV_BYTES: Final = 1 << 30
"""Of blocks, at most, on the CPU, whose memory is everybody's. Slots come on top: as many as were asked for."""
MIN_BLOCK_SIZE: Final = 16
"""Tokens."""
MIN_LADDER: Final = 64
"""Short prompts go by graphs too, however few slots there are."""
GPU_RESERVE: Final = 0.08
"""Share of a GPU's memory that is left for activations and for others."""
_SIGNS: Final = ("allocate", "out of memory", "ALLOC_FAILED")
"""Of errors that have no type of their own: torch's on a CPU, Triton's and the driver's, the CUDA libraries'."""


@contextmanager
def memory_faults(config: WorkerConfig) -> Iterator[None]:
    """Whatever runs out of memory inside is a `WorkerFault`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_typed = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_typed and not any(sign in str(error) for sign in _SIGNS):
            raise
        raise WorkerFault("out_of_memory", f"{Path(config.model).name}: {error}") from error


def limits_of(config: WorkerConfig, model: Model, ops: Ops) -> Limits:
    """What plans may name: as configured, or as many blocks as fit beside the weights. Raises `WorkerFault`."""
    # Without graphs sizes are the same: so are the kernels, and so are the bits.
    longest_draft = _longest_draft(config, model)
    most = min(max(config.num_slots * (1 + longest_draft), MIN_LADDER), config.max_batch_positions)
    block_size = config.block_size or block_size_of(model.block_multiple)
    limits = Limits(
        num_slots=config.num_slots,
        num_blocks=config.num_blocks,
        block_size=block_size,
        max_len=model.max_len,
        vocab_size=model.vocab_size,
        max_batch_positions=config.max_batch_positions,
        ladder=ladder(most) if ops.device.type == "cuda" else (),
        row_multiple=ops.row_multiple,
        longest_draft=longest_draft,
    )
    return limits._replace(num_blocks=limits.num_blocks or _num_blocks(config, model, ops, limits))


def state_bytes(needs: CacheNeeds, limits: Limits) -> int:
    """On the device, for one slot: the model's, and the runner's."""
    drafts = draft_slot_bytes(limits.longest_draft, limits.vocab_size) if limits.longest_draft else 0
    return needs.slot_bytes + slot_bytes(limits.max_len, limits.block_size) + drafts


def block_size_of(multiple: int) -> int:
    """Tokens of a block, where the configuration leaves it to us."""
    return -(-MIN_BLOCK_SIZE // multiple) * multiple


def _longest_draft(config: WorkerConfig, model: Model) -> int:
    if model.drafter is None:
        return 0
    block = model.drafter.block_size
    return block if config.num_drafts < 0 else min(config.num_drafts, block)


def _num_blocks(config: WorkerConfig, model: Model, ops: Ops, limits: Limits) -> int:
    needs = model.cache_needs(limits.block_size)
    block_bytes = needs.block_bytes
    if config.kv_cache_bytes:
        what, most, num_blocks = "kv_cache_bytes", config.kv_cache_bytes, config.kv_cache_bytes // block_bytes
    else:
        per_slot = state_bytes(needs, limits)
        what, most = "what is free beside the slots,", _bytes_beside_slots(config, model.max_len, per_slot, ops)
        most_useful = config.num_slots * -(-model.max_len // limits.block_size)
        num_blocks = min(most_useful, most // block_bytes)
    if num_blocks < 1:
        raise WorkerFault("out_of_memory", f"{what} {most} bytes, holds no block of {block_bytes} bytes")
    return num_blocks


def _bytes_beside_slots(config: WorkerConfig, max_len: int, per_slot: int, ops: Ops) -> int:
    """For blocks, where the configuration leaves it to us. Raises `WorkerFault` without room for the slots."""
    spare, needed = _spare_bytes(ops), config.num_slots * per_slot
    if spare is not None and needed > spare:
        slots = f"max_num_seqs {config.num_slots} with max_model_len {max_len} takes {needed} bytes"
        text = f"{slots}, {per_slot} for each sequence, and {max(spare, 0)} are free"
        raise WorkerFault("out_of_memory", text)
    if ops.device.type == "cuda":
        assert spare is not None, "CUDA says it"
        return spare - needed
    return DEFAULT_KV_BYTES if spare is None else min(spare - needed, DEFAULT_KV_BYTES)


def _spare_bytes(ops: Ops) -> int | None:
    """For slots and blocks; `None` where the system does not say."""
    if ops.device.type != "cuda":
        return free_bytes(ops.device)
    torch.cuda.empty_cache()  # what loading left behind is free as well
    free, total = torch.cuda.mem_get_info(ops.device)
    return int(free - GPU_RESERVE * total)
