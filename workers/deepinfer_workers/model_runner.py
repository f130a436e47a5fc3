"""A `Runner` that computes: plan -> tensors -> forward -> tokens. Knows nothing of sockets, processes or requests.

`build` runs on the host thread and keeps the ledger; slots, caches and the model belong to `launch`. On a GPU nothing
in `launch` waits for the device: results come back by a second stream, and `PendingStep.wait` is who waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import Ops, PackedRows, UnknownAccelerator, select_ops
from deepinfer_protocol import MaskBatch, ProtocolError, Ready, StepPlan, WorkerConfig, unpack_int32
from deepinfer_workers.batch import DeviceBatch, Ints
from deepinfer_workers.capacity import limits_of, memory_faults
from deepinfer_workers.graphs import GraphLadder
from deepinfer_workers.ledger import SlotLedger
from deepinfer_workers.models.model import ModelOptions, Step
from deepinfer_workers.models.registry import load_model, num_threads_for, open_checkpoint
from deepinfer_workers.queue_clock import QueueClock, Timing
from deepinfer_workers.runner import DoneStep, PendingStep, StepOutput, StepTimes, WorkerFault
from deepinfer_workers.sampler import ROWS_AT_ONCE, unpack_masks
from deepinfer_workers.sampling_state import Logprobs, PromptPositions, SamplingState
from deepinfer_workers.slots import SlotState, slot_bytes
from deepinfer_workers.step_results import StepResults
from deepinfer_workers.upload import Parcel, to_device


@dataclass(frozen=True)
class BuiltStep:
    """A checked plan and its columns, packed for the device."""

    batch: DeviceBatch
    starts: Ints
    """[S]: the first position of every row."""
    changes: Parcel | None
    """Slots, positions, tokens; slots, columns, blocks; slots, lengths. `None`: the plan changes nothing."""
    inputs: Parcel
    """[2, T] slots and offsets of the positions; [S] slots of the rows; [R] slots and places of the sampled ones."""
    prefetched: object
    """The model's."""


