"""The chat in the terminal: what is typed, what is answered, and Ctrl-C."""

from __future__ import annotations

import builtins
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfer import SyncEngine
from deepinfer.cli import app
from deepinfer.cli.run import Chat
from deepinfer_protocol import SamplingParams
from doubles.command import run_command, running
from doubles.reading import FAKE
from doubles.smollm2 import model_path

pytestmark = pytest.mark.usefixtures("runtime_home")


@pytest.fixture
def chat_model(word_model: str) -> str:
    """A tokenizer with a chat template that shows every message it is given."""
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    (Path(word_model) / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return word_model


def fake(tokenizer: str, step_s: float = 0.001) -> list[str]:
    settings = {"tokenizer": tokenizer, "fake_vocab_size": 97, "fake_step_s": step_s}
    return ["run", "fake", "--temperature", "0"] + [
        part for name, value in settings.items() for part in ("--set", f"{name}={value}")
    ]


def test_a_pipe_of_prompts_gives_an_answer_a_line(word_model: str) -> None:
    done = run_command(*fake(word_model), "--max-tokens", "4", "--stats", stdin="w1 w2\n\n/help\nw1 w2\nw3\n")
    assert done.returncode == 0
    answers = done.stdout.splitlines()
    assert len(answers) == 3 and answers[0] == answers[1] != answers[2]
    assert all(len(answer.split()) == 4 for answer in answers)
    assert done.stderr.count("[4 tokens: the first after") == 3 and "/clear" in done.stderr


def test_an_answer_with_drafts_says_how_many_tokens_a_forward_committed(word_model: str) -> None:
    asked = [*fake(word_model), "--max-tokens", "30", "--stats"]
    drafting = run_command(*asked, "--set", "fake_num_drafts=4", stdin="w1 w2\n")
    plain = run_command(*asked, stdin="w1 w2\n")
    assert drafting.stdout == plain.stdout
    told = re.search(r"; (\d\.\d\d) tokens a forward]", drafting.stderr)
    assert told is not None and 1 < float(told[1]) < 5
    assert "a forward" not in plain.stderr


@pytest.mark.parametrize("is_answering", [True, False])
def test_sigint_ends_a_run_of_a_pipe(word_model: str, is_answering: bool) -> None:
    with running(*fake(word_model, step_s=0.02), "--max-tokens", "1000" if is_answering else "5") as command:
        command.write("w1 w2\n")
        command.read_until("w" if is_answering else "\n", times=2 if is_answering else 1)
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130
    assert "Traceback" not in command.written and "deepinfer run: interrupted" in command.written


def test_on_a_terminal_ctrl_c_stops_the_answer_and_a_second_one_leaves(word_model: str) -> None:
    with running(*fake(word_model, step_s=0.02), "--max-tokens", "1000", on_terminal=True) as command:
        command.read_until(">>> ")
        command.write("w1 w2\n")
        shown = len(command.written)
        while " w" not in command.written[shown + 10 :]:
            command.read_until("w", times=command.written.count("w") + 1)
        command.write("\x03")
        command.read_until("(stopped)")
        command.read_until(">>> ", times=2)
        command.write("/nonsense\n")
        command.read_until("no such command")
        command.read_until(">>> ", times=3)
        command.press_until_it_ends("\x03")
        assert command.end() == 0
    assert "Traceback" not in command.written


def test_on_a_terminal_ctrl_d_leaves(word_model: str) -> None:
    with running(*fake(word_model), on_terminal=True) as command:
        command.read_until(">>> ")
        command.write("\x04")
        assert command.end() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "nothing-known"], 2, "deepinfer run: 'nothing-known' is neither"),
        (["run", "fake", "--set", "block_size=-1"], 2, "deepinfer run: block_size: '-1'"),
        (["run", "fake", "--set", "nonsense=1"], 2, "deepinfer run: nonsense: there is no such setting"),
        (["run", "fake", "--set", "model=x"], 2, "deepinfer run: model: is the command's own argument"),
        (["run", "fake", "--temperature", "-1"], 2, "deepinfer run: temperature: -1.0, a number of 0.0 to 100.0"),
        (["run", "fake"], 2, "deepinfer run: tokenizer: this model has none"),
        (["run", "gone.gguf"], 1, "deepinfer run: gone.gguf: no such file"),
        (["run"], 2, "Missing argument"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(arguments: list[str], code: int, words: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert words in done.stderr and isinstance(done.exception, SystemExit)
    if words.startswith("deepinfer"):
        assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_ends_the_command_in_silence(word_model: str) -> None:
    with running(*fake(word_model, step_s=0.005), "--max-tokens", "1000") as command:
        command.write("w1 w2\n")
        command.read_until("w")
        assert command.process.stdout is not None
        command.process.stdout.close()
        assert command.process.wait(30) == 1


@pytest.mark.model
def test_a_real_model_remembers_the_conversation() -> None:
    stdin = "What is the capital of France?\nAnd of Italy?\n/clear\nWhat is the capital of France?\n"
    done = run_command("run", str(model_path()), "--temperature", "0", "--max-tokens", "12", stdin=stdin)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert "Paris" in first and "Rome" in second and third == first


# The conversation itself, in this process


def greedy_chat(engine: SyncEngine, system: str | None = None) -> Chat:
    return Chat(engine, SamplingParams(max_tokens=3, temperature=0.0), system, has_stats=False)


def test_a_conversation_is_told_to_the_model_as_messages(chat_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with SyncEngine("fake", tokenizer=chat_model, **FAKE) as engine:
        chat = greedy_chat(engine, system="w9")
        assert chat.take("w1\n") and chat.take("w2")
        answers = capsys.readouterr().out.splitlines()
        contents = [message["content"] for message in chat._messages]
        assert contents == ["w9", "w1", answers[0], "w2", answers[1]]
        roles = [message["role"] for message in chat._messages]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        assert chat.take("/clear") and [message["role"] for message in chat._messages] == ["system"]
        assert not chat.take(" /exit ")
        spent = engine.metrics()["prompt_tokens"].value
        assert spent == 4 + 4 + (3 + 1 + 2), "role and content each, and the first answer"


def test_a_refused_question_is_taken_back(chat_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with SyncEngine("fake", tokenizer=chat_model, max_model_len=24, **FAKE) as engine:
        chat = greedy_chat(engine)
        assert chat.take("w1")
        known = list(chat._messages)
        assert len(known[-1]["content"].split()) == 3
        assert chat.take("w1 " * 30)
        assert chat._messages == known and chat.num_refused == 1
        assert "/clear forgets the conversation" in capsys.readouterr().err
        assert chat.take("w2 " * 15) and len(chat._messages) == 4
        assert len(chat._messages[-1]["content"].split()) == 2, "as many tokens as fit"


def test_an_interrupted_answer_is_aborted_and_kept(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def show(text: str = "", **options: Any) -> None:
        shown.append(text)
        if len(shown) == 5:
            raise KeyboardInterrupt

    with SyncEngine("fake", tokenizer=chat_model, **FAKE) as engine:
        chat = Chat(engine, SamplingParams(max_tokens=5000, temperature=0.0), None, has_stats=False)
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "print", show)
            chat.take("w1")
        engine.generate([1], SamplingParams(max_tokens=1))  # behind the abort
        metrics = engine.metrics()
        assert metrics["request_success"].values == {"abort": 1, "length": 1}
        assert metrics["generation_tokens"].value < 200
        assert chat._messages[-1] == {"role": "assistant", "content": "".join(shown[:5])}
