"""Which request runs when: the queue, admission, steps, deadlines. Pure and synchronous; `now` is an argument.

Knows nothing of asyncio, sockets, text or devices: it turns requests into `StepPlan`s and `StepResult`s into tokens.
A step is planned before the tokens of the step before it are known; `apply` brings the facts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from itertools import count
from math import inf
from operator import sub
from typing import NamedTuple

from msgspec import Struct

from deepinfer.admission import Admitted
from deepinfer.budget import DraftPolicy, NoDrafts
from deepinfer.deadlines import Deadlines
from deepinfer.draft_counts import DraftCounts, by_place
from deepinfer.errors import DuplicateRequestId, Overloaded, WorkerLost
from deepinfer.rank import CacheShape, PromptRow, Rank, RankStep
from deepinfer.request import FinishReason, Request, Sequence, State, TokenLogprobs
from deepinfer.waiting import WaitingQueue
from deepinfer_protocol import StepResult, split_columns, unpack_float32, unpack_int32


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Limits and habits of one scheduler."""

    max_batch_tokens: int
    """Positions a step may compute on each rank."""
    prefill_chunk: int
    """Positions of one prompt a step may compute."""
    prefix_cache: bool = True
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_000_000
    ageing_s: float = 10.0
    """Waiting this long is worth one step of priority."""


class Step(Struct):
    """A step in flight."""

    step_id: int
    ranks: list[RankStep]


Emission = tuple[Sequence, int | None, FinishReason | None, TokenLogprobs | None]
"""One sample got a token, or ended, or both. A plain tuple: there is one for every token."""


class RowTokens(NamedTuple):
    """What a result says of each row."""

    counts: array[int]
    """How many tokens it has."""
    num_verified: array[int]


class SchedulerStats(NamedTuple):
    """What is going on. Counts are of samples, not of requests."""

    num_waiting: int
    num_running: int
    num_preempted: int  # ever
    num_queued_tokens: int
    num_blocks_used: int
    num_blocks_cached: int  # of no owner, still to be adopted by their hash
    num_blocks: int


