"""Rows that wait for masks, in simulation: whatever the schedule, each mask is that of its row's own tokens."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, Final

import pytest
from msgspec.structs import replace

from deepinfer import Engine
from deepinfer.errors import GrammarError, InternalError
from deepinfer.masks import DRAFTS_S, FilledMasks, MaskJob, MaskRow, fill_masks
from deepinfer.matcher import is_allowed
from deepinfer.request import Request
from deepinfer.stream import Mailbox
from deepinfer_protocol import (
    AnyMessage,
    LogitShaping,
    MaskBatch,
    RowFlag,
    SlotSampling,
    StepPlan,
    split_columns,
    unpack_int32,
)
from doubles.oracle import next_token
from engine.test_simulation import AXES, VOCAB_SIZE, Case, Simulation

WIDTH: Final = 4 * -(-VOCAB_SIZE // 32)
EVERYTHING: Final = ((1 << VOCAB_SIZE) - 1).to_bytes(WIDTH, "little")


def mask_after(output: Sequence[int]) -> bytes:
    """Every third token, which ones hangs on all of `output`."""
    first = (31 * sum(output) + len(output)) % 3
    return sum(1 << token for token in range(first, VOCAB_SIZE, 3)).to_bytes(WIDTH, "little")


class Thirds:
    """In place of a `Matcher`: counts what it is given."""

    any_token = EVERYTHING

    def __init__(self, dead_end: int = -1) -> None:
        self.output: list[int] = []
        self.num_masks = 0
        self._dead_end = dead_end

    def next_masks(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        """Now and then fewer than there could be."""
        self.output += tokens
        if len(self.output) >= self._dead_end >= 0:
            raise GrammarError("regex", "a dead end")
        masks = [mask_after(self.output)]
        for index, draft in enumerate(drafts, 1):
            behind = [*self.output, *drafts[:index]]
            if not is_allowed(masks[-1], draft) or len(behind) == self._dead_end or sum(behind) % 7 == 0:
                break
            masks.append(mask_after(behind))
        self.num_masks += len(masks)
        return masks


def masked_completion(request: Request, index: int) -> tuple[list[int], str]:
    tokens = list(request.prompt)
    sampling = request.sampling[index]
    while True:
        output = tokens[len(request.prompt) :]
        shaping = replace(sampling.shaping or LogitShaping(), allowed_bits=mask_after(output))
        token = next_token(tokens, replace(sampling, shaping=shaping), VOCAB_SIZE)
        tokens.append(token)
        if token in request.stop_ids or len(tokens) >= request.max_length:
            return tokens[len(request.prompt) :], "stop" if token in request.stop_ids else "length"


class MaskedSimulation(Simulation):
    """Half of the requests wait for masks, which take their time."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, seed)
        self._filled_s = 0.0
        self.core._fill_masks = self._fill
        self.plans: list[AnyMessage] = []
        self.masked: set[str] = set()
        self._send = self.group.send
        self.group.send = self._note  # type: ignore[method-assign]

    def _note(self, rank: int, message: AnyMessage) -> None:
        self.plans.append(message)
        self._send(rank, message)

    def _fill(self, job: MaskJob, hand_on: Callable[[FilledMasks], None]) -> None:
        """One after another, in the order of the jobs."""
        self._filled_s = max(self._filled_s, self.clock.time()) + self.random.choice((0.0, 0.001, 0.02))
        self.clock.call_at(self._filled_s, lambda: hand_on(fill_masks(job)))

    def request(self, *, priority: int = 0, n: int = 1, dead_end: int = -1) -> Request:
        request = super().request(priority=priority, n=n)
        if dead_end >= 0 or self.random.random() < 0.5:
            for seq in request.samples:
                matcher: Any = Thirds(dead_end)
                seq.matcher = matcher
            self.masked.add(request.request_id)
        return request

    def wanted(self, request: Request) -> list[tuple[list[int], str]]:
        if request.request_id not in self.masked:
            return super().wanted(request)
        return [masked_completion(request, index) for index in range(len(request.samples))]


