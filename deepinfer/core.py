"""EngineCore: the one loop of the engine. Admit, schedule, send, receive, apply, publish.

Synchronous callbacks on one thread: whatever runs them (an asyncio loop, a thread's loop, a simulator with a virtual
clock) gives it the time and calls it back. Knows nothing of sockets, processes, tokenizers' files or torch.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from math import inf
from typing import Any, Protocol

from msgspec import Struct, field

from deepinfer.admission import Admitted
from deepinfer.draft_counts import DraftCounts
from deepinfer.errors import DeepInferError, EngineClosed, EngineError, InternalError, SlowConsumer, WorkerLost
from deepinfer.link import WorkerLink
from deepinfer.masks import FilledMasks, FillMasks, MaskJob, fill_now
from deepinfer.observer import Observer, Observers, StepReport
from deepinfer.outbox import Outbox
from deepinfer.output import OutputText
from deepinfer.request import FinishReason, Request, Sequence
from deepinfer.scheduler import Emission, Scheduler, Step
from deepinfer.stream import Mailbox, PromptLogprobs, readable
from deepinfer_protocol import AnyMessage, Fault, StepResult

logger = logging.getLogger(__name__)


class Timer(Protocol):
    """What `call_at` returns."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that the core uses."""

    def time(self) -> float: ...

    def call_soon(self, callback: Callable[[], object]) -> object: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class CoreConfig(Struct, frozen=True, kw_only=True):
    """Limits of the core."""

    overlap: bool = True
    """Two steps in flight instead of one. The tokens are the same."""
    max_unread_tokens: int = 4096
    slow_consumer_s: float = 60.0
    step_timeout_s: float = 120.0
    """A step that takes longer is a lost worker; 0 waits for ever."""


class CoreStats(Struct):
    """Sums over all steps so far. Times are as the workers report them, of the slowest rank."""

    num_steps: int = 0
    num_tokens: int = 0
    host_us: int = 0
    device_us: int = 0
    draft_us: int = 0
    """Of `device_us`: making drafts."""
    idle_us: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """What became of the drafts that were verified. Those of a sample that had ended are not counted."""


class InFlight(Struct):
    """A step that was sent, and the answers so far."""

    step: Step
    results: list[StepResult | None]
    num_missing: int
    started_s: float
    """When it was sent, or when the step before it was done."""
    times_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """For the report: when its planning began, when it was planned, when it was sent."""


