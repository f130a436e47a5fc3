"""SyncEngine: the same engine for scripts without an event loop, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from deepinfer.admission import ModelLimits
from deepinfer.draft_counts import DraftCounts
from deepinfer.engine import Engine, EngineStats
from deepinfer.errors import EngineClosed, ForkedEngine, InvalidRequest, WrongLoop
from deepinfer.home import OwnThread
from deepinfer.intake import Messages, Prompt
from deepinfer.metrics import Metric
from deepinfer.migrating import rename_options
from deepinfer.result import Completion
from deepinfer.stream import PromptLogprobs, TokenChunk, TokenStream
from deepinfer_protocol import SamplingParams

T = TypeVar("T")
ManyPrompts = list[str] | list[list[int]] | list[dict[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class SyncStream:
    """A `TokenStream`, read by `for`. Leaving `with`, or Ctrl-C while reading, ends the request."""

    def __init__(self, engine: SyncEngine, stream: TokenStream) -> None:
        self._engine = engine
        self._stream = stream
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[TokenChunk]:
        return self

    def __next__(self) -> TokenChunk:
        try:
            chunk = self._engine._call(_read, self._stream)
        except BaseException:
            self.abort()  # Ctrl-C: whoever keeps the traceback (a shell, a debugger) must not keep the request
            raise
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        self._stream.abort()

    @property
    def num_prompt_tokens(self) -> int:
        """As `TokenStream.num_prompt_tokens`."""
        return self._stream.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """As `TokenStream.num_cached_tokens`."""
        return self._stream.num_cached_tokens

    @property
    def num_preemptions(self) -> int:
        """As `TokenStream.num_preemptions`."""
        return self._stream.num_preemptions

    @property
    def drafts(self) -> DraftCounts:
        """As `TokenStream.drafts`."""
        return self._stream.drafts

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """As `TokenStream.prompt_logprobs`."""
        return self._stream.prompt_logprobs


class _Session:
    """An engine on a loop in a thread of its own. Outlives its `SyncEngine` by as long as the close takes."""

    def __init__(self, engine: Engine, on_progress: Callable[[str], None] | None) -> None:
        self.engine = engine
        self._on_progress = on_progress
        self._home: OwnThread | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """`function(*arguments)` on the engine's loop, which is opened if it was not yet.

        Raises what `Engine.open` raises, `EngineClosed` after a close, `WrongLoop` in the engine's own thread, which
        would wait for itself.
        """
        if os.getpid() != self._pid:
            raise ForkedEngine("this engine was made before a fork; make one in the child")
        self._check_thread()
        return _run(self._opened(), function, *arguments)

    def _opened(self) -> OwnThread:
        with self._lock:
            if self._is_closed:
                raise EngineClosed("the engine is not open: it was closed")
            if self._home is None:
                self._home = home = OwnThread()
                try:
                    _run(home, self.engine.open, self._on_progress)
                except BaseException:
                    self._home, self._is_closed = None, True
                    _end(home, self.engine)
                    raise
            return self._home

    def _check_thread(self) -> None:
        home = self._home
        if home is not None and home.is_here():
            raise WrongLoop("this is the engine's own thread, which cannot wait for itself: use another one")

    def close(self) -> None:
        """End every open stream, the workers and the thread. Idempotent. Raises `WrongLoop` in that thread."""
        if os.getpid() != self._pid:
            return  # in a forked child: thread and workers are the parent's
        self._check_thread()
        with self._lock:
            home, self._home, self._is_closed = self._home, None, True
            if home is not None:
                _end(home, self.engine)

    def close_forgotten(self) -> None:
        """`close` from a finalizer, which may run in the engine's own thread."""
        home = self._home
        if home is not None and home.is_here():
            threading.Thread(target=self.close, name="deepinfer-close").start()
        else:
            self.close()


