"""The response to one request: pumps a stream of the engine through an exchange, to a client that may be slow or go.

A client that goes ends its request at once, whatever the server is waiting for. Nothing is sent before the first chunk
or the first keep-alive is due: a refusal still has a status of its own until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepinfer.errors import DeepInferError
from deepinfer.http.completions import CompletionExchange
from deepinfer.http.config import HttpConfig
from deepinfer.http.exchange import Event, Exchange, Usage
from deepinfer.http.fault import HttpFault, fault_of
from deepinfer.http.note import Note
from deepinfer.many import run_all
from deepinfer.stream import TokenChunk, TokenStream

logger = logging.getLogger("deepinfer.http")

KEEP_ALIVE: Final = b": keep-alive\n\n"
_EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Answer(Response):
    """One stream, one exchange."""

    def __init__(self, stream: TokenStream, exchange: Exchange, config: HttpConfig, *, is_stream: bool) -> None:
        self._stream = stream
        self._exchange = exchange
        self._config = config
        self._is_stream = is_stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note: Note = scope["state"]["note"]
        async with aborted_when_gone(receive, self._stream) as watch:
            try:
                if self._is_stream:
                    await self._send_events(note, send, watch)
                else:
                    await self._send_whole(note, send)
            except (DeepInferError, HttpFault) as error:
                if watch.is_gone:
                    raise ClientDisconnect from None
                raise self._fault(error) from None

    def _fault(self, error: DeepInferError | HttpFault) -> HttpFault:
        return error if isinstance(error, HttpFault) else fault_of(error, self._exchange.names)

    async def _send_whole(self, note: Note, send: Send) -> None:
        await drain(self._stream, self._exchange, note)
        note.end(self._exchange.num_samples)
        await send_json(send, self._exchange.whole())

    async def _send_events(self, note: Note, send: Send, watch: _Watch) -> None:
        exchange, writer = self._exchange, _Writer(send)
        has_begun = False
        try:
            while not exchange.is_finished:
                chunk = await next_within(self._stream, max(self._config.keep_alive_s - writer.quiet_s, 0.0))
                events: list[Event] = []
                if chunk is not None:
                    events = [] if has_begun else await begin(self._stream, exchange, note)
                    has_begun = True
                    note.take(chunk)
                    events += exchange.push(chunk)
                await writer.write(KEEP_ALIVE if chunk is None else frames(events))
                if chunk is not None:
                    note.progress.sent_tokens(chunk.sample_index, len(chunk.token_ids))
        except (DeepInferError, HttpFault) as error:
            if watch.is_gone or not writer.has_begun:
                raise
            fault = self._fault(error)
            note.error = fault.code
            logger.info("%s ended with %s", note.request_id, fault.code)
            await writer.write(frames([exchange.failure(fault)]))
        else:
            self._stream.abort()  # a stop string may have ended the answer before the model did
            note.end(exchange.num_samples)
            if exchange.done is not None:
                await writer.write(f"data: {exchange.done}\n\n".encode())
        await writer.end()


class BatchAnswer(Response):
    """Several prompts of /v1/completions, one whole response."""

    def __init__(self, streams: Sequence[TokenStream], exchanges: Sequence[CompletionExchange]) -> None:
        self._streams = streams
        self._exchanges = exchanges
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note: Note = scope["state"]["note"]
        async with aborted_when_gone(receive, *self._streams) as watch:
            try:
                await run_all([drain(*pair, note) for pair in zip(self._streams, self._exchanges, strict=True)])
            except (DeepInferError, HttpFault):
                if not watch.is_gone:
                    raise
                raise ClientDisconnect from None
            note.end(sum(exchange.num_samples for exchange in self._exchanges))
            await send_json(send, self._exchanges[0].whole_of(self._exchanges))


class _Watch:
    is_gone = False


@asynccontextmanager
async def aborted_when_gone(receive: Receive, *streams: TokenStream) -> AsyncIterator[_Watch]:
    """Ends `streams` as soon as the client has gone, and when the block is left."""
    watch = _Watch()

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        watch.is_gone = True
        for stream in streams:
            stream.abort()

    task = asyncio.create_task(wait())
    try:
        yield watch
    finally:
        task.cancel()
        for stream in streams:
            stream.abort()


async def next_within(stream: TokenStream, timeout_s: float) -> TokenChunk | None:
    """The next chunk; `None` where none comes in time, and nothing is lost."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream)
    except TimeoutError:
        return None


async def drain(stream: TokenStream, exchange: Exchange, note: Note) -> None:
    """All of a stream into its exchange."""
    has_begun = False
    while not exchange.is_finished:
        chunk = await anext(stream)
        if not has_begun:
            await begin(stream, exchange, note)
            has_begun = True
        note.take(chunk)
        exchange.push(chunk)
    stream.abort()


async def begin(stream: TokenStream, exchange: Exchange, note: Note) -> list[Event]:
    """What comes before the first chunk, once that is here."""
    note.begin(stream)
    usage = Usage(stream.num_prompt_tokens, stream.num_cached_tokens, stream.source, stream.prompt_logprobs)
    if usage.prompt_logprobs is None:
        return exchange.begin(usage)
    return await asyncio.to_thread(exchange.begin, usage)  # those of a long prompt would keep the loop


def frames(events: Iterable[Event]) -> bytes:
    """Server-sent events; their data has no line breaks, as JSON has none."""
    return "".join([_frame(event) for event in events]).encode()


def _frame(event: Event) -> str:
    return f"event: {event.name}\ndata: {event.data}\n\n" if event.name else f"data: {event.data}\n\n"


async def send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Writer:
    """Sends pieces of a response that begins with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._wrote_s = time.monotonic()
        self.has_begun = False

    @property
    def quiet_s(self) -> float:
        """For how long nothing was sent."""
        return time.monotonic() - self._wrote_s

    async def write(self, body: bytes) -> None:
        if not body:
            return
        self._wrote_s = time.monotonic()
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_EVENT_HEADERS)})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
