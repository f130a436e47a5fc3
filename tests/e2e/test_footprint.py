"""What engines cost the process and the system around them when they do nothing, and when they come and go."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer import Engine, SamplingParams


async def test_engines_that_come_and_go_leave_descriptors_threads_and_folders_as_they_were(
    no_tasks_left: None, footprint: Callable[[], object]
) -> None:
    async def cycle() -> None:
        async with Engine("fake") as engine:
            await engine.generate([1], SamplingParams(max_tokens=2))

    def settled() -> object:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("deepinfer-"):
                thread.join(5.0)  # an executor's thread ends by itself, a moment after its engine
        return footprint()

    await cycle()
    before = settled()
    for _ in range(20):
        await cycle()
    assert settled() == before


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("own_thread", [False, True], ids=["on the caller's loop", "in its own thread"])
async def test_an_idle_engine_uses_hardly_any_processor_time(no_tasks_left: None, own_thread: bool) -> None:
    async with Engine("fake", own_thread=own_thread) as engine:
        await engine.generate([1], SamplingParams(max_tokens=20), timeout_s=60.0)
        pids = [os.getpid(), *engine.worker_pids]
        gc.collect()
        start_s, before = time.monotonic(), [cpu_s(pid) for pid in pids]
        await asyncio.sleep(1.0)
        share = [(cpu_s(pid) - used) / (time.monotonic() - start_s) for pid, used in zip(pids, before, strict=True)]
        assert max(share) < 0.05, share


async def test_a_long_temporary_folder_is_no_obstacle(
    no_tasks_left: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.delenv("DEEPINFER_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(long))
    async with Engine("fake") as engine:
        assert len((await engine.generate([1], SamplingParams(max_tokens=3))).token_ids) == 3
        folder = engine._group._runtime_dir.path
        assert folder.parent != long and folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


DROPPED = """
import asyncio, gc, os, sys
from deepinfer import Engine

async def start():
    engine = await Engine.start("fake", own_thread=sys.argv[1] == "own")
    await anext(engine.stream([1, 2]))
    return engine

engine = asyncio.run(start())
if sys.argv[2] == "dropped":
    del engine
    gc.collect()
print("ends")
"""


@pytest.mark.parametrize("home", ["caller", "own"])
@pytest.mark.parametrize("kept", ["dropped", "kept"])
def test_a_script_that_forgets_to_close_its_engine_ends_with_a_warning(
    nothing_left: None, home: str, kept: str
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-c", DROPPED, home, kept]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=15)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr
    assert kept == "kept" or "ResourceWarning: fake: an engine was not closed" in ended.stderr
