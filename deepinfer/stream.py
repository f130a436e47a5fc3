"""Token streams: the mailbox of one request, and the async iterator that its user holds.

A class and not an async generator: a generator's `finally` does not run at `break`, and a timed-out `anext` ends it.
Knows nothing of scheduling; it asks for an end or for more through two callbacks that may be called from any thread.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, overload

from msgspec import Struct

from deepinfer.draft_counts import DraftCounts
from deepinfer.errors import WrongLoop
from deepinfer.loop import Loop, Waiter, running_loop, wake
from deepinfer.request import FinishReason, TokenLogprobs

StopReason = int | str | None


class Source(NamedTuple):
    """What a request's samples go on from."""

    text: str | None
    """`None`: token ids were given."""
    token_ids: array[int]
    spell: Callable[[int], str] | None
    """A token id as text, by itself; `None` without a tokenizer."""


class Logprob(NamedTuple):
    """A token and the logarithm of its probability under the unmodified logits."""

    token_id: int
    logprob: float


class TokenLogprob(NamedTuple):
    """What was known at one position."""

    token_id: int
    logprob: float
    top: tuple[Logprob, ...]
    """The most probable tokens, best first."""
    rank: int = 0
    """The token's place among all tokens, by their probability: 1 is the best."""


def readable(logprobs: TokenLogprobs) -> TokenLogprob:
    """What came of one position, for people."""
    pairs = [Logprob(token_id, value) for token_id, value in zip(logprobs.token_ids, logprobs.values, strict=True)]
    return TokenLogprob(pairs[0].token_id, pairs[0].logprob, tuple(pairs[1:]), logprobs.rank)


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """One entry a token of the prompt; `None` for the first, which nothing comes before.

    An entry is made when it is looked at: all of a long prompt's at once would keep the loop.
    """

    __slots__ = ("_known",)

    def __init__(self, known: Sequence[TokenLogprobs]) -> None:
        """`known` has one entry for each token but the first."""
        self._known = known

    def __len__(self) -> int:
        return 1 + len(self._known)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[TokenLogprob | None, ...]: ...

    def __getitem__(self, place: int | slice) -> TokenLogprob | tuple[TokenLogprob | None, ...] | None:
        places = range(len(self))[place]
        if isinstance(places, range):
            return tuple([self[each] for each in places])
        return readable(self._known[places - 1]) if places else None


class TokenChunk(Struct, frozen=True, gc=False):
    """What is new since the last read, of one sample: a delta, never the text so far.

    A reader that keeps up gets one token a chunk; one that does not gets several in one.
    """

    text: str
    """New text. Empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]
    first_index: int
    """Place of the first of `token_ids` among the sample's tokens; the prompt does not count."""
    sample_index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One entry a token, if they were asked for."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a sample."""
    stop_reason: StopReason = None
    """With the finish reason `stop`: the stop string or stop token that ended it; `None` for the model's own end."""


Piece = tuple[int, int | None, str, TokenLogprob | None, FinishReason | None]
"""One step's part of a sample on its way to the reader: sample index, token, text, logprob, finish reason.

A plain tuple: there is one for every token.
"""


