"""The clients in other languages: how each is built, and the programs of theirs that the tests run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

CLIENTS: Final = Path(__file__).resolve().parents[2] / "protocol" / "clients"
BUILD_TIMEOUT_S: Final = 110.0
MIN_NODE: Final = 20


class Programs(NamedTuple):
    """One language's: commands that take arguments."""

    probe: list[str]
    """Makes one request and prints what comes of it."""
    example: list[str]
    """Prints the answer to a prompt."""
    vectors: list[str]
    """Runs the golden frames."""
    verdicts: list[str]
    """Reads lines of sender and hex, and prints what decoding gives."""


class ToolchainMissing(Exception):
    """What would have to be installed."""


def build_node() -> Programs:
    """Raises `ToolchainMissing` where there is no Node, or its packages cannot be had."""
    folder = CLIENTS / "node"
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            raise ToolchainMissing(f"{tool} is not installed")
    version = _run(["node", "--version"], folder).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < MIN_NODE:
        raise ToolchainMissing(f"node is {version}, {MIN_NODE} or later is needed")
    if not (folder / "node_modules" / "zeromq").exists():
        installed = _run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        if installed.returncode:
            raise ToolchainMissing(f"npm cannot install: {installed.stderr[-300:]}")
    _check(_run(["npm", "run", "--silent", "build"], folder))
    test = folder / "test"
    return Programs(
        ["node", str(test / "probe.mjs")],
        ["node", str(folder / "examples" / "stream.mjs")],
        ["node", "--test", "--test-reporter=tap", *map(str, sorted(test.glob("*.test.mjs")))],
        ["node", str(test / "verdicts.mjs")],
    )


def build_c() -> Programs:
    """Raises `ToolchainMissing` where there is no compiler, or a library's headers are not there."""
    folder = CLIENTS / "c"
    for tool in ("cc", "make", "pkg-config"):
        if shutil.which(tool) is None:
            raise ToolchainMissing(f"{tool} is not installed")
    for package, debian in (("libzmq", "libzmq3-dev"), ("msgpack", "libmsgpack-dev")):
        if _run(["pkg-config", "--exists", package], folder).returncode:
            raise ToolchainMissing(f"{debian} is not installed")
    _check(_run(["make", "--silent"], folder))
    return Programs(*([str(folder / "build" / name)] for name in ("probe", "stream", "vectors", "verdicts")))


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
