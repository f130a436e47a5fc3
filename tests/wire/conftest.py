"""A server over an engine with a fake worker, and what tests connect to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from deepinfer import Client, Engine, connect
from deepinfer.wire.server import WireServer
from deepinfer.wire.session import Settings

QUICK = Settings(ping_s=0.1, idle_s=2.0, retention_s=5.0)
"""Cuts are noticed soon."""


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[WireServer]:
    """On ipc, in a folder of its own."""
    async with WireServer(engine, settings=QUICK) as server:
        yield server


@pytest.fixture
async def client(server: WireServer) -> AsyncIterator[Client]:
    async with connect(server.url) as client:
        yield client
