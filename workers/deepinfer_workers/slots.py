"""The state of every slot: its tokens, its length, its blocks, how it is sampled. Belongs to the device thread.

Tokens and block tables are on the device. Lengths and generations are on the host, where they are known without asking
the device: a row adds the positions that its plan says. Knows nothing of models and of how sampling is done.

Legend: `N` slots, and one null slot behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import PackedRows
from deepinfer_protocol import ProtocolError, SlotSampling
from deepinfer_workers.batch import Admission, DeviceBatch, Ints, Limits

EMPTY: Final = -1
"""Generation of a slot that holds no sequence."""


@dataclass(frozen=True)
class SlotParams:
    """How a slot is sampled."""

    sampling: SlotSampling
    stop_ids: Ints


class SlotState:
    """Applies plans. Every contradiction between a plan and the state is a `ProtocolError`."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        num_slots = limits.num_slots + 1
        self._limits = limits
        self._device = device
        # One column more than positions: the token after the last position has a place.
        self._tokens = torch.zeros(num_slots, limits.max_len + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(num_slots, limits.max_blocks, dtype=torch.int32, device=device)
        self._lengths = np.zeros(num_slots, np.int64)
        self._num_known = np.zeros(num_slots, np.int64)
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._generations = np.full(num_slots, EMPTY, np.int64)
        self._params: dict[int, SlotParams] = {}

    @property
    def slot_bytes(self) -> int:
        """On the device, for one slot."""
        return 4 * (self._tokens.shape[1] + self._tables.shape[1])

    def apply(self, batch: DeviceBatch) -> None:
        """Retire, admit, append, check the rows: in this order."""
        self._generations[batch.retired] = EMPTY
        for slot in batch.retired.tolist():
            self._params.pop(slot, None)
        for admission in batch.admissions:
            self._admit(admission)
        self._append(batch.append_slots, batch.append_blocks)
        self._check_rows(batch)

    def starts(self, batch: DeviceBatch) -> Ints:
        """[S]: the first position of every row."""
        return self._lengths[batch.slots]

    def pack(self, batch: DeviceBatch, positions: Tensor) -> PackedRows:
        """The step's `positions` [T] with their slots and block tables."""
        slots = np.full(batch.num_positions, self._limits.num_slots)
        slots[: len(batch.row_of)] = batch.slots[batch.row_of]
        return PackedRows(batch.counts, torch.from_numpy(slots).to(self._device), positions, self._tables)

    def gather(self, batch: DeviceBatch, null_index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and cache indices of the step's positions, [T] each; padding goes to `null_index`."""
        num_real = len(batch.row_of)
        slots = np.full(batch.num_positions, self._limits.num_slots)
        slots[:num_real] = batch.slots[batch.row_of]
        positions = np.zeros(batch.num_positions, np.int64)
        positions[:num_real] = self.starts(batch)[batch.row_of] + batch.offset_of
        device_slots, device_positions = (torch.from_numpy(array).to(self._device) for array in (slots, positions))
        tokens = self._tokens[device_slots, device_positions].long()
        block_size = self._limits.block_size
        blocks = self._tables[device_slots, device_positions // block_size].long()
        cache_indices = blocks * block_size + device_positions % block_size
        cache_indices[num_real:] = null_index
        return tokens, device_positions, cache_indices

    def advance(self, batch: DeviceBatch) -> Ints:
        """The rows' keys and values are written: their lengths after the step, [S]."""
        self._lengths[batch.slots] += batch.counts
        return self._lengths[batch.slots]

    def store(self, slots: Ints, tokens: Tensor) -> None:
        """Sampled `tokens` become known, each at its slot's length."""
        lengths = self._lengths[slots]
        at = torch.from_numpy(slots).to(self._device), torch.from_numpy(lengths).to(self._device)
        self._tokens[at] = tokens.to(torch.int32)
        self._num_known[slots] = lengths + 1

    def lengths(self, slots: Ints) -> Ints:
        return self._lengths[slots]

    def params(self, slot: int) -> SlotParams:
        return self._params[slot]

    def _admit(self, admission: Admission) -> None:
        slot = admission.slot
        if self._generations[slot] != EMPTY:
            text = f"it holds generation {self._generations[slot]} and was not retired"
            raise ProtocolError(f"slot {slot} admitted with generation {admission.generation}: {text}")
        num_tokens, num_blocks = len(admission.tokens), len(admission.block_ids)
        self._tokens[slot, :num_tokens] = torch.from_numpy(admission.tokens).to(self._device, torch.int32)
        self._tables[slot, :num_blocks] = torch.from_numpy(admission.block_ids).to(self._device, torch.int32)
        self._lengths[slot] = admission.length
        self._num_known[slot] = num_tokens
        self._num_blocks[slot] = num_blocks
        self._generations[slot] = admission.generation
        self._params[slot] = SlotParams(admission.sampling, admission.stop_ids)

    def _append(self, slots: Ints, blocks: Ints) -> None:
        if not slots.size:
            return
        columns = np.empty_like(slots)
        for index, slot in enumerate(slots.tolist()):
            if self._generations[slot] == EMPTY:
                raise ProtocolError(f"block {blocks[index]} appended to slot {slot}, which is empty")
            if self._num_blocks[slot] == self._limits.max_blocks:
                raise ProtocolError(f"block {blocks[index]} appended to slot {slot}, whose table is full")
            columns[index] = self._num_blocks[slot]
            self._num_blocks[slot] += 1
        at = torch.from_numpy(slots).to(self._device), torch.from_numpy(columns).to(self._device)
        self._tables[at] = torch.from_numpy(blocks).to(self._device, torch.int32)

    def _check_rows(self, batch: DeviceBatch) -> None:
        slots = batch.slots
        ends = self._lengths[slots] + batch.counts
        self._refuse(
            batch, self._generations[slots] != batch.generations, self._generations[slots], "generation of slot"
        )
        self._refuse(batch, ends > self._num_known[slots], self._num_known[slots], "known tokens")
        capacity = np.minimum(self._num_blocks[slots] * self._limits.block_size, self._limits.max_len)
        self._refuse(batch, ends > capacity, capacity, "positions in its blocks")

    def _refuse(self, batch: DeviceBatch, is_wrong: np.typing.NDArray[np.bool_], facts: Ints, what: str) -> None:
        if not is_wrong.any():
            return
        row = int(np.flatnonzero(is_wrong)[0])
        slot, generation, count = int(batch.slots[row]), int(batch.generations[row]), int(batch.counts[row])
        start = int(self._lengths[slot])
        text = f"slot {slot}, generation {generation}, positions {start} to {start + count - 1}"
        raise ProtocolError(f"step {batch.step_id}, row {row} ({text}): {what}: {facts[row]}")
