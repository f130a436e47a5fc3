"""The examples run as a newcomer runs them, and the README's program is one of them."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from deepinfer import Engine
from doubles.notebook import Notebook
from doubles.program import REPO, environment, run
from doubles.tiny_llama import TinyLlama

EXAMPLES: Final = REPO / "examples"
PROGRAMS: Final = ("offline_inference", "stream", "sync_script", "two_engines")

pytestmark = pytest.mark.timeout(180)


def run_example(name: str, *arguments: str, model: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return run(f"examples/{name}.py", *arguments, DEEPINFER_HF_MODEL_DIR=model, **variables)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with random weights, a tokenizer of words and a chat template: it says nothing sensible, at once."""
    folder = tmp_path_factory.mktemp("tiny")
    llama = TinyLlama()
    llama.write(folder)
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(llama.vocab)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment, unused-ignore]
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_folder_of_the_environment_is_served(name: str, tiny_model: str) -> None:
    done = run_example(name, model=tiny_model)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bw\d+ w\d+\b", done.stdout), done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_says_how_it_is_used(name: str) -> None:
    done = run_example(name, "--help")
    assert done.returncode == 0 and done.stderr == "", done
    assert f"python examples/{name}.py [--model NAME_OR_PATH]" in done.stdout and "usage:" in done.stdout


