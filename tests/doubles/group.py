"""A group of fake workers on a virtual clock, with seeded delays, behind the real wire format."""

from __future__ import annotations

import random
from collections import deque

import msgspec

from deepinfer.link import LinkListener
from deepinfer.rank import CacheShape
from deepinfer_protocol import (
    AnyMessage,
    MaskBatch,
    RowFlag,
    StepPlan,
    StepResult,
    WorkerConfig,
    decode,
    encode,
    split_columns,
    unpack_int32,
)
from deepinfer_workers.fake import FakeRunner
from doubles.clock import VirtualClock
from doubles.config import worker_config


def no_masks() -> MaskBatch:
    raise AssertionError("nobody sent masks")


def fake_config(
    shape: CacheShape, rank: int = 0, num_ranks: int = 1, vocab_size: int = 97, window: int = 0, num_drafts: int = 0
) -> WorkerConfig:
    return worker_config(
        rank=rank,
        num_ranks=num_ranks,
        num_slots=shape.num_slots,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        fake_vocab_size=vocab_size,
        fake_replay_tokens=window,
        fake_num_drafts=num_drafts,
    )


def with_window(shape: CacheShape, window: int, *, is_exact: bool) -> CacheShape:
    """`shape` where slots keep a state of `window` positions, which hits rebuild in one of the two ways."""
    ready = FakeRunner(fake_config(shape, window=window)).load(lambda done, total: None)
    bounded, exact = ready.bounded_replay_tokens, ready.exact_replay_tokens
    is_bounded = not is_exact and bounded < exact
    return msgspec.structs.replace(shape, replay_tokens=bounded if is_bounded else exact, is_replay_bounded=is_bounded)


def _waits(plan: StepPlan) -> bool:
    return any(flags & RowFlag.WAITS_FOR_MASK for flags in split_columns(plan.rows, 4)[3])


class FenceGuard:
    """Asserts deferred release: what a step in flight names is not handed to anybody else before its result."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks_of: dict[int, list[int]] = {}
        self._in_flight: dict[int, tuple[set[int], set[int]]] = {}

    def sent(self, plan: StepPlan) -> None:
        for slot in unpack_int32(plan.retired):
            del self._blocks_of[slot]
        for admit in plan.admits:
            assert all(admit.slot not in slots for slots, _ in self._in_flight.values()), (
                f"slot {admit.slot} is in flight"
            )
            block_ids = list(unpack_int32(admit.block_ids))
            self._check_fresh(block_ids[admit.floor // self._block_size :])
            self._blocks_of[admit.slot] = block_ids
        for slot, block in zip(*split_columns(plan.appends, 2), strict=True):
            self._check_fresh([block])
            self._blocks_of[slot].append(block)
        slots = set(split_columns(plan.rows, 4)[0])
        self._in_flight[plan.step_id] = (slots, {block for slot in slots for block in self._blocks_of[slot]})

    def answered(self, plan: StepPlan) -> None:
        del self._in_flight[plan.step_id]

    def _check_fresh(self, block_ids: list[int]) -> None:
        for _, blocks in self._in_flight.values():
            assert blocks.isdisjoint(block_ids), f"blocks {blocks.intersection(block_ids)} are in flight"


class SimulatedGroup:
    """Implements `WorkerLink`. Each rank is a device with a queue; a step takes as long as its slowest rank."""

    def __init__(
        self,
        clock: VirtualClock,
        shape: CacheShape,
        num_ranks: int,
        seed: int,
        vocab_size: int = 97,
        window: int = 0,
        num_drafts: int = 0,
    ) -> None:
        self._clock = clock
        self._random = random.Random(seed)
        self.runners = [
            FakeRunner(fake_config(shape, rank, num_ranks, vocab_size, window, num_drafts)) for rank in range(num_ranks)
        ]
        self._guards = [FenceGuard(shape.block_size) for _ in range(num_ranks)]
        self._free_s = [0.0] * num_ranks
        self._answered_s = [0.0] * num_ranks
        self._computed: list[deque[StepPlan]] = [deque() for _ in range(num_ranks)]  # not answered: masks are missing
        self._masks: list[dict[int, MaskBatch]] = [{} for _ in range(num_ranks)]
        self._listener: LinkListener | None = None
        self.padded_positions: dict[int, set[int]] = {}

    @property
    def num_ranks(self) -> int:
        return len(self.runners)

    def listen(self, listener: LinkListener) -> None:
        self._listener = listener

    def close(self) -> None:
        self._listener = None

    def send(self, rank: int, message: AnyMessage) -> None:
        plan = decode(encode(message))
        if isinstance(plan, MaskBatch):
            self._masks[rank][plan.step_id] = plan
            self._clock.call_soon(lambda: self._answer_all(rank))
            return
        assert isinstance(plan, StepPlan)
        self._guards[rank].sent(plan)
        self.padded_positions.setdefault(plan.step_id, set()).add(plan.padded_positions)
        start_s = max(self._clock.time() + self._random.uniform(0, 0.001), self._free_s[rank])
        self._free_s[rank] = start_s + self._random.uniform(0.001, 0.01)
        answered_s = max(self._free_s[rank] + self._random.uniform(0, 0.003), self._answered_s[rank])
        self._answered_s[rank] = answered_s
        self._clock.call_at(answered_s, lambda: self._compute(rank, plan))

    def _compute(self, rank: int, plan: StepPlan) -> None:
        self._computed[rank].append(plan)
        self._answer_all(rank)

    def _answer_all(self, rank: int) -> None:
        """In order, up to the first that waits for masks."""
        computed, masks = self._computed[rank], self._masks[rank]
        while computed and (not _waits(computed[0]) or computed[0].step_id in masks):
            plan = computed.popleft()
            self._answer(rank, plan, masks.pop(plan.step_id, None))

    def _answer(self, rank: int, plan: StepPlan, masks: MaskBatch | None) -> None:
        runner = self.runners[rank]
        output = runner.compute(runner.build(plan), no_masks if masks is None else lambda: masks)
        result = StepResult(plan.epoch, plan.step_id, rank, 0, 0, 0, *output)
        self._guards[rank].answered(plan)
        if self._listener is not None:
            self._listener.on_message(rank, decode(encode(result)))
