"""What one rank of a worker group holds: slots, blocks, running sequences, and the rows of its next plan.

Pure and synchronous. Decides which running sequences get a row and who gives way when blocks run out; which waiting
sequence comes next, and to which rank, is the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from msgspec import Struct

from deepinfer.blocks import BlockPool
from deepinfer.budget import DraftPlan, DraftPolicy
from deepinfer.masks import MaskRow
from deepinfer.prefix import chain_root, extend_chain
from deepinfer.release import DeferredRelease
from deepinfer.request import Sequence, State
from deepinfer_protocol import RowFlag, SlotAdmit, StepPlan, pack_int32
from deepinfer_protocol.limits import MAX_MESSAGE_BYTES

MAX_ADMITTED_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""What admissions may take of one plan, which travels as one message."""


class CacheShape(Struct, frozen=True):
    """What a rank can hold, as its worker says when it is ready."""

    num_slots: int
    num_blocks: int
    block_size: int
    weights_version: str = ""
    replay_tokens: int = 0
    """Positions before the end of a prefix hit that are computed again, to rebuild what a slot keeps for itself."""
    is_replay_bounded: bool = False
    """They are fewer than all that the slot state depends on: what is computed behind them is an approximation."""


class PromptRow(NamedTuple):
    """Log probabilities that a row will bring: of prompt tokens from `first` on."""

    seq: Sequence
    first: int
    num_tokens: int


class DraftedRows(NamedTuple):
    """The rows of a step whose lengths and tokens are known by their result alone."""

    seqs: list[Sequence]
    num_positions: list[int]
    num_tokens: list[int]
    """1 where a row is sampled, and the tokens are one more for each draft that is accepted; else 0."""
    most_drafts: list[int]
    """How many drafts may be verified."""
    num_decodes: int
    """Rows that decode; they come first."""


class RankStep(Struct):
    """One rank's half of a step in flight."""

    plan: StepPlan
    expected_rows: bytes
    """The rows that its result must have: slots, generations and, where there are no drafts, lengths after the step,
    tokens of the row."""
    sampled: list[Sequence]
    """Sequences that get a token or more, in the order of the result's tokens."""
    prompts: list[PromptRow]
    """Rows that bring log probabilities of their prompt, in the order of the result's."""
    drafted: DraftedRows | None = None
    """`None`: nobody drafts."""
    masked: list[MaskRow] = []
    """Rows that wait for a mask."""


class _Columns(NamedTuple):
    """The part of a plan's rows that does not change from one step of the same decoding rows to the next."""

    rows: list[Sequence]
    addresses: bytes
    """Slots, generations."""
    work: bytes
    """Positions, flags."""
    num_tokens: bytes


_NO_COLUMNS: Final = _Columns([], b"", b"", b"")
_NO_DRAFTS: Final = DraftPlan(0, 0)
_SAMPLE: Final = int(RowFlag.SAMPLE)  # for every row of every step: the flag's own arithmetic is slow
_WAIT: Final = int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)


