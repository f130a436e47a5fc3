"""Reads request bodies within limits of size and time, and keeps count of all that is held at once.

Knows nothing of what a body says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import Request

from deepinfer.http.config import HttpConfig
from deepinfer.http.fault import RETRY_AFTER_S, HttpFault


class BodyReader:
    """Of one server."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self.num_held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, counted as held until the block is left.

        Raises `HttpFault`: 413, 415, 408, 429; and `ClientDisconnect`.
        """
        check_head(request.headers, self._config.max_body_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for part in request.stream():
                    body += part
                    self._hold(len(part))
                    if len(body) > self._config.max_body_bytes:
                        raise too_large(self._config.max_body_bytes)
            yield bytes(body)
        except TimeoutError:
            raise HttpFault(408, "body_timeout", "the body did not come in time") from None
        finally:
            self.num_held_bytes -= len(body)

    def _hold(self, num_bytes: int) -> None:
        self.num_held_bytes += num_bytes
        if self.num_held_bytes > self._config.max_buffered_bytes:
            raise HttpFault(429, "overloaded", "too many large requests at once", retry_after_s=RETRY_AFTER_S)


def check_head(headers: Headers, max_body_bytes: int) -> None:
    """What can be known before anything is read. Raises `HttpFault`.

    Only JSON is taken: a page of another site could have a browser send plain text or a form here without asking.
    """
    if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may have read another one
        raise HttpFault(400, "invalid_http", "content-length and transfer-encoding: one of them is expected")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > max_body_bytes:
        raise too_large(max_body_bytes)
    kind, _, options = headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json" or not _is_utf8(options):
        raise HttpFault(415, "not_json", "content-type: application/json is expected, in UTF-8")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpFault(415, "encoded", "content-encoding: bodies are read as they are, without compression")


def _is_utf8(options: str) -> bool:
    name, _, value = options.partition("=")
    return name.strip() != "charset" or value.strip().strip('"') in ("utf-8", "utf8", "us-ascii")


def too_large(max_body_bytes: int) -> HttpFault:
    return HttpFault(413, "body_too_large", f"at most {max_body_bytes} bytes are read")
