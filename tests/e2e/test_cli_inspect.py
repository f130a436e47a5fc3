"""The command that says what a checkpoint holds, over generated checkpoints and released configs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.errors import ModelFileError
from deepinfer.inspection import inspect_model
from doubles.command import environment, run_command
from doubles.released_deepseek import v41_flash
from doubles.tiny_deepseek import tiny_v41


def test_a_config_alone_tells_the_release_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(v41_flash()))
    done = run_command("inspect", str(tmp_path), "--ep", "8", "--dp", "8")
    assert done.returncode == 0, done.stderr
    for words in ("a config alone", "96,085", "510,286,023,000", "every token 890 bytes", "every request 2,928,384"):
        assert words in done.stdout, done.stdout
    (line,) = [line.split() for line in done.stdout.splitlines() if "each" in line]
    figures = ["0-7", "0-7", "48", "each", "9.8", "36.1", "45.9", "+", "1.6", "+", "1.0"]
    assert [word for word in line if word != "│"] == figures, done.stdout
    assert "…" not in done.stdout and all(len(line) <= 80 for line in done.stdout.splitlines() if "│" in line)


def test_what_was_generated_is_told_to_the_byte_and_damage_by_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_v41(vocab_size=512)))
    folder = tmp_path / "model"
    command = [sys.executable, "-m", "deepinfer_workers.random_checkpoint", str(tmp_path / "config.json"), str(folder)]
    subprocess.run(command, env=environment(), check=True, timeout=60)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    done = run_command("inspect", str(folder), "--ep", "2", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["files"], len(told["ranks"])) == (0, "match", 2)
    assert (told["num_tensors"], told["num_bytes"]) == (len(index["weight_map"]), index["metadata"]["total_size"])
    assert sum(group["num_bytes"] for group in told["groups"]) == told["num_bytes"]

    shard = folder / index["weight_map"]["norm.weight"]
    shard.write_bytes(shard.read_bytes()[:-1])
    done = run_command("inspect", str(folder))
    assert done.returncode == 1 and "files do not match the config" in done.stdout
    assert f"deepinfer inspect: {shard.name}: tensor " in done.stderr and "it is truncated" in done.stderr


def test_what_cannot_be_told_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_v41(hidden_size=130)))
    with pytest.raises(ModelFileError, match="text_config: hidden_size: a multiple of 32 was expected, 130 came"):
        inspect_model(tmp_path)
    done = run_command("inspect", str(tmp_path), "--ep", "0")
    words = "deepinfer inspect: ep: 1 to 4096 ranks were expected, 0 came"
    assert (done.returncode, done.stdout, done.stderr.strip()) == (2, "", words)
