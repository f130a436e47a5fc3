"""`deepinfer serve`: a model behind the client wire and, where asked for, HTTP, until a signal ends it.

SIGTERM and the first Ctrl-C drain: no further request is taken, open ones have their time. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Protocol

import typer

from deepinfer.cli.common import Model, Settings, engine_settings, favour_the_loop, in_words, run_async, say, starting
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


MakeWire = Callable[[Engine], WireServer]
MakeHttp = Callable[[Engine, WireServer], Door]


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
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Listen here for HTTP as well; port 0 takes a free one.")
    ] = None,
    served_name: Annotated[
        list[str] | None,
        typer.Option(help="What HTTP requests call the model; may be given several times. Not given: MODEL's own."),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="A file of keys for HTTP, a line each. Required for hosts beyond this machine."),
    ] = None,
    traces: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send spans of HTTP requests to this OpenTelemetry collector, .../v1/traces."),
    ] = None,
    drain_s: Annotated[float, typer.Option(help="Seconds that open requests have at the end.", min=0)] = 30.0,
    log: Annotated[bool, typer.Option(help="A line an HTTP request on standard error, without what was said.")] = True,
    settings: Settings = None,
) -> None:
    """Serve a model to clients in any language (docs/wire.md) and, with --http, to HTTP clients (docs/http.md)."""
    with in_words("serve"), ExitStack() as stack:
        make_wire, make_http = _wire(listen, key, clients, token_file), None
        if http is not None:
            make_http = _http(stack, http, tuple(served_name or ()), api_keys, traces)
        elif served_name or api_keys is not None or traces is not None:
            raise ConfigError("http", "--served-name, --api-keys and --traces are for --http HOST:PORT")
        if log:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
            logging.getLogger("uvicorn").setLevel(logging.WARNING)
        run_async(_serve(model, engine_settings(settings), make_wire, make_http, drain_s))


# ---- what can be said of the doors before a model is loaded, which takes its time


def _wire(listen: str | None, key: Path | None, clients: Path | None, token_file: Path | None) -> MakeWire:
    keys = _keys(key, clients)
    if listen is not None:
        check_listen(listen, has_keys=keys is not None)
    settings = WireSettings(token="" if token_file is None else _secrets("token_file", token_file))
    return lambda engine: WireServer(engine, listen, keys=keys, settings=settings)


def _keys(key: Path | None, clients: Path | None) -> ServerKeys | None:
    if key is None and clients is None:
        return None
    if key is None or clients is None:
        raise ConfigError("key", "--key and --clients belong together")
    return ServerKeys(read_pair(key), read_clients(clients))


def _http(
    stack: ExitStack, address: str, served_names: tuple[str, ...], api_keys: Path | None, traces: str | None
) -> MakeHttp:
    server = _import_server()
    keys = () if api_keys is None else tuple(_secrets("api_keys", api_keys).split())
    host, port = server.split_address(address)
    server.check_exposure(host, bool(keys))
    config = server.HttpConfig(served_names=served_names, api_keys=keys)
    provider = None if traces is None else stack.enter_context(_import_traces().exported(traces))
    listener = stack.enter_context(server.bound(host, port))

    def make(engine: Engine, wire: WireServer) -> Door:
        options = {"tracer_provider": provider, "more_metrics": wire.metrics}
        door: Door = server.HttpServer(engine, listener, config, **options)
        return door

    return make


def _secrets(field: str, path: Path) -> str:
    """What a file of them says. Raises `ConfigError`, also for one that says nothing: it would let everybody in."""
    try:
        found = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(field, f"{path}: text in UTF-8 is expected") from None
    if not found:
        raise ConfigError(field, f"{path} is empty")
    return found


def _import_server() -> ModuleType:
    try:
        from deepinfer.cli import http_server
    except ImportError as error:
        raise ConfigError("http", f"serving needs pip install 'deepinfer-runtime[server]' ({error})") from None
    return http_server


def _import_traces() -> ModuleType:
    try:
        from deepinfer.cli import traces
    except ImportError as error:
        raise ConfigError("traces", f"traces need pip install 'deepinfer-runtime[tracing]' ({error})") from None
    return traces


# ---- from the start to the end


async def _serve(
    model: str, settings: dict[str, Any], make_wire: MakeWire, make_http: MakeHttp | None, drain_s: float
) -> None:
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    async with AsyncExitStack() as stack:
        engine = await _start(stack, model, settings, stop)
        if engine is None:
            return
        await engine.prepare_grammars()  # before anybody could wait for it
        favour_the_loop()
        wire = make_wire(engine)
        doors: list[Door] = [wire] if make_http is None else [wire, make_http(engine, wire)]
        for door in doors:
            await stack.enter_async_context(door)
            print(f"listening on {door.url}", flush=True)
        await stop.wait()
        say("finishing what is open; a second signal ends at once")
        draining = asyncio.create_task(_drain(doors, drain_s))
        ending = asyncio.create_task(_wait(stop_now))
        await asyncio.wait({draining, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        draining.cancel()
        await asyncio.gather(draining, ending, return_exceptions=True)
    say("stopped")


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
