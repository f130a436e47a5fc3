"""A tiny engine for tests: drives a `ModelRunner` with plans of one's own making. No scheduling, no sharing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from deepinfer_protocol import (
    MaskBatch,
    Ready,
    RowFlag,
    SlotAdmit,
    SlotSampling,
    StepPlan,
    pack_int32,
    split_columns,
    unpack_int32,
)
from deepinfer_workers.model_runner import ModelRunner
from deepinfer_workers.runner import StepOutput
from doubles.config import worker_config

GREEDY = SlotSampling()
DEFAULTS = worker_config(epoch=1, runner="model", num_slots=16, num_blocks=256, max_batch_positions=2048, num_threads=2)


class Row(NamedTuple):
    slot: int
    num_positions: int
    flags: int = int(RowFlag.SAMPLE)
    most_drafts: int = 0


def no_masks() -> NoReturn:
    raise AssertionError("no row waits for a mask")


def plan(
    rows: Sequence[tuple[int, int, int, int]] = (),
    admits: Sequence[SlotAdmit] = (),
    appends: Sequence[tuple[int, int]] = (),
    retired: Sequence[int] = (),
    *,
    most_drafts: Sequence[int] = (),
    verify_budget: int = 0,
    num_drafts: int = 0,
) -> StepPlan:
    """A plan of `rows` (slot, generation, positions, flags)."""
    return StepPlan(
        epoch=1,
        step_id=1,
        rank=0,
        padded_positions=sum(row[2] for row in rows),
        retired=pack_int32(list(retired)),
        admits=list(admits),
        appends=pack_int32([pair[0] for pair in appends] + [pair[1] for pair in appends]),
        rows=pack_int32([row[column] for column in range(4) for row in rows]),
        most_drafts=pack_int32(list(most_drafts)),
        verify_budget=verify_budget,
        num_drafts=num_drafts,
    )


def admit(
    slot: int,
    tokens: Sequence[int],
    block_ids: Sequence[int],
    *,
    generation: int = 1,
    length: int = 0,
    floor: int | None = None,
    sampling: SlotSampling = GREEDY,
) -> SlotAdmit:
    floor = length if floor is None else floor
    return SlotAdmit(slot, generation, length, floor, pack_int32(list(tokens)), pack_int32(list(block_ids)), sampling)


class Driver:
    """Sequences by slot; blocks are given out from a list and come back at `retire`."""

    def __init__(self, model: Path, **changes: object) -> None:
        self.config = msgspec.structs.replace(DEFAULTS, model=str(model), **changes)
        self.runner = ModelRunner(self.config)
        self.reports: list[tuple[int, int]] = []
        self.ready: Ready = self.runner.load(lambda done, total: self.reports.append((done, total)))
        self.generation = 0
        self._free = list(range(self.ready.num_blocks))
        self._blocks: dict[int, list[int]] = {}
        self._generations: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        """By slot; whoever runs plans of his own keeps them up himself."""
        self._admits: list[SlotAdmit] = []
        self._retired: list[int] = []

    def close(self) -> None:
        self.runner.close()

    def admit(self, slot: int, tokens: Sequence[int], sampling: SlotSampling = GREEDY) -> None:
        self.generation += 1
        self._generations[slot], self.lengths[slot], self._blocks[slot] = self.generation, 0, []
        self._admits.append(admit(slot, tokens, [], generation=self.generation, sampling=sampling))

    def retire(self, slot: int) -> None:
        # The blocks used last are given out first: what an old owner left must not matter.
        self._free = self._blocks.pop(slot) + self._free
        self._retired.append(slot)

    def step(
        self, *rows: Row, masks: MaskBatch | None = None, verify_budget: int | None = None, num_drafts: int = 0
    ) -> StepOutput:
        """`verify_budget` is as many as the rows may verify, unless given."""
        most_drafts = [row.most_drafts for row in rows]
        budget = sum(most_drafts) if verify_budget is None else verify_budget
        output = self.run(self.plan(*rows, verify_budget=budget, num_drafts=num_drafts), masks)
        if not rows:
            return output
        _, _, lengths, num_tokens = split_columns(output.rows, 4)
        for row, length, count in zip(rows, lengths, num_tokens, strict=True):
            assert length == self.lengths[row.slot] + row.num_positions + max(count - 1, 0)
            self.lengths[row.slot] = length
        return output

    def plan(self, *rows: Row, verify_budget: int = 0, num_drafts: int = 0) -> StepPlan:
        """Of a step whose rows begin at `lengths`, with blocks for all drafts."""
        appends: list[tuple[int, int]] = []
        for row in rows:
            end = self.lengths[row.slot] + row.num_positions + row.most_drafts
            while len(self._blocks[row.slot]) * self.ready.block_size < end:
                self._blocks[row.slot].append(self._free.pop(0))
                appends.append((row.slot, self._blocks[row.slot][-1]))
        columns = [(row.slot, self._generations[row.slot], row.num_positions, int(row.flags)) for row in rows]
        most_drafts = [row.most_drafts for row in rows]
        step = plan(
            columns, self._admits, appends, self._retired,
            most_drafts=most_drafts if any(most_drafts) else [], verify_budget=verify_budget, num_drafts=num_drafts,
        )  # fmt: skip
        self._admits, self._retired = [], []
        return step

    def run(self, step: StepPlan, masks: MaskBatch | None = None) -> StepOutput:
        built = self.runner.build(step)
        output, _ = self.runner.launch(built, no_masks if masks is None else lambda: masks).wait()
        return output

    def prefill(self, slot: int, num_tokens: int, chunk: int) -> int:
        """Compute a prompt in chunks; the first token after it."""
        for start in range(0, num_tokens, chunk):
            count = min(chunk, num_tokens - start)
            is_last = start + count == num_tokens
            output = self.step(Row(slot, count, int(RowFlag.SAMPLE) if is_last else 0))
        return int(unpack_int32(output.tokens)[0])

    def generate(
        self, slot: int, tokens: Sequence[int], num_new: int, chunk: int = 4096, **params: object
    ) -> list[int]:
        """A sequence alone in its steps, from admission to retirement."""
        return self.generate_with(tokens, num_new, SlotSampling(**params), slot, chunk)  # type: ignore[arg-type]

    def generate_with(
        self, tokens: Sequence[int], num_new: int, sampling: SlotSampling, slot: int = 0, chunk: int = 4096
    ) -> list[int]:
        """`generate`, as `sampling` says."""
        self.admit(slot, tokens, sampling)
        out = [self.prefill(slot, len(tokens), chunk)]
        while len(out) < num_new:
            out += unpack_int32(self.step(Row(slot, 1)).tokens)
        self.retire(slot)
        return out
