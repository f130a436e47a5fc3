"""SyncEngine: the same engine for scripts without an event loop. A thin face over anyio's blocking portal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from deepinfer.admission import ModelLimits
from deepinfer.engine import Engine
from deepinfer.errors import EngineClosed
from deepinfer.intake import Messages, Prompt
from deepinfer.metrics import Metric
from deepinfer.result import Completion
from deepinfer.stream import TokenChunk, TokenStream
from deepinfer_protocol import SamplingParams

T = TypeVar("T")


class SyncStream:
    """A `TokenStream`, read by `for`. Leaving `with`, or Ctrl-C inside it, ends the request."""

    def __init__(self, engine: SyncEngine, stream: TokenStream) -> None:
        self._engine = engine
        self._stream = stream
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[TokenChunk]:
        return self

    def __next__(self) -> TokenChunk:
        chunk = self._engine._call(_read, self._stream)
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


class SyncEngine:
    """`with SyncEngine("smollm2-135m") as engine: for tok in engine.stream("…"): …`"""

    def __init__(
        self, model: str | None = None, *, on_progress: Callable[[str], None] | None = None, **settings: Any
    ) -> None:
        """Takes what `Engine` takes; starts nothing. `on_progress` hears of the start, in the engine's thread."""
        self._engine = Engine(model, **settings)
        self._on_progress = on_progress
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        try:
            self._portal = self._stack.enter_context(start_blocking_portal("asyncio"))
            self._portal.call(self._engine.open, self._on_progress)
        except BaseException:
            self._portal = None
            self._stack.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every open stream, the workers and the thread. Idempotent."""
        with self._stack:
            portal, self._portal = self._portal, None
            if portal is not None:
                portal.call(self._engine.aclose)

    def _call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """`function(*arguments)` on the engine's loop."""
        if self._portal is None:
            raise EngineClosed("the engine is not open: use it inside `with`")
        return self._portal.call(function, *arguments)

    @property
    def has_chat_template(self) -> bool:
        """As `Engine.has_chat_template`."""
        return self._engine.has_chat_template

    @property
    def limits(self) -> ModelLimits:
        """What the model allows. Raises `AttributeError` before the engine is open."""
        return self._engine.limits

    def metrics(self) -> dict[str, Metric]:
        """As `Engine.metrics`."""
        return self._engine.metrics()

    def stream(self, prompt: Prompt | None = None, params: SamplingParams | None = None, **options: Any) -> SyncStream:
        """As `Engine.stream`."""
        return SyncStream(self, self._call(_open_stream, self._engine, prompt, params, options))

    def generate(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """As `Engine.generate`."""
        return self._call(_generate, self._engine, prompt, params, options)

    def generate_many(
        self,
        prompts: Sequence[Prompt | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """As `Engine.generate_many`."""
        return self._call(_generate_many, self._engine, prompts, params, progress, options)


async def _read(stream: TokenStream) -> TokenChunk | None:
    return await anext(stream, None)


async def _open_stream(
    engine: Engine, prompt: Any, params: SamplingParams | None, options: dict[str, Any]
) -> TokenStream:
    return engine.stream(prompt, params, **options)


async def _generate(engine: Engine, prompt: Any, params: SamplingParams | None, options: dict[str, Any]) -> Completion:
    return await engine.generate(prompt, params, **options)


async def _generate_many(
    engine: Engine, prompts: Any, params: Any, progress: bool, options: dict[str, Any]
) -> list[Completion]:
    return await engine.generate_many(prompts, params, progress=progress, **options)
