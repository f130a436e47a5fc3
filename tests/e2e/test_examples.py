"""The examples run as a newcomer runs them, and the README's program is one of them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from doubles.smollm2 import model_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    model_path()
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=REPO, timeout=150)


def test_offline_inference_answers_and_counts() -> None:
    done = run("examples/offline_inference.py", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert re.search(r"6 answers, \d+ prompt tokens, \d+ new tokens in [\d.]+ s: \d+ tokens/s", done.stdout)


def test_offline_inference_refuses_in_words() -> None:
    done = run("examples/offline_inference.py", "--model", "nothing")
    assert done.returncode == 1 and "smollm2-135m" in done.stderr and "Traceback" not in done.stderr


def test_stream_prints_text() -> None:
    """It samples, and the model may choose to end at once: then once more."""
    for _ in range(3):
        done = run("examples/stream.py", "Once upon a time, in a small village by the sea, there was")
        assert done.returncode == 0 and done.stderr == "", done
        if len(done.stdout.split()) > 3:
            return
    raise AssertionError("three times hardly a word")


def test_the_readme_shows_the_program_that_runs() -> None:
    body = [line.strip() for line in (EXAMPLES / "stream.py").read_text().splitlines()]
    readme = (REPO / "README.md").read_text()
    program = re.search(r"```python\n(from deepinfer import.*?)```", readme, re.S)
    assert program is not None
    for line in program.group(1).splitlines():
        wanted = line.strip().replace('"The capital of France is"', "prompt")
        assert wanted in body or not wanted, f"{line!r} is not in examples/stream.py"


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
    done = run("-W", "error", str(script), "smollm2-135m")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "chat: The capital of France is Paris." in done.stdout
    assert done.stdout.count("first token:") == 4 and "London" not in done.stdout


def test_the_web_app_streams_and_refuses() -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", "examples", "--port", str(port), "fastapi_app:app"]
    model_path()
    with subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as server:
        try:
            assert server.stderr is not None
            while "running on" not in server.stderr.readline():
                assert server.poll() is None, "the server ended"
            url = f"http://127.0.0.1:{port}/stream?prompt="
            with urllib.request.urlopen(f"{url}What+is+the+capital+of+France%3F", timeout=60) as response:
                assert response.read() == b"The capital of France is Paris."
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