def run_case(case: Case, seed: int) -> MaskedSimulation:
    simulation = MaskedSimulation(case, seed)
    for _ in range(case.batch):
        n = simulation.random.choice((1, 1, 3)) if case.batch > 1 else 1
        simulation.submit_at(simulation.random.uniform(0, 0.1), simulation.request(n=n))
    if case.preempted and case.batch == 1:
        for _ in range(4 * case.num_ranks):
            simulation.submit_at(simulation.random.uniform(0, 0.2), simulation.request(priority=-100))
    simulation.run()
    return simulation


@pytest.mark.parametrize("longest_draft", [0, 3])
@pytest.mark.parametrize("part", range(4))
def test_every_schedule_gives_the_tokens_that_the_masks_allow(part: int, longest_draft: int) -> None:
    num_preempted = num_masked = num_verified = num_accepted = num_places = 0
    for index, case in enumerate(AXES[part::7]):
        simulation = run_case(case._replace(longest_draft=longest_draft), seed=index)
        for request in simulation.requests:
            assert simulation.outputs(request) == simulation.wanted(request), f"{case=} {index=} {request.request_id=}"
            assert all(seq.matcher is None for seq in request.samples), "the reader may keep them"
            if request.request_id in simulation.masked:
                num_masked += 1
                num_verified += request.drafts.num_verified
                num_accepted += request.drafts.num_accepted
        num_preempted += simulation.scheduler.stats().num_preempted
        num_places += check_masks(simulation)
    assert num_preempted > 10 and num_masked > 50
    if longest_draft:
        assert num_verified > 2 * num_accepted > 400 and num_places > num_accepted
    else:
        assert num_verified == num_places == 0


def check_masks(simulation: MaskedSimulation) -> int:
    """A row has no more masks than places that it may verify. Returns how many masks are of places behind drafts."""
    most_of: dict[tuple[int, int], dict[int, int]] = {}
    num_places = 0
    for message in simulation.plans:
        if isinstance(message, StepPlan):
            slots, _, _, flags = split_columns(message.rows, 4)
            most = unpack_int32(message.most_drafts) if message.most_drafts else [0] * len(slots)
            waiting = [bool(flag & RowFlag.WAITS_FOR_MASK) for flag in flags]
            most_of[message.rank, message.step_id] = dict(compress(zip(slots, most, strict=True), waiting))
        elif isinstance(message, MaskBatch):
            slots = unpack_int32(message.slots)
            counts = unpack_int32(message.num_masks) if message.num_masks else [1] * len(slots)
            allowed = most_of[message.rank, message.step_id]
            assert set(slots) == set(allowed)
            assert all(1 <= count <= 1 + allowed[slot] for slot, count in zip(slots, counts, strict=True))
            num_places += sum(counts) - len(counts)
    return num_places


