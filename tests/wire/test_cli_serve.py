"""`deepinfer serve` and `deepinfer keygen` as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deepinfer import EngineClosed, connect
from doubles.reading import PROMPT, greedy, tokens_of, wanted

pytestmark = pytest.mark.usefixtures("no_tasks_left")
FAKE = ("--set", "fake_vocab_size=97", "--set", "fake_step_s=0.001")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@asynccontextmanager
async def served(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and where it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deepinfer", "serve", "fake", *FAKE, *arguments),
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        yield process, line.decode().split()[-1]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def test_sigterm_drains_and_exits_with_zero() -> None:
    async with served() as (process, url), connect(url) as client:
        stream = client.stream(PROMPT, greedy(400))
        tokens = list((await anext(stream)).token_ids)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        with pytest.raises(EngineClosed):
            await client.generate(PROMPT, greedy(1))
        assert tokens + await tokens_of(stream) == wanted(400)
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def test_a_second_signal_ends_at_once() -> None:
    async with served() as (process, url), connect(url, give_up_s=1.0) as client:
        stream = client.stream(PROMPT, greedy(30_000))
        await anext(stream)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        with pytest.raises(EngineClosed):
            await tokens_of(stream)


async def test_keys_made_by_keygen_open_a_server(tmp_path: Path) -> None:
    for folder, name in ((tmp_path, "server"), (tmp_path / "clients", "me")):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deepinfer", "keygen", name, "--dir", str(folder)),
            env=environment(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert await process.wait() == 0
    keys = ("--key", str(tmp_path / "server.key_secret"), "--clients", str(tmp_path / "clients"))
    async with (
        served("--listen", "tcp://127.0.0.1:*", *keys) as (_, url),
        connect(url, key=tmp_path / "clients" / "me.key_secret", server_key=tmp_path / "server.key") as client,
    ):
        assert await tokens_of(client.stream(PROMPT, greedy(20))) == wanted(20)


async def test_a_place_beyond_loopback_is_refused_without_keys() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deepinfer", "serve", "fake", "--listen", "tcp://0.0.0.0:*"),
        env=environment(),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2 and b"deepinfer keygen" in errors
