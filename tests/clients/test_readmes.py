"""The programs of the READMEs run as they stand there, against the model that comes with the packages."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from clients.conftest import BUILDERS, Server, start_server, stop_server
from clients.programs import CLIENTS, ToolchainMissing
from doubles.program import REPO, environment

README: Final = REPO / "README.md"
SECTION: Final = "\n## Serving other programs\n"
WORDS: Final = r"(?s).*\w.*"
PROGRAMS: Final = {
    "python": (README, "python", WORDS),
    "node": (README, "js", WORDS),
    "c": (README, "c", WORDS),
    "node's own": (CLIENTS / "node" / "README.md", "js", r"(?s).*\w.*\n.*\w.* \(\d+ tokens\)\n(yes|no)\n"),
    "c's own": (CLIENTS / "c" / "README.md", "c", r"(?s).*\w.*\n\(\d+ tokens\)\n"),
}
"""Where each is, its language, and what it prints."""


def text_of(readme: Path, language: str) -> str:
    """The one program of this language."""
    text = readme.read_text(encoding="utf-8")
    if readme == README:
        text = text.split(SECTION)[1].split("\n## ")[0]
    (program,) = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return str(program)


@pytest.fixture(scope="module")
def nano(home: Path) -> Iterator[Server]:
    server = start_server(home, model="v41-nano")
    yield server
    stop_server(server.process)


def command(language: str, program: str, folder: Path) -> list[str]:
    """What runs `program`, made ready as its README says."""
    if language == "python":
        (folder / "program.py").write_text(program)
        return [sys.executable, "-W", "error", str(folder / "program.py")]
    try:
        BUILDERS["node" if language == "js" else language]()
    except ToolchainMissing as missing:
        pytest.skip(f"the program in {language} is not run: {missing}")
    if language == "js":
        (folder / "node_modules").mkdir()
        (folder / "node_modules" / "deepinfer-client").symlink_to(CLIENTS / "node")
        (folder / "program.mjs").write_text(program)
        return ["node", str(folder / "program.mjs")]
    (folder / "program.c").write_text(program)
    here, there = CLIENTS / "c", folder / "program"
    libraries = ["-ldeepinfer_client", "-lzmq", "-lmsgpackc"]
    assert " ".join(libraries) in (here / "README.md").read_text(encoding="utf-8")
    compiler = ["cc", "-Wall", "-Wextra", "-Werror", "-std=c11", f"-I{here}/include", f"-L{here}/build"]
    subprocess.run([*compiler, "-o", str(there), f"{there}.c", *libraries], check=True, timeout=60)
    return [str(there)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_stands(name: str, nano: Server, tmp_path: Path) -> None:
    readme, language, says = PROGRAMS[name]
    ready = command(language, text_of(readme, language), tmp_path)
    done = subprocess.run([*ready, nano.url], capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(says, done.stdout), done.stdout
