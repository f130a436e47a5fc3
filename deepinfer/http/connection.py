"""One client's connection: uvicorn's, with limits for a client that does not say what it wants, or says too much.

The head of a request comes whole within `head_timeout_s`, or is given up. What a client sends ahead of its answer is
kept within bounds, and never keeps the server from noticing that it went. A body that goes on after its answer is read
for a moment only. Faults of HTTP itself are answered as the app answers its own. Knows nothing of the app.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from deepinfer.http.config import HttpConfig
from deepinfer.http.fault import RETRY_AFTER_S, HttpFault, error_body, head_too_large

KEEP_ALIVE_S: Final = 75
"""An idle connection stays open for so long."""
LINGER_S: Final = 1.0
"""So long a client may go on with a body that nobody reads: closed at once, it might not see its answer."""


def uvicorn_settings(config: HttpConfig) -> dict[str, Any]:
    """Of `uvicorn.Config`, for a server within the limits of `config`."""
    return {
        "http": partial(Connection, limits=config),
        "h11_max_incomplete_event_size": config.max_head_bytes,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
    }


class Connection(H11Protocol):
    """Speaks HTTP/1.1."""

    def __init__(self, *args: Any, limits: HttpConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self.access_log = False  # it would have the query; the app has a log of its own
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(HttpFault(503, "overloaded", "too many connections are open", retry_after_s=RETRY_AFTER_S))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_rest_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._is_lingering():
            self._stop_rest_timer()
        if self.conn.their_state is h11.IDLE:
            self._await_head()
            return
        self._stop_head_timer()
        if self.conn.their_state is h11.DONE and self.conn.our_state is not h11.DONE and self.flow.read_paused:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Go on reading, as only who reads notices that the other side has gone."""
        if len(self.conn.trailing_data[0]) > self._limits.max_head_bytes:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_lingering():
            self._rest_timer = self.loop.call_later(LINGER_S, self.transport.close)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await_head()

    def _is_lingering(self) -> bool:
        """The answer is out, and the body of its request goes on."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._give_up)

    def _give_up(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(HttpFault(408, "head_timeout", "the head of the request did not come in time"))
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, or too much of it."""
        if len(self.conn.trailing_data[0]) > self._limits.max_head_bytes:
            self._refuse(head_too_large(self._limits.max_head_bytes))
        else:
            self._refuse(HttpFault(400, "invalid_http", "the request is no HTTP/1.1"))

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: whoever asks for WebSockets is answered as if he had not."""

    def _refuse(self, fault: HttpFault) -> None:
        """The last that is said here."""
        self._stop_head_timer()
        self._stop_rest_timer()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body(fault, "")
            headers = {"content-type": "application/json", "content-length": str(len(body)), **fault.headers}
            raw = [(name.encode(), value.encode()) for name, value in (headers | {"connection": "close"}).items()]
            reason = HTTPStatus(fault.status).phrase.encode()
            for event in (
                h11.Response(status_code=fault.status, headers=raw, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