class Rank:
    """One rank's bookkeeping. Every method leaves `check_integrity` true."""

    def __init__(
        self,
        index: int,
        shape: CacheShape,
        *,
        prefix_cache: bool,
        requeue: Callable[[Sequence], None],
        drafts: DraftPolicy,
    ) -> None:
        """`requeue` takes a sequence whose preemption is complete."""
        self.index = index
        self.shape = shape
        self.pool = BlockPool(shape.num_blocks)
        self.release = DeferredRelease(self._give_back)
        self.prefill: dict[Sequence, None] = {}
        self.decode: dict[Sequence, None] = {}
        self.parked: dict[Sequence, None] = {}  # would decode, but its reader is too slow
        self.held: dict[Sequence, None] = {}  # waiting samples that own blocks of their prompt
        self._requeue = requeue
        self.drafts = drafts
        self._prefix_cache = prefix_cache
        self._root = chain_root(shape.weights_version)
        self._marked_root = chain_root(shape.weights_version, is_marked=True)
        self._free_slots = list(range(shape.num_slots - 1, -1, -1))
        self._generations = [0] * shape.num_slots
        self._retired: list[int] = []
        self._admits: list[SlotAdmit] = []
        self._num_admitted_bytes = 0
        self._rows: list[Sequence] = []
        self._num_positions: list[int] = []
        self._flags: list[int] = []
        self._prompts: list[PromptRow] = []
        self._appends: list[tuple[int, int]] = []
        self._columns = _NO_COLUMNS
        self._num_decodes = 0  # rows of the plan under construction that decode; they come first
        self._most_drafts: list[int] = []  # of each of them, as many as it may verify
        self._survivals: list[bytes] = []  # of these drafts
        self._draft_plan = _NO_DRAFTS
        self._masked_step = -1  # the last with rows that decode and wait for masks
        self._num_reserved = 0  # positions kept for them
        self.budget = 0  # positions that the plan under construction may still take

    # ---- what it holds

    @property
    def num_running(self) -> int:
        return len(self.prefill) + len(self.decode) + len(self.parked)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def running(self) -> Iterator[Sequence]:
        yield from self.prefill
        yield from self.decode
        yield from self.parked

    def worst(self) -> Sequence | None:
        """Who gives way first: a sequence that nobody reads, else the last in order."""
        return max(self.running(), key=lambda seq: (seq.request.is_paused, seq.request.order), default=None)

    # ---- one plan

    def begin(self, budget: int) -> None:
        """Start a plan of at most `budget` positions."""
        self.budget = budget
        self._rows, self._num_positions, self._flags, self._appends, self._prompts = [], [], [], [], []
        self._most_drafts, self._survivals, self._draft_plan = [], [], _NO_DRAFTS

    def plan_decodes(self, step_id: int) -> None:
        """A row for every decoding sequence that may have one more token.

        Where drafts are in flight, that is said of the most that they may bring: a sequence whose length or blocks may
        have come to their end has no row until the results say that they have not.
        """
        left_out = self._left_out()
        for seq in [seq for seq in self.decode if seq.num_planned + seq.num_drafts >= seq.limit]:
            if seq in self.decode and seq not in left_out:
                self._grow(seq)
        self._rows = rows = [seq for seq in self.decode if seq.num_planned < seq.limit and seq not in left_out]
        if self.drafts.longest:
            self._most_drafts = [min(seq.num_drafts, seq.limit - seq.num_planned - 1) for seq in rows]
            self._survivals = [seq.foresee(most) for seq, most in zip(rows, self._most_drafts, strict=True)]
        for seq in rows:
            seq.num_planned += 1
            seq.last_step = step_id
        self._num_decodes = len(rows)
        self.budget -= len(rows)
        # Prompts leave drafts at most half of what the step has left, and get the other half: neither waits.
        self._num_reserved = min(sum(self._most_drafts), self.budget // 2)
        self.budget -= self._num_reserved
        self._num_positions = [1] * len(rows)
        self._flags = [_SAMPLE if seq.matcher is None else _WAIT for seq in rows]
        if _WAIT in self._flags:
            self._masked_step = step_id

    def _left_out(self) -> set[Sequence]:
        """Decoding sequences that wait for masks, and get no row now.

        The mask of one whose last token is not here could not be in time, and nobody else shall wait for it. The others
        wait with it: by turns, in halves of the batch, everybody would take longer.
        """
        masked = {seq for seq in self.decode if seq.matcher is not None}
        if masked and not self.release.is_in_flight(self._masked_step):
            return {seq for seq in masked if not seq.is_caught_up}
        return masked

    def plan_drafts(self) -> None:
        """How many drafts the step verifies in the positions that nothing else has taken, and how many it makes."""
        if not self.drafts.longest or not any(self._flags):
            return
        num_other = sum(self._num_positions) - self._num_decodes
        room = self.budget + self._num_reserved
        plan = self.drafts.plan(self._survivals, self._num_decodes, num_other, room)
        budget = min(plan.verify_budget, sum(self._most_drafts), room)
        self._draft_plan = DraftPlan(budget, min(plan.num_drafts, self.drafts.longest))
        self._most_drafts = [min(most, budget) for most in self._most_drafts]
        num_drafts = self._draft_plan.num_drafts
        for seq, most in zip(self._rows, self._most_drafts, strict=False):
            seq.num_planned += most
            seq.num_unsure += most
            seq.num_drafts = num_drafts
        for seq, flags in zip(self._rows[self._num_decodes :], self._flags[self._num_decodes :], strict=True):
            if flags:
                seq.num_drafts = num_drafts

    def plan_prefills(self, step_id: int, chunk: int) -> None:
        """Chunks of the prompts that are under way, in order, at most `chunk` positions each."""
        for seq in sorted(self.prefill, key=lambda seq: seq.request.order):
            if self.budget <= 0:
                return
            if not seq.request.is_paused:
                self.plan_chunk(seq, step_id, chunk)

    def plan_chunk(self, seq: Sequence, step_id: int, chunk: int) -> None:
        """The next positions of a sequence whose tokens are known; with the last of them it starts to decode."""
        num_positions = min(len(seq.tokens) - seq.num_planned, chunk, self.budget)
        if seq.request.sampling[seq.sample_index].num_prompt_logprobs >= 0:
            self._expect_prompt(seq, num_positions)
        seq.num_planned += num_positions
        seq.last_step = step_id
        self.budget -= num_positions
        is_complete = seq.num_planned == len(seq.tokens)
        self._rows.append(seq)
        self._num_positions.append(num_positions)
        self._flags.append(0 if not is_complete else _SAMPLE if seq.matcher is None else _WAIT)
        if is_complete:
            seq.move(State.DECODE)
            del self.prefill[seq]
            (self.parked if seq.request.is_paused else self.decode)[seq] = None

    def _expect_prompt(self, seq: Sequence, num_positions: int) -> None:
        """The row computes this many positions: log probabilities of the prompt tokens behind them will come."""
        first = seq.num_planned + 1
        num_tokens = min(first + num_positions, seq.num_prompt) - first
        if num_tokens > 0:
            self._prompts.append(PromptRow(seq, first, num_tokens))

    def newly_decoding(self) -> list[Sequence]:
        """Sequences whose known tokens are complete with the plan under construction."""
        return [seq for seq in self._rows[self._num_decodes :] if seq.state is State.DECODE]

    @property
    def num_planned_positions(self) -> int:
        return sum(self._num_positions) + self._draft_plan.verify_budget

    def finish_plan(self, epoch: int, step_id: int, padded_positions: int) -> RankStep:
        """The plan under construction, and what must come back for it."""
        rows = self._rows
        columns = self._columns_of(rows)
        plan = StepPlan(
            epoch=epoch,
            step_id=step_id,
            rank=self.index,
            padded_positions=padded_positions,
            retired=pack_int32(self._retired),
            admits=self._admits,
            appends=pack_int32([slot for slot, _ in self._appends] + [block for _, block in self._appends]),
            rows=columns.addresses + columns.work,
            most_drafts=self._pack_most_drafts(),
            verify_budget=self._draft_plan.verify_budget,
            num_drafts=self._draft_plan.num_drafts,
        )
        if self.drafts.longest:
            expected, drafted = columns.addresses, self._drafted_rows(rows)
        else:
            expected = columns.addresses + pack_int32([seq.num_planned for seq in rows]) + columns.num_tokens
            drafted = None
        prefills = zip(rows[self._num_decodes :], self._flags[self._num_decodes :], strict=True)
        # By the flag, not by the state: admission may have preempted a row since it was planned.
        sampled = [seq for seq, flags in prefills if flags & _SAMPLE]
        masked = self._masked_rows() if _WAIT in self._flags else []
        self._retired, self._admits, self._appends = [], [], []
        self._num_admitted_bytes = 0
        for seq in rows[self._num_decodes :]:
            self.publish(seq)
        self._rows = []
        prompts, self._prompts = self._prompts, []
        return RankStep(plan, expected, rows[: self._num_decodes] + sampled, prompts, drafted, masked)

    def _masked_rows(self) -> list[MaskRow]:
        return [
            MaskRow(seq, seq.matcher, seq.slot, seq.take_unmatched(), seq.draft_ids[:most])
            for seq, flags, most in zip(self._rows, self._flags, self._most_drafts_of_all(), strict=True)
            if flags == _WAIT and seq.matcher is not None
        ]

    def _pack_most_drafts(self) -> bytes:
        if not self._draft_plan.verify_budget:
            return b""
        return pack_int32(self._most_drafts_of_all())

    def _most_drafts_of_all(self) -> list[int]:
        """Of all rows: those that do not decode verify none."""
        return self._most_drafts + [0] * (len(self._rows) - len(self._most_drafts))

    def _drafted_rows(self, rows: list[Sequence]) -> DraftedRows:
        num_tokens = [flags & _SAMPLE for flags in self._flags]
        return DraftedRows(rows, self._num_positions, num_tokens, self._most_drafts_of_all(), self._num_decodes)

    def _columns_of(self, rows: list[Sequence]) -> _Columns:
        """Columns that stay as they are while the same sequences decode, step after step."""
        all_decode = self._num_decodes == len(rows)
        if rows and all_decode and rows == self._columns.rows:
            return self._columns
        num_tokens = [1 if flags & _SAMPLE else 0 for flags in self._flags]
        columns = _Columns(
            rows,
            pack_int32([seq.slot for seq in rows] + [seq.generation for seq in rows]),
            pack_int32(self._num_positions + self._flags),
            pack_int32(num_tokens),
        )
        self._columns = columns if all_decode else _NO_COLUMNS
        return columns

    # ---- admission

    def has_room_for(self, seq: Sequence) -> bool:
        """Has the plan under construction a position left, and space for all tokens of one more sequence?"""
        if not self._admits:
            return self.budget > 0
        return self.budget > 0 and self._num_admitted_bytes + self._num_bytes(seq) <= MAX_ADMITTED_BYTES

    def _num_bytes(self, seq: Sequence) -> int:
        """What its admission takes of a plan: tokens, blocks, and what is done to its logits."""
        num_blocks = -(-len(seq.tokens) // self.shape.block_size)
        shaping = seq.request.sampling[seq.sample_index].shaping
        num_bytes = 4 * (len(seq.tokens) + num_blocks)
        if shaping is not None:
            columns = shaping.bias_ids, shaping.bias_values, shaping.allowed_bits, shaping.bad_words
            num_bytes += sum(map(len, columns))
        return num_bytes

    def match(self, seq: Sequence) -> list[int]:
        """Blocks whose content is a prefix of the sequence's tokens; the last token is never among them.

        None where all of their positions would be replayed: without them it costs the same, and is exact.
        """
        num_blocks = (len(seq.tokens) - 1) // self.shape.block_size
        hits: list[int] = []
        if self._prefix_cache and seq.may_adopt:
            extend_chain(seq.block_hashes, self._root, seq.tokens, self.shape.block_size, num_blocks)
            self._follow(seq.block_hashes[:num_blocks], hits)
            if self.shape.is_replay_bounded and len(hits) < num_blocks:
                extend_chain(seq.marked_hashes, self._marked_root, seq.tokens, self.shape.block_size, num_blocks)
                self._follow(seq.marked_hashes[:num_blocks], hits)
        return hits if self.first_computed(hits) else []

    def _follow(self, hashes: list[bytes], hits: list[int]) -> None:
        """Add the blocks behind `hits` that are published under their place's hash, up to the first that is not."""
        for block_hash in hashes[len(hits) :]:
            block = self.pool.find(block_hash)
            if block is None:
                return
            hits.append(block)

    def first_computed(self, hits: list[int]) -> int:
        """The first position that a sequence with these blocks computes; 0: they save it nothing."""
        return max(len(hits) * self.shape.block_size - self.shape.replay_tokens, 0)

    def try_admit(self, seq: Sequence, hits: list[int]) -> bool:
        """Give a waiting sequence a slot and the blocks of all its known tokens, if there are enough."""
        held = seq.held_block_ids
        if len(held) > len(hits):
            hits = held
        num_total = -(-len(seq.tokens) // self.shape.block_size)
        num_taken = num_total - len(hits) + sum(map(self.pool.is_cached, hits))
        if not self._free_slots or self.pool.num_available - num_taken < self._num_spare():
            return False
        for block in hits:
            self.pool.share(block)
        self.drop_held(seq)
        seq.block_ids = hits + [self.pool.allocate() for _ in range(num_total - len(hits))]
        self._set_capacity(seq)
        self._take_slot(seq, hits)
        return True

    def _num_spare(self) -> int:
        """Blocks left alone at admission, so that those who run do not need each other's soon after."""
        return -(-len(self.decode) // self.shape.block_size)

    def _take_slot(self, seq: Sequence, hits: list[int]) -> None:
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        if seq.tokens is seq.request.prompt:
            seq.tokens = seq.tokens[:]  # grows from here on
        seq.rank, seq.slot, seq.generation = self.index, slot, self._generations[slot]
        seq.num_published = len(hits)
        seq.num_planned = seq.num_computed = self.first_computed(hits)
        seq.is_marked = self.shape.is_replay_bounded and bool(hits)
        seq.move(State.PREFILL)
        self.prefill[seq] = None
        self._num_admitted_bytes += self._num_bytes(seq)
        self._admits.append(
            SlotAdmit(
                slot=slot,
                generation=seq.generation,
                length=seq.num_planned,
                floor=len(hits) * self.shape.block_size,
                tokens=pack_int32(seq.tokens),
                block_ids=pack_int32(seq.block_ids),
                sampling=seq.request.sampling[seq.sample_index],
            )
        )

    def hold_prompt(self, first: Sequence, others: list[Sequence]) -> None:
        """Let the further samples of a prompt own its full blocks until they get a slot, if that saves them work."""
        shared = first.block_ids[: (first.num_prompt - 1) // self.shape.block_size]
        if not self.first_computed(shared):
            shared = []
        for seq in others:
            seq.rank = self.index
            if shared:
                seq.held_block_ids = list(shared)
                self.held[seq] = None
                for block in shared:
                    self.pool.share(block)

    def drop_held(self, seq: Sequence) -> None:
        """A waiting sample no longer owns blocks of its prompt; it may have to compute them again."""
        if self.held.pop(seq, 0) is None:
            self.pool.release(seq.held_block_ids)
            seq.held_block_ids = []

    # ---- giving up

    def leave(self, seq: Sequence, state: State) -> None:
        """Take a sequence off its slot; slot and blocks come back behind the last step that names them."""
        for group in (self.prefill, self.decode, self.parked):
            group.pop(seq, None)
        self._columns = _NO_COLUMNS  # of rows that will not come again, and must not be kept alive
        if seq not in self._rows:  # it may have grown for a row that it will not have
            self._appends = [(slot, block) for slot, block in self._appends if slot != seq.slot]
        seq.move(state)
        slot, block_ids = seq.slot, seq.block_ids
        if state is State.PREEMPTING:
            seq.request.num_preemptions += 1
            self.release.release(seq.last_step, slot, block_ids, lambda: self._finish_preemption(seq))
        else:
            seq.block_ids = []
            self.release.release(seq.last_step, slot, block_ids)

    def _finish_preemption(self, seq: Sequence) -> None:
        seq.block_ids, seq.slot, seq.capacity = [], -1, 0
        if seq.state is State.PREEMPTING:
            seq.forget_slot()
            seq.move(State.WAITING)
            self._requeue(seq)

    def _give_back(self, slot: int, block_ids: list[int]) -> None:
        self._free_slots.append(slot)
        self._retired.append(slot)
        self.pool.release(block_ids)

    # ---- blocks

    def _grow(self, seq: Sequence) -> None:
        """Blocks for the next row of a decoding sequence, if there are; for one that it needs somebody may give way.

        It needs one if no draft in flight can turn out to leave it room. Drafts take none that others need soon.
        """
        if seq.capacity <= seq.num_planned < seq.max_length - 1 and (
            self.pool.num_available if seq.num_unsure else self._make_room(seq)
        ):
            self._append_block(seq)
        num_wanted = min(seq.num_planned + 1 + seq.num_drafts, seq.max_length - 1)
        while seq.num_planned < seq.capacity < num_wanted and self.pool.num_available > self._num_spare():
            self._append_block(seq)

    def _append_block(self, seq: Sequence) -> None:
        block = self.pool.allocate()
        seq.block_ids.append(block)
        self._set_capacity(seq)
        self._appends.append((seq.slot, block))

    def _set_capacity(self, seq: Sequence) -> None:
        seq.capacity = len(seq.block_ids) * self.shape.block_size
        seq.limit = min(seq.capacity, seq.max_length - 1)

    def _make_room(self, seq: Sequence) -> bool:
        """Is a block available now? If not, see to it that one will be."""
        while not self.pool.num_available:
            if self._is_block_on_its_way():
                return False
            if self.held:
                self.drop_held(max(self.held, key=lambda held: held.request.order))
                continue
            victim = self.worst()
            assert victim is not None
            self.leave(victim, State.PREEMPTING)
            if victim is seq:
                return False
        return True

    def _is_block_on_its_way(self) -> bool:
        return any(self.pool.num_owners(block) == count for block, count in Counter(self.release.block_ids()).items())

    def publish(self, seq: Sequence) -> None:
        """Let others adopt the blocks of `seq` that are full of known tokens and computed by steps sent so far.

        Those that it adopted are published already, and a replay brings no others.
        """
        if not self._prefix_cache:
            return
        size = self.shape.block_size
        num_full = min(len(seq.tokens), seq.lowest_length) // size
        if num_full > seq.num_published:
            hashes, root = seq.block_hashes, self._root
            if seq.is_marked:
                hashes, root = seq.marked_hashes, self._marked_root
            extend_chain(hashes, root, seq.tokens, size, num_full)
            for index in range(seq.num_published, num_full):
                self.pool.publish(seq.block_ids[index], hashes[index])
            seq.num_published = num_full

    def check_integrity(self) -> None:
        """Every slot and block has exactly the owners that the sequences say. Raises `AssertionError`."""
        running = list(self.running())
        owned = [block for seq in running for block in seq.block_ids]
        owned += [block for seq in self.held for block in seq.held_block_ids]
        self.pool.check_integrity(owned + self.release.block_ids())
        slots = [seq.slot for seq in running] + self._free_slots + self.release.slots()
        assert sorted(slots) == list(range(self.shape.num_slots)), f"slots {sorted(slots)}"
        assert all(seq.state is State.PREFILL for seq in self.prefill)
        assert all(seq.state is State.DECODE for seq in [*self.decode, *self.parked])
        assert all(seq.state is State.WAITING for seq in self.held)
        for seq in running:
            assert len(seq.block_ids) * self.shape.block_size == seq.capacity >= seq.num_planned
            assert 0 <= seq.num_pending <= 2 * (1 + self.drafts.longest)
            assert len(seq.tokens) + seq.num_pending <= seq.max_length
            assert 0 <= seq.num_unsure <= max(seq.num_pending - 1, 0)
            assert seq.num_computed <= seq.lowest_length and seq.num_drafts <= self.drafts.longest
            assert seq.limit == min(seq.capacity, seq.max_length - 1)