def _run(home: OwnThread, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    async def work() -> T:
        return await function(*arguments)

    future = asyncio.run_coroutine_threadsafe(work(), home.loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C here: what was called ends there, too
        raise


def _end(home: OwnThread, engine: Engine) -> None:
    try:
        _run(home, engine.aclose)
    finally:
        home.close()


class SyncEngine:
    """`with SyncEngine("smollm2-135m") as engine: for tok in engine.stream("…"): …`

    Without `with` it opens at its first use, and closes when it is forgotten or the program ends.
    """

    def __init__(
        self, model: str | None = None, *, on_progress: Callable[[str], None] | None = None, **settings: Any
    ) -> None:
        """Takes what `Engine` takes; starts nothing. `on_progress` hears of the start, in the engine's thread."""
        self._engine = Engine(model, **settings)
        self._session = _Session(self._engine, on_progress)
        self._finalizer = weakref.finalize(self, self._session.close_forgotten)

    def __enter__(self) -> Self:
        self._session.call(_do_nothing)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every open stream, the workers and the thread. Idempotent. Raises `WrongLoop` in that thread."""
        self._session.close()
        self._finalizer.detach()

    def _call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """`function(*arguments)` on the engine's loop."""
        return self._session.call(function, *arguments)

    @property
    def has_chat_template(self) -> bool:
        """As `Engine.has_chat_template`."""
        return self._engine.has_chat_template

    @property
    def limits(self) -> ModelLimits:
        """What the model allows. Raises `EngineClosed` before the engine is open."""
        return self._engine.limits

    def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        self._call(self._engine.abort, request_id)

    def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return self._engine.stats()

    def metrics(self) -> dict[str, Metric]:
        """As `Engine.metrics`."""
        return self._engine.metrics()

    def stream(self, prompt: Prompt | None = None, params: SamplingParams | None = None, **options: Any) -> SyncStream:
        """As `Engine.stream`."""
        return SyncStream(self, self._call(_open_stream, self._engine, prompt, params, options))

    @overload
    def generate(
        self, prompt: ManyPrompts, params: Params = None, *, progress: bool = True, **options: Any
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Prompt | None = None, params: Params = None, *, progress: bool = True, **options: Any
    ) -> Completion: ...

    def generate(
        self,
        prompt: Prompt | ManyPrompts | None = None,
        params: Params = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> Completion | list[Completion]:
        """As `Engine.generate`; for a list of prompts as `generate_many`, with a list of what comes."""
        progress = options.pop("use_tqdm", progress)
        options = rename_options({"prompt": prompt, "params": params}, options) if options else options
        prompt, params = options.pop("prompt", prompt), options.pop("params", params)
        if _is_many(prompt):
            return self._call(_generate_many, self._engine, prompt, params, progress, options)
        return self._call(_generate, self._engine, prompt, params, options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """The answers to a conversation, or to several: a list in either case."""
        progress = options.pop("use_tqdm", progress)
        options = rename_options({"params": params}, options)
        params = options.pop("params", params)
        is_one = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], Mapping)
        chats: Any = [messages] if is_one else messages
        return self._call(_generate_many, self._engine, chats, params, progress, options)

    def generate_many(
        self,
        prompts: Sequence[Prompt | Messages],
        params: Params = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """As `Engine.generate_many`."""
        return self._call(_generate_many, self._engine, prompts, params, progress, options)


def _is_many(prompt: Any) -> bool:
    """Is it a list of prompts, and not one of token ids? An empty one is: no token ids are no prompt."""
    if not isinstance(prompt, list | tuple):
        return False
    if not prompt:
        return True
    if isinstance(prompt[0], Mapping) and "role" in prompt[0]:
        raise InvalidRequest("prompt", "messages came: chat() takes them, or messages=...")
    return isinstance(prompt[0], str | list | tuple | array | Mapping)


async def _do_nothing() -> None:
    """To open the engine."""


async def _read(stream: TokenStream) -> TokenChunk | None:
    return await anext(stream, None)


async def _open_stream(
    engine: Engine, prompt: Any, params: SamplingParams | None, options: dict[str, Any]
) -> TokenStream:
    return engine.stream(prompt, params, **options)


async def _generate(engine: Engine, prompt: Any, params: Any, options: dict[str, Any]) -> Completion:
    return await engine.generate(prompt, params, **options)


async def _generate_many(
    engine: Engine, prompts: Any, params: Any, progress: bool, options: dict[str, Any]
) -> list[Completion]:
    return await engine.generate_many(prompts, params, progress=progress, **options)
