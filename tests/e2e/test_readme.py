"""Each program of the README's section on embedding runs as it stands there, silent but for its answer."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import uvicorn

from deepinfer import Engine
from doubles.program import REPO, run
from doubles.smollm2 import model_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

WEB_APP: Final = "FastAPI and Starlette"
NOTEBOOK: Final = "Notebook"
SAYS: Final = {
    "asyncio": r"\['The sea is .+A library is .+\]\n",
    "uvloop": r"(?s).*\w.*",
    WEB_APP: "",
    NOTEBOOK: r"(?s).*\w.*\[.*\w.*, .*\w.*\]\n",
    "A script without a loop": r"(?s).*The capital of France is Paris\.\n",
    "Two engines in one process": r"(?s).+ \[.*\w.*, .*\w.*\]\n.*\w.*",
}
"""The sections, and what their programs print."""


def programs() -> dict[str, str]:
    """The Python under each subheading of the section."""
    section = (REPO / "README.md").read_text().split("\n## Embedding\n")[1].split("\n## ")[0]
    parts = [part.split("\n", 1) for part in section.split("\n### ")[1:]]
    return {heading: "\n".join(re.findall(r"```python\n(.*?)```", text, re.S)) for heading, text in parts}


def test_every_section_is_known_here_and_has_a_program() -> None:
    assert programs().keys() == SAYS.keys()
    assert all(programs().values())


@pytest.mark.parametrize("heading", [heading for heading in SAYS if heading != WEB_APP])
def test_a_program_of_the_readme_runs(heading: str, tmp_path: Path) -> None:
    model_path()
    program = tmp_path / "program.py"
    program.write_text(programs()[heading])
    runner = [REPO / "tests/doubles/notebook.py"] if heading == NOTEBOOK else []
    done = run(*runner, program)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(SAYS[heading], done.stdout), done.stdout


async def test_the_web_app_of_the_readme_ends_the_request_of_a_client_that_leaves(no_tasks_left: None) -> None:
    model_path()
    names: dict[str, Any] = {"__name__": "readme"}
    exec(programs()[WEB_APP], names)
    app = names["app"]
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections from here on: no need to wait
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/stream"
        serving = asyncio.create_task(server.serve([listener]))
        async with httpx.AsyncClient(timeout=60) as client:
            async with client.stream("GET", url, params={"prompt": "one, two, three, four, five, six,"}) as response:
                assert response.status_code == 200
                text = await anext(response.aiter_text())
                engine: Engine = app.state.engine
                assert text and engine.stats().scheduler.num_running == 1
        async with asyncio.timeout(10):
            while engine.stats().scheduler.num_running:  # noqa: ASYNC110 (the app tells nobody that a client left)
                await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
