"""A `Runner` that computes: plan -> tensors -> forward -> tokens. Knows nothing of sockets, processes or requests.

`build` runs on the host thread and keeps the ledger; slots, caches and the model belong to `launch`. On a GPU nothing
in `launch` waits for the device: results come back by a second stream, and `PendingStep.wait` is who waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_kernels import Ops, PackedRows, UnknownAccelerator, select_ops
from deepinfer_protocol import MaskBatch, ProtocolError, Ready, StepPlan, WorkerConfig, unpack_int32
from deepinfer_workers.batch import DeviceBatch, Ints
from deepinfer_workers.capacity import limits_of, memory_faults, state_bytes
from deepinfer_workers.drafts import DraftState, Verdict, VerifyRows
from deepinfer_workers.graphs import GraphLadder, shapes
from deepinfer_workers.ledger import LedgerEntry, SlotLedger
from deepinfer_workers.models.model import ModelOptions, Step
from deepinfer_workers.models.registry import load_model, num_threads_for, open_checkpoint
from deepinfer_workers.queue_clock import QueueClock, Timing
from deepinfer_workers.runner import DoneStep, PendingStep, StepOutput, StepTimes, WorkerFault
from deepinfer_workers.sampler import ROWS_AT_ONCE, unpack_masks
from deepinfer_workers.sampling_state import Logprobs, PromptPositions, SamplingState
from deepinfer_workers.slots import SlotState
from deepinfer_workers.step_costs import measure_costs
from deepinfer_workers.step_results import Drafted, StepResults
from deepinfer_workers.upload import Parcel, to_device


@dataclass(frozen=True)
class BuiltStep:
    """A checked plan and its columns, packed for the device."""

    batch: DeviceBatch
    entry: LedgerEntry
    changes: Parcel | None
    """Slots, positions, tokens; slots, columns, blocks; slots, lengths. `None`: the plan changes nothing."""
    inputs: Parcel | None
    """The columns of `_Inputs`; `None`: only the device can say how many drafts each row verifies."""
    prefetched: object
    """The model's."""


class _Inputs(NamedTuple):
    """Columns of a step on the device. `T` packed positions, padded; `P` of them have logits."""

    positions: Tensor
    """[2, T]: slots, and offsets from their lengths before the step."""
    slots: Tensor
    """[S]"""
    sampled: Tensor
    """[R]: slots of the sampled rows."""
    places: Tensor
    """[P]: which positions have logits."""


class _DraftInputs(NamedTuple):
    """More columns, of a step that verifies drafts."""

    sizes: Tensor
    """[R]: logits of each sampled row."""
    owners: Tensor
    """[P]: the sampled row of each."""
    backs: Tensor
    """[P]: how far behind each the row ends."""
    slots: Tensor
    """[D]: of the drafts."""
    offsets: Tensor
    """[D]: from the length before the step."""