class ModelRunner:
    """Loads the model that the configuration names and computes its steps."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._graphs: GraphLadder | None = None
        self._clock: QueueClock | None = None  # of a device with a queue
        self._at_end = ExitStack()

    def load(self, report: Callable[[int, int], None]) -> Ready:
        """Weights, caches, slots, graphs. Raises `WorkerFault`."""
        with memory_faults(self._config):
            return self._load(report)

    @property
    def is_queued(self) -> bool:
        return self._clock is not None

    def build(self, plan: StepPlan) -> BuiltStep:
        """Check the plan and lay it out. Raises `ProtocolError`."""
        batch = DeviceBatch.from_plan(plan, self._limits)
        changes = self._ledger.apply(batch)
        has_changes = changes.blocks[0].size or changes.lengths[0].size
        device = self._ops.device
        return BuiltStep(
            batch,
            changes.starts,
            Parcel([*changes.tokens, *changes.blocks, *changes.lengths], device) if has_changes else None,
            Parcel(_inputs(batch, self._limits.num_slots), device),
            self._model.prefetch(batch, changes.starts),
        )

    @torch.inference_mode()
    def launch(self, built: BuiltStep, wait_for_masks: Callable[[], MaskBatch]) -> PendingStep:
        """One step. Raises `ProtocolError` when masks contradict the plan, `WorkerFault` when memory runs out.

        Logits that are not numbers are a `WorkerFault` too, here or in the pending step's `wait`.
        """
        with memory_faults(self._config):
            if self._clock is None:
                return DoneStep(self._compute(built, wait_for_masks).to_output())
            with self._clock.step() as timing:
                results = self._compute(built, wait_for_masks)
                timing.end()
                return _QueuedStep(results.download(timing.ended, self._clock.copy_stream), timing)

    def close(self) -> None:
        self._at_end.close()

    def _compute(self, built: BuiltStep, wait_for_masks: Callable[[], MaskBatch]) -> StepResults:
        batch = built.batch
        self._change_slots(built)
        if not batch.slots.size:
            return StepResults.empty()
        positions, row_slots, sampled_slots, last = built.inputs.unpack()
        wanted = self._sampling.prompt_positions(batch.slots, built.starts, batch.counts)
        hidden = self._forward(built, positions)
        is_every = len(batch.sampled) == len(batch.row_of)  # one position a row, all sampled: plain decoding
        logits = self._model.logits(
            hidden[: len(batch.sampled)] if is_every else hidden.index_select(0, last)
        )  # [R, V]
        lengths = self._slots.lengths[row_slots]
        places = lengths if is_every else self._slots.lengths[sampled_slots]
        tokens = self._sample(built, logits, places, wait_for_masks)
        self._slots.write_tokens(sampled_slots, places, tokens)
        return StepResults(
            batch,
            lengths=lengths,
            tokens=tokens,
            is_nan=logits.amax(-1).isnan(),
            logprobs=self._sampling.logprobs(logits, tokens, batch.slots[batch.sampled]),
            prompt_logprobs=None if wanted is None else self._prompt_logprobs(hidden, wanted),
        )

    def _change_slots(self, built: BuiltStep) -> None:
        self._sampling.retire(built.batch.retired)
        if built.changes is None:
            return
        columns = built.changes.unpack()
        self._slots.write_tokens(*columns[:3])
        self._slots.write_blocks(*columns[3:6])
        self._slots.write_lengths(*columns[6:])
        self._sampling.admit(built.batch.admissions)
        self._model.admit(built.batch.admissions)

    def _forward(self, built: BuiltStep, positions: Tensor) -> Tensor:
        """Hidden states, [T, C]. Afterwards the lengths are those after the step."""
        batch = built.batch
        if self._graphs is not None and batch.num_positions in self._graphs and self._ops.is_flat(batch.counts):
            return self._graphs.replay(positions)
        return self._run_layers(positions, batch.counts, built.prefetched)

    def _prompt_logprobs(self, hidden: Tensor, wanted: PromptPositions) -> Logprobs:
        parts = to_device(wanted.packed, hidden.device).split(ROWS_AT_ONCE)
        logits = (self._model.logits(hidden.index_select(0, part)) for part in parts)  # a long prompt has many
        return self._sampling.prompt_logprobs(logits, wanted)

    def _run_layers(self, positions: Tensor, counts: Ints, prefetched: object = None) -> Tensor:
        """Hidden states [T, C] of `positions` [2, T], which are slots and offsets; `counts` [S] are the rows' sizes."""
        slots, offsets = positions.unbind(0)
        tokens, places, cache_indices = self._slots.gather(slots, offsets)
        rows = PackedRows(counts, slots, places, self._slots.tables)
        hidden = self._model.forward(Step(tokens, cache_indices, rows, self._slots.tokens, prefetched))
        self._slots.advance(slots)
        return hidden

    def _prepare_gpu(self) -> None:
        """Compile our own kernels for what steps will launch, and capture the small steps, before somebody waits.

        The first steps still pay for what torch and its libraries load at a first use: products of other sizes, and
        the kernels of the ways of sampling.
        """
        null_slot, device = self._config.num_slots, self._ops.device
        for counts in self._model.typical_steps():
            positions = torch.zeros(2, int(counts.sum()), dtype=torch.int64, device=device)
            positions[0] = null_slot
            self._model.logits(self._run_layers(positions, counts)[-1:])
        if self._config.cuda_graphs and self._model.can_capture:
            self._graphs = GraphLadder(self._limits.ladder, self._run_flat, null_slot, device)
        self._clock = QueueClock(device)

    def _run_flat(self, positions: Tensor) -> Tensor:
        """What a graph does: every position as if it were a row of its own."""
        return self._run_layers(positions, np.ones(positions.shape[1], np.int64))

    def _sample(
        self, built: BuiltStep, logits: Tensor, places: Tensor, wait_for_masks: Callable[[], MaskBatch]
    ) -> Tensor:
        """Tokens of the sampled rows, [R], to be stored at `places` [R]; rows with a mask in a second launch."""
        batch = built.batch
        slots, num_known = batch.slots[batch.sampled], (built.starts + batch.counts)[batch.sampled]
        if not batch.is_waiting.any():
            return self._sampling.sample(logits, slots, places, None, num_known)
        tokens = torch.zeros_like(places)
        for part, has_masks in ((np.flatnonzero(~batch.is_waiting), False), (np.flatnonzero(batch.is_waiting), True)):
            if part.size:
                allowed = self._masks(slots[part], wait_for_masks()) if has_masks else None
                index = to_device(part, logits.device)
                tokens[index] = self._sampling.sample(
                    logits[index], slots[part], places[index], allowed, num_known[part]
                )
        return tokens

    def _masks(self, slots: Ints, masks: MaskBatch) -> Tensor:
        """Masks in the order of `slots`, [rows, V] bool."""
        came = unpack_int32(masks.slots).tolist()
        if sorted(came) != sorted(slots.tolist()):
            raise ProtocolError(f"masks for the slots {sorted(slots.tolist())} were expected, {sorted(came)} came")
        vocab_size = self._limits.vocab_size
        num_bytes = len(came) * 4 * -(-vocab_size // 32)
        if len(masks.bits) != num_bytes:
            raise ProtocolError(f"{num_bytes} bytes of masks were expected, {len(masks.bits)} came")
        allowed = unpack_masks(masks.bits, len(came), vocab_size, torch.device("cpu")).numpy()
        is_empty = ~allowed.any(-1)
        if is_empty.any():
            raise ProtocolError(f"the mask of slot {came[int(is_empty.argmax())]} allows no token")
        place_of = {slot: place for place, slot in enumerate(came)}
        return to_device(allowed[[place_of[slot] for slot in slots.tolist()]], self._ops.device)

    def _load(self, report: Callable[[int, int], None]) -> Ready:
        config = self._config
        checkpoint = open_checkpoint(Path(config.model), config.load_format)
        num_threads = config.num_threads or num_threads_for(checkpoint)
        if num_threads:
            torch.set_num_threads(num_threads)
        try:
            ops = select_ops(
                config.accelerator, batch_invariant=config.batch_invariant, dtype=config.dtype, rank=config.rank
            )
        except UnknownAccelerator as error:
            raise WorkerFault("unsupported_model", str(error)) from None
        self._ops = ops
        with torch.inference_mode():
            self._model = load_model(checkpoint, ops, ModelOptions.of(config), report)
            self._at_end.callback(self._model.close)
            self._limits = limits_of(config, self._model, ops)
            self._model.allocate(self._limits)
            self._slots = SlotState(self._limits, ops.device)
            self._ledger = SlotLedger(self._limits)
            self._sampling = SamplingState(self._slots.tokens, self._limits.vocab_size)
            if ops.device.type == "cuda":
                self._prepare_gpu()
        limits = self._limits
        needs = self._model.cache_needs(limits.block_size)
        return Ready(
            epoch=config.epoch,
            rank=config.rank,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_len,
            num_slots=limits.num_slots,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            block_bytes=needs.block_bytes,
            slot_bytes=needs.slot_bytes + slot_bytes(limits.max_len, limits.block_size),
            global_bytes_per_token=needs.token_bytes,
            bounded_replay_tokens=needs.bounded_replay,
            exact_replay_tokens=needs.exact_replay,
            weights_version=checkpoint.version,
            device=_describe(ops, self._graphs),
        )


class _QueuedStep:
    """A `PendingStep` whose results are on their way."""

    def __init__(self, results: Callable[[], StepOutput], timing: Timing) -> None:
        self._results = results
        self._timing = timing

    def wait(self) -> tuple[StepOutput, StepTimes | None]:
        return self._results(), self._timing.read()


def _inputs(batch: DeviceBatch, null_slot: int) -> list[Ints]:
    num_real = len(batch.row_of)
    positions = np.zeros((2, batch.num_positions), np.int64)  # slots, offsets
    positions[0] = null_slot
    positions[0, :num_real] = batch.slots[batch.row_of]
    positions[1, :num_real] = batch.offset_of
    last = np.cumsum(batch.counts)[batch.sampled] - 1
    return [positions, batch.slots, batch.slots[batch.sampled], last]


def _describe(ops: Ops, graphs: GraphLadder | None) -> str:
    if ops.device.type == "cuda":
        how = "no graphs" if graphs is None else f"{len(graphs)} graphs"
        return f"{torch.cuda.get_device_name(ops.device)}, {ops.arithmetic}, {how}"
    invariance = ", row-invariant" if ops.is_batch_invariant else ""
    return f"CPU, {torch.get_num_threads()} threads, {ops.arithmetic}{invariance}"