class EngineCore:
    """Drives a scheduler over a link, and fills mailboxes."""

    def __init__(
        self,
        scheduler: Scheduler,
        link: WorkerLink,
        clock: Clock,
        config: CoreConfig,
        observers: Sequence_[Observer] = (),
        stopwatch: Callable[[], float] = time.monotonic,
        fill_masks: FillMasks = fill_now,
    ) -> None:
        """`fill_masks` may fill them in a thread; what it hands them on to is called on the core's own.

        `stopwatch` is for the observers alone: a loop's own time may stand still within a turn of the loop.
        """
        self.scheduler = scheduler
        self.scheduler.on_finish = self._note_end
        self.observer = Observers(observers)
        self.stats = CoreStats(drafts=scheduler.drafts)
        self.failure: DeepInferError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._link = link
        self._clock = clock
        self._config = config
        self._max_in_flight = 2 if config.overlap else 1
        self._in_flight: deque[InFlight] = deque()
        self._inbox: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._outbox = Outbox(clock)
        self._stopwatch = stopwatch
        self._fill_masks = fill_masks
        self._ended: list[tuple[Request, str]] = []  # not yet told to the observers
        self._is_pump_due = False
        self._timer: Timer | None = None
        self._timer_s = inf
        link.listen(self)

    # ---- requests: `post` from any thread, the rest on the core's own

    def post(self, action: Callable[[Any], None], argument: Any) -> None:
        """Run `action(argument)` before the next step is planned. Only enqueues: callable from any thread."""
        self._inbox.append((action, argument))

    def wake(self) -> None:
        """Look into the inbox soon."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._clock.call_soon(self._pump)

    def submit(self, request: Request) -> None:
        """Queue `request`, or close its mailbox with the reason. Its prompt may still be text."""
        try:
            if self.failure is not None:
                raise _again(self.failure)
            self.scheduler.add(request, self._clock.time())
        except DeepInferError as error:
            self._outbox.add((request.user, error))
            self.observer.request_refused(error.code)

    def encode(self, content: tuple[Request, array[int], Admitted]) -> None:
        """The text of a submitted request has become tokens."""
        request, prompt, admitted = content
        if self._is_open(request):
            self.scheduler.encode(request, prompt, admitted)

    def refuse(self, content: tuple[Request, DeepInferError]) -> None:
        """A submitted request turned out not to be one."""
        request, error = content
        if self._is_open(request):
            self.scheduler.finish_request(request, "abort", self._clock.time())
            self._outbox.add((request.user, error))
            self._ended.pop()  # it never was one: a refusal, not an end
            self.observer.request_refused(error.code)

    def abort(self, request: Request) -> None:
        """End `request`; idempotent."""
        if self._is_open(request):
            self._emit_ends(self.scheduler.finish_request(request, "abort", self._clock.time()))

    def _is_open(self, request: Request) -> bool:
        return self.failure is None and self.scheduler.requests.get(request.request_id) is request

    def abort_id(self, request_id: str) -> None:
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self.abort(request)

    def resume(self, request: Request) -> None:
        """The reader of `request` has caught up."""
        if request.is_paused and request.num_unfinished:
            request.slow_since_s = inf
            self.scheduler.resume(request)

    # ---- the loop

    def _pump(self) -> None:
        """Whatever is due. An error of our own is not left to the loop: it ends every stream in words."""
        self._is_pump_due = False
        try:
            self._drain_inbox()
            if self.failure is None:
                self._expire()
                self._dispatch()
            self._tell_ends()
            self._outbox.publish()
            self._arm_timer()
        except Exception as error:
            self._crash(error)

    def _crash(self, error: Exception) -> None:
        logger.error("the core failed", exc_info=error)
        self.fail(EngineError(f"the core failed: {type(error).__name__}: {error}"))

    def _drain_inbox(self) -> None:
        inbox = self._inbox
        while inbox:
            action, argument = inbox.popleft()
            try:
                action(argument)
            except Exception as error:
                self._lose_action(argument, error)

    def _lose_action(self, argument: Any, error: Exception) -> None:
        """One action of the inbox failed: the end of the request that it was for, if it was for one, and no more."""
        request = argument[0] if isinstance(argument, tuple) else argument
        logger.error("an action on %s failed", getattr(request, "request_id", "no request"), exc_info=error)
        if isinstance(request, Request):
            if self._is_open(request):
                self.scheduler.finish_request(request, "abort", self._clock.time())
            self._outbox.add((request.user, InternalError(f"the request failed: {type(error).__name__}: {error}")))

    def _expire(self) -> None:
        now = self._clock.time()
        if self.scheduler.next_deadline() <= now:
            self._emit_ends(self.scheduler.expire(now))

    def _dispatch(self) -> None:
        while len(self._in_flight) < self._max_in_flight:
            now, planning_s = self._clock.time(), self._stopwatch()
            step = self.scheduler.schedule(now)
            if step is None:
                return
            planned_s = self._stopwatch()
            num_ranks = len(step.ranks)
            sending = InFlight(step, [None] * num_ranks, num_ranks, now)
            self._in_flight.append(sending)
            for rank, rank_step in enumerate(step.ranks):
                self._link.send(rank, rank_step.plan)
            sending.times_s = (planning_s, planned_s, self._stopwatch())
            for rank, rank_step in enumerate(step.ranks):
                if rank_step.masked:
                    job = MaskJob(self.scheduler.epoch, step.step_id, rank, rank_step.masked)
                    self._fill_masks(job, self.take_masks)

    def take_masks(self, filled: FilledMasks) -> None:
        """Masks that rows of a step wait for. A sample that cannot go on ends its request, with the reason."""
        if self.failure is not None:
            return
        try:
            self._link.send(filled.batch.rank, filled.batch)
            for seq, error in filled.failures:
                self._fail_request(seq.request, error)
            if filled.failures:
                self.wake()
        except Exception as error:
            self._crash(error)

    def _fail_request(self, request: Request, error: DeepInferError) -> None:
        if self._is_open(request):
            self.scheduler.finish_request(request, "abort", self._clock.time())
            self._outbox.add((request.user, error))

    def on_message(self, rank: int, message: AnyMessage) -> None:
        if self.failure is not None:
            return
        if isinstance(message, Fault):
            self.on_lost(rank, f"failed: {message.text}")
            return
        if not isinstance(message, StepResult):
            self.on_lost(rank, f"sent an unexpected {type(message).__name__}")
            return
        try:
            self._take_result(rank, message)
            self._apply_complete()
        except WorkerLost as error:
            self.fail(error)
        except Exception as error:
            self._crash(error)
        else:
            self._pump()

    def _take_result(self, rank: int, result: StepResult) -> None:
        for waiting in self._in_flight:
            if waiting.results[rank] is None:
                step_id = waiting.step.step_id
                if result.epoch != self.scheduler.epoch:
                    raise WorkerLost(f"rank {rank} answered for another epoch, {result.epoch}")
                if (result.step_id, result.rank) != (step_id, rank):
                    came = f"step {result.step_id} of rank {result.rank}"
                    raise WorkerLost(f"step {step_id} of rank {rank} was due, {came} came")
                waiting.results[rank] = result
                waiting.num_missing -= 1
                return
        raise WorkerLost(f"rank {rank} answered step {result.step_id}, which was not asked")

    def _apply_complete(self) -> None:
        while self._in_flight and self._in_flight[0].num_missing == 0:
            self._drain_inbox()  # an abort that is here already takes effect before the tokens
            done = self._in_flight.popleft()
            if self._in_flight:
                self._in_flight[0].started_s = self._clock.time()  # a rank computes its steps one after another
            results = [result for result in done.results if result is not None]
            received_s = self._stopwatch()
            emissions = self.scheduler.apply(done.step, results, self._clock.time())
            applied_s = self._stopwatch()
            for rank_step in done.step.ranks:
                for row in rank_step.prompts:
                    self._tell_prompt(row.seq.request)
            emissions = self._emit(emissions)
            self._count(results)
            times_s = (*done.times_s, received_s, applied_s, self._stopwatch())
            self.observer.step_done(StepReport(done.step, results, emissions, *times_s))
            self._tell_ends()

    def _note_end(self, request: Request, reason: str) -> None:
        self._ended.append((request, reason))

    def _tell_ends(self) -> None:
        if self._ended:
            now_s = self._stopwatch()
            for request, reason in self._ended:
                self.observer.request_done(request, reason, now_s)
            self._ended.clear()

    def _tell_prompt(self, request: Request) -> None:
        """When the last of them is here, the reader may see the log probabilities of its prompt."""
        mailbox: Mailbox = request.user
        if request.num_prompt_logprobs_due == 0 and mailbox.prompt_logprobs is None:
            mailbox.prompt_logprobs = PromptLogprobs(request.prompt_logprobs)

    def _count(self, results: list[StepResult]) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.host_us += max([result.host_us for result in results])
        stats.device_us += max([result.device_us for result in results])
        stats.draft_us += max([result.draft_us for result in results])
        stats.idle_us += min([result.idle_us for result in results])

    # ---- what users get

    def _emit(self, emissions: list[Emission]) -> list[Emission]:
        """Tokens to pieces: text, stop strings, readers that are too slow.

        Returns what was told. It is less where a row brought tokens behind the end of a stop string.
        """
        add = self._outbox.add
        cap = self._config.max_unread_tokens
        ended: set[Sequence] = set()
        surplus: set[int] = set()
        for index, (seq, token, reason, logprobs) in enumerate(emissions):
            if ended and seq in ended:
                surplus.add(index)
                seq.tokens.pop()
                continue
            text = ""
            output: OutputText | None = seq.user
            if output is not None:
                try:
                    if reason is None and token is not None and not output.has_stops:
                        text = output.push(token)
                    else:
                        text, reason = self._text_of(seq, output, token, reason)
                        if reason is not None:
                            ended.add(seq)
                except Exception as error:
                    self._lose_text(seq, error)
                    ended.add(seq)
                    continue
            mailbox: Mailbox = seq.request.user
            if reason is not None:
                if reason == "stop":
                    stop = None if output is None else output.stop
                    mailbox.stop_reasons[seq.sample_index] = (
                        token if stop is None and token in mailbox.told_stop_ids else stop
                    )
                mailbox.num_preemptions = seq.request.num_preemptions
                mailbox.drafts = seq.request.drafts
            logprob = None if logprobs is None else readable(logprobs)
            add((mailbox, (seq.sample_index, token, text, logprob, reason)))
            if not mailbox.num_pushed:
                mailbox.num_cached_tokens = seq.request.num_cached_tokens
            mailbox.num_pushed += 1
            if mailbox.num_pushed - mailbox.num_taken >= cap and not seq.request.is_paused:
                self._pause(seq.request, mailbox)
        if surplus:
            emissions = [emission for index, emission in enumerate(emissions) if index not in surplus]
        self.stats.num_tokens += len(emissions)
        return emissions

    def _lose_text(self, seq: Sequence, error: Exception) -> None:
        """One request's text cannot be made: its end, and nobody else's."""
        logger.error("detokenizing %s failed", seq.request.request_id, exc_info=error)
        self.scheduler.finish_request(seq.request, "abort", self._clock.time())
        reason = f"the text of a token could not be made: {type(error).__name__}: {error}"
        self._outbox.add((seq.request.user, InternalError(reason)))

    def _text_of(
        self, seq: Sequence, output: OutputText, token: int | None, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """The text of one more token; a token that ends its sample has none, unless asked. A stop string may end it."""
        text = ""
        if token is not None and (reason != "stop" or output.keeps_stop):
            text = output.push(token)
            if output.stop is not None and reason is None:
                self.scheduler.finish(seq, "stop", self._clock.time())
            if output.stop is not None:
                self._correct_end(seq)
                reason = "stop"
        return (text, None) if reason is None else (text + output.flush(), reason)

    def _correct_end(self, seq: Sequence) -> None:
        """A stop string was complete before its sample's length was noticed: the observers hear `stop`, too."""
        ends = self._ended
        if seq.finish_reason == "length" and ends and seq.request.num_unfinished == 0:
            seq.finish_reason = "stop"
            self._ended = [(request, "stop" if request is seq.request else told) for request, told in ends]

    def _emit_ends(self, emissions: list[Emission]) -> None:
        """Samples that end without a token of their own."""
        for seq, _, reason, _ in emissions:
            mailbox: Mailbox = seq.request.user
            if reason == "slow_consumer":
                error = SlowConsumer(f"more than {self._config.max_unread_tokens} tokens stood unread for too long")
                self._outbox.add((mailbox, error))
            else:
                output: OutputText | None = seq.user
                text = "" if output is None else output.flush()
                mailbox.num_pushed += 1
                self._outbox.add((mailbox, (seq.sample_index, None, text, None, reason)))

    def _pause(self, request: Request, mailbox: Mailbox) -> None:
        mailbox.is_paused = True
        self.scheduler.pause(request)
        request.slow_since_s = self._clock.time() + self._config.slow_consumer_s
        self.scheduler.add_deadline(request.slow_since_s, request, "slow_consumer")
        if mailbox.num_pushed - mailbox.num_taken <= self._config.max_unread_tokens // 2:
            mailbox.is_paused = False  # it was read meanwhile, by another thread that saw no pause yet
            self.resume(request)

    # ---- ends

    def on_lost(self, rank: int, reason: str) -> None:
        self.fail(WorkerLost(f"worker {rank} {reason}"))

    def fail(self, error: DeepInferError) -> None:
        """Every open stream ends with `error`, and so does every later one. The requests stay in the scheduler."""
        if self.failure is not None:
            return
        self.failure = error
        self._in_flight.clear()
        for request in self.scheduler.requests.values():
            self._outbox.add((request.user, _again(error)))
            self._note_end(request, error.code)
        self._tell_ends()
        self._outbox.publish()
        self.on_failure()
        self._pump()

    def close(self) -> None:
        """Every open stream ends with `EngineClosed`."""
        self.fail(EngineClosed("the engine is closed"))
        if self._timer is not None:
            self._timer.cancel()

    @property
    def stalled_s(self) -> float:
        """How long the step that is due next has been computed; 0 with nothing in flight. From any thread."""
        try:
            return max(self._clock.time() - self._in_flight[0].started_s, 0.0)
        except IndexError:
            return 0.0

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, running or in flight."""
        return not (self._inbox or self._in_flight or self.scheduler.requests)

    # ---- time

    def _arm_timer(self) -> None:
        """One timer for the next deadline and for the step in flight, moved only when the next event is earlier."""
        when_s = self.scheduler.next_deadline()
        if self._in_flight and self._config.step_timeout_s:
            when_s = min(when_s, self._in_flight[0].started_s + self._config.step_timeout_s)
        if self.failure is not None or when_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = self._clock.call_at(when_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, inf
        timeout_s = self._config.step_timeout_s
        if self._in_flight and timeout_s and self._clock.time() >= self._in_flight[0].started_s + timeout_s:
            waiting = self._in_flight[0]
            ranks = [rank for rank, result in enumerate(waiting.results) if result is None]
            self.fail(WorkerLost(f"step {waiting.step.step_id} took more than {timeout_s} s on ranks {ranks}"))
        else:
            self._pump()

    def check_integrity(self) -> None:
        """The scheduler's books agree, and with nothing in flight nothing is on its way. Raises `AssertionError`."""
        self.scheduler.check_integrity()
        if not self._in_flight:
            for rank in self.scheduler.ranks:
                assert rank.release.num_slots == 0, "something waits for a step that is not in flight"


def _again(error: DeepInferError) -> DeepInferError:
    """`error` for one more reader: a shared one would gather every reader's frames in its traceback."""
    return type(error)(*error.args)