class _Masks(NamedTuple):
    """Of the rows that waited for them."""

    allowed: Tensor
    """[P, V] bool: of every place; behind those that have a mask, the last again."""
    counts: Tensor
    """[R]: how many each row has."""


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
        entry = self._ledger.apply(batch)
        most = entry.most_drafts
        is_settled = most is None or int(most.sum()) <= batch.verify_budget
        if most is not None and is_settled:
            batch = batch.with_drafts(most, self._limits)
        changes, device = entry.changes, self._ops.device
        has_changes = changes.blocks[0].size or changes.lengths[0].size
        return BuiltStep(
            batch,
            entry,
            Parcel([*changes.tokens, *changes.blocks, *changes.lengths], device) if has_changes else None,
            Parcel(_inputs(batch, self._limits.num_slots), device) if is_settled else None,
            self._model.prefetch(batch, entry.starts),
        )

    @torch.inference_mode()
    def launch(self, built: BuiltStep, wait_for_masks: Callable[[], MaskBatch]) -> PendingStep:
        """One step. Raises `ProtocolError` when masks contradict the plan, `WorkerFault` when memory runs out.

        Logits that are not numbers are a `WorkerFault` too, here or in the pending step's `wait`.
        """
        with memory_faults(self._config):
            learn = self._learner(built)
            if self._clock is None:
                output = self._compute(built, wait_for_masks).to_output()
                learn(output)
                return DoneStep(output)
            with self._clock.step() as timing:
                results = self._compute(built, wait_for_masks, timing)
                timing.end()
                return _QueuedStep(results.download(timing.ended, self._clock.copy_stream), timing, learn)

    def close(self) -> None:
        self._at_end.close()

    def _learner(self, built: BuiltStep) -> Callable[[StepOutput], None]:
        """What tells the ledger how long the slots have become."""
        batch, growth = built.batch, built.entry.growth

        def learn(output: StepOutput) -> None:
            if growth is not None:
                self._ledger.learn(batch, growth, np.asarray(output.lengths, np.int64))

        return learn

    def _compute(
        self, built: BuiltStep, wait_for_masks: Callable[[], MaskBatch], timing: Timing | None = None
    ) -> StepResults:
        self._change_slots(built)
        if not built.batch.slots.size:
            return StepResults.empty()
        if built.inputs is None and self._can_lay_out(built):
            return self._compute_on_device(built, timing)
        batch, columns = self._settle(built)
        inputs = _Inputs(*columns[:4])
        of_drafts = None if batch.num_verified is None else _DraftInputs(*columns[4:])
        predicted = None if of_drafts is None else self._write_drafts(batch, of_drafts)
        wanted = self._sampling.prompt_positions(batch.slots, built.entry.starts, batch.counts)
        hidden = self._forward(batch, inputs.positions, int(built.entry.ends.max()), built.prefetched)
        num_logits = len(inputs.places)
        is_every = num_logits == len(batch.row_of)  # plain decoding
        logits = self._model.logits(
            hidden[:num_logits] if is_every else hidden.index_select(0, inputs.places)
        )  # [P, V]
        ends = self._slots.lengths[inputs.sampled]
        places = ends if of_drafts is None else ends[of_drafts.owners] - of_drafts.backs
        rows = _verify_rows(batch, places, built.entry.ends)
        verdict = self._judge(batch.is_waiting, logits, rows, wait_for_masks)
        self._slots.write_tokens(
            inputs.sampled if of_drafts is None else inputs.sampled[of_drafts.owners], places, verdict.tokens
        )
        if of_drafts is not None:
            self._slots.take_back(inputs.sampled, of_drafts.sizes - verdict.num_tokens)
        is_final = of_drafts is None and len(inputs.sampled) == len(inputs.slots)
        lengths = ends if is_final else self._slots.lengths[inputs.slots]
        return StepResults(
            batch,
            lengths=lengths,
            tokens=verdict.tokens,
            is_nan=logits.amax(-1).isnan(),
            logprobs=self._sampling.logprobs(
                logits, verdict.tokens, rows.slots if of_drafts is None else _repeat_slots(rows)
            ),
            prompt_logprobs=None if wanted is None else self._prompt_logprobs(hidden, wanted),
            num_tokens=None if of_drafts is None else verdict.num_tokens,
            predicted=predicted,
            drafted=self._draft(batch, inputs.sampled, timing),
        )

    def _can_lay_out(self, built: BuiltStep) -> bool:
        """The device needs nobody to go on with as many drafts of each row as it finds best."""
        batch, most = built.batch, built.entry.most_drafts
        if self._graphs is None or self._drafts is None or not self._drafts.are_judged_at_once or most is None:
            return False
        longest = replace(batch, counts=batch.counts + most)
        return (
            bool((batch.counts == 1).all())
            and not self._model.needs_host
            and self._is_flat(longest)
            and not batch.is_waiting.any()
            and bool(self._sampling.are_plain(batch.slots).all())
            and not self._sampling.has_logprobs(batch.slots)
            and self._graphs.find(self._limits.padded(len(most) + batch.verify_budget), int(built.entry.ends.max()))
            is not None
        )

    def _compute_on_device(self, built: BuiltStep, timing: Timing | None) -> StepResults:
        """As `_compute`, of a step that the device lays out, so that nothing waits for it."""
        batch, most = built.batch, built.entry.most_drafts
        assert self._drafts is not None and most is not None
        layout = self._drafts.layout(batch.slots, most, batch.verify_budget)
        num_logits = len(layout.owners)
        positions = layout.positions(self._limits.padded(num_logits), self._config.num_slots)
        starts, slots = self._slots.lengths[layout.slots], layout.slots[layout.owners]
        newest = self._slots.tokens[layout.slots, starts].long()
        places = starts[layout.owners] + layout.offsets
        self._slots.write_tokens(slots, places, self._drafts.tokens_of(layout, newest))
        predicted = self._drafts.predicted_of(layout)
        spread = replace(batch, counts=batch.counts + most, num_positions=positions.shape[1])
        hidden = self._forward(spread, positions, int(built.entry.ends.max()), built.prefetched)
        logits = self._model.logits(hidden[:num_logits])  # [P, V]
        verdict = self._drafts.judge_on_device(logits, layout, batch.slots, places + 1)
        self._slots.write_tokens(slots, places + 1, verdict.tokens)
        self._slots.take_back(layout.slots, layout.counts + 1 - verdict.num_tokens)
        return StepResults(
            batch,
            lengths=self._slots.lengths[layout.slots],
            tokens=verdict.tokens,
            is_nan=logits.amax(-1).isnan(),
            num_tokens=verdict.num_tokens,
            num_verified=layout.counts,
            predicted=predicted,
            drafted=self._draft(batch, layout.slots, timing),
        )

    def _settle(self, built: BuiltStep) -> tuple[DeviceBatch, list[Tensor]]:
        """The batch with its drafts, and its columns."""
        batch, inputs = built.batch, built.inputs
        if inputs is None:
            most = built.entry.most_drafts
            assert most is not None and self._drafts is not None
            rows = np.flatnonzero(most)
            num_verified = np.zeros_like(most)
            num_verified[rows] = self._drafts.lengths(batch.slots[rows], most[rows], batch.verify_budget)
            batch = batch.with_drafts(num_verified, self._limits)
            inputs = Parcel(_inputs(batch, self._limits.num_slots), self._ops.device)
        return batch, inputs.unpack()

    def _write_drafts(self, batch: DeviceBatch, of_drafts: _DraftInputs) -> Tensor:
        """The drafts take their places behind the newest tokens; how probable they are, by place in the block."""
        assert self._drafts is not None and batch.num_verified is not None
        rows = np.flatnonzero(batch.num_verified)
        slots, counts = batch.slots[rows], batch.num_verified[rows]
        self._slots.write_drafts(of_drafts.slots, of_drafts.offsets, self._drafts.tokens(slots, counts))
        return self._drafts.predicted(slots, counts)

    def _draft(self, batch: DeviceBatch, slots: Tensor, timing: Timing | None) -> Drafted | None:
        """New drafts behind the newest tokens of `slots` [R], which are those of the sampled rows."""
        if not batch.num_drafts or not batch.sampled.size:
            return None
        assert self._drafts is not None and self._model.drafter is not None
        if timing is not None:
            timing.begin_drafts()
        started_ns = perf_counter_ns()
        anchors = self._slots.lengths[slots]
        survivals = self._drafts.propose(
            self._model.drafter,
            batch.slots[batch.sampled],
            anchors,
            self._slots.tokens[slots, anchors].long(),
            batch.num_drafts,
        )
        waiting = batch.slots[batch.sampled][batch.is_waiting]
        ids = self._drafts.tokens(waiting, np.full_like(waiting, batch.num_drafts)) if waiting.size else None
        return Drafted(survivals, (perf_counter_ns() - started_ns) // 1000, ids)

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

    def _forward(self, batch: DeviceBatch, positions: Tensor, longest: int, prefetched: object) -> Tensor:
        """Hidden states, [T, C], of sequences up to `longest`.

        Afterwards the lengths are those after the step, if it accepts all drafts.
        """
        if self._graphs is not None and self._is_flat(batch):
            shape = self._graphs.find(batch.num_positions, longest)
            if shape is not None:
                if self._model.needs_host:
                    self._model.stage(self._step(positions, batch.counts, prefetched))
                return self._graphs.replay(shape, positions)
        hidden = self._model.forward(self._step(positions, batch.counts, prefetched))
        self._slots.advance(positions[0])
        return hidden

    def _is_flat(self, batch: DeviceBatch) -> bool:
        return self._ops.is_flat(batch.counts) and self._model.is_flat(batch)

    def _prompt_logprobs(self, hidden: Tensor, wanted: PromptPositions) -> Logprobs:
        parts = to_device(wanted.packed, hidden.device).split(ROWS_AT_ONCE)
        logits = (self._model.logits(hidden.index_select(0, part)) for part in parts)  # a long prompt has many
        return self._sampling.prompt_logprobs(logits, wanted)

    def _step(self, positions: Tensor, counts: Ints, prefetched: object = None) -> Step:
        """Of `positions` [2, T], which are slots and offsets; `counts` [S] are the rows' sizes."""
        slots, offsets = positions.unbind(0)
        tokens, places, cache_indices = self._slots.gather(slots, offsets)
        rows = PackedRows(counts, slots, places, self._slots.tables)
        return Step(tokens, cache_indices, rows, self._slots.tokens, prefetched)

    def _prepare_gpu(self) -> None:
        """Compile our own kernels for what steps will launch, and capture the small steps, before somebody waits.

        The first steps still pay for what torch and its libraries load at a first use: products of other sizes, and
        the kernels of the ways of sampling.
        """
        null_slot, device = self._config.num_slots, self._ops.device
        self._sampling.prepare()
        for counts in self._model.typical_steps():
            positions = torch.zeros(2, int(counts.sum()), dtype=torch.int64, device=device)
            positions[0] = null_slot
            self._model.logits(self._model.forward(self._step(positions, counts))[-1:])
        lengths = self._model.capture_lengths if self._config.cuda_graphs else ()
        if lengths:
            self._graphs = GraphLadder(shapes(self._limits.ladder, lengths), self._run_flat, null_slot, device)
        if self._drafts is not None and self._model.drafter is not None:
            self._drafts.prepare(self._model.drafter, in_graphs=bool(lengths))
        self._clock = QueueClock(device)

    def _run_flat(self, positions: Tensor, most_positions: int) -> Tensor:
        """What a graph does: every position as if it were a row of its own."""
        step = self._step(positions, np.ones(positions.shape[1], np.int64))
        hidden = self._model.forward_flat(step, most_positions)
        self._slots.advance(positions[0])
        return hidden

    def _judge(
        self,
        is_waiting: npt.NDArray[np.bool_],
        logits: Tensor,
        rows: VerifyRows,
        wait_for_masks: Callable[[], MaskBatch],
    ) -> Verdict:
        """Tokens of the sampled `rows`; those that wait for a mask, [R], get theirs in a second launch."""
        if not is_waiting.any():
            return self._judge_some(logits, rows, None)
        if is_waiting.all():
            return self._judge_some(logits, rows, self._masks(rows, wait_for_masks()))
        verdict = Verdict(
            torch.ones(len(rows.slots), dtype=torch.int64, device=logits.device), torch.zeros_like(rows.places)
        )
        for part, has_masks in ((np.flatnonzero(~is_waiting), False), (np.flatnonzero(is_waiting), True)):
            if part.size:
                packed = np.flatnonzero(np.isin(np.repeat(np.arange(len(rows.slots)), rows.counts + 1), part))
                index, of_rows = to_device(packed, logits.device), to_device(part, logits.device)
                some = VerifyRows(rows.slots[part], rows.counts[part], rows.places[index], rows.num_known[packed])
                masks = self._masks(some, wait_for_masks()) if has_masks else None
                verdict.num_tokens[of_rows], verdict.tokens[index] = self._judge_some(logits[index], some, masks)
        return verdict

    def _judge_some(self, logits: Tensor, rows: VerifyRows, masks: _Masks | None) -> Verdict:
        """Of rows that all have masks, or none."""
        allowed = None if masks is None else masks.allowed
        if not rows.counts.any():
            tokens = self._sampling.sample(logits, rows.slots, rows.places, allowed, rows.num_known)
            return Verdict(self._ones[: len(rows.slots)], tokens)
        assert self._drafts is not None
        verdict = self._drafts.judge(logits, rows, allowed)
        if masks is None:
            return verdict
        return verdict._replace(num_tokens=torch.minimum(verdict.num_tokens, masks.counts))

    def _masks(self, rows: VerifyRows, masks: MaskBatch) -> _Masks:
        """Masks in the order of `rows` and their places."""
        came = unpack_int32(masks.slots).tolist()
        if sorted(came) != sorted(rows.slots.tolist()):
            raise ProtocolError(f"masks for the slots {sorted(rows.slots.tolist())} were expected, {sorted(came)} came")
        counts = np.asarray(unpack_int32(masks.num_masks) if masks.num_masks else [1] * len(came), np.int64)
        vocab_size, total = self._limits.vocab_size, int(counts.sum())
        num_bytes = total * 4 * -(-vocab_size // 32)
        if len(masks.bits) != num_bytes:
            raise ProtocolError(f"{num_bytes} bytes of masks were expected, {len(masks.bits)} came")
        order = np.argsort(came)[np.argsort(np.argsort(rows.slots))]  # where the masks of each row are
        firsts, counts = (np.cumsum(counts) - counts)[order], counts[order]
        owners = np.repeat(np.arange(len(came)), rows.counts + 1)
        places = np.arange(len(owners)) - np.searchsorted(owners, owners)
        index = firsts[owners] + np.minimum(places, counts[owners] - 1)
        packed = np.frombuffer(masks.bits, np.uint8).reshape(total, -1)[index]
        allowed = unpack_masks(packed.tobytes(), len(index), vocab_size, torch.device("cpu")).numpy()
        is_empty = ~allowed.any(-1)
        if is_empty.any():
            raise ProtocolError(f"a mask of slot {rows.slots[owners[is_empty.argmax()]]} allows no token")
        return _Masks(to_device(allowed, self._ops.device), to_device(counts, self._ops.device))

    def _load(self, report: Callable[[int, int], None]) -> Ready:
        config = self._config
        checkpoint = open_checkpoint(Path(config.model), config.load_format)
        share = max(torch.get_num_threads() // config.num_ranks, 1)  # the other workers compute beside this one
        torch.set_num_threads(config.num_threads or num_threads_for(checkpoint) or share)
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
            self._sampling = SamplingState(self._slots.tokens, self._limits.vocab_size, ops.draw)
            self._ones = torch.ones(self._limits.num_slots, dtype=torch.int64, device=ops.device)
            self._drafts = self._draft_state()
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
            slot_bytes=state_bytes(needs, limits),
            global_bytes_per_token=needs.token_bytes,
            bounded_replay_tokens=needs.bounded_replay,
            exact_replay_tokens=needs.exact_replay,
            weights_version=checkpoint.version,
            device=_describe(ops, self._graphs),
            num_drafts=limits.longest_draft,
            costs=measure_costs(limits, self._time) if config.measure_costs else None,
        )

    def _draft_state(self) -> DraftState | None:
        limits = self._limits
        if not limits.longest_draft:
            return None
        ops = self._ops
        return DraftState(
            limits.num_slots + 1,
            limits.longest_draft,
            limits.vocab_size,
            self._sampling,
            ops.device,
            ops.draw,
            ops.verify,
        )

    def _time(self, plan: StepPlan) -> tuple[int, int]:
        """Microseconds that a step takes, and those of them that make drafts."""
        started_ns = perf_counter_ns()
        output, times = self.launch(self.build(plan), _no_masks).wait()
        total_us = (perf_counter_ns() - started_ns) // 1000 if times is None else times.device_us
        return total_us, output.draft_us


class _QueuedStep:
    """A `PendingStep` whose results are on their way."""

    def __init__(self, results: Callable[[], StepOutput], timing: Timing, learn: Callable[[StepOutput], None]) -> None:
        self._results = results
        self._timing = timing
        self._learn = learn

    def wait(self) -> tuple[StepOutput, StepTimes | None]:
        output = self._results()
        self._learn(output)
        return output._replace(draft_us=self._timing.read_drafts_us()), self._timing.read()


def _inputs(batch: DeviceBatch, null_slot: int) -> list[Ints]:
    """The columns of `_Inputs`, and of `_DraftInputs` where drafts are verified."""
    num_real = len(batch.row_of)
    positions = np.zeros((2, batch.num_positions), np.int64)  # slots, offsets
    positions[0] = null_slot
    positions[0, :num_real] = batch.slots[batch.row_of]
    positions[1, :num_real] = batch.offset_of
    last = np.cumsum(batch.counts)[batch.sampled] - 1
    columns = [positions, batch.slots, batch.slots[batch.sampled]]
    if batch.num_verified is None:
        return [*columns, last]
    num_verified = batch.num_verified[batch.sampled]
    sizes = num_verified + 1
    owners = np.repeat(np.arange(len(sizes)), sizes)
    backs = np.repeat(np.cumsum(sizes), sizes) - 1 - np.arange(len(owners))
    draft_owners = np.repeat(np.arange(len(sizes)), num_verified)
    draft_offsets = 1 + np.arange(len(draft_owners)) - (np.cumsum(num_verified) - num_verified)[draft_owners]
    slots = batch.slots[batch.sampled][draft_owners]
    return [*columns, last[owners] - backs, sizes, owners, backs, slots, draft_offsets]


def _verify_rows(batch: DeviceBatch, places: Tensor, ends: Ints) -> VerifyRows:
    """`places` [P] are where tokens go, `ends` [S] bounds of the rows' lengths after the step."""
    slots, sampled_ends = batch.slots[batch.sampled], ends[batch.sampled]
    if batch.num_verified is None:
        return VerifyRows(slots, np.zeros_like(slots), places, sampled_ends)
    counts = batch.num_verified[batch.sampled]
    return VerifyRows(slots, counts, places, np.repeat(sampled_ends, counts + 1))


def _repeat_slots(rows: VerifyRows) -> Ints:
    """[P]: the slot of each of the logits."""
    return np.repeat(rows.slots, rows.counts + 1)


def _no_masks() -> NoReturn:
    raise AssertionError("no row waits for a mask")


def _describe(ops: Ops, graphs: GraphLadder | None) -> str:
    if ops.device.type == "cuda":
        how = "no graphs" if graphs is None else f"{len(graphs)} graphs"
        return f"{torch.cuda.get_device_name(ops.device)}, {ops.arithmetic}, {how}"
    invariance = ", row-invariant" if ops.is_batch_invariant else ""
    return f"CPU, {torch.get_num_threads()} threads, {ops.arithmetic}{invariance}"
