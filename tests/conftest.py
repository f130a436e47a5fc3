"""What all tests share: both event loops, an engine over a fake worker, and the check that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers

from deepinfer import Engine


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asynchronous test runs on both loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_finish() -> None:
    """Tests look for what they left behind with the collector: what the imports made is not looked at again."""
    importlib.import_module("hypothesis")  # asks the collector who refers to trio's random numbers
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def collected() -> None:
    """Nor what the modules before this one have left in caches: a look costs what is looked at, a thousand times."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A run without the weights must not look like a run with them."""
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if "model" in getattr(report, "keywords", ())
    ]  # a file skipped as a whole has none
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of real models were skipped: their weights are not here")


class Footprint(NamedTuple):
    """What this process holds of the system."""

    children: frozenset[int]
    fds: frozenset[str]  # numbers and what they stand for
    threads: frozenset[threading.Thread]
    folders: frozenset[Path]

    def beyond(self, before: Footprint) -> list[str]:
        """What there is now and was not there `before`."""
        return [str(thing) for now, then in zip(self, before, strict=True) for thing in now - then]


def _footprint(runtime_home: Path) -> Footprint:
    tasks = Path("/proc/self/task").iterdir()
    children = " ".join(_read_if_there(task / "children") for task in tasks)
    return Footprint(
        frozenset(map(int, children.split())),
        frozenset(_open_fds()),
        frozenset(threading.enumerate()),
        frozenset(runtime_home.iterdir()),
    )


def _open_fds() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield f"{fd}: {os.readlink(f'/proc/self/fd/{fd}')}"
        except OSError:
            pass  # the one that lists them


def _read_if_there(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


@pytest.fixture
def runtime_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the engines of this test keep their sockets; a path that is short enough."""
    home = Path(tempfile.mkdtemp(prefix="di-"))
    monkeypatch.setenv("DEEPINFER_RUNTIME_DIR", str(home))
    yield home
    shutil.rmtree(home)


@pytest.fixture
def footprint(runtime_home: Path) -> Callable[[], Footprint]:
    """A look at what this process holds now."""
    return lambda: _footprint(runtime_home)


@pytest.fixture(scope="session")
def warm_uvloop() -> None:
    """The first loop of libuv makes a pipe that the process keeps."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.fixture
def nothing_left(warm_uvloop: None, footprint: Callable[[], Footprint]) -> Iterator[None]:
    """No process, descriptor, thread or runtime folder outlives the test."""
    gc.collect()
    before = footprint()
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before.threads:
        thread.join(5.0)  # an executor's thread ends by itself, a moment after its engine
    left = footprint().beyond(before)
    assert not left, f"left behind: {left}"


@pytest.fixture
async def no_tasks_left(nothing_left: None) -> AsyncIterator[None]:
    """As `nothing_left`, and no task outlives the test either."""
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"left behind: {left}"


@pytest.fixture
async def engine(no_tasks_left: None) -> AsyncIterator[Engine]:
    """Over one fake worker: steps of a millisecond, small blocks, few slots."""
    async with Engine("fake", fake_step_s=0.001, fake_vocab_size=97, block_size=4, max_num_seqs=32) as engine:
        yield engine
        engine.check_integrity()


async def _settle(engine: Engine) -> None:
    await asyncio.get_running_loop().run_in_executor(engine._executor, lambda: None)  # behind the last text
    async with asyncio.timeout(10):
        while not engine._core.is_idle:  # noqa: ASYNC110 (nothing in the core waits for this: it has no event)
            await asyncio.sleep(0)


@pytest.fixture
def settle() -> Callable[[Engine], Awaitable[None]]:
    """Waits until an engine has nothing queued, running or in flight."""
    return _settle


@pytest.fixture
def word_model(tmp_path: Path) -> str:
    """A folder with a tokenizer of 97 words, for engines whose model has none."""
    words = {f"w{index}": index for index in range(96)} | {"word": 96}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment, unused-ignore]
    backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)
