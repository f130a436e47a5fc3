"""DeepSeek models as a user meets them: messages in, a stream out."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from deepinfer import ConfigError, Engine, InvalidRequest, ModelTooLarge, SamplingParams, SyncEngine, fit
from deepinfer.cli.run import Chat
from deepinfer.tokenizer import Tokenizer
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.random_tokenizer import write_tokenizer
from doubles.program import REPO, run
from doubles.released_deepseek import v41_flash
from doubles.tiny_deepseek import tiny_v41

VOCAB_SIZE: Final = 300
HELLO: Final = [{"role": "user", "content": "Hello"}]
TOOLS: Final = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SHORT: Final = SamplingParams(temperature=0, max_tokens=4)


# Over a fake worker, whose tokens mean nothing: what becomes of a call


@pytest.fixture
def v41_folder(tmp_path: Path) -> str:
    """What an engine reads for its prompts, and no more."""
    write_tokenizer(tmp_path, VOCAB_SIZE)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41", "bos_token_id": 0, "eos_token_id": 1}')
    return str(tmp_path)


@pytest.fixture
async def fake_v41(v41_folder: str, no_tasks_left: None) -> AsyncIterator[Engine]:
    async with Engine("fake", tokenizer=v41_folder, fake_vocab_size=VOCAB_SIZE, block_size=4) as engine:
        yield engine


async def prompt_of(engine: Engine, messages: Any = HELLO, **options: Any) -> str:
    completion = await engine.generate(messages=messages, params=SHORT, **options)
    assert completion.prompt is not None and completion.num_prompt_tokens == len(completion.prompt_token_ids)
    return completion.prompt


async def test_messages_are_rendered_as_the_options_say(fake_v41: Engine) -> None:
    assert fake_v41.has_chat_template
    thinks = await prompt_of(fake_v41)
    assert thinks.endswith("<｜User｜>Hello<｜Assistant｜><think>") and "Effort: 75 " in thinks
    assert await prompt_of(fake_v41, thinking=True) == thinks
    assert "Effort: 100 " in await prompt_of(fake_v41, reasoning_effort="max")
    plain = "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>"
    assert await prompt_of(fake_v41, thinking=False) == plain
    assert await prompt_of(fake_v41, reasoning_effort="none") == plain
    required = await prompt_of(fake_v41, thinking=False, tools=TOOLS, tool_choice="required")
    assert '"name": "add"' in required and required.endswith("</think>\n\n<｜DSML｜ calls>\n")


async def test_options_by_the_names_of_vllm(fake_v41: Engine) -> None:
    plain = await prompt_of(fake_v41, thinking=False)
    assert await prompt_of(fake_v41, chat_template_kwargs={"thinking": False}) == plain
    assert await prompt_of(fake_v41, chat_template_kwargs={"enable_thinking": False}) == plain
    assert await prompt_of(fake_v41, chat_template_kwargs={}) == await prompt_of(fake_v41)
    no_thinking = {"thinking": False}
    [completion] = await fake_v41.generate_many([HELLO], SHORT, progress=False, chat_template_kwargs=no_thinking)
    assert completion.prompt == plain
    for kwargs, words in (({"thinking": True}, "has another value"), ({"documents": []}, "not understood"), (3, "int")):
        with pytest.raises(InvalidRequest, match=words):
            await prompt_of(fake_v41, thinking=False, chat_template_kwargs=kwargs)


async def test_long_conversations_and_many_tools_are_encoded_off_the_loop_to_the_same_prompt(fake_v41: Engine) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"<｜User｜>{index}" * 20} for index in range(40)]
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(40)]
    stream = fake_v41.stream(messages=messages, tools=tools, params=SHORT)
    tools.clear()  # the caller's own may change meanwhile
    assert [chunk async for chunk in stream][-1].finish_reason == "length"
    prompt = stream.source
    assert prompt is not None and prompt.text is not None
    assert all(f'"f{index}"' in prompt.text for index in range(40))
    [user] = Tokenizer.from_model(Path(fake_v41.config.tokenizer)).encode("<｜User｜>", add_special_tokens=False)
    assert prompt.text.count("<｜User｜>") == 801 and list(prompt.token_ids).count(user) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": HELLO, "reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"messages": HELLO, "thinking": "yes"}, "thinking"),
        ({"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x" * 10_000}]}, "messages[0].role"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "Hello", "thinking": False}, "thinking"),
        ({"prompt": [1, 2], "tools": TOOLS}, "tools"),
    ],
)
async def test_what_is_refused_names_its_field(options: dict[str, Any], field: str, fake_v41: Engine) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await fake_v41.generate(params=SHORT, **options)
    assert caught.value.field == field


async def test_a_model_with_a_chat_template_has_no_such_choice(word_model: str, no_tasks_left: None) -> None:
    (Path(word_model) / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    async with Engine("fake", tokenizer=word_model, fake_vocab_size=97) as engine:
        assert await prompt_of(engine, [{"role": "user", "content": "w1 w2"}]) == "w1 w2"
        for name, value in {
            "thinking": False,
            "reasoning_effort": "low",
            "tools": TOOLS,
            "tool_choice": "auto",
        }.items():
            with pytest.raises(InvalidRequest, match=f"^{name}: this model has no such choice"):
                await prompt_of(engine, [{"role": "user", "content": "w1 w2"}], **{name: value})


def test_a_chat_in_the_terminal_forgets_what_was_only_thought(v41_folder: str, nothing_left: None) -> None:
    class Recorded(Chat):
        def _answer(self, request: dict[str, Any], params: Any) -> str:
            requests.append(json.loads(json.dumps(request)))
            return "Hm.</think>Yes."

    requests: list[dict[str, Any]] = []
    with SyncEngine("fake", tokenizer=v41_folder, fake_vocab_size=VOCAB_SIZE) as engine:
        chat = Recorded(engine, SHORT, None, False, thinking=True)
        assert chat.take("One?") and chat.take("Two?")
    assert [request["thinking"] for request in requests] == [True, True]
    contents = [(message["role"], message["content"]) for message in requests[1]["messages"]]
    assert contents == [("user", "One?"), ("assistant", "Yes."), ("user", "Two?")]


def test_a_chat_without_roles_cannot_be_told_to_think(word_model: str, nothing_left: None) -> None:
    with (
        SyncEngine("fake", tokenizer=word_model, fake_vocab_size=97) as engine,
        pytest.raises(ConfigError, match=r"^thinking: this model has no chat template"),
    ):
        Chat(engine, SHORT, None, False, thinking=True)


# A small random model in the released format, as a new user meets it


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-v4.1")
    write_model(tiny_v41(vocab_size=384), folder)
    return folder


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products this small are slower on two."""
    monkeypatch.setenv("DEEPINFER_NUM_THREADS", "1")


