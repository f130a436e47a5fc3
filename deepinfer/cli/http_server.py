"""HTTP as a way in to an engine: its app, run by uvicorn on a socket of ours. Needs the `server` extra.

Knows nothing of signals, which are the command's.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import uvicorn

from deepinfer.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.http import HttpConfig, http_app
from deepinfer.http.connection import uvicorn_settings
from deepinfer.loopback import is_loopback
from deepinfer.metrics import Metric

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["HttpConfig", "HttpServer", "bound", "check_exposure", "split_address"]

DEAD_CLIENT_MS: Final = 120_000
"""A connection is cut whose client has taken nothing for so long."""
CUT_OFF_S: Final = 1
"""How long requests that are cut off may take to end."""


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT`, with an IPv6 host in brackets. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isdecimal() or int(port[:6]) > 65_535:
        raise ConfigError("http", f"{address!r}: HOST:PORT is expected, [HOST]:PORT for IPv6")
    return host, int(port)


def check_exposure(host: str, has_keys: bool) -> None:
    """Whoever can reach it from another machine needs a key. Raises `ConfigError`."""
    if not has_keys and not is_loopback(host):
        raise ConfigError("http", f"{host} can be reached from other machines: --api-keys FILE says who may")


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens only when the model is there: until then who connects is refused."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # frees what is kept for a client that takes nothing any more
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_CLIENT_MS)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError("http", f"{host}:{port}: {error.strerror or error}") from None
    return listener


class HttpServer:
    """Serves an open engine, on the loop that runs at `__aenter__`. The engine stays open behind it."""

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        config: HttpConfig,
        *,
        tracer_provider: TracerProvider | None = None,
        more_metrics: Callable[[], Mapping[str, Metric]] = dict,
    ) -> None:
        """`listener` is bound, and closed at the end. The rest is as `http_app` has it."""
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._listener = listener
        app = http_app(engine, config, tracer_provider=tracer_provider, more_metrics=more_metrics)
        self._server = _Server(uvicorn.Config(app, **uvicorn_settings(config)))

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._serving.done():
            await self._serving
        return self

    async def drain(self, deadline_s: float) -> None:
        """Close the port; return when the open requests have ended. After `deadline_s` they are cut off."""
        self._stop(math.ceil(deadline_s))
        await asyncio.wait({self._serving})

    async def __aexit__(self, *error: Any) -> None:
        """Cut off what is still open."""
        self._stop(CUT_OFF_S)
        self._server.force_exit = True
        for request in self._server.server_state.tasks:
            request.cancel()
        await asyncio.wait({self._serving}, timeout=CUT_OFF_S)
        self._serving.cancel()  # what is left waits for clients that read nothing
        await asyncio.gather(self._serving, return_exceptions=True)

    def _stop(self, deadline_s: int) -> None:
        self._server.config.timeout_graceful_shutdown = deadline_s
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening: Final = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
