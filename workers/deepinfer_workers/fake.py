"""A worker without a model: every token is a hash of all tokens before it, read from a KV cache that checks itself.

The KV row of a position is stamped with (token, position) and carries the hash of the prefix that ends there. A read
asserts every stamp, so a block that was freed too early, shared wrongly or evicted under a reader is found at the
step that reads it.

With `fake_replay_tokens` a slot has a state of its own besides, as models with window attention do: a row's hash then
depends on what layers of windows make of the latest tokens, so that it differs where a state was not rebuilt far
enough.

With `fake_num_drafts` it drafts: a draft is the right token, or the one after it, as often as it says itself that it
will be; both are read from the prefix. So how many are accepted varies from none to all, and the tokens stay those of
a run without drafts. Knows nothing of torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from deepinfer_protocol import (
    LogitShaping,
    MaskBatch,
    ProtocolError,
    Ready,
    RowFlag,
    SlotAdmit,
    SlotSampling,
    StepCosts,
    StepPlan,
    WorkerConfig,
    pack_float32,
    pack_int32,
    split_columns,
    split_words,
    unpack_float32,
    unpack_int32,
)
from deepinfer_workers.runner import DoneStep, StepOutput
from deepinfer_workers.truncation import check_keep

_MASK64: Final = (1 << 64) - 1
_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_DEFAULT_BLOCK_SIZE: Final = 16
_DEFAULT_NUM_BLOCKS: Final = 65_536
_LAYERS: Final = 3
"""Of a window each: what comes out of the last one reaches as often a window, less the position itself, back."""


class FakeBatch(NamedTuple):
    """A decoded plan, and when the device's queue got it."""

    plan: StepPlan
    columns: list[tuple[int, int, int, int]]
    arrived_s: float


class _Slot:
    """What the device knows of one sequence."""

    __slots__ = (
        "allowed",
        "bad_words",
        "banned",
        "blocks",
        "drafts",
        "floor",
        "generation",
        "length",
        "sampling",
        "shaping",
        "stop_ids",
        "survivals",
        "tokens",
        "window",
    )

    def __init__(self, admit: SlotAdmit, window: int) -> None:
        """`window` in positions; 0: a slot keeps nothing for itself."""
        self.generation = admit.generation
        self.tokens = list(unpack_int32(admit.tokens))
        self.length = admit.length
        self.floor = admit.floor
        self.window = _Window(admit, window) if window else None
        self.drafts: list[int] = []
        self.survivals: list[float] = []
        self.blocks = list(unpack_int32(admit.block_ids))
        self.sampling: SlotSampling = admit.sampling
        self.stop_ids = frozenset(unpack_int32(admit.sampling.stop_ids))
        self.shaping = admit.sampling.shaping or LogitShaping()
        self.bad_words = [word.tolist() for word in split_words(self.shaping.bad_words)]
        biases = zip(unpack_int32(self.shaping.bias_ids), unpack_float32(self.shaping.bias_values), strict=True)
        self.banned = frozenset(token for token, bias in biases if bias == -inf)
        bits = self.shaping.allowed_bits
        self.allowed = int.from_bytes(bits, "little") if bits else None

    def value_at(self, position: int) -> int:
        """What the KV row of a position adds to the hash of the prefix. Called once for each, in their order."""
        token = self.tokens[position]
        return token + 1 if self.window is None else self.window.push(token, position)

    @property
    def output(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.sampling.num_prompt :]


class _Window:
    """What layers of window attention keep for one sequence: of each the values of its latest positions."""

    def __init__(self, admit: SlotAdmit, width: int) -> None:
        self._slot, self._width = admit.slot, width
        self._start, self._floor = admit.length, admit.floor
        self._layers: list[deque[int]] = [deque(maxlen=width) for _ in range(_LAYERS)]

    def copy(self) -> _Window:
        other = copy(self)
        other._layers = [layer.copy() for layer in self._layers]
        return other

    def push(self, token: int, position: int) -> int:
        """What comes out of the last layer at the next position. Behind a replay every window must be whole."""
        oldest = position - self._width + 1
        if position >= self._floor and oldest < self._start > 0:
            raise AssertionError(
                f"slot {self._slot}: the window of position {position} begins at {oldest}, the replay at {self._start}"
            )
        value = token + 1
        for layer in self._layers:
            layer.append(value)
            value = _FNV_OFFSET
            for key in layer:
                value = _mix(value, key)
        return value