class Mailbox:
    """Pieces between the core and the reader of one request.

    Filled by `push` and `close` on the reader's loop. The counters are read across threads: `num_pushed` is the
    core's, `num_taken` the reader's.
    """

    __slots__ = (
        "_num_tokens",
        "_pieces",
        "drafts",
        "error",
        "is_closed",
        "is_paused",
        "loop",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_pushed",
        "num_taken",
        "num_unfinished",
        "prompt_logprobs",
        "source",
        "stop_reasons",
        "told_stop_ids",
        "waiter",
    )

    def __init__(self, loop: Loop | None, num_samples: int = 1) -> None:
        self.loop = loop
        self.num_unfinished = num_samples
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.drafts = DraftCounts()
        self.num_pushed = 0
        self.num_taken = 0
        self.is_paused = False
        self.is_closed = False
        self.error: Exception | None = None
        self.waiter: Waiter | None = None
        self.source: Source | None = None
        self.told_stop_ids: frozenset[int] = frozenset()
        """Tokens that are a stop reason when they end a sample."""
        self.stop_reasons: dict[int, StopReason] = {}
        """By sample; there before its last piece is."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """There before the first token is, if they were asked for."""
        self._pieces: deque[Piece] = deque()
        self._num_tokens: dict[int, int] = {}  # tokens taken of each sample

    def push(self, piece: Piece) -> None:
        """One more piece for the reader; wakes it."""
        if self.is_closed:
            return
        self._pieces.append(piece)
        if piece[4] is not None:
            self.num_unfinished -= 1
            self.is_closed = self.num_unfinished == 0
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def close(self, error: Exception | None) -> None:
        """Nothing more will come. What is here can still be read; then `error` is raised, if any."""
        if not self.is_closed:
            self.is_closed = True
            self.error = error
            if self.waiter is not None:
                wake(self.waiter)

    @property
    def is_over(self) -> bool:
        """Has it ended, with all of its tokens taken? Its ends may still be here."""
        return self.is_closed and all(piece[1] is None for piece in self._pieces)

    def take(self) -> TokenChunk | None:
        """Everything that waits for the sample whose piece is oldest, as one chunk."""
        pieces = self._pieces
        if not pieces:
            return None
        self.num_taken += len(pieces)
        if len(pieces) == 1:
            return self._chunk_of_one(pieces.popleft())
        first = pieces[0][0]
        mine = [piece for piece in pieces if piece[0] == first]
        others = [piece for piece in pieces if piece[0] != first] if len(mine) < len(pieces) else ()
        self._pieces = deque(others)
        self.num_taken -= len(others)
        return self._chunk_of_many(mine)

    def _chunk_of_one(self, piece: Piece) -> TokenChunk:
        sample_index, token, text, logprob, finish_reason = piece
        first_index = self._num_tokens.get(sample_index, 0)
        stop_reason = None if finish_reason is None else self.stop_reasons.get(sample_index)
        if token is None:
            return TokenChunk(text, (), first_index, sample_index, None, finish_reason, stop_reason)
        self._num_tokens[sample_index] = first_index + 1
        logprobs = None if logprob is None else (logprob,)
        return TokenChunk(text, (token,), first_index, sample_index, logprobs, finish_reason, stop_reason)

    def _chunk_of_many(self, pieces: Sequence[Piece]) -> TokenChunk:
        sample_indices, tokens, texts, logprobs, reasons = zip(*pieces, strict=True)
        sample_index = sample_indices[0]
        first_index = self._num_tokens.get(sample_index, 0)
        token_ids = tuple([token for token in tokens if token is not None])
        self._num_tokens[sample_index] = first_index + len(token_ids)
        known = tuple([logprob for logprob in logprobs if logprob is not None])
        stop_reason = None if reasons[-1] is None else self.stop_reasons.get(sample_index)
        return TokenChunk("".join(texts), token_ids, first_index, sample_index, known or None, reasons[-1], stop_reason)


class TokenStream:
    """The tokens of one request, as an async iterator of `TokenChunk`.

    It was submitted when it was made. It ends when its request does, by `abort()`, by leaving `async with`, when the
    last reference to it goes away, or when the engine closes. A timed-out or cancelled read loses nothing: the next
    read goes on where it left off. A stream that is held but not read pauses at a cap of unread tokens, and ends with
    `SlowConsumer` if it stays there.
    """

    def __init__(
        self, request_id: str, mailbox: Mailbox, abort: Callable[[], None], resume: Callable[[], None], low_water: int
    ) -> None:
        """`abort` and `resume` must hold no reference to this object; both only enqueue."""
        self.request_id = request_id
        self._mailbox = mailbox
        self._abort = abort
        self._resume = resume
        self._low_water = low_water
        self._is_checked = False
        finalizer = weakref.finalize(self, _abort_unfinished, mailbox, abort)
        finalizer.atexit = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        """The next chunk. Raises the request's error, if it was refused or failed, after what came before it."""
        mailbox = self._mailbox
        if not self._is_checked:
            self._check_loop()
        while True:
            chunk = mailbox.take()
            if chunk is not None:
                if mailbox.is_paused and mailbox.num_pushed - mailbox.num_taken <= self._low_water:
                    mailbox.is_paused = False
                    self._resume()
                return chunk
            if mailbox.is_closed:
                if mailbox.error is not None:
                    raise mailbox.error.with_traceback(None)
                raise StopAsyncIteration
            if mailbox.waiter is not None and not mailbox.waiter.done():
                raise RuntimeError("this stream is being read already")
            mailbox.waiter = waiter = mailbox.loop.create_future()  # type: ignore[union-attr]
            try:
                await waiter
            except BaseException as error:
                if isinstance(error, RuntimeError):  # asyncio's own word for a future of another loop
                    mailbox.waiter = None
                    self._check_loop()
                del self  # or a traceback that somebody keeps (IPython, a debugger, a cycle) keeps the request running
                raise

    def _check_loop(self) -> None:
        loop = self._mailbox.loop  # None: refused before it had one
        if loop is not None and running_loop() is not loop:
            raise WrongLoop("this stream belongs to another event loop than the one that reads it")
        self._is_checked = True

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """End the request, at once and for good; idempotent. A reader that waits gets a last chunk, `abort`."""
        if not self._mailbox.is_closed:
            self._abort()

    async def aclose(self) -> None:
        """`abort`, for those who look for it under this name."""
        self.abort()

    @property
    def is_over(self) -> bool:
        """Has it ended, with all of its tokens read? How it ended may still be unread."""
        return self._mailbox.is_over

    @property
    def num_prompt_tokens(self) -> int:
        return self._mailbox.num_prompt_tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """One entry a token of the prompt, the first `None`; there from the first chunk on, if they were asked for."""
        return self._mailbox.prompt_logprobs

    @property
    def source(self) -> Source | None:
        """The prompt, as text and token ids; known from the first chunk on."""
        return self._mailbox.source

    @property
    def num_preemptions(self) -> int:
        """How often its samples gave way to others and were computed again; known at the end."""
        return self._mailbox.num_preemptions

    @property
    def drafts(self) -> DraftCounts:
        """What became of the drafts of its samples; known at the end."""
        return self._mailbox.drafts

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a prefix hit spared; known from the first chunk on."""
        return self._mailbox.num_cached_tokens


def _abort_unfinished(mailbox: Mailbox, abort: Callable[[], None]) -> None:
    """Runs in any thread, at any point, also inside the core: it may only enqueue."""
    if not mailbox.is_closed:
        abort()
