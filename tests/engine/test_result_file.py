"""Lines of results: each is there or not, whatever ended the process that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer import ConfigError
from deepinfer.result_file import ResultFile


def test_what_was_written_is_known_to_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        for line in (3, 1, 2**20):
            results.write({"line": line, "id": f"id{line}", "crc": 10 + line, "text": "x"})
    with ResultFile(path) as results:
        assert [line for line in range(6) if results.has(line, 10 + line)] == [1, 3]
        assert results.has(2**20, 10 + 2**20) and not results.has(2**20 + 1, 0)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("torn", ['{"line": 2, "id": null, "te', '{"line": 2, "id": null}', "{"])
def test_a_torn_last_line_is_dropped(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = '{"line": 1, "crc": 5}\n'
    path.write_text(whole + torn)
    with ResultFile(path) as results:
        assert results.has(1, 5) and not results.has(2, 5)
        assert path.read_text() == whole
        results.write({"line": 2, "crc": 6})
    assert path.read_text() == whole + '{"line":2,"crc":6}\n'


def test_results_of_other_prompts_are_not_taken_for_these(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"line": 1, "crc": 5}\n')
    with ResultFile(path) as results, pytest.raises(ConfigError, match="line 1 is of another prompt or other parame"):
        results.has(1, 6)


def test_a_number_in_a_line_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"line": {1 << 31}, "crc": 5}}\n')
    with ResultFile(path) as results:
        assert results.has(1 << 31, 5) and len(results._line_to_crc) == 1


OTHERS = [
    *("hello\n", '{"text": "x"}\n', '{"line": -1, "crc": 5}\n', '{"line": "1", "crc": 5}\n', '{"line": 1}\n'),
    *("hello", '{"prompt": "x"}', '{"lin": 1}', " "),  # without an end of the line
]


@pytest.mark.parametrize("content", OTHERS)
def test_a_file_of_something_else_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text('{"line": 1, "crc": 5}\n' + content)
    with pytest.raises(ConfigError, match="line 2 is no result of ours"):
        ResultFile(path)
    assert path.read_text() == '{"line": 1, "crc": 5}\n' + content


def test_two_writers_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path), pytest.raises(ConfigError, match="is being written by another process"):
        ResultFile(path)
    with ResultFile(path):
        pass


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out: .* cannot be written: No such file or directory"):
        ResultFile(tmp_path / "gone" / "out.jsonl")