class FakeKV:
    """Stamps and prefix hashes by block and offset."""

    def __init__(self, block_size: int, check_stamps: bool) -> None:
        self._block_size = block_size
        self._check_stamps = check_stamps
        self._stamps: dict[int, list[tuple[int, int]]] = {}
        self._hashes: dict[int, list[int]] = {}

    def write(self, block: int, offset: int, stamp: tuple[int, int], prefix_hash: int) -> None:
        stamps = self._stamps.setdefault(block, [])
        hashes = self._hashes.setdefault(block, [])
        del stamps[offset:], hashes[offset:]  # what follows belongs to an older owner
        if len(stamps) != offset:
            raise AssertionError(f"block {block}: offset {offset} written after {len(stamps)} rows")
        stamps.append(stamp)
        hashes.append(prefix_hash)

    def check(self, blocks: list[int], tokens: list[int], length: int) -> None:
        """Are the first `length` rows those of `tokens`? Raises `AssertionError`."""
        size = self._block_size
        if self._check_stamps:
            for index in range(-(-length // size)):
                start, stop = index * size, min((index + 1) * size, length)
                wanted = [(tokens[position], position) for position in range(start, stop)]
                found = self._stamps.get(blocks[index], [])[: stop - start]
                if found != wanted:
                    raise AssertionError(f"block {blocks[index]} holds {found}, {wanted} was expected")

    def hash_at(self, blocks: Sequence[int], length: int) -> int:
        """The hash that the row of the last of `length` positions carries."""
        if length == 0:
            return _FNV_OFFSET
        return self._hashes[blocks[(length - 1) // self._block_size]][(length - 1) % self._block_size]


class FakeRunner:
    """Implements `Runner`. With `fake_step_s` a step takes that long, counted from the deadline of the step before."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._slots: dict[int, _Slot] = {}
        self._block_size = config.block_size or _DEFAULT_BLOCK_SIZE
        self.kv = FakeKV(self._block_size, config.fake_check_stamps)
        self._num_blocks = config.num_blocks or _DEFAULT_NUM_BLOCKS
        self._deadline_s = 0.0

    def load(self, report: Callable[[int, int], None]) -> Ready:
        config = self._config
        if config.fake_replay_tokens:
            keep_tokens = config.prefill_keep_tokens if config.prefill_truncation == "compact" else None
            check_keep(keep_tokens, window=config.fake_replay_tokens)
        report(1, 1)
        return Ready(
            epoch=config.epoch,
            rank=config.rank,
            vocab_size=config.fake_vocab_size,
            max_model_len=config.max_model_len or 32_768,
            num_slots=config.num_slots,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            block_bytes=0,
            slot_bytes=0,
            global_bytes_per_token=0.0,
            bounded_replay_tokens=config.fake_replay_tokens,
            exact_replay_tokens=_LAYERS * max(config.fake_replay_tokens - 1, 0),
            weights_version="fake",
            device="none",
            num_drafts=self._longest_draft,
            costs=self._costs() if config.measure_costs else None,
        )

    @property
    def _longest_draft(self) -> int:
        config = self._config
        return config.fake_num_drafts if config.num_drafts < 0 else min(config.num_drafts, config.fake_num_drafts)

    def _costs(self) -> StepCosts:
        """Every step takes as long as the setting says."""
        step_us = max(1e6 * self._config.fake_step_s, 1.0)
        sizes = pack_int32([1, self._config.max_batch_positions + 1])
        return StepCosts(sizes, pack_float32([step_us] * 2), pack_int32([1]), pack_float32([0.0]))

    def build(self, plan: StepPlan) -> FakeBatch:
        return FakeBatch(plan, list(zip(*split_columns(plan.rows, 4), strict=True)), time.monotonic())

    is_queued = False

    def launch(self, batch: FakeBatch, wait_for_masks: Callable[[], MaskBatch]) -> DoneStep:
        output = self.compute(batch, wait_for_masks)
        if self._config.fake_step_s:
            self._deadline_s = max(self._deadline_s, batch.arrived_s) + self._config.fake_step_s
            time.sleep(max(self._deadline_s - time.monotonic(), 0.0))
        return DoneStep(output)

    def close(self) -> None:
        pass

    def compute(self, batch: FakeBatch, wait_for_masks: Callable[[], MaskBatch]) -> StepOutput:
        """The step without its duration."""
        self._take_deltas(batch.plan)
        hashes = [self._forward(slot, generation, num) for slot, generation, num, _ in batch.columns]
        waits = any(flags & RowFlag.WAITS_FOR_MASK for *_, flags in batch.columns)
        masks = _masks_by_slot(wait_for_masks()) if waits else {}
        waiting = {slot for slot, _, _, flags in batch.columns if flags & RowFlag.WAITS_FOR_MASK}
        if waiting != set(masks):
            raise ProtocolError(f"masks for slots {sorted(waiting)} were due, {sorted(masks)} came")
        prompt = [entry for slot, _, num, _ in batch.columns for entry in self._prompt_logprobs(slot, num)]
        tokens: list[int] = []
        logprob_ids: list[int] = []
        num_tokens: list[int] = []
        draft_ids: list[int] = []
        survivals = bytearray()
        num_ranks = 0
        predicted: list[float] = []
        num_verified = self._share_out(batch.plan)
        for (slot, _, _, flags), prefix_hash, num_drafts in zip(batch.columns, hashes, num_verified, strict=True):
            new_tokens: list[int] = []
            if flags & RowFlag.SAMPLE:
                state = self._slots[slot]
                if state.length < len(state.tokens):
                    raise ProtocolError(f"slot {slot} is sampled at {state.length} of {len(state.tokens)} tokens")
                _add(predicted, state.survivals[:num_drafts])
                is_waiting = flags & RowFlag.WAITS_FOR_MASK
                allowed: list[int | None] = [*masks[slot]] if is_waiting else [None] * (1 + num_drafts)
                prefix_hash, new_tokens = self._verify(state, prefix_hash, allowed, num_drafts)
                self._draft(state, prefix_hash, batch.plan.num_drafts)
                draft_ids += state.drafts if is_waiting else []
                survivals += bytes([int(255 * survival) for survival in state.survivals])
                tokens += new_tokens
                logprob_ids += [token for token in new_tokens for _ in range(state.sampling.num_logprobs + 1)]
                num_ranks += len(new_tokens) if state.sampling.num_logprobs >= 0 else 0
            num_tokens.append(len(new_tokens))
        slots, generations, _, _ = split_columns(batch.plan.rows, 4)
        lengths = [self._slots[slot].length for slot in slots]
        rows = pack_int32(slots + generations) + pack_int32(lengths + num_tokens)
        return StepOutput(
            rows,
            pack_int32(tokens),
            pack_int32(logprob_ids),
            bytes(4 * len(logprob_ids)),
            pack_int32([1] * num_ranks),
            pack_int32([token for token, _, count in prompt for _ in range(count)]),
            pack_float32([-position for _, position, count in prompt for _ in range(count)]),
            pack_int32([position for _, position, _ in prompt]),
            pack_int32(num_verified) if batch.plan.verify_budget else b"",
            bytes(survivals),
            pack_float32(predicted),
            draft_ids=pack_int32(draft_ids),
        )

    def _share_out(self, plan: StepPlan) -> list[int]:
        """How many drafts each row verifies: of all that may be, as many as the budget has, most likely first."""
        slots = split_columns(plan.rows, 4)[0]
        num_verified = [0] * len(slots)
        if plan.verify_budget:
            offers = [
                (-survival, place, row)
                for row, (slot, most) in enumerate(zip(slots, unpack_int32(plan.most_drafts), strict=True))
                for place, survival in enumerate(self._slots[slot].survivals[:most])
            ]
            for _, _, row in sorted(offers)[: plan.verify_budget]:
                num_verified[row] += 1
        return num_verified

    def _verify(
        self, state: _Slot, prefix_hash: int, masks: list[int | None], num_drafts: int
    ) -> tuple[int, list[int]]:
        """The next token, and one more for each draft that is the token before it, as far as there are `masks` of them.

        Rows of all of them are written. Returns the hash of the positions that hold, too.
        """
        drafts = state.drafts[:num_drafts]
        new_tokens = [self._sample(state, prefix_hash, masks[0])]
        state.tokens.append(new_tokens[0])
        while drafts and drafts[0] == new_tokens[-1] and len(new_tokens) < len(masks):
            del drafts[0]
            prefix_hash = self._advance(state, prefix_hash)
            new_tokens.append(self._sample(state, prefix_hash, masks[len(new_tokens)]))
            state.tokens.append(new_tokens[-1])
        if drafts:
            with self._tentatively(state):
                rejected_hash = prefix_hash
                state.tokens[-1:] = drafts
                for _ in drafts:
                    rejected_hash = self._advance(state, rejected_hash)
        return prefix_hash, new_tokens

    def _draft(self, state: _Slot, prefix_hash: int, count: int) -> None:
        """Guesses of the tokens behind the newest, and how likely each is to be right with all before it."""
        state.drafts, state.survivals = [], []
        if not count:
            return
        survival = 1.0
        with self._tentatively(state):
            for _ in range(count):
                prefix_hash = _mix(prefix_hash, state.value_at(state.length))
                state.length += 1
                right = self._sample(state, prefix_hash, None)
                confidence, roll = 96 + (prefix_hash >> 20) % 160, (prefix_hash >> 33) % 256
                survival *= confidence / 256
                state.tokens.append(right if roll < confidence else (right + 1) % self._config.fake_vocab_size)
                state.drafts.append(state.tokens[-1])
                state.survivals.append(survival)

    @contextmanager
    def _tentatively(self, state: _Slot) -> Iterator[None]:
        """What happens to tokens, length and window is undone; rows that were written stay."""
        tokens, length, window = state.tokens, state.length, state.window
        state.tokens = tokens[:]
        state.window = None if window is None else window.copy()
        yield
        state.tokens, state.length, state.window = tokens, length, window

    def _advance(self, state: _Slot, prefix_hash: int) -> int:
        """Write the KV row of one more position, which the prefix of this hash comes before. Returns the new hash."""
        position, size = state.length, self._block_size
        if position >= len(state.blocks) * size:
            raise ProtocolError(f"a draft at position {position}, {len(state.blocks)} blocks")
        prefix_hash = _mix(prefix_hash, state.value_at(position))
        self.kv.write(state.blocks[position // size], position % size, (state.tokens[position], position), prefix_hash)
        state.length += 1
        return prefix_hash

    def _prompt_logprobs(self, slot: int, num_positions: int) -> list[tuple[int, int, int]]:
        """Of the positions that a row has just computed: the next token, its position, how many ids it comes with."""
        state = self._slots[slot]
        num_best, end = state.sampling.num_prompt_logprobs, min(state.length + 1, state.sampling.num_prompt)
        if num_best < 0:
            return []
        return [(state.tokens[p], p, num_best + 1) for p in range(state.length - num_positions + 1, end)]

    def _take_deltas(self, plan: StepPlan) -> None:
        for slot in unpack_int32(plan.retired):
            self._slots.pop(slot, None)
        for admit in plan.admits:
            if admit.slot in self._slots:
                raise ProtocolError(f"slot {admit.slot} is admitted twice")
            self._slots[admit.slot] = _Slot(admit, self._config.fake_replay_tokens)
        for slot, block in zip(*split_columns(plan.appends, 2), strict=True):
            if slot not in self._slots:
                raise ProtocolError(f"block {block} is appended to slot {slot}, which is empty")
            self._slots[slot].blocks.append(block)

    def _forward(self, slot: int, generation: int, num_positions: int) -> int:
        """Write the KV rows of the next positions from the floor on. Returns the hash of the prefix that they end."""
        state = self._slots.get(slot)
        if state is None or state.generation != generation:
            raise ProtocolError(f"slot {slot} does not hold generation {generation}")
        size = self._block_size
        end = state.length + num_positions
        if end > min(len(state.tokens), len(state.blocks) * size):
            raise ProtocolError(f"slot {slot}: {end} positions, {len(state.tokens)} tokens, {len(state.blocks)} blocks")
        self.kv.check(state.blocks, state.tokens, max(state.length, state.floor))
        prefix_hash = self.kv.hash_at(state.blocks, max(state.length, min(state.floor, end)))
        for position in range(state.length, end):
            value = state.value_at(position)
            if position >= state.floor:
                prefix_hash = _mix(prefix_hash, value)
                stamp = (state.tokens[position], position)
                self.kv.write(state.blocks[position // size], position % size, stamp, prefix_hash)
        state.length = end
        return prefix_hash

    def _sample(self, state: _Slot, prefix_hash: int, mask: int | None) -> int:
        """A function of the prefix and, above temperature 0, of the seed."""
        vocab_size = self._config.fake_vocab_size
        masks = (mask, state.allowed)
        if state.sampling.temperature > 0:
            prefix_hash ^= state.sampling.seed
        if state.shaping.presence_penalty:  # a token depends on what is output and what is prompt
            prefix_hash ^= len(state.output) * _FNV_PRIME
        mixed = ((prefix_hash ^ (prefix_hash >> 29)) * 0xBF58476D1CE4E5B9) & _MASK64
        token = (mixed >> 24) % vocab_size
        passing = _passing_bans(state)
        fallback: int | None = None  # where nothing else is left, bans that come and go give way
        for candidate in range(token, token + vocab_size):
            choice = candidate % vocab_size
            if choice in state.banned or any(bits is not None and not (bits >> choice) & 1 for bits in masks):
                continue
            if choice not in passing:
                return choice
            fallback = choice if fallback is None else fallback
        return token if fallback is None else fallback


def _mix(prefix_hash: int, value: int) -> int:
    return ((prefix_hash ^ value) * _FNV_PRIME) & _MASK64


def _add(sums: list[float], column: list[float]) -> None:
    """Add a column to sums by place, which grow with it."""
    sums += [0.0] * (len(column) - len(sums))
    for place, value in enumerate(column):
        sums[place] += value


def _passing_bans(state: _Slot) -> set[int]:
    """Stop tokens before the minimum length, and the last tokens of bad words that are complete but for them."""
    banned = set(state.stop_ids) if state.length + 1 <= state.sampling.min_length else set()
    output = state.output if state.bad_words else []
    banned |= {word[-1] for word in state.bad_words if output[len(output) + 1 - len(word) :] == word[:-1]}
    return banned


def _masks_by_slot(masks: MaskBatch) -> dict[int, list[int]]:
    """The masks of each slot as integers, bit `t` for token `t`."""
    slots = unpack_int32(masks.slots)
    counts = unpack_int32(masks.num_masks) if masks.num_masks else [1] * len(slots)
    width = len(masks.bits) // max(sum(counts), 1)
    parts = (masks.bits[start : start + width] for start in range(0, len(masks.bits), width or 1))
    return {
        slot: [int.from_bytes(part, "little") for part in islice(parts, count)]
        for slot, count in zip(slots, counts, strict=True)
    }
