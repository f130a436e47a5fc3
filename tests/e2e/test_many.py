"""Many prompts at once: what counts as one, what is refused, and a bar that leaves the caller's streams alone."""

from __future__ import annotations

import io
import sys
from collections import UserDict
from typing import Any

import pytest

from deepinfer import Engine, InvalidRequest
from doubles.reading import FAKE, PROMPT, greedy

pytestmark = pytest.mark.usefixtures("no_tasks_left")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Watching(list[Any]):
    """Prompts that note, when one is taken, what the standard streams are."""

    def __init__(self, prompts: list[Any]) -> None:
        super().__init__(prompts)
        self.seen: set[tuple[Any, Any]] = set()

    def __getitem__(self, place: Any) -> Any:
        self.seen.add((sys.stdout, sys.stderr))
        return super().__getitem__(place)


@pytest.mark.parametrize("prompts", ["hello", b"hello", 5, None, {"role": "user", "content": "x"}])
async def test_what_is_no_list_of_prompts_is_refused(prompts: Any) -> None:
    async with Engine("fake", **FAKE) as engine:
        with pytest.raises(InvalidRequest, match="a list of prompts is expected") as caught:
            await engine.generate_many(prompts, greedy(1), progress=False)
        with pytest.raises(InvalidRequest, match="prompts: a range of too many items came"):
            await engine.generate_many(range(10**30), greedy(1), progress=False)  # type: ignore[arg-type]
    assert caught.value.field == "prompts"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (5, "a int came"),
        (None, "give a prompt or messages"),
        ([], "is empty"),
        ([{"role": "user", "content": "x"}], "no tokenizer"),
        ([UserDict(role="user", content="x")], "no tokenizer"),
        ([5, {"role": "user", "content": "x"}], "every token id"),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_refused_as_what_it_is(prompt: Any, words: str) -> None:
    """A list that begins with a mapping is a list of messages, which the fake model has no text for."""
    async with Engine("fake", **FAKE) as engine:
        with pytest.raises(InvalidRequest, match=words):
            await engine.generate_many([prompt], greedy(1), progress=False)


async def test_the_bar_leaves_the_standard_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    prompts = Watching([PROMPT] * 8)
    async with Engine("fake", **FAKE) as engine:
        assert len(await engine.generate_many(prompts, greedy(2))) == 8
    assert prompts.seen == {(sys.stdout, terminal)}
    assert "8/8" in terminal.getvalue()


async def test_the_bar_is_silent_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("FORCE_COLOR", "1")
    async with Engine("fake", **FAKE) as engine:
        await engine.generate_many([PROMPT], greedy(2))
    assert file.getvalue() == ""
