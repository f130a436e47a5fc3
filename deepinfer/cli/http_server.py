"""Runs the HTTP app of an engine with uvicorn, and owns the signals meanwhile. Needs the `server` extra."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn

from deepinfer.cli.common import say, starting
from deepinfer.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.http import HttpConfig, http_app

__all__ = ["HttpConfig", "bound", "serve"]

KEEP_ALIVE_S: Final = 75
"""An idle connection stays open for so long."""
DEAD_CLIENT_MS: Final = 120_000
"""A connection is cut whose client has taken nothing for so long."""


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


async def serve(engine: Engine, listener: socket.socket, config: HttpConfig, drain_s: int) -> None:
    """Open the engine, serve until a signal comes, finish what is open, close the engine."""
    with starting() as tell:
        await engine.open(tell)
    try:
        server = _Server(
            uvicorn.Config(
                http_app(engine, config),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=drain_s,
            )
        )
        await server.serve([listener])
        say("stopped")
    finally:
        await engine.aclose()


class _Server(uvicorn.Server):
    """Ends in order at SIGTERM or Ctrl-C, and at a second one at once. The engine is closed behind it either way."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            say(f"listening at http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        if not self.should_exit:
            say("finishing what is open; again to stop at once")
        self.should_exit = True
