"""A `Runner` that computes: plan -> tensors -> forward -> tokens. Knows nothing of sockets, processes or requests.

`build` runs on the host thread and touches only the plan; slots, caches and the model belong to `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import Ops, UnknownAccelerator, select_ops
from deepinfer_protocol import MaskBatch, ProtocolError, Ready, StepPlan, WorkerConfig, unpack_int32
from deepinfer_workers.batch import DeviceBatch, Ints, Limits
from deepinfer_workers.kv import PagedKVCache
from deepinfer_workers.models.llama import Llama, Positions
from deepinfer_workers.models.registry import load_model, open_checkpoint
from deepinfer_workers.runner import StepOutput, WorkerFault
from deepinfer_workers.sampler import unpack_masks
from deepinfer_workers.sampling_state import PromptPositions, SamplingState
from deepinfer_workers.slots import SlotState

DEFAULT_KV_BYTES: Final = 1 << 30
NO_LOGPROBS: Final = (b"", b"", b"")
_INT32: Final = np.dtype("<i4")


class ModelRunner:
    """Loads the model that the configuration names and computes its steps."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config

    def load(self, report: Callable[[int, int], None]) -> Ready:
        """Weights, caches, slots. Raises `WorkerFault`."""
        try:
            return self._load(report)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise WorkerFault("out_of_memory", f"{Path(self._config.model).name}: {error}") from error
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise WorkerFault("out_of_memory", f"{Path(self._config.model).name}: {error}") from error

    def build(self, plan: StepPlan) -> DeviceBatch:
        """Check the plan and lay it out. Raises `ProtocolError`."""
        return DeviceBatch.from_plan(plan, self._limits)

    @torch.inference_mode()
    def run(self, batch: DeviceBatch, wait_for_masks: Callable[[], MaskBatch]) -> StepOutput:
        """One step. Raises `ProtocolError` when the plan contradicts the slots."""
        self._slots.apply(batch)
        self._sampling.retire(batch.retired)
        self._sampling.admit(batch.admissions)
        if not batch.slots.size:
            return StepOutput(b"", b"")
        wanted = self._sampling.prompt_positions(batch.slots, self._slots.starts(batch), batch.counts)
        logits = self._forward(batch, wanted)
        prompt_logits, logits = logits[len(batch.sampled) :], logits[: len(batch.sampled)]
        lengths = self._slots.advance(batch)
        tokens = self._sample(batch, logits, wait_for_masks)
        logprobs = self._sampling.logprobs(logits, tokens, batch.slots[batch.sampled])
        prompt_logprobs = None if wanted is None else self._sampling.prompt_logprobs(prompt_logits, wanted)
        num_tokens = np.zeros_like(batch.slots)
        num_tokens[batch.sampled] = 1
        columns = np.concatenate((batch.slots, batch.generations, lengths, num_tokens))
        return StepOutput(
            columns.astype(_INT32).tobytes(),
            tokens.to("cpu", torch.int32).numpy().astype(_INT32).tobytes(),
            *(logprobs.to_bytes() if logprobs is not None else NO_LOGPROBS),
            *(prompt_logprobs.to_bytes() if prompt_logprobs is not None else NO_LOGPROBS),
        )

    def _load(self, report: Callable[[int, int], None]) -> Ready:
        config = self._config
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        try:
            ops = select_ops(config.accelerator, batch_invariant=config.batch_invariant)
        except UnknownAccelerator as error:
            raise WorkerFault("unsupported_model", str(error)) from None
        checkpoint = open_checkpoint(Path(config.model))
        with torch.inference_mode():
            self._ops, self._model = ops, load_model(checkpoint, ops, config.max_model_len, report)
            self._limits = _limits(config, self._model)
            self._cache = PagedKVCache(self._model.cache_shape, self._limits.num_blocks, config.block_size, ops.device)
            self._slots = SlotState(self._limits, ops.device)
            self._sampling = SamplingState(self._slots.tokens, self._limits.vocab_size)
        return Ready(
            epoch=config.epoch,
            rank=config.rank,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_len,
            num_slots=config.num_slots,
            num_blocks=self._limits.num_blocks,
            block_size=config.block_size,
            block_bytes=self._model.cache_shape.position_bytes * config.block_size,
            slot_bytes=self._slots.slot_bytes,
            replay_tokens=0,
            weights_version=checkpoint.version,
            device=_describe(ops),
        )

    def _forward(self, batch: DeviceBatch, wanted: PromptPositions | None) -> Tensor:
        """Logits of the sampled rows and then of the `wanted` positions of prompts, [R + P, V]."""
        starts, counts = self._slots.starts(batch).tolist(), batch.counts.tolist()
        tokens, positions, cache_indices = self._slots.gather(batch, self._cache.null_index)
        attention = self._ops.plan_attention(
            starts,
            counts,
            self._slots.tables(batch),
            block_size=self._limits.block_size,
            group_size=self._model.group_size,
            num_positions=batch.num_positions,
        )
        last = np.cumsum(batch.counts)[batch.sampled] - 1
        last = last if wanted is None else np.concatenate((last, wanted.packed))
        sampled = torch.from_numpy(last).to(self._ops.device)
        return self._model.forward(Positions(tokens, positions, cache_indices, attention, sampled), self._cache)

    def _sample(self, batch: DeviceBatch, logits: Tensor, wait_for_masks: Callable[[], MaskBatch]) -> Tensor:
        """Tokens of the sampled rows, [R]; rows with a mask in a second launch."""
        slots = batch.slots[batch.sampled]
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
        free, waiting = np.flatnonzero(~batch.is_waiting), np.flatnonzero(batch.is_waiting)
        if free.size:
            self._launch(slots, free, logits, tokens, None)
        if waiting.size:
            self._launch(slots, waiting, logits, tokens, self._masks(slots[waiting], wait_for_masks()))
        return tokens

    def _launch(self, slots: Ints, part: Ints, logits: Tensor, tokens: Tensor, allowed: Tensor | None) -> None:
        index = torch.from_numpy(part).to(logits.device)
        is_all = len(part) == len(slots)
        lengths = self._slots.lengths(slots[part])
        positions = torch.from_numpy(lengths).to(logits.device)
        chosen = self._sampling.sample(logits if is_all else logits[index], slots[part], positions, allowed, lengths)
        tokens[index] = chosen
        self._slots.store(slots[part], chosen)

    def _masks(self, slots: Ints, masks: MaskBatch) -> Tensor:
        """Masks in the order of `slots`, [rows, V] bool."""
        came = unpack_int32(masks.slots).tolist()
        if sorted(came) != sorted(slots.tolist()):
            raise ProtocolError(f"masks for the slots {sorted(slots.tolist())} were expected, {sorted(came)} came")
        vocab_size = self._limits.vocab_size
        num_bytes = len(came) * 4 * -(-vocab_size // 32)
        if len(masks.bits) != num_bytes:
            raise ProtocolError(f"{num_bytes} bytes of masks were expected, {len(masks.bits)} came")
        allowed = unpack_masks(masks.bits, len(came), vocab_size, self._ops.device)
        is_empty = ~allowed.any(-1)
        if bool(is_empty.any()):
            raise ProtocolError(f"the mask of slot {came[int(is_empty.nonzero()[0])]} allows no token")
        return allowed[[came.index(slot) for slot in slots.tolist()]]


def _limits(config: WorkerConfig, model: Llama) -> Limits:
    block_bytes = model.cache_shape.position_bytes * config.block_size
    num_blocks = config.num_blocks or config.kv_cache_bytes // block_bytes
    if not num_blocks and config.kv_cache_bytes:
        text = f"kv_cache_bytes {config.kv_cache_bytes} holds no block of {block_bytes} bytes"
        raise WorkerFault("out_of_memory", text)
    if not num_blocks:
        most_useful = config.num_slots * -(-model.max_len // config.block_size)
        num_blocks = max(1, min(most_useful, DEFAULT_KV_BYTES // block_bytes))
    return Limits(
        num_slots=config.num_slots,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_len=model.max_len,
        vocab_size=model.vocab_size,
        max_batch_positions=config.max_batch_positions,
    )


def _describe(ops: Ops) -> str:
    if ops.device.type == "cuda":
        return f"{torch.cuda.get_device_name()}, float32"
    invariance = ", row-invariant" if ops.is_batch_invariant else ""
    return f"CPU, {torch.get_num_threads()} threads, float32{invariance}"