class Scheduler:
    """The queue of requests and the ranks that serve them."""

    def __init__(
        self,
        config: SchedulerConfig,
        shapes: list[CacheShape],
        *,
        epoch: int = 0,
        drafts: Sequence_[DraftPolicy] | None = None,
    ) -> None:
        """`shapes` has one entry a rank, and so has `drafts`; without it nobody drafts."""
        self.config = config
        self.epoch = epoch
        policies = [NoDrafts() for _ in shapes] if drafts is None else drafts
        self.ranks = [
            Rank(index, shape, prefix_cache=config.prefix_cache, requeue=self._requeue, drafts=policy)
            for index, (shape, policy) in enumerate(zip(shapes, policies, strict=True))
        ]
        self.drafts = DraftCounts()
        """What became of them, of all requests."""
        self.requests: dict[str, Request] = {}
        self.on_finish: Callable[[Request, FinishReason], object] = _tell_nobody
        self._queue = WaitingQueue()
        self._deadlines = Deadlines()
        self._serial = count()
        self._step_ids = count()
        self._num_queued = 0  # requests that have not started
        self._num_queued_tokens = 0
        self._num_preempted = 0
        self._finish_rate = 0.0  # requests a second, smoothed
        self._last_finish_s = -inf

    # ---- requests come and go

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Raises `DuplicateRequestId` or `Overloaded`, and then nothing has changed."""
        if request.request_id in self.requests:
            raise DuplicateRequestId("request_id", f"{request.request_id!r} is the id of an open request")
        self._check_load(request.num_queued_tokens)
        serial = next(self._serial)
        request.order = (request.arrival_s + request.priority * self.config.ageing_s, serial)
        self.requests[request.request_id] = request
        self._num_queued += 1
        self._num_queued_tokens += request.num_queued_tokens
        if request.samples[0].state is State.WAITING:
            self._queue.push(request.samples[0])
        self.add_deadline(request.queue_deadline_s, request, "queue_timeout")
        self.add_deadline(request.deadline_s, request, "timeout")

    def encode(self, request: Request, prompt: array[int], admitted: Admitted) -> None:
        """The text of an open request has become tokens: it waits like any other."""
        self._num_queued_tokens -= request.num_queued_tokens
        request.encode(prompt, admitted.sampling, max_length=admitted.max_length, stop_ids=admitted.stop_ids)
        self._num_queued_tokens += request.num_queued_tokens
        request.samples[0].move(State.WAITING)
        self._queue.push(request.samples[0])

    def _leave_queue(self, request: Request) -> None:
        self._num_queued -= 1
        self._num_queued_tokens -= request.num_queued_tokens

    def _check_load(self, num_tokens: int) -> None:
        config = self.config
        if self._num_queued >= config.max_queued_requests:
            raise Overloaded(
                f"{self._num_queued} requests wait, the limit is {config.max_queued_requests}", self._wait_s()
            )
        if self._num_queued_tokens + num_tokens > config.max_queued_tokens and self._num_queued:
            raise Overloaded(
                f"{self._num_queued_tokens} prompt tokens wait, the limit is {config.max_queued_tokens}", self._wait_s()
            )

    def _wait_s(self) -> float:
        """When the queue will have shrunk by a tenth, at the rate at which requests have been finishing."""
        if self._finish_rate <= 0:
            return 1.0
        return min(max(self._num_queued / 10 / self._finish_rate, 0.1), 60.0)

    def finish(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """End one sample: its slot and blocks come back behind the last step that names them."""
        if seq.state is State.FINISHED:
            return
        rank = self.ranks[seq.rank]
        if seq.has_slot:
            rank.leave(seq, State.FINISHED)
        else:
            if seq.state is State.WAITING:
                self._queue.discard(seq)
                rank.drop_held(seq)
            seq.move(State.FINISHED)
        seq.matcher = None  # the reader may keep the sample; masks under way have their own reference
        seq.finish_reason = reason
        request = seq.request
        if request.started_s is None and seq.sample_index == 0:
            self._leave_queue(request)
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self.requests[request.request_id]
            self._note_finish(now)
            self.on_finish(request, reason)
        elif seq.sample_index == 0:
            self._release_samples(seq)

    def finish_request(self, request: Request, reason: FinishReason, now: float) -> list[Emission]:
        """End every sample of a request that has not ended."""
        ended = [seq for seq in request.samples if seq.state is not State.FINISHED]
        for seq in reversed(ended):  # the first sample last: the others depend on its prompt
            self.finish(seq, reason, now)
        return [(seq, None, reason, None) for seq in ended]

    def _note_finish(self, now: float) -> None:
        gap_s = max(now - self._last_finish_s, 1e-6)
        self._last_finish_s = now
        if gap_s < inf:
            self._finish_rate += 0.1 * (1.0 / gap_s - self._finish_rate)

    # ---- readers that are too slow

    def pause(self, request: Request) -> None:
        """Plan no more rows for `request` until `resume`."""
        request.is_paused = True
        for seq in request.samples:
            decode = self.ranks[seq.rank].decode
            if seq in decode:
                del decode[seq]
                self.ranks[seq.rank].parked[seq] = None

    def resume(self, request: Request) -> None:
        request.is_paused = False
        for seq in request.samples:
            parked = self.ranks[seq.rank].parked
            if seq in parked:
                del parked[seq]
                self.ranks[seq.rank].decode[seq] = None
        self._queue.resume(request)

    # ---- deadlines

    def add_deadline(self, when_s: float, request: Request, reason: FinishReason) -> None:
        self._deadlines.add(when_s, request, reason)

    def next_deadline(self) -> float:
        """When `expire` should be called; `inf`: no need."""
        return self._deadlines.next()

    def expire(self, now: float) -> list[Emission]:
        """End the requests whose deadline is over."""
        return [
            emission
            for request, reason in self._deadlines.expire(now)
            for emission in self.finish_request(request, reason, now)
        ]

    # ---- steps

    def schedule(self, now: float) -> Step | None:
        """The next step, or `None` when there is nothing to compute."""
        step_id = next(self._step_ids)
        for rank in self.ranks:
            rank.begin(self.config.max_batch_tokens)
            rank.plan_decodes(step_id)
            rank.plan_prefills(step_id, self.config.prefill_chunk)
        self._admit(step_id, now)
        for rank in self.ranks:
            rank.plan_drafts()
        padded = max(rank.num_planned_positions for rank in self.ranks)
        if padded == 0:
            return None
        for rank in self.ranks:
            for seq in rank.newly_decoding():
                self._release_samples(seq)
        return Step(step_id, [rank.finish_plan(self.epoch, step_id, padded) for rank in self.ranks])

    def apply(self, step: Step, results: list[StepResult], now: float) -> list[Emission]:
        """Take in what the ranks answered. Raises `WorkerLost` when an answer is not the one to this step."""
        emissions: list[Emission] = []
        for rank, rank_step, result in zip(self.ranks, step.ranks, results, strict=True):
            if rank_step.drafted is None:
                if result.rows != rank_step.expected_rows:
                    raise WorkerLost(_describe_drift(step.step_id, rank.index, rank_step, result))
                self._apply_tokens(rank, rank_step.sampled, result, emissions, now)
            else:
                row_tokens = _check_drafted(step.step_id, rank.index, rank_step, result)
                self._apply_drafted(rank, rank_step, row_tokens, result, emissions, now)
            if rank_step.prompts or result.prompt_logprobs:
                _take_prompt_logprobs(rank_step.prompts, result)
            rank.release.applied(step.step_id)
        return emissions

    def _apply_tokens(
        self, rank: Rank, sampled: list[Sequence], result: StepResult, emissions: list[Emission], now: float
    ) -> None:
        """One token for each of `sampled`."""
        block_size = rank.shape.block_size
        logprobs = _split_logprobs(sampled, result) if result.logprobs else None
        for index, (seq, token) in enumerate(zip(sampled, unpack_int32(result.tokens), strict=True)):
            if seq.state is State.FINISHED:
                continue  # ended while the step was under way: the token is surplus
            known = seq.tokens
            known.append(token)
            length = len(known)
            reason = _end_at(seq, token, length)
            if length % block_size == 1 and seq.has_slot:
                rank.publish(seq)
            emissions.append((seq, token, reason, logprobs[index] if logprobs else None))
            if reason is not None:
                self.finish(seq, reason, now)

    def _apply_drafted(
        self,
        rank: Rank,
        rank_step: RankStep,
        row_tokens: RowTokens,
        result: StepResult,
        emissions: list[Emission],
        now: float,
    ) -> None:
        """As many tokens for each row as its result has; only now is it known how many positions it has computed."""
        drafted = rank_step.drafted
        assert drafted is not None
        counts, num_verified = row_tokens
        num_accepted = list(map(sub, counts, drafted.num_tokens))
        tokens, start = unpack_int32(result.tokens), 0
        logprobs = _split_logprobs(_repeat(drafted.seqs, counts), result) if result.logprobs else None
        survivals, num_drafts, first = result.survivals, rank_step.plan.num_drafts, 0
        columns = drafted.seqs, drafted.num_positions, drafted.most_drafts, counts, num_verified, num_accepted
        for index, (seq, positions, most, num_tokens, verified, accepted) in enumerate(zip(*columns, strict=True)):
            seq.settle(positions, most, accepted)
            if not num_tokens:
                continue
            seq.older_survivals, seq.survivals = seq.survivals, survivals[first : first + num_drafts]
            first += num_drafts
            end = start + num_tokens
            if seq.state is not State.FINISHED:  # else it ended while the step was under way: the tokens are surplus
                if index < drafted.num_decodes:
                    seq.request.drafts.add(verified, accepted)
                    self.drafts.add(verified, accepted)
                known = logprobs[start:end] if logprobs else None
                self._take_tokens(rank, seq, tokens[start:end], known, emissions, now)
            start = end
        if rank_step.masked and num_drafts:
            ids = unpack_int32(result.draft_ids)
            for index, masked in enumerate(rank_step.masked):
                masked.seq.draft_ids = ids[index * num_drafts : (index + 1) * num_drafts]
        if result.predicted:
            predicted = unpack_float32(result.predicted)
            tried, reached = by_place(zip(num_verified, num_accepted, strict=True), len(predicted))
            self.drafts.add_predicted(predicted, tried, reached)
            rank.drafts.learn(predicted, reached)

    def _take_tokens(
        self,
        rank: Rank,
        seq: Sequence,
        tokens: array[int],
        logprobs: list[TokenLogprobs | None] | None,
        emissions: list[Emission],
        now: float,
    ) -> None:
        """One after another, up to the first that ends the sequence: those behind it are surplus."""
        known, block_size = seq.tokens, rank.shape.block_size
        num_full = (len(known) - 1) // block_size
        reason: FinishReason | None = None
        for index, token in enumerate(tokens):
            known.append(token)
            reason = _end_at(seq, token, len(known))
            emissions.append((seq, token, reason, logprobs[index] if logprobs else None))
            if reason is not None:
                break
        if (len(known) - 1) // block_size > num_full and seq.has_slot:
            rank.publish(seq)
        if reason is not None:
            self.finish(seq, reason, now)

    # ---- the queue

    def _requeue(self, seq: Sequence) -> None:
        """Its preemption is complete."""
        self._num_preempted += 1
        self._queue.push(seq)

    def _release_samples(self, first: Sequence) -> None:
        """The prompt is computed, or never will be: the further samples may start."""
        others = [seq for seq in first.request.samples if seq.state is State.HELD]
        if others:
            for seq in others:
                seq.move(State.WAITING)
                self._queue.push(seq)
            if first.has_slot:
                self.ranks[first.rank].hold_prompt(first, others)

    def _admit(self, step_id: int, now: float) -> None:
        """Give slots to those who wait, in order, while slots, blocks and positions last."""
        while (seq := self._queue.head()) is not None and self._admit_one(seq):
            self._queue.pop()
            request = seq.request
            if request.started_s is None:
                request.started_s = now
                request.num_cached_tokens = seq.num_planned
                self._leave_queue(request)
            self.ranks[seq.rank].plan_chunk(seq, step_id, self.config.prefill_chunk)

    def _admit_one(self, seq: Sequence) -> bool:
        while True:
            ranks = self._candidates(seq)
            if any(rank.try_admit(seq, hits) for rank, hits in ranks):
                return True
            if not any(self._free_held(rank, seq) for rank, _ in ranks) and not self._make_way(seq):
                return False

    def _candidates(self, seq: Sequence) -> list[tuple[Rank, list[int]]]:
        """Ranks whose plan can take it now, the one with the least to do first; equals take turns."""
        ranks = [rank for rank in self.ranks if rank.has_room_for(seq)]
        if seq.held_block_ids:
            ranks = [rank for rank in ranks if rank.index == seq.rank]
        matched = [(rank, rank.match(seq)) for rank in ranks]
        turn = seq.request.order[1]
        return sorted(
            matched,
            key=lambda pair: (
                pair[0].num_running * pair[0].shape.block_size - pair[0].first_computed(pair[1]),
                (pair[0].index + turn) % len(self.ranks),
            ),
        )

    def _free_held(self, rank: Rank, seq: Sequence) -> bool:
        """If nobody runs, and still there is no room: a waiting sample gives its prompt blocks up, the last first."""
        if rank.num_running or rank.release.num_slots:
            return False
        others = [held for held in rank.held if held is not seq]
        if others:
            rank.drop_held(max(others, key=lambda held: held.request.order))
        return bool(others)

    def _make_way(self, seq: Sequence) -> bool:
        """Preempt a sequence that nobody reads, or of lower priority, unless room is on its way. Is there more now?"""
        if any(rank.release.num_slots for rank in self.ranks):
            return False
        victims = [victim for rank in self.ranks if rank.has_room_for(seq) and (victim := rank.worst()) is not None]
        victim = max(victims, key=lambda victim: (victim.request.is_paused, victim.request.order), default=None)
        if victim is None:
            return False
        theirs, mine = victim.request, seq.request
        if not theirs.is_paused and (theirs.order <= mine.order or theirs.priority <= mine.priority):
            return False
        rank = self.ranks[victim.rank]
        rank.leave(victim, State.PREEMPTING)
        return rank.release.num_slots == 0

    # ---- reports

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=self._queue.num_waiting,
            num_running=sum(rank.num_running for rank in self.ranks),
            num_preempted=self._num_preempted,
            num_queued_tokens=self._num_queued_tokens,
            num_blocks_used=sum(rank.pool.num_used for rank in self.ranks),
            num_blocks_cached=sum(rank.pool.num_cached for rank in self.ranks),
            num_blocks=sum(rank.pool.num_blocks for rank in self.ranks),
        )

    def check_integrity(self) -> None:
        """The books agree with each other. Callable after every method; raises `AssertionError`."""
        for rank in self.ranks:
            rank.check_integrity()
        unfinished = [seq for request in self.requests.values() for seq in request.samples]
        waiting = [seq for seq in unfinished if seq.state is State.WAITING]
        self._queue.check_integrity(waiting)
        with_slot = [seq for seq in unfinished if seq.has_slot]
        assert len(with_slot) == sum(rank.num_running for rank in self.ranks)
        unstarted = [request for request in self.requests.values() if request.started_s is None]
        assert len(unstarted) == self._num_queued
        assert sum(request.num_queued_tokens for request in unstarted) == self._num_queued_tokens
        for request in self.requests.values():
            assert request.num_unfinished == sum(seq.state is not State.FINISHED for seq in request.samples) > 0


def _tell_nobody(request: Request, reason: FinishReason) -> None:
    """For a scheduler that nobody watches."""


def _end_at(seq: Sequence, token: int, length: int) -> FinishReason | None:
    """Does `token`, with which the sequence has this length, end it?"""
    if token in seq.stop_ids and length > seq.min_length:
        return "stop"
    return "length" if length >= seq.max_length else None


def _repeat(seqs: list[Sequence], counts: array[int]) -> list[Sequence]:
    """Each as often as it has tokens."""
    return [seq for seq, count in zip(seqs, counts, strict=True) for _ in range(count)]


def _check_drafted(step_id: int, rank: int, expected: RankStep, result: StepResult) -> RowTokens:
    """What the rows have, if that is possible. Raises `WorkerLost` when it is not."""
    drafted, budget = expected.drafted, expected.plan.verify_budget
    assert drafted is not None
    num_rows, where = len(drafted.seqs), f"step {step_id}, rank {rank}"
    if result.rows[: 8 * num_rows] != expected.expected_rows or len(result.rows) != 16 * num_rows:
        raise WorkerLost(_describe_drift(step_id, rank, expected, result))
    lengths, counts = split_columns(result.rows[8 * num_rows :], 2)
    num_verified = unpack_int32(result.num_verified) if result.num_verified else array("i", bytes(4 * num_rows))
    if len(num_verified) != num_rows:
        raise WorkerLost(f"{where}: drafts of {len(num_verified)} rows were verified, {num_rows} were planned")
    if sum(num_verified) > budget:
        raise WorkerLost(f"{where}: {sum(num_verified)} drafts were verified, {budget} were planned")
    rows = zip(*drafted[:4], lengths, counts, num_verified, strict=True)
    for index, (seq, positions, least, most, length, num_tokens, verified) in enumerate(rows):
        wanted = seq.num_computed + positions + num_tokens - least
        if length != wanted or verified > most or not least <= num_tokens <= least + verified:
            told = f"length {wanted} expected, {length} came"
            if verified > most:
                told = f"at most {most} verified drafts expected, {verified} came"
            elif not least <= num_tokens <= least + verified:
                told = f"{least} to {least + verified} tokens expected, {num_tokens} came"
            raise WorkerLost(f"{where}, row {index}: the worker's state has drifted: {told}")
    num_sampled = sum(drafted.num_tokens)
    if len(result.survivals) != num_sampled * expected.plan.num_drafts:
        due = f"{expected.plan.num_drafts} drafts of {num_sampled} rows were due"
        raise WorkerLost(f"{where}: {due}, {len(result.survivals)} survivals came")
    num_ids = len(expected.masked) * expected.plan.num_drafts
    if len(result.draft_ids) != 4 * num_ids:
        raise WorkerLost(f"{where}: the ids of {num_ids} drafts were due, {len(result.draft_ids) // 4} came")
    return RowTokens(counts, num_verified)


def _split_logprobs(sampled: list[Sequence], result: StepResult) -> list[TokenLogprobs | None]:
    """What belongs to each sampled token. Raises `WorkerLost` when the columns do not add up."""
    widths = [seq.request.sampling[seq.sample_index].num_logprobs + 1 for seq in sampled]
    columns = result.logprob_ids, result.logprobs, result.logprob_ranks
    split = iter(_split_entries([width for width in widths if width], columns, result))
    return [next(split) if width else None for width in widths]


def _take_prompt_logprobs(prompts: list[PromptRow], result: StepResult) -> None:
    """Each prompt token's once: a prompt that is computed again, after a preemption, brings them again."""
    widths = [row.seq.request.sampling[0].num_prompt_logprobs + 1 for row in prompts for _ in range(row.num_tokens)]
    columns = result.prompt_logprob_ids, result.prompt_logprobs, result.prompt_logprob_ranks
    entries = iter(_split_entries(widths, columns, result))
    for row in prompts:
        known = row.seq.request.prompt_logprobs
        for position in range(row.first, row.first + row.num_tokens):
            entry = next(entries)
            if position == 1 + len(known):
                known.append(entry)


