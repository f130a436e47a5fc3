"""A server in a process of its own, and the clients of each language that can be built here."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from clients.programs import Programs, ToolchainMissing, build_c, build_node

START_TIMEOUT_S: Final = 60.0
BUILDERS: Final[dict[str, Callable[[], Programs]]] = {"node": build_node, "c": build_c}


class Server(NamedTuple):
    """`deepinfer serve` over a fake worker, whose tokens follow from the prompt."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def start_server(home: Path, *options: str, listen: str = "tcp://127.0.0.1:*", model: str = "fake") -> Server:
    """Returns when it listens."""
    settings = {"fake_step_s": "0.001", "fake_vocab_size": "97", "max_num_seqs": "32"} if model == "fake" else {}
    command = [sys.executable, "-m", "deepinfer", "serve", model, "--listen", listen]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    command += options
    environment = os.environ | {"DEEPINFER_RUNTIME_DIR": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        deadline = time.monotonic() + START_TIMEOUT_S
        while selector.select(max(deadline - time.monotonic(), 0.0)) and (line := process.stdout.readline()):
            if (found := re.match(r"listening on (\S+)", line)) is not None:
                return Server(found[1], process)
    stop_server(process)
    raise AssertionError("the server does not listen")


def stop_server(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM):  # the second ends it at once
        process.send_signal(number)
        time.sleep(0.05)
    process.wait(20.0)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    server = start_server(home)
    yield server
    stop_server(server.process)


@pytest.fixture(scope="session", params=list(BUILDERS))
def programs(request: pytest.FixtureRequest) -> Programs:
    """Each language's in turn."""
    try:
        return BUILDERS[request.param]()
    except ToolchainMissing as missing:
        pytest.skip(f"the {request.param} client is not tested: {missing}")
