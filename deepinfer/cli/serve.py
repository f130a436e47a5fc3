"""`deepinfer serve`: one model for everybody who may ask, until it is told to stop."""

from __future__ import annotations

import ipaddress
import logging
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from deepinfer.cli.common import Model, Settings, engine_settings, in_words, run_async
from deepinfer.engine import Engine
from deepinfer.errors import ConfigError


def serve(
    model: Model,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listen here for HTTP; port 0 takes a free one.")
    ] = "127.0.0.1:8000",
    served_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model; may be given several times.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file of keys, a line each. Required for hosts beyond this machine.")
    ] = None,
    drain_s: Annotated[
        int, typer.Option(min=0, help="How long open requests may take to end after SIGTERM or Ctrl-C.")
    ] = 30,
    log: Annotated[bool, typer.Option(help="A line a request on standard error, without what was said.")] = True,
    settings: Settings = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's and Anthropic's APIs have it."""
    with in_words("serve"):
        http_server = _import_server()
        keys = () if api_keys is None else tuple(api_keys.read_text(encoding="utf-8").split())
        host, port = split_address(http)
        check_exposure(host, bool(keys))
        if log:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
            logging.getLogger("uvicorn").setLevel(logging.WARNING)
        engine = Engine(model, **engine_settings(settings))
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # while there is nothing to drain
        config = http_server.HttpConfig(served_names=tuple(served_name or ()), api_keys=keys)
        with http_server.bound(host, port) as listener:
            run_async(http_server.serve(engine, listener, config, drain_s))


def _import_server() -> ModuleType:
    try:
        from deepinfer.cli import http_server
    except ImportError as error:
        raise ConfigError("http", f"serving needs pip install 'deepinfer-runtime[server]' ({error})") from None
    return http_server


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT`, with an IPv6 host in brackets. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isdecimal() or int(port[:6]) > 65_535:
        raise ConfigError("http", f"{address!r}: HOST:PORT is expected, [HOST]:PORT for IPv6")
    return host, int(port)


def check_exposure(host: str, has_keys: bool) -> None:
    """Whoever can reach it from another machine needs a key. Raises `ConfigError`."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not has_keys:
        raise ConfigError("http", f"{host} can be reached from other machines: --api-keys FILE says who may")
