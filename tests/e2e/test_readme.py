"""Each program of the README's section on embedding runs as it stands there, silent but for its answer."""

from __future__ import annotations

import asyncio
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess
from typing import Any, Final

import httpx
import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette

from deepinfer import Engine
from doubles.program import REPO, run

pytestmark = pytest.mark.timeout(180)

WEB_APP: Final = "FastAPI and Starlette"
NOTEBOOK: Final = "Notebook"
SAYS: Final = {
    "asyncio": r"\[.The sea is .+, .A library is .+\]\n",
    "uvloop": r"(?s).*\w.*",
    WEB_APP: "",
    NOTEBOOK: r"(?s).*\w.*\[.*\w.*, .*\w.*\]\n",
    "A script without a loop": r"(?s).*\w.*\w\.\n",
    "Two engines in one process": r"(?s).+ \[.*\w.*, .*\w.*\]\n.*\w.*",
}
"""The sections, and what their programs print."""
TO_THE_END: Final = [heading for heading in SAYS if heading != WEB_APP]
"""The app serves until it is told to stop; the others end by themselves."""


def programs() -> dict[str, str]:
    """The Python under each subheading of the section."""
    section = (REPO / "README.md").read_text().split("\n## Embedding\n")[1].split("\n## ")[0]
    parts = [part.split("\n", 1) for part in section.split("\n### ")[1:]]
    return {heading: "\n".join(re.findall(r"```python\n(.*?)```", text, re.S)) for heading, text in parts}


def test_every_section_is_known_here_and_has_a_program() -> None:
    assert programs().keys() == SAYS.keys()
    assert all(programs().values())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess[str]]:
    """What became of each program, by its heading. They run two at a time: starting is most of what they do."""
    folder = tmp_path_factory.mktemp("readme")

    def run_one(heading: str) -> CompletedProcess[str]:
        program = folder / heading.replace(" ", "_") / "program.py"  # asyncio.py would be found in place of asyncio
        program.parent.mkdir()
        program.write_text(programs()[heading])
        return run(*([REPO / "tests/doubles/notebook.py"] if heading == NOTEBOOK else []), program)

    with ThreadPoolExecutor(2) as executor:
        return dict(zip(TO_THE_END, executor.map(run_one, TO_THE_END), strict=True))


@pytest.mark.parametrize("heading", TO_THE_END)
def test_a_program_of_the_readme_runs(heading: str, done: dict[str, CompletedProcess[str]]) -> None:
    assert (done[heading].returncode, done[heading].stderr) == (0, "")
    assert re.fullmatch(SAYS[heading], done[heading].stdout), done[heading].stdout


def test_the_web_app_of_the_readme_ends_the_request_of_a_client_that_leaves(nothing_left: None) -> None:
    names: dict[str, Any] = {"__name__": "readme"}  # as a server imports it: it must not listen by itself
    exec(programs()[WEB_APP], names)
    uvloop.run(serve_and_leave(names["app"]))


async def serve_and_leave(app: Starlette) -> None:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections from here on: no need to wait
        serving = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/stream?prompt=one,+two,+three,+four,+five,"
        try:
            async with httpx.AsyncClient(timeout=120) as client, client.stream("GET", url) as response:
                assert response.status_code == 200 and await anext(aiter(response.aiter_text())) != ""
                engine: Engine = app.state.engine
                assert engine.stats().scheduler.num_running == 1
            async with asyncio.timeout(10):
                while engine.stats().scheduler.num_running:  # noqa: ASYNC110 (nobody is told that a client left)
                    await asyncio.sleep(0.01)
        finally:
            server.should_exit = True
            await serving
