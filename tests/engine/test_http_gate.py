"""The gate before every route: clients that take nothing are given up, whatever they are sent."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer.http import HttpConfig
from deepinfer.http.gate import Gate
from deepinfer.http.metrics import HttpMetrics

SCOPE: Scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": []}


async def nothing_comes() -> Any:
    await asyncio.Event().wait()


async def pieces(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    raise ArithmeticError("a bug")


@pytest.mark.parametrize(
    ("app", "num_taken"),
    [
        (pieces, 0),
        (pieces, 1),
        (pieces, 2),
        (Response(b"whole"), 0),
        (Response(b"whole"), 1),
        (failing, 0),
        (failing, 1),
    ],
)
async def test_a_client_that_takes_nothing_is_given_up_wherever_its_answer_is(
    app: ASGIApp, num_taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deepinfer.http.access")
    taken: list[str] = []

    async def send(message: Any) -> None:
        if len(taken) == num_taken:
            await asyncio.Event().wait()
        taken.append(message["type"])

    gate = Gate(app, HttpConfig(write_timeout_s=0.01), HttpMetrics(()))
    async with asyncio.timeout(10):
        await gate(dict(SCOPE), nothing_comes, send)
    assert len(taken) == num_taken
    assert " 499 " in caplog.messages[-1], "the client has no answer"
