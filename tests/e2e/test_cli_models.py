"""The command that lists, pulls and removes models, with a hub on this machine in place of the real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deepinfer.catalog import list_models
from doubles.command import run_command
from doubles.hub import fake_hub

REPO = "org/tiny"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "model.safetensors": bytes(range(256)) * 5000,
    "tokenizer.json": b"{}",
    "evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
}


def models(tmp_path: Path, *arguments: str, endpoint: str = "http://127.0.0.1:9") -> subprocess.CompletedProcess[str]:
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    return run_command("models", *arguments, DEEPINFER_CACHE_DIR=str(tmp_path / "cache"), **hub)


def test_a_model_is_pulled_listed_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache/hub/org--tiny"
    with fake_hub(REPO, FILES) as hub:
        done = models(tmp_path, "pull", REPO, endpoint=hub.url)
        assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
        assert "pulling org/tiny at 0123456789ab (3 files, 1 MB)" in done.stderr
        assert hub.served == {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {name: FILES[name] for name in hub.served}
    listed = models(tmp_path)
    assert listed.returncode == 0 and REPO in listed.stdout and str(folder) in listed.stdout
    assert models(tmp_path, "pull", REPO).returncode == 0, "it is here: nobody is asked"
    assert models(tmp_path, "rm", REPO).returncode == 0 and not folder.exists()


def test_a_tampered_file_is_refused(tmp_path: Path) -> None:
    with fake_hub(REPO, FILES) as hub:
        hub.sent["model.safetensors"] = FILES["model.safetensors"][::-1]
        done = models(tmp_path, "pull", REPO, endpoint=hub.url)
    assert done.returncode == 1 and "model.safetensors: expected sha256" in done.stderr
    assert not (tmp_path / "cache/hub/org--tiny").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pull", REPO], 1, "deepinfer models pull: org/tiny: the hub could not be asked: "),
        (["pull", "nothing-known"], 2, "deepinfer models pull: 'nothing-known' is neither"),
        (["rm", "smollm2-135m"], 1, "deepinfer models rm: smollm2-135m: is not in"),
    ],
)
def test_what_goes_wrong_is_one_line(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    """Also on a machine that reaches no hub."""
    done = models(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(words) and len(done.stderr.splitlines()) == 1


def test_local_models_are_listed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for folder in (cache / "mine", tmp_path / "models/theirs", cache / "no-model"):
        folder.mkdir(parents=True)
    (cache / "mine/config.json").write_text("{}")
    (cache / "plain.gguf").write_bytes(b"GGUF")
    (tmp_path / "models/theirs/config.json").write_text("{}")
    one = [model.name for model in list_models(cache_dir=cache, local=str(tmp_path / "models"), catalog=(), shipped=())]
    assert one == [str(tmp_path / "models/theirs"), str(cache / "mine"), str(cache / "plain.gguf")]
    two = [
        model.name
        for model in list_models(cache_dir=cache, local=str(tmp_path / "models/theirs"), catalog=(), shipped=())
    ]
    assert two[0] == str(tmp_path / "models/theirs") and len(two) == 3
    gone = [
        model.name for model in list_models(cache_dir=cache, local=os.fspath(tmp_path / "gone"), catalog=(), shipped=())
    ]
    assert gone == [str(cache / "mine"), str(cache / "plain.gguf")]
    shown = run_command("models", DEEPINFER_CACHE_DIR=str(cache), DEEPINFER_HF_MODEL_DIR=str(tmp_path / "models"))
    assert "theirs" in shown.stdout and "plain.gguf" in shown.stdout and "smollm2-135m" in shown.stdout
