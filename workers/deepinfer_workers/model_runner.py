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
from deepinfer_workers.sampler import Logprobs, RowSampling, logprobs, sample, unpack_masks
from deepinfer_workers.slots import SlotState

DEFAULT_KV_BYTES: Final = 1 << 30
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
        if not batch.slots.size:
            return StepOutput(b"", b"")
        logits = self._forward(batch)
        lengths = self._slots.advance(batch)
        tokens = self._sample(batch, logits, wait_for_masks)
        num_tokens = np.zeros_like(batch.slots)
        num_tokens[batch.sampled] = 1
        columns = np.concatenate((batch.slots, batch.generations, lengths, num_tokens))
        return StepOutput(
            columns.astype(_INT32).tobytes(),
            tokens.to("cpu", torch.int32).numpy().astype(_INT32).tobytes(),
            *self._logprobs(batch, logits, tokens),
        )

    def _load(self, report: Callable[[int, int], None]) -> Ready:
        config = self._config
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        try:
            ops = select_ops(config.accelerator, batch_invariant=config.batch_invariant, dtype=config.dtype)
        except UnknownAccelerator as error:
            raise WorkerFault("unsupported_model", str(error)) from None
        checkpoint = open_checkpoint(Path(config.model))
        with torch.inference_mode():
            self._ops, self._model = ops, load_model(checkpoint, ops, config.max_model_len, report)
            self._limits = _limits(config, self._model, ops)
            self._cache = PagedKVCache(self._model.cache_shape, self._limits.num_blocks, config.block_size, ops.device)
            self._slots = SlotState(self._limits, ops.device)
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

    def _forward(self, batch: DeviceBatch) -> Tensor:
        """Logits of the sampled rows, [R, V]."""
        tokens, positions, cache_indices = self._slots.gather(batch, self._cache.null_index)
        attention = self._ops.plan_attention(
            self._slots.pack(batch, positions),
            block_size=self._limits.block_size,
            group_size=self._model.group_size,
            num_kv=self._model.num_kv_heads,
        )
        last = np.cumsum(batch.counts)[batch.sampled] - 1
        sampled = torch.from_numpy(last).to(self._ops.device)
        hidden = self._model.forward(Positions(tokens, positions, cache_indices, attention), self._cache)
        return self._model.logits(hidden.index_select(0, sampled))

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
        chosen = sample(logits if is_all else logits[index], self._row_sampling(slots[part]), allowed)
        tokens[index] = chosen
        self._slots.store(slots[part], chosen)

    def _row_sampling(self, slots: Ints) -> list[RowSampling]:
        lengths = self._slots.lengths(slots).tolist()
        params = [self._slots.params(slot) for slot in slots.tolist()]
        return [RowSampling(p.sampling, p.stop_ids, length) for p, length in zip(params, lengths, strict=True)]

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

    def _logprobs(self, batch: DeviceBatch, logits: Tensor, tokens: Tensor) -> tuple[bytes, bytes]:
        params = [self._slots.params(slot).sampling for slot in batch.slots[batch.sampled].tolist()]
        wanted = [row for row, sampling in enumerate(params) if sampling.num_logprobs >= 0]
        if not wanted:
            return b"", b""
        index = torch.tensor(wanted, device=logits.device)
        found = logprobs(logits[index], tokens[index], [params[row].num_logprobs for row in wanted])
        return _pack(found)


def _pack(found: list[Logprobs]) -> tuple[bytes, bytes]:
    ids = np.concatenate([entry.ids for entry in found]).astype(_INT32)
    values = np.concatenate([entry.values for entry in found]).astype("<f4")
    return ids.tobytes(), values.tobytes()


def _limits(config: WorkerConfig, model: Llama, ops: Ops) -> Limits:
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
        row_multiple=ops.row_multiple,
    )


def _describe(ops: Ops) -> str:
    if ops.device.type == "cuda":
        return f"{torch.cuda.get_device_name()}, {ops.arithmetic}"
    invariance = ", row-invariant" if ops.is_batch_invariant else ""
    return f"CPU, {torch.get_num_threads()} threads, {ops.arithmetic}{invariance}"
