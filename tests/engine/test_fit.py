"""What is said of a model that this machine cannot hold, or whose files are not all here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from deepinfer import fit, model_files
from deepinfer.deepseek_chat import deepseek_family
from deepinfer.errors import ModelFileError, ModelTooLarge
from deepinfer.fit import INDEX, available_memory, check_fit, judge, missing_files
from deepinfer.inspection import Inspection, inspect_model
from deepinfer.tokenizer import Tokenizer
from doubles.released_deepseek import v41_flash

NEEDED: Final = 4 * (8_299_036_784 - 129_280 * 5120)
"""Bytes of V4.1-Flash's weights without experts, tables, embedding, drafts and vision, in float32."""


def write_index(folder: Path, *shards: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"w{index}": name for index, name in enumerate(shards)}}))


def test_files_that_the_index_names_and_that_are_not_there_are_missing(tmp_path: Path) -> None:
    assert missing_files(tmp_path) == [INDEX, "model-*.safetensors", "tokenizer.json"]
    write_index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    (tmp_path / "tokenizer.json").touch()
    assert missing_files(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / "a.safetensors").touch()
    assert missing_files(tmp_path) == ["b.safetensors"]
    (tmp_path / "b.safetensors").touch()
    assert missing_files(tmp_path) == []


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert missing_files(tmp_path) == []


def test_an_index_that_is_a_pipe_or_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(ModelFileError, match="a regular file was expected, and it is none"):
        missing_files(tmp_path)
    (tmp_path / INDEX).unlink()
    write_index(tmp_path, "a.safetensors")
    monkeypatch.setattr(model_files, "MAX_BYTES", 9)
    with pytest.raises(ModelFileError, match=r"at most 9 bytes were expected, \d+ came"):
        missing_files(tmp_path)


def test_a_pipe_in_place_of_a_config_or_a_tokenizer_is_not_opened(tmp_path: Path) -> None:
    reads: list[tuple[str, Callable[[Path], object]]] = [
        ("config.json", deepseek_family),
        ("tokenizer.json", Tokenizer.from_model),
    ]
    for name, read in reads:
        os.mkfifo(tmp_path / name)
        with pytest.raises(ModelFileError, match="a regular file was expected, and it is none"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["\x1b[2J.safetensors", "n" * 5000, "../a.safetensors", "\0"])
def test_a_name_in_an_index_that_is_no_files_is_told_short_and_printable(name: str, tmp_path: Path) -> None:
    write_index(tmp_path, name)
    with pytest.raises(ModelFileError, match=r"files in its folder were expected, .* came") as caught:
        missing_files(tmp_path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelFileError, match=re.escape(f"{INDEX}: cannot be read")):
        missing_files(tmp_path)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    folder = tmp_path_factory.mktemp("flash")
    (folder / "config.json").write_text(json.dumps(v41_flash()))
    return inspect_model(folder)


def test_what_is_missing_is_listed_with_all_figures(flash: Inspection) -> None:
    shards = [f"{index}.safetensors" for index in range(48)]
    with pytest.raises(ModelFileError) as caught:
        judge(Path("flash"), flash, 1, shards, 10_000_000_000, 24_000_000_000)
    assert str(caught.value) == (
        "flash: files are missing: 0.safetensors, 1.safetensors, 2.safetensors and 45 more; "
        "10.0 GB of 510.3 GB are here. It takes 30.5 GB of memory for its dense weights (float32), "
        "beside 491.5 GB in mapped files; this machine can hold 24.0 GB, 6.5 GB too little"
    )


def test_a_model_beyond_the_memory_is_refused_with_both_figures(flash: Inspection) -> None:
    with pytest.raises(ModelTooLarge, match=r"^flash: .* hold 24\.0 GB, \d+\.\d GB too little$") as caught:
        judge(Path("flash"), flash, 1, [], flash.num_bytes, 24_000_000_000)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (NEEDED, 24_000_000_000)
    judge(Path("flash"), flash, 1, [], flash.num_bytes, NEEDED)
    judge(Path("flash"), flash, 1, [], flash.num_bytes, None)
    with pytest.raises(ModelTooLarge):
        judge(Path("flash"), flash, 2, [], flash.num_bytes, 2 * NEEDED - 1)


def test_a_small_model_is_not_looked_into(flash: Inspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_into(folder: Path) -> Inspection:
        looked_into.append(folder)
        return flash

    looked_into: list[Path] = []
    monkeypatch.setattr(fit, "inspect_model", look_into)
    monkeypatch.setattr(fit, "available_memory", lambda: 8_000)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    check_fit(tmp_path, 2)
    check_fit(tmp_path, 3, counts_memory=False)
    assert not looked_into
    with pytest.raises(ModelTooLarge):
        check_fit(tmp_path, 3)
    assert looked_into == [tmp_path]


def test_available_memory_is_what_linux_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24684092 kB\nMemAvailable:   22932188 kB\n")
    assert available_memory(meminfo) == 22_932_188 * 1024
    meminfo.write_text("MemTotal:       24684092 kB\n")
    assert available_memory(meminfo) is None
    assert available_memory(tmp_path / "none") is None
