"""Lines of prompts: what is one, what is not and why, and how much of a file is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepinfer import ConfigError, SamplingParams
from deepinfer.prompt_file import BadLine, PromptFile, PromptLine


def read(tmp_path: Path, *lines: Any, **defaults: Any) -> list[PromptLine | BadLine]:
    path = tmp_path / "prompts.jsonl"
    texts = [line if isinstance(line, str) else msgspec.json.encode(line).decode() for line in lines]
    path.write_text("\n".join(texts))
    return list(PromptFile(path, defaults))


def test_the_three_kinds_of_prompts_are_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    text, ids, chat = read(tmp_path, {"prompt": "a", "id": "x"}, {"prompt_token_ids": [1, 2]}, {"messages": messages})
    assert isinstance(text, PromptLine) and (text.line, text.id, text.prompt) == (1, "x", "a")
    assert isinstance(ids, PromptLine) and (ids.line, ids.id, ids.prompt) == (2, None, [1, 2])
    assert isinstance(chat, PromptLine) and (chat.prompt, chat.messages) == (None, messages)


def test_what_a_line_says_of_its_chat_is_kept(tmp_path: Path) -> None:
    said = {"thinking": False, "reasoning_effort": "low", "tools": [{"type": "function"}], "tool_choice": "auto"}
    plain, chat = read(tmp_path, {"prompt": "a"}, {"messages": [{"role": "user", "content": "Hello"}], **said})
    assert isinstance(plain, PromptLine) and plain.chat == {}
    assert isinstance(chat, PromptLine) and chat.chat == said


def test_a_line_s_own_parameters_beat_the_defaults(tmp_path: Path) -> None:
    plain, own = read(tmp_path, {"prompt": "a"}, {"prompt": "a", "params": {"max_tokens": 9, "n": 2}}, max_tokens=5)
    assert isinstance(plain, PromptLine) and plain.params == SamplingParams(max_tokens=5)
    assert isinstance(own, PromptLine) and own.params == SamplingParams(max_tokens=9, n=2)


def test_stops_may_be_text_or_a_list(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "params": {"stop": stop, "stop_token_ids": [7]}} for stop in ("x", ["x", "y"])]
    one, two = read(tmp_path, *lines)
    assert isinstance(one, PromptLine) and one.params.stop == "x" and isinstance(two, PromptLine)
    assert list(two.params.stop or ()) == ["x", "y"] and list(two.params.stop_token_ids or ()) == [7]


def test_empty_lines_count_and_are_passed_over(tmp_path: Path) -> None:
    assert [line.line for line in read(tmp_path, {"prompt": "a"}, "", "  ", {"prompt": "b"}, "")] == [1, 4]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a"', "json: Input data was truncated"),
        ("[1]", "json: Expected `object`, got `array`"),
        ('{"prompt": 5}', "prompt: Expected `str | null`, got `int`"),
        ('{"prompt_token_ids": [1, "2"]}', "prompt_token_ids[1]: Expected `int`, got `str`"),
        ("{}", "prompt: exactly one of prompt, prompt_token_ids and messages is expected"),
        ('{"prompt": "a", "messages": []}', "prompt: exactly one"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content: expected a string"),
        ('{"prompt": "a", "thinking": true}', "thinking: it says how messages become a prompt"),
        ('{"prompt": "a", "thinking": "yes"}', "thinking: Expected `bool | null`, got `str`"),
        ('{"prompt": "a", "parms": {}}', "parms: there is no such field"),
        ('{"prompt": "a", "params": {"temprature": 1}}', "temprature: there is no such field"),
        ('{"prompt": "a", "params": {"temperature": "hot"}}', "temperature: Expected `float`, got `str`"),
        ('{"prompt": "a", "params": {"temperature": -1}}', "temperature: -1.0, a number of 0.0 to 100.0"),
        ('{"prompt": "a", "params": {"max_tokens": 0}}', "max_tokens: 0"),
    ],
)
def test_a_bad_line_says_where_and_why(line: str, reason: str, tmp_path: Path) -> None:
    good, bad = read(tmp_path, {"prompt": "a"}, line)
    assert isinstance(good, PromptLine) and isinstance(bad, BadLine)
    assert bad.line == 2 and bad.reason.startswith(reason)


def test_what_is_no_text_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n{"prompt": "a"}\n')
    bad, good = PromptFile(path)
    assert isinstance(bad, BadLine) and isinstance(good, PromptLine)


def test_a_line_that_is_too_long_does_not_hide_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.prompt_file.MAX_LINE_BYTES", 20)
    fits = '{"prompt": "123456"}'
    lines = read(tmp_path, {"prompt": "a" * 70}, {"prompt": "b"}, fits[:-3] + '"}', {"prompt": "a" * 9})
    assert [type(line) for line in lines] == [BadLine, PromptLine, PromptLine, BadLine]
    assert [line.line for line in lines] == [1, 2, 3, 4]


def test_a_line_tells_its_prompt_and_its_parameters_from_others(tmp_path: Path) -> None:
    same = [
        read(tmp_path, {"prompt": "a"}, max_tokens=5)[0].crc,
        read(tmp_path, '{"prompt":"a"}\n', max_tokens=5)[0].crc,
    ]
    others = [
        *(line.crc for line in read(tmp_path, {"prompt": "b"}, {"prompt": "a", "params": {"n": 2}}, max_tokens=5)),
        read(tmp_path, {"prompt": "a"}, max_tokens=6)[0].crc,
        read(tmp_path, "{", max_tokens=5)[0].crc,
    ]
    assert len(set(same)) == 1 and len({*same, *others}) == 5


def test_a_bad_line_keeps_its_id_if_it_has_one(tmp_path: Path) -> None:
    (bad,) = read(tmp_path, {"id": 7, "prompt": "a", "params": {"n": 0}})
    assert isinstance(bad, BadLine) and bad.id == 7


def test_bad_defaults_and_a_missing_file_are_said_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts: .*gone\.jsonl: no such file"):
        PromptFile(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigError, match="temperature: -1"):
        read(tmp_path, {"prompt": "a"}, temperature=-1.0)


def test_a_file_is_read_as_far_as_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' * 100_000)
    lines = iter(PromptFile(path))
    next(lines)
    path.write_text("")  # what is not read yet is gone
    assert sum(1 for _ in lines) < 10_000
