"""A scheduler over fake workers, a step at a time: without a loop, and with a clock that the test turns."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from deepinfer.budget import DraftPolicy, NoDrafts
from deepinfer.rank import CacheShape
from deepinfer.request import Request
from deepinfer.scheduler import Emission, Scheduler, SchedulerConfig, Step
from deepinfer_protocol import SlotSampling, StepResult
from deepinfer_workers.fake import FakeRunner
from doubles.group import fake_config, no_masks, with_window
from doubles.oracle import completion
from doubles.published import Published, check_published

VOCAB_SIZE = 97


class Bench:
    """A scheduler and its workers. A step takes a second; `depth` of them are in flight."""

    def __init__(
        self,
        *,
        depth: int = 2,
        num_ranks: int = 1,
        slots: int = 8,
        blocks: int = 256,
        window: int = 0,
        is_exact: bool = True,
        drafts: Callable[[], DraftPolicy] = NoDrafts,
        **config: Any,
    ) -> None:
        """With `window`, slots keep a state of their own; without `is_exact` a hit rebuilds it as far as that.

        `drafts` makes the policy of a rank.
        """
        shape = with_window(CacheShape(slots, blocks, 4), window, is_exact=is_exact)
        self.window, self.is_exact = window, is_exact
        self.scheduler = Scheduler(
            SchedulerConfig(**{"max_batch_tokens": 2048, "prefill_chunk": 512, **config}),
            [shape] * num_ranks,
            drafts=[drafts() for _ in range(num_ranks)],
        )
        self.runners = [
            FakeRunner(fake_config(shape, rank, num_ranks, VOCAB_SIZE, window, drafts().longest))
            for rank in range(num_ranks)
        ]
        self.depth = depth
        self.in_flight: deque[tuple[Step, list[StepResult]]] = deque()
        self.now = 0.0
        self.requests: list[Request] = []
        self.emissions: list[Emission] = []

    def add(
        self,
        prompt: list[int],
        num_new: int = 4,
        *,
        n: int = 1,
        sampling: SlotSampling | None = None,
        stop_ids: frozenset[int] = frozenset(),
        **options: Any,
    ) -> Request:
        request = Request(
            f"r{len(self.requests)}",
            array("i", prompt),
            [SlotSampling(temperature=1.0, seed=index) for index in range(n)]
            if n > 1
            else [sampling or SlotSampling()],
            max_length=len(prompt) + num_new,
            stop_ids=stop_ids,
            arrival_s=self.now,
            **options,
        )
        self.scheduler.add(request, self.now)
        self.requests.append(request)
        return request

    def send(self) -> None:
        """Plan steps until as many as may be are in flight."""
        while len(self.in_flight) < self.depth and (step := self.scheduler.schedule(self.now)) is not None:
            self.scheduler.check_integrity()
            self.in_flight.append((step, [self._answer(rank, step) for rank in range(len(self.runners))]))

    def _answer(self, rank: int, step: Step) -> StepResult:
        runner, plan = self.runners[rank], step.ranks[rank].plan
        return StepResult(plan.epoch, plan.step_id, rank, 0, 0, 0, *runner.compute(runner.build(plan), no_masks))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.send()
            if self.in_flight:
                self.emissions += self.scheduler.apply(*self.in_flight.popleft(), self.now)
            self.now += 1.0
            self.scheduler.check_integrity()

    def run(self, limit: int = 500) -> int:
        """Until everything is done and nothing is held. Returns how many steps it took."""
        for count in range(limit):
            if not self.scheduler.requests and not self.in_flight:
                assert self.scheduler.stats().num_blocks_used == 0
                self.check_tokens()
                self.check_published()
                return count
            self.step()
        raise AssertionError(f"no end after {limit} steps: {self.scheduler.stats()}")

    def check_tokens(self) -> None:
        for request in self.requests:
            for seq in request.samples:
                if not self.is_exact and (request.num_cached_tokens or request.num_preemptions or seq.sample_index):
                    continue  # it may descend from a bounded hit
                wanted, _ = completion(
                    request.prompt,
                    request.sampling[seq.sample_index],
                    request.max_length,
                    request.stop_ids,
                    VOCAB_SIZE,
                    self.window,
                )
                got = list(seq.tokens[seq.num_prompt :])
                assert got == wanted or seq.finish_reason not in ("stop", "length"), request.request_id

    def check_published(self) -> Published:
        return check_published(self.scheduler.ranks, self.runners, self.requests, self.window)
