"""A program: the HTTP server over a model, on a free port, with a watch on its loop. Ends with its standard input.

    python watched_server.py {asyncio,uvloop} MODEL

Prints its port. `GET /worst-stall` answers with the longest stall since the last time, in seconds; `GET /stall/SECONDS`
burns so much on the loop, `GET /hold/SECONDS` holds the interpreter's lock in a thread.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer import Engine
from deepinfer.cli.common import favour_the_loop
from deepinfer.http import HttpConfig, http_app
from doubles.loop_watch import LoopWatch
from doubles.serving import serving_app

SLOTS: Final = 8
"""Samples that run at once; as many may wait."""
LOOPS: Final = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Watched:
    """The app, and three places beside it."""

    def __init__(self, app: ASGIApp, watch: LoopWatch) -> None:
        self._app = app
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, name, *rest = scope["path"].split("/")
        if name == "stall":
            burn(float(rest[0]))
        elif name == "hold":
            await asyncio.to_thread(hold, float(rest[0]))
        elif name != "worst-stall":
            await self._app(scope, receive, send)
            return
        body = str(self._watch.take_worst_s()).encode() if name == "worst-stall" else b""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def burn(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def hold(seconds: float) -> None:
    """Calls in C that give the lock to nobody, each longer than the last, until one has taken so long."""
    size, took_s = 1 << 16, 0.0
    while took_s < seconds:
        started_s = time.thread_time()
        sum(range(size))
        took_s, size = time.thread_time() - started_s, size * 2


async def main(model: str) -> None:
    async with Engine(model, num_threads=1, max_num_seqs=SLOTS, max_queued_requests=SLOTS) as engine:
        watch = LoopWatch()
        app = Watched(http_app(engine, HttpConfig(served_names=("model",))), watch)
        async with serving_app(app) as served:
            favour_the_loop()
            watch.start()
            print(served.port, flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=LOOPS[sys.argv[1]]) as runner:
        runner.run(main(sys.argv[2]))