def test_offline_inference_answers_and_counts(tmp_path: Path) -> None:
    """With the model that is there without a download, and without a place where one could be kept."""
    done = run_example("offline_inference", "--max-tokens", "24", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [], "something was fetched"
    answers = re.findall(r"\n> .+\n(.+)", done.stdout)
    assert len(answers) == 6 and all(re.search(r"[a-z]+ [a-z]+ [a-z]+", answer) for answer in answers), done.stdout
    committed = re.search(r"^([\d.]+) tokens a forward", done.stdout, re.M)
    assert committed is not None and float(committed[1]) > 1.5
    assert re.search(r"6 answers, \d+ prompt tokens, \d+ new tokens in [\d.]+ s: [\d.]+ tokens/s", done.stdout)


def test_offline_inference_does_without_drafts() -> None:
    done = run_example("offline_inference", "--max-tokens", "4", DEEPINFER_USE_NEXTN_DECODE="0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^6 answers, ", done.stdout, re.M) and "drafts" not in done.stdout


def test_offline_inference_refuses_in_words() -> None:
    done = run_example("offline_inference", "--model", "nothing")
    assert done.returncode == 1 and "known: v41-nano, smollm2-135m" in done.stderr and "Traceback" not in done.stderr


def test_the_readme_shows_the_program_that_runs() -> None:
    body = [line.strip() for line in (EXAMPLES / "stream.py").read_text().splitlines()]
    readme = (REPO / "README.md").read_text()
    program = re.search(r"```python\n(from deepinfer import.*?)```", readme, re.S)
    assert program is not None
    for line in program.group(1).splitlines():
        wanted = (
            line.strip().replace('"Tell me a short story about a lost dog."', "prompt").replace('"v41-nano"', "model")
        )
        assert wanted in body or not wanted, f"{line!r} is not in examples/stream.py"


def test_ctrl_c_ends_the_sync_script_without_a_word(tiny_model: str) -> None:
    command = [sys.executable, "-W", "error", "examples/sync_script.py", *["w1 w2 w3"] * 1000]
    variables = environment(DEEPINFER_HF_MODEL_DIR=tiny_model)
    with subprocess.Popen(command, cwd=REPO, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        assert script.stdout is not None and script.stdout.readline() == b"> w1 w2 w3\n"
        script.send_signal(signal.SIGINT)
        _, errors = script.communicate(timeout=30)
    assert (script.returncode, errors) == (130, b"")


def test_a_vllm_script_runs_with_two_lines_changed(tmp_path: Path) -> None:
    """The import, and the class that is made; the outcome is the example, which anybody can run."""
    theirs = (REPO / "tests" / "data" / "vllm_script.txt").read_text()
    ours = theirs.replace("from vllm import LLM, SamplingParams", "from deepinfer import SamplingParams, SyncEngine")
    ours = ours.replace("llm = LLM(", "llm = SyncEngine(")
    pairs = zip(theirs.splitlines(), ours.splitlines(), strict=True)
    assert len([1 for before, after in pairs if before != after]) == 2
    assert ours == (EXAMPLES / "migrate_from_vllm.py").read_text()
    call = re.search(r"sampling_params = SamplingParams\((.*?)\n    \)", theirs, re.S)
    assert call is not None and len(re.findall(r"^        \w+=", call.group(1), re.M)) == 24
    script = tmp_path / "script.py"
    script.write_text(ours)
    done = run(str(script), DEEPINFER_HF_MODEL_DIR="")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.search(r"^chat: The [a-z]+ ", done.stdout, re.M), done.stdout
    assert done.stdout.count("first token:") == 4 and "London" not in done.stdout


def test_the_web_app_streams_and_refuses() -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", "examples", "--port", str(port), "fastapi_app:app"]
    with subprocess.Popen(
        command, cwd=REPO, stderr=subprocess.PIPE, text=True, env=environment(DEEPINFER_HF_MODEL_DIR="")
    ) as server:
        try:
            assert server.stderr is not None
            while "running on" not in server.stderr.readline():
                assert server.poll() is None, "the server ended"
            url = f"http://127.0.0.1:{port}/stream?prompt="
            with urllib.request.urlopen(f"{url}Write+one+sentence+about+the+sea.", timeout=60) as response:
                assert re.search(rb"[a-z]+ [a-z]+ [a-z]+", response.read())
            for temperature in ("-1", "nan", "abc"):
                with pytest.raises(urllib.error.HTTPError) as caught:
                    urllib.request.urlopen(f"{url}x&temperature={temperature}", timeout=60)
                assert caught.value.code == 400 and b'"field":"temperature"' in caught.value.read()
                caught.value.close()
        finally:
            server.terminate()
            server.communicate(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- the notebook


class Screen(io.StringIO):
    """Where cells print to; `on_text` is called at the next text."""

    on_text: Callable[[], object] | None = None

    def write(self, text: str) -> int:
        on_text, self.on_text = self.on_text, None
        if on_text is not None:
            on_text()
        return super().write(text)


def interrupt() -> None:
    raise KeyboardInterrupt


def cells() -> dict[str, dict[str, Any]]:
    """By their ids."""
    return {cell["id"]: cell for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]}


def test_the_notebook_is_one_of_format_4_and_keeps_no_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len(cells()) == len(notebook["cells"])
    for cell in notebook["cells"]:
        outputs = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | outputs and cell["cell_type"] in (
            "code",
            "markdown",
        )
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"]) and not cell.get("outputs")
        assert all(isinstance(line, str) for line in cell["source"])


def test_the_notebook_runs_and_a_cell_that_is_stopped_leaves_its_engine_usable(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)
    with redirect_stdout(Screen()) as screen:
        asyncio.run(run_the_notebook(screen))
    shown = screen.getvalue()
    answers = re.findall(r"> .+\n(.+)", shown)
    assert len(answers) == 3 and all(re.search(r"[a-z]+ [a-z]+ [a-z]+", answer) for answer in answers), shown


async def run_the_notebook(screen: Screen) -> None:
    """Every cell in its turn; the one to be stopped is run twice, once for each way of being stopped."""
    notebook = Notebook()
    for cell in cells().values():
        source = "".join(cell["source"])
        if "stop" in cell["metadata"].get("tags", ()):
            engine: Engine = notebook.names["engine"]
            running = asyncio.create_task(notebook.run(source))
            screen.on_text = running.cancel  # what the stop button of Jupyter does
            assert isinstance(await running, asyncio.CancelledError)
            await becomes_idle(engine)
            screen.on_text = interrupt  # what it does in the middle of a cell's own code
            assert isinstance(await notebook.run(source), KeyboardInterrupt)
            await becomes_idle(engine)
        elif cell["cell_type"] == "code":
            assert await asyncio.create_task(notebook.run(source)) is None


async def becomes_idle(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while engine.stats().scheduler.num_running:  # noqa: ASYNC110 (a request that ends has nobody left to tell)
            await asyncio.sleep(0.01)
