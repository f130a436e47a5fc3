"""The HTTP server on a loopback port, on the loop of the test, and plain requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

import uvicorn
from opentelemetry.trace import TracerProvider
from starlette.types import ASGIApp

from deepinfer import Engine
from deepinfer.http import HttpConfig, http_app
from deepinfer.http.connection import uvicorn_settings


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the test's


class Reply(NamedTuple):
    """What came back, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A server that runs, and requests to it over connections of their own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def send(self, head: str, body: bytes = b"") -> Reply:
        """A request as it is, to its end."""
        async with self.connected() as (reader, writer):
            writer.write(head.encode() + body)
            return await read_reply(reader)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """`body`: bytes as they are, or what becomes JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send(post_head(path, len(raw), **headers), raw)

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.send(_head("GET", path, headers))


def post_head(path: str, num_bytes: int, **headers: str) -> str:
    return _head("POST", path, {"content_type": "application/json", "content_length": str(num_bytes), **headers})


def _head(method: str, path: str, headers: dict[str, str]) -> str:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines) + "\r\n\r\n"


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the headers of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """A response to the end of its connection; chunks are joined."""
    status, headers = await read_head(reader)
    rest = await reader.read()
    return Reply(status, headers, _joined(rest) if headers.get("transfer-encoding") == "chunked" else rest)


def _joined(rest: bytes) -> bytes:
    parts: list[bytes] = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(parts)


@asynccontextmanager
async def serving(
    engine: Engine, *, send_buffer_bytes: int = 0, tracer_provider: TracerProvider | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """`settings` are of `HttpConfig`; the buffer is the system's, of each connection."""
    limits = HttpConfig(**settings)
    app = http_app(engine, limits, tracer_provider=tracer_provider)
    async with serving_app(app, send_buffer_bytes=send_buffer_bytes, **uvicorn_settings(limits)) as served:
        yield served


@asynccontextmanager
async def serving_app(app: ASGIApp, *, send_buffer_bytes: int = 0, **settings: Any) -> AsyncIterator[Served]:
    """As `serving`, whatever the app is; `settings` are uvicorn's."""
    config = uvicorn.Config(app, **({"lifespan": "off", "log_config": None, "ws": "none"} | settings))
    config.timeout_graceful_shutdown = 5
    server = _Uvicorn(config)
    with socket.socket() as listener:
        if send_buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0.001)
        try:
            yield Served(port)
        finally:
            server.should_exit = True
            await task