async def test_a_checkpoint_streams_by_messages(tiny_folder: Path, one_thread: None, no_tasks_left: None) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    ends = SamplingParams(temperature=0, max_tokens=12, logit_bias={1: 100.0})
    async with Engine(str(tiny_folder), prefix_hits="exact", max_num_seqs=4, num_blocks=64) as engine:
        assert engine.has_chat_template and engine.limits.eos_token_ids == (1,)
        texts: list[str] = []
        for thinking in (True, False):
            async with engine.stream(messages=HELLO, params=params, thinking=thinking) as stream:
                chunks = [chunk async for chunk in stream]
            texts.append("".join(chunk.text for chunk in chunks))
            assert chunks[-1].finish_reason == "length"
            again = await engine.generate(messages=HELLO, params=params, thinking=thinking)
            assert again.text == texts[-1] != ""
        assert texts[0] != texts[1]
        done = await engine.generate(messages=HELLO, params=ends)
        assert (done.finish_reason, done.text, done.num_generated_tokens) == ("stop", "", 1)


def test_the_example_serves_the_folder_of_the_environment(tiny_folder: Path, one_thread: None) -> None:
    folder = str(tiny_folder)
    arguments = ("--max-tokens", "4", "--no-thinking")
    done = run("examples/offline_inference.py", *arguments, DEEPINFER_HF_MODEL_DIR=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"6 answers, \d+ prompt tokens, \d+ new tokens in [\d.]+ s: [\d.]+ tokens/s", done.stdout)


def test_the_program_of_the_readme_serves_it_as_well(tiny_folder: Path, one_thread: None, tmp_path: Path) -> None:
    section = (REPO / "README.md").read_text().split("\n## DeepSeek-V4.1-Flash\n")[1].split("\n## ")[0]
    [program] = re.findall(r"```python\n(.*?)```", section, re.S)
    file = tmp_path / "program.py"
    file.write_text(program)
    done = run(file, DEEPINFER_HF_MODEL_DIR=str(tiny_folder), DEEPINFER_SEED="1")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_of_a_config_alone_the_example_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(v41_flash()))
    done = run("examples/offline_inference.py", DEEPINFER_HF_MODEL_DIR=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "model.safetensors.index.json" in done.stderr and "0.0 GB of 510.3 GB are here" in done.stderr
    assert re.search(r"takes 30\.5 GB of memory .*; this machine can hold [\d,.]+ GB", done.stderr)


async def test_a_model_beyond_the_memory_is_refused_before_a_worker_starts(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, no_tasks_left: None
) -> None:
    monkeypatch.setattr(fit, "available_memory", lambda: 1_000_000)
    with pytest.raises(ModelTooLarge, match=r"this machine can hold 0\.0 GB") as caught:
        await Engine.start(str(tiny_folder))
    assert caught.value.needed_bytes > caught.value.available_bytes == 1_000_000
