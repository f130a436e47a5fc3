"""SyncEngine: the same engine for scripts without an event loop. A thin face over anyio's blocking portal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from deepinfer.engine import Engine
from deepinfer.intake import Messages, Prompt
from deepinfer.result import Completion
from deepinfer.stream import TokenChunk, TokenStream
from deepinfer_protocol import SamplingParams


class SyncStream:
    """A `TokenStream`, read by `for`. Leaving `with`, or Ctrl-C inside it, ends the request."""

    def __init__(self, portal: BlockingPortal, stream: TokenStream) -> None:
        self._portal = portal
        self._stream: TokenStream | None = stream
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[TokenChunk]:
        return self

    def __next__(self) -> TokenChunk:
        assert self._stream is not None
        chunk = self._portal.call(_read, self._stream)
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
        assert self._stream is not None
        self._stream.abort()


class SyncEngine:
    """`with SyncEngine("smollm2-135m") as engine: for tok in engine.stream("…"): …`"""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Takes what `Engine` takes; starts nothing."""
        self._engine = Engine(model, **settings)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        portal: AbstractContextManager[BlockingPortal] = start_blocking_portal("asyncio")
        try:
            self._portal = self._stack.enter_context(portal)
            self._portal.call(self._engine.open)
        except BaseException:
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
            if hasattr(self, "_portal"):
                self._portal.call(self._engine.aclose)
                del self._portal

    def stream(self, prompt: Prompt | None = None, params: SamplingParams | None = None, **options: Any) -> SyncStream:
        """As `Engine.stream`."""
        return SyncStream(self._portal, self._portal.call(_open_stream, self._engine, prompt, params, options))

    def generate(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """As `Engine.generate`."""
        completion: Completion = self._portal.call(_generate, self._engine, prompt, params, options)
        return completion

    def generate_many(
        self, prompts: Sequence[Prompt | Messages], params: SamplingParams | None = None, *, progress: bool = True
    ) -> list[Completion]:
        """As `Engine.generate_many`."""
        return self._portal.call(_generate_many, self._engine, prompts, params, progress)


async def _read(stream: TokenStream) -> TokenChunk | None:
    return await anext(stream, None)


async def _open_stream(
    engine: Engine, prompt: Any, params: SamplingParams | None, options: dict[str, Any]
) -> TokenStream:
    return engine.stream(prompt, params, **options)


async def _generate(engine: Engine, prompt: Any, params: SamplingParams | None, options: dict[str, Any]) -> Completion:
    return await engine.generate(prompt, params, **options)


async def _generate_many(engine: Engine, prompts: Any, params: Any, progress: bool) -> list[Completion]:
    return await engine.generate_many(prompts, params, progress=progress)
