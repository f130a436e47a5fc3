"""Stands before every route: keys, the number of open requests, ids, faults as responses, one line of log a request.

The log never has what was asked or answered: method, path, status, times and counts. Knows nothing of bodies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer.errors import DeepInferError
from deepinfer.http.config import HttpConfig
from deepinfer.http.fault import RETRY_AFTER_S, HttpFault, error_body, fault_of, head_too_large
from deepinfer.http.metrics import HttpMetrics, Progress
from deepinfer.http.note import Note
from deepinfer.http.page import PAGE_FILES
from deepinfer.loopback import is_loopback

if TYPE_CHECKING:
    from deepinfer.http.tracing import Spans

logger = logging.getLogger("deepinfer.http")
access = logging.getLogger("deepinfer.http.access")

OPEN_PATHS: Final = frozenset({"/health", *PAGE_FILES})
"""They ask for no key."""
GONE: Final = 499
"""Logged where the client went before it had all of its answer; nobody gets it."""


class Gate:
    """ASGI middleware of one server."""

    def __init__(self, app: ASGIApp, config: HttpConfig, metrics: HttpMetrics, spans: Spans | None = None) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._spans = spans
        self._keys = [_digest(key) for key in config.api_keys]
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = scope.setdefault("state", {})["note"] = Note(scope, self._metrics.begin(scope["path"]))
        receive, send = _counting(note.progress, receive), _noting(note, send)
        send = _within(self._config.write_timeout_s, send)
        try:
            await self._answer(note, scope, receive, send)
        except ClientDisconnect:
            note.status, note.error = GONE, "client_gone"
        finally:
            note.progress.end(note.status or GONE)
            access.log(note.level, note.line())
            if self._spans is not None and note.method == "POST":
                self._spans.record(note, Headers(scope=scope))

    async def _answer(self, note: Note, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._enter(note, scope, receive, send)
        except ClientDisconnect:
            raise
        except Exception as error:
            await self._refuse(note, _as_fault(error), send)

    async def _enter(self, note: Note, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_head(scope)
        if note.path not in OPEN_PATHS:
            self._check_asker(scope)
        if note.method != "POST":
            await self._app(scope, receive, send)
            return
        if self.num_open >= self._config.max_open_requests:
            raise HttpFault(429, "overloaded", "too many requests are open", retry_after_s=RETRY_AFTER_S)
        self.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= 1

    def _check_asker(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._keys:
            self._check_key(headers)
        else:
            self._check_host(headers.get("host"), scope.get("server"))

    def _check_host(self, host: str | None, server: tuple[str, int | None] | None) -> None:
        """A page of another site can have its own name mean this address, and then ask here; a browser says the name.

        `server` is where the connection came in.
        """
        if host is None or "*" in self._hosts:
            return
        name = _host_name(host)
        if not is_loopback(name) and name not in self._hosts and (server is None or name != server[0]):
            raise HttpFault(421, "unknown_host", f"host: {name} is not the name of this server")

    def _check_head(self, scope: Scope) -> None:
        num_bytes = len(scope["path"]) + len(scope["query_string"])
        num_bytes += sum([len(name) + len(value) + 4 for name, value in scope["headers"]])
        if num_bytes > self._config.max_head_bytes:
            raise head_too_large(self._config.max_head_bytes)

    def _check_key(self, headers: Headers) -> None:
        """In a time that says nothing of the keys: every one is compared, by digests of one length."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key", "") or (token.strip() if scheme.lower() == "bearer" else "")
        digest = _digest(given)
        is_known = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(is_known):
            raise HttpFault(401, "invalid_api_key", "a key is expected: authorization: Bearer KEY, or x-api-key: KEY")

    async def _refuse(self, note: Note, fault: HttpFault, send: Send) -> None:
        note.error = fault.code
        if note.status:
            return  # the response has begun: all that is left is to cut it off
        body = error_body(fault, note.path)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **fault.headers}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": fault.status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


def _counting(progress: Progress, receive: Receive) -> Receive:
    async def counting() -> Message:
        message = await receive()
        progress.num_received_bytes += len(message.get("body", b""))
        return message

    return counting


def _within(timeout_s: float, send: Send) -> Send:
    """`send`, which raises `ClientDisconnect` where the client takes nothing for too long."""

    async def within(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError:
            raise ClientDisconnect from None

    return within


def _noting(note: Note, send: Send) -> Send:
    """`send`, with status and bytes noted, and the request's id under the names that the SDKs look for."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            note.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = headers["request-id"] = note.request_id
        note.progress.num_sent_bytes += len(message.get("body", b""))
        await send(message)

    return noting


def _as_fault(error: Exception) -> HttpFault:
    if isinstance(error, HttpFault):
        return error
    if isinstance(error, DeepInferError):
        return fault_of(error)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
        return HttpFault(error.status_code, code, error.detail, more_headers=error.headers or {})
    logger.error("a request failed", exc_info=error)
    return HttpFault(500, "internal", "the server failed")


def _host_name(host: str) -> str:
    """Without a port, and without the brackets of IPv6."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]").lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
