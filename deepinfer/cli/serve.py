"""`deepinfer serve`: a model behind the client wire, until a signal ends it.

SIGTERM and the first Ctrl-C drain: no further request is taken, open ones have their time. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from deepinfer.cli.common import Model, Settings, engine_settings, in_words, run_async, say, starting
from deepinfer.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.wire.address import check_listen
from deepinfer.wire.keys import ServerKeys, read_clients, read_pair
from deepinfer.wire.server import WireServer
from deepinfer.wire.session import Settings as WireSettings


class Door(Protocol):
    """A way in to an engine: open once it is entered."""

    url: str

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: Any) -> None: ...

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new; return when what is open has ended, after `deadline_s` at the latest."""


def serve(
    model: Model,
    listen: Annotated[
        str | None,
        typer.Option(help="ipc:///folder/name or tcp://host:port. Not given: ipc in a folder of its own."),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The server's .key_secret file: for clients with keys only.")] = None,
    clients: Annotated[Path | None, typer.Option(help="A folder with the .key file of every client.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with a text that clients must know, for tcp on loopback.")
    ] = None,
    drain_s: Annotated[float, typer.Option(help="Seconds that open requests have at the end.", min=0)] = 30.0,
    settings: Settings = None,
) -> None:
    """Serve a model to clients in any language: docs/wire.md."""
    with in_words("serve"):
        keys = _keys(key, clients)
        if listen is not None:  # a model takes its time to load
            check_listen(listen, has_keys=keys is not None)
        token = "" if token_file is None else token_file.read_text(encoding="utf-8").strip()

        def doors(engine: Engine) -> list[Door]:
            return [WireServer(engine, listen, keys=keys, settings=WireSettings(token=token))]

        run_async(_serve(model, engine_settings(settings), doors, drain_s))


def _keys(key: Path | None, clients: Path | None) -> ServerKeys | None:
    if key is None and clients is None:
        return None
    if key is None or clients is None:
        raise ConfigError("key", "--key and --clients belong together")
    return ServerKeys(read_pair(key), read_clients(clients))


async def _serve(
    model: str, settings: dict[str, Any], make_doors: Callable[[Engine], list[Door]], drain_s: float
) -> None:
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    async with AsyncExitStack() as stack:
        engine = await _start(stack, model, settings, stop)
        if engine is None:
            return
        doors = make_doors(engine)
        for door in doors:
            await stack.enter_async_context(door)
            print(f"listening on {door.url}", flush=True)
        await stop.wait()
        say("draining; a second signal ends at once")
        draining = asyncio.create_task(_drain(doors, drain_s))
        ending = asyncio.create_task(_wait(stop_now))
        await asyncio.wait({draining, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        draining.cancel()
        await asyncio.gather(draining, ending, return_exceptions=True)


async def _drain(doors: list[Door], deadline_s: float) -> None:
    await asyncio.gather(*(door.drain(deadline_s) for door in doors))


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _start(stack: AsyncExitStack, model: str, settings: dict[str, Any], stop: asyncio.Event) -> Engine | None:
    """The open engine; None if a signal came first."""
    with starting() as tell:
        opening = asyncio.create_task(Engine.start(model, on_progress=tell, **settings))
        stopping = asyncio.create_task(_wait(stop))
        both: set[asyncio.Task[Any]] = {opening, stopping}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set() and not opening.done():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            return None
        engine = await opening
    stack.push_async_callback(engine.aclose)
    return engine
