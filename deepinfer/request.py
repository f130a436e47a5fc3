"""The nouns of scheduling: a request, the sequences that are its samples, and their states.

Data and the table of legal transitions. Knows nothing of pools, plans or streams.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Sequence_
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from deepinfer.draft_counts import DraftCounts
from deepinfer_protocol import SlotSampling

if TYPE_CHECKING:
    from deepinfer.matcher import Matcher

FinishReason = Literal["stop", "length", "abort", "queue_timeout", "timeout", "slow_consumer"]


class State(Enum):
    """Where a sequence stands."""

    ENCODING = "encoding"
    """The first sample, while the text of its prompt is turned into tokens."""
    HELD = "held"
    """A further sample: waits for the prompt of the first one to be computed."""
    WAITING = "waiting"
    PREFILL = "prefill"
    """Has a slot; known tokens are still to be computed."""
    DECODE = "decode"
    """Has a slot; each step computes the newest token."""
    PREEMPTING = "preempting"
    """Gave up its slot; the tokens of steps already sent are applied before it waits again."""
    FINISHED = "finished"


TRANSITIONS: Final = {
    State.ENCODING: {State.WAITING, State.FINISHED},
    State.HELD: {State.WAITING, State.FINISHED},
    State.WAITING: {State.PREFILL, State.FINISHED},
    State.PREFILL: {State.DECODE, State.PREEMPTING, State.FINISHED},
    State.DECODE: {State.PREEMPTING, State.FINISHED},
    State.PREEMPTING: {State.WAITING, State.FINISHED},
    State.FINISHED: set[State](),
}
"""The only moves there are. `PREFILL` and `DECODE` are the states with a slot."""


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: the token's, then the k best."""

    token_ids: Sequence_[int]
    values: Sequence_[float]
    rank: int
    """The token's own; 1 is the best."""


class Request:
    """What a user asked for: one prompt, `n` sequences, one place in the queue, one set of deadlines."""

    __slots__ = (
        "arrival_s",
        "deadline_s",
        "drafts",
        "first_token_s",
        "is_paused",
        "max_length",
        "num_cached_tokens",
        "num_preemptions",
        "num_queued_tokens",
        "num_unfinished",
        "order",
        "priority",
        "prompt",
        "prompt_logprobs",
        "queue_deadline_s",
        "request_id",
        "samples",
        "sampling",
        "skips_prefix_cache",
        "slow_since_s",
        "started_s",
        "stop_ids",
        "traceparent",
        "user",
    )

    def __init__(
        self,
        request_id: str,
        prompt: array[int],
        sampling: list[SlotSampling],
        *,
        max_length: int,
        stop_ids: frozenset[int],
        priority: int = 0,
        arrival_s: float = 0.0,
        queue_deadline_s: float = inf,
        deadline_s: float = inf,
        skips_prefix_cache: bool = False,
        traceparent: str | None = None,
        user: Any = None,
    ) -> None:
        """`sampling` has one entry a sample. `max_length` counts the prompt and the tokens of one sample."""
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.max_length = max_length
        self.stop_ids = stop_ids
        self.priority = priority
        self.arrival_s = arrival_s
        self.queue_deadline_s = queue_deadline_s
        self.deadline_s = deadline_s
        self.skips_prefix_cache = skips_prefix_cache
        self.traceparent = traceparent  # the trace's: what its user's own trace calls it
        self.user = user  # the core's; the scheduler does not look at it
        self.order = (0.0, 0)  # set by the scheduler: smaller goes first
        self.started_s: float | None = None  # when its first row was planned
        self.first_token_s: float | None = None  # the metrics': of any sample
        self.is_paused = False  # its reader is too slow
        self.slow_since_s = inf  # the deadline that its pause has set
        self.num_cached_tokens = 0  # positions that the first sample's first admission did not compute
        self.num_preemptions = 0
        self.drafts = DraftCounts()  # of all samples
        self.num_queued_tokens = len(prompt)  # its share of what waits
        self.num_unfinished = len(sampling)
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens from the second on, as far as known
        self.samples = [Sequence(self, index) for index in range(len(sampling))]

    @classmethod
    def unencoded(cls, request_id: str, num_samples: int, num_expected_tokens: int, **options: Any) -> Request:
        """A request whose prompt is still text. It has its place, its deadlines and its share of the load already."""
        unknown = [SlotSampling()] * num_samples
        request = cls(request_id, array("i"), unknown, max_length=0, stop_ids=frozenset(), **options)
        request.num_queued_tokens = num_expected_tokens
        request.samples[0].state = State.ENCODING
        return request

    def queued_s(self, now_s: float) -> float:
        """How long it waited for its first step, or has until now."""
        started_s = now_s if self.started_s is None else self.started_s
        return max(started_s - self.arrival_s, 0.0)  # the loop's own time may lag behind the clock of arrivals

    def encode(
        self, prompt: array[int], sampling: list[SlotSampling], *, max_length: int, stop_ids: frozenset[int]
    ) -> None:
        """The text has become `prompt`; the rest as in the constructor."""
        self.prompt = prompt
        self.sampling = sampling
        self.max_length = max_length
        self.stop_ids = stop_ids
        self.num_queued_tokens = len(prompt)
        for seq in self.samples:
            seq.take_prompt()

    @property
    def num_prompt_logprobs_due(self) -> int:
        """Prompt tokens whose log probabilities are asked for and not here yet."""
        if self.sampling[0].num_prompt_logprobs < 0:
            return 0
        return len(self.prompt) - 1 - len(self.prompt_logprobs)