@pytest.mark.parametrize("dead_end", [0, 1, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_dead_end_is_that_request_s_alone(dead_end: int, overlap: bool) -> None:
    simulation = MaskedSimulation(Case(overlap, 64, True, 16, False, True, 1), seed=7)
    fine = [simulation.request() for _ in range(8)]
    stuck = simulation.request(n=2, dead_end=dead_end)
    stuck.max_length = len(stuck.prompt) + 20
    for seq in stuck.samples:
        seq.take_prompt()
        seq.stop_ids = frozenset()
    for request in [*fine, stuck]:
        simulation.submit_at(0.0, request)
    simulation.run()
    mailbox: Mailbox = stuck.user
    assert isinstance(mailbox.error, GrammarError) and mailbox.error.field == "regex"
    chunks = []
    while (chunk := mailbox.take()) is not None:
        chunks.append(chunk)
    assert all(sum(len(c.token_ids) for c in chunks if c.sample_index == index) <= dead_end for index in (0, 1))
    assert all(simulation.outputs(request) == simulation.wanted(request) for request in fine)


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_matcher_that_panics_fails_its_request_alone() -> None:
    simulation = MaskedSimulation(Case(True, 64, True, 16, False, True, 1), seed=8)
    broken, fine = simulation.request(dead_end=0), simulation.request()
    matcher: Any = Thirds()

    def panic(*_: Any) -> bytes:
        raise Panic("index out of bounds")

    matcher.next_masks = panic
    broken.samples[0].matcher = matcher
    for request in (broken, fine):
        simulation.submit_at(0.0, request)
    simulation.run()
    assert isinstance(broken.user.error, InternalError) and broken.user.error.code == "internal"
    assert simulation.outputs(fine) == simulation.wanted(fine)


def test_a_batch_that_is_large_already_has_fewer_masks_behind_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("r", array("i", [1, 2]), [SlotSampling()], max_length=9, stop_ids=frozenset())
    drafts: list[int] = []
    while len(drafts) < 3:  # those that the masks allow
        behind = mask_after(drafts)
        drafts.append(next(t for t in range(VOCAB_SIZE) if is_allowed(behind, t) and (sum(drafts) + t) % 7))
    counts = []
    for room in (100, 7, 4, 3, 1):
        monkeypatch.setattr("deepinfer.masks.MAX_BATCH_BYTES", room * WIDTH + 1)
        matchers: list[Any] = [Thirds() for _ in range(3)]
        rows = [MaskRow(request.samples[0], matcher, 0, array("i"), array("i", drafts)) for matcher in matchers]
        batch = fill_masks(MaskJob(0, 1, 0, rows)).batch
        counts.append(list(unpack_int32(batch.num_masks)))
        assert len(batch.bits) == WIDTH * (sum(counts[-1]) or 3)
    assert counts == [[4, 4, 4], [4, 2, 1], [2, 1, 1], [], []]


def test_a_job_that_takes_long_makes_only_the_masks_that_its_step_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("r", array("i", [1, 2]), [SlotSampling()], max_length=9, stop_ids=frozenset())
    now_s = 7.0
    monkeypatch.setattr("deepinfer.masks.perf_counter", lambda: now_s)

    class Slow(Thirds):
        def next_masks(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
            nonlocal now_s
            now_s += 0.6 * DRAFTS_S
            return [mask_after(())] * (1 + len(drafts))

    matchers: list[Any] = [Slow() for _ in range(4)]
    rows = [MaskRow(request.samples[0], matcher, 0, array("i"), array("i", [1, 2, 3])) for matcher in matchers]
    for _ in range(2):
        assert list(unpack_int32(fill_masks(MaskJob(0, 1, 0, rows)).batch.num_masks)) == [4, 4, 1, 1]


@pytest.mark.parametrize("own_thread", [True, False])
def test_an_engine_that_cannot_start_its_threads_leaves_none(own_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        engine = Engine("fake", own_thread=own_thread)
        before = set(threading.enumerate())
        monkeypatch.setattr("deepinfer.engine.MaskThread", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await engine.open()
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive(), thread
        await engine.aclose()
        monkeypatch.undo()
        async with engine:
            assert engine.health().failure is None

    asyncio.run(run())


def test_a_matcher_that_breaks_fails_its_request_alone() -> None:
    simulation = MaskedSimulation(Case(True, 64, True, 16, False, True, 1), seed=8)
    broken, fine = simulation.request(dead_end=0), simulation.request()
    unusable: Any = Thirds()
    unusable.next_masks = None
    broken.samples[0].matcher = unusable
    for request in (broken, fine):
        simulation.submit_at(0.0, request)
    simulation.run()
    assert "a mask could not be made: TypeError" in str(broken.user.error)
    assert simulation.outputs(fine) == simulation.wanted(fine)


def test_a_request_that_ends_while_its_mask_is_made_leaves_nothing_behind() -> None:
    for seed in range(20):
        simulation = MaskedSimulation(Case(True, 64, True, 16, False, True, 1), seed=seed)
        requests = [simulation.request(dead_end=1000) for _ in range(8)]
        for request in requests:
            simulation.submit_at(0.0, request)
            simulation.clock.call_at(simulation.random.uniform(0, 0.3), partial(_abort, simulation, request))
        simulation.run()


def _abort(simulation: MaskedSimulation, request: Request) -> None:
    simulation.core.post(simulation.core.abort, request)
    simulation.core.wake()


def test_a_sequence_gives_its_matcher_each_token_once() -> None:
    request = Request("r", array("i", [1, 2]), [SlotSampling()], max_length=9, stop_ids=frozenset())
    [seq] = request.samples
    assert list(seq.take_unmatched()) == []
    seq.tokens = seq.tokens + array("i", [5, 6])
    assert list(seq.take_unmatched()) == [5, 6]
    seq.forget_slot()
    seq.tokens.append(7)
    assert list(seq.take_unmatched()) == [7] and list(seq.take_unmatched()) == []