def _split_entries(widths: list[int], columns: tuple[bytes, bytes, bytes], result: StepResult) -> list[TokenLogprobs]:
    """Ids, values and ranks of entries that are `widths` ids wide. Raises `WorkerLost` when they do not add up."""
    ids, values, ranks = unpack_int32(columns[0]), unpack_float32(columns[1]), unpack_int32(columns[2])
    if sum(widths) != len(ids) or len(widths) != len(ranks):
        expected = f"{sum(widths)} logprobs of {len(widths)} tokens expected, {len(ids)} of {len(ranks)} came"
        raise WorkerLost(f"step {result.step_id}, rank {result.rank}: {expected}")
    entries: list[TokenLogprobs] = []
    start = 0
    for width, rank in zip(widths, ranks, strict=True):
        entries.append(TokenLogprobs(ids[start : start + width], values[start : start + width], rank))
        start += width
    return entries


def _describe_drift(step_id: int, rank: int, expected: RankStep, result: StepResult) -> str:
    """Which row of a result differs, in words. With drafts slots and generations alone are known beforehand."""
    names = ("slot", "generation", "length", "tokens")[: 4 if expected.drafted is None else 2]
    wanted = list(zip(*split_columns(expected.expected_rows, len(names)), strict=True))
    came = list(zip(*split_columns(result.rows, 4)[: len(names)], strict=True))
    if len(wanted) != len(came):
        return f"step {step_id}, rank {rank}: {len(wanted)} rows were planned, {len(came)} came back"
    index = next(i for i, (a, b) in enumerate(zip(wanted, came, strict=True)) if a != b)
    told = ", ".join(
        f"{n} {a} expected, {b} came" for n, a, b in zip(names, wanted[index], came[index], strict=True) if a != b
    )
    return f"step {step_id}, rank {rank}, row {index}: the worker's state has drifted: {told}"