class Sequence:
    """One sample: its tokens, and what the device has been told of them."""

    __slots__ = (
        "block_hashes",
        "block_ids",
        "capacity",
        "draft_ids",
        "finish_reason",
        "generation",
        "held_block_ids",
        "is_marked",
        "last_step",
        "last_token_s",
        "limit",
        "marked_hashes",
        "matcher",
        "max_length",
        "min_length",
        "num_computed",
        "num_drafts",
        "num_matched",
        "num_planned",
        "num_prompt",
        "num_published",
        "num_unsure",
        "older_survivals",
        "rank",
        "request",
        "sample_index",
        "slot",
        "state",
        "stop_ids",
        "survivals",
        "tokens",
        "user",
    )

    def __init__(self, request: Request, sample_index: int) -> None:
        self.request = request
        self.sample_index = sample_index
        self.state = State.WAITING if sample_index == 0 else State.HELD
        self.take_prompt()
        self.num_planned = 0  # positions that steps sent so far compute, if all their drafts are accepted
        self.num_unsure = 0  # of them: those that they do not, if none is
        self.num_computed = 0  # positions that the steps applied so far have computed
        self.num_drafts = 0  # that the last step sent makes
        self.draft_ids = array("i")  # that the last step applied has made, where a mask is due
        self.survivals = b""  # of the drafts that the last step applied has made
        self.older_survivals = b""  # of the step before it
        self.num_published = 0  # blocks that others can adopt
        self.last_step = -1  # last step sent that names it
        self.last_token_s: float | None = None  # the metrics': set when a step goes by without one
        self.rank = 0
        self.slot = -1
        self.generation = -1
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that its blocks hold
        self.limit = 0  # how far it may decode without a look: its blocks, or its length, end there
        self.block_hashes: list[bytes] = []
        self.marked_hashes: list[bytes] = []  # of the same blocks, in the chain of bounded replays
        self.is_marked = False  # its slot state was rebuilt by a bounded replay
        self.held_block_ids: list[int] = []  # prompt blocks kept for a sample that still waits
        self.finish_reason: FinishReason | None = None
        self.matcher: Matcher | None = None  # its next token waits for a mask
        self.user: Any = None

    def take_prompt(self) -> None:
        """Copies of what the request says of its prompt: they are read for every row of every step."""
        request = self.request
        self.tokens = request.prompt  # the request's own, until there is a slot
        self.num_prompt = self.num_matched = len(request.prompt)
        self.max_length = request.max_length
        self.stop_ids = request.stop_ids
        self.min_length = request.sampling[self.sample_index].min_length

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that steps in flight will bring, at most."""
        return self.num_planned + 1 - len(self.tokens) if self.state is not State.PREFILL else 0

    @property
    def lowest_length(self) -> int:
        """Positions that steps sent so far compute, whatever becomes of their drafts."""
        return self.num_planned - self.num_unsure

    @property
    def is_caught_up(self) -> bool:
        """Are the tokens of all steps sent so far here? The mask of the next one needs them."""
        return self.num_planned < len(self.tokens)

    def take_unmatched(self) -> array[int]:
        """Tokens that its matcher has not been given. It keeps what it has, also where the sample is computed again."""
        tokens = self.tokens[self.num_matched :]
        self.num_matched = len(self.tokens)
        return tokens

    def foresee(self, num_drafts: int) -> bytes:
        """How likely drafts are to be reached that its next row may verify, as far as that may be known by then.

        What is said of these very drafts is left out: whether one is looked at would depend on the draft itself, and
        what is accepted would no longer be distributed as the target says. With a row in flight the newest that came
        is of drafts before them; without, it is of them. What is not known counts as certain.
        """
        known = self.survivals if self.num_planned >= len(self.tokens) else self.older_survivals
        return known if len(known) == num_drafts else known[:num_drafts].ljust(num_drafts, b"\xff")

    def settle(self, num_positions: int, most_drafts: int, num_accepted: int) -> None:
        """A row of so many positions, behind which so many drafts might have been verified, has been computed."""
        self.num_computed += num_positions + num_accepted
        self.num_planned -= most_drafts - num_accepted
        self.num_unsure -= most_drafts

    def forget_slot(self) -> None:
        """Nothing is computed, planned or drafted any more."""
        self.num_planned = self.num_unsure = self.num_computed = self.num_published = self.num_drafts = 0
        self.survivals = self.older_survivals = b""
        self.draft_ids = array("i")

    @property
    def has_slot(self) -> bool:
        return self.state is State.PREFILL or self.state is State.DECODE

    @property
    def may_adopt(self) -> bool:
        """May it take the blocks of an equal prefix, and so leave positions uncomputed?"""
        request = self.request
        return not request.skips_prefix_cache and (self.sample_index > 0 or request.num_prompt_logprobs_due == 0)

    def move(self, state: State) -> None:
        """To `state`, if the table allows it."""
        assert state in TRANSITIONS[self.state], f"{self.request.request_id}: {self.state} to {state}"
        self.state = state
