"""Files of prompts through the command: nothing finished is lost, and nothing is done twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from deepinfer import Engine, InvalidRequest
from deepinfer.generate_file import generate_file
from deepinfer.prompt_file import PromptFile
from deepinfer.result_file import ResultFile
from doubles.command import run_command, running
from doubles.reading import FAKE, VOCAB_SIZE, greedy, wanted

pytestmark = pytest.mark.usefixtures("runtime_home")

Record = dict[str, Any]


def write_prompts(path: Path, count: int, **params: Any) -> Path:
    lines = [{"prompt_token_ids": [1 + index % 90], "id": f"p{index}", "params": params} for index in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(prompts: Path, out: Path, *more: str, step_s: float = 0.001) -> list[str]:
    settings = ("--set", f"fake_step_s={step_s}", "--set", f"fake_vocab_size={VOCAB_SIZE}", "--set", "max_num_seqs=4")
    return [
        "generate",
        "fake",
        str(prompts),
        "-o",
        str(out),
        "--temperature",
        "0",
        "--max-tokens",
        "6",
        *settings,
        *more,
    ]


def check_complete(records: list[Record], count: int, num_tokens: int = 6) -> None:
    """Every line once, with the tokens of its own prompt."""
    assert sorted(record["line"] for record in records) == list(range(1, count + 1))
    for record in records:
        index = record["line"] - 1
        assert record["id"] == f"p{index}" and record["finish_reason"] == "length"
        assert record["token_ids"] == wanted(num_tokens, [1 + index % 90])
        assert (record["num_prompt_tokens"], record["num_generated_tokens"]) == (1, num_tokens)


def test_every_line_is_answered_and_a_second_run_does_nothing(tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "in.jsonl", 40), tmp_path / "out.jsonl"
    done = run_command(*generate(prompts, out, "--trace", str(tmp_path / "trace.json")))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "40 lines answered: 240 tokens in" in done.stderr
    check_complete(read(out), 40)
    steps = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["name"].startswith("step ")]
    assert sum(event["args"]["tokens"] for event in steps) == 240
    before, trace = out.read_bytes(), (tmp_path / "trace.json").read_bytes()
    again = run_command(*generate(prompts, out, "--trace", str(tmp_path / "trace.json")))
    assert again.returncode == 0 and "all 40 lines are in" in again.stderr
    assert out.read_bytes() == before and (tmp_path / "trace.json").read_bytes() == trace
    with prompts.open("a") as file:
        file.write('{"prompt_token_ids": [1]}\n')
    out.write_bytes(before + before.splitlines(keepends=True)[0])  # as many lines as prompts, but not of the last
    more = run_command(*generate(prompts, out))
    assert more.returncode == 0 and "1 lines answered, 40 were there" in more.stderr
    other = run_command(*generate(prompts, out, "--seed", "1"))
    assert other.returncode == 2 and "is of another prompt or other parameters" in other.stderr
    onto = run_command(*generate(prompts, prompts))
    assert onto.returncode == 2 and "is the file of the prompts" in onto.stderr
    assert len(prompts.read_bytes().splitlines()) == 41


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_run_that_was_ended_goes_on_where_it_was(number: signal.Signals, code: int, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "in.jsonl", 60), tmp_path / "out.jsonl"
    with running(*generate(prompts, out, step_s=0.01)) as command:
        while not (out.exists() and out.read_bytes().count(b"\n") >= 10):
            assert command.process.poll() is None
        command.process.send_signal(number)
        assert command.end() == code and "Traceback" not in command.written
    kept = out.read_bytes()
    num_kept = kept.count(b"\n")
    assert 10 <= num_kept < 60
    if number == signal.SIGINT:
        assert "run again to go on" in command.written
    out.write_bytes(kept + b'{"line":33,"id":"p32","crc"')  # as a power cut may leave it
    done = run_command(*generate(prompts, out))
    assert done.returncode == 0 and f"{60 - num_kept} lines answered, {num_kept} were there" in done.stderr
    assert out.read_bytes().startswith(kept)
    check_complete(read(out), 60)


def test_bad_lines_are_named_before_anything_runs(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_token_ids": [1]}\n{"prompt": \n\n{"prompt_token_ids": [1], "params": {"n": 0}}\n')
    done = run_command(*generate(prompts, out))
    assert done.returncode == 2 and not out.exists()
    assert f"{prompts}: line 2: json: Input data was truncated" in done.stderr
    assert f"{prompts}: line 4: n: 0" in done.stderr
    assert "2 of 3 lines cannot be asked" in done.stderr and "loading" not in done.stderr


def test_bad_lines_can_become_error_lines(tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        f'{{"prompt_token_ids": [1]}}\n{{"prompt": \n{{"prompt_token_ids": [{VOCAB_SIZE}], "id": "z"}}\n'
    )
    done = run_command(*generate(prompts, out, "--skip-bad"))
    assert done.returncode == 0 and "1 lines answered, 2 could not be asked" in done.stderr
    records = {record["line"]: record for record in read(out)}
    assert records[1]["token_ids"] == wanted(6, [1])
    assert records[2]["error"] == {"code": "invalid_param", "message": "json: Input data was truncated"}
    assert records[3]["id"] == "z" and "not in the vocabulary" in records[3]["error"]["message"]


# In this process


def test_what_became_of_drafts_is_told_and_in_the_lines(tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    done = run_command(*generate(prompts, out, "--set", "fake_num_drafts=3"))
    assert done.returncode == 0 and "tokens a forward" in done.stderr, done.stderr
    check_complete(read(out), 20)
    drafts = [record["drafts"] for record in read(out)]
    assert 0 < sum(each["accepted"] for each in drafts) < sum(each["verified"] for each in drafts)


@pytest.mark.usefixtures("no_tasks_left")
async def test_what_only_the_model_refuses_names_the_line_and_keeps_what_is_finished(tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt_token_ids": [1], "params": {"max_tokens": 2}}\n' * 3 + '{"prompt_token_ids": [97]}\n')
    async with Engine("fake", max_num_seqs=1, max_queued_requests=1, **FAKE) as engine:
        refused = pytest.raises(InvalidRequest, match=r"line 4: prompt: token id 97")
        with ResultFile(tmp_path / "out.jsonl") as results, refused:
            await generate_file(engine, PromptFile(prompts), results)
    assert [record["line"] for record in read(tmp_path / "out.jsonl")] == [1, 2, 3]


@pytest.mark.usefixtures("no_tasks_left")
async def test_samples_and_logprobs_are_in_the_line(tmp_path: Path) -> None:
    params: Record = {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0, "stop_token_ids": [wanted(3, [1])[2]]}
    prompts = write_prompts(tmp_path / "in.jsonl", 3, n=2, temperature=0, **params)
    async with Engine("fake", **FAKE) as engine:
        with ResultFile(tmp_path / "out.jsonl") as results:
            totals = await generate_file(engine, PromptFile(prompts), results)
    assert (totals.num_done, totals.num_bad, totals.num_tokens) == (3, 0, 18)
    for record in read(tmp_path / "out.jsonl"):
        first, second = record["samples"]
        assert first["token_ids"] == record["token_ids"] and len(second["token_ids"]) == 3
        assert [each["token_id"] for each in record["logprobs"]] == record["token_ids"]
        assert len(record["logprobs"][0]["top"]) == 1 == record["logprobs"][0]["rank"]
        assert record["prompt_logprobs"] == [None]
    ended = next(record for record in read(tmp_path / "out.jsonl") if record["line"] == 1)
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", wanted(3, [1])[2])


@pytest.mark.usefixtures("no_tasks_left")
async def test_prompts_that_fill_the_queue_wait_for_their_turn(tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3], "params": {"max_tokens": 2}}\n' * 6)
    async with Engine("fake", max_num_seqs=1, max_queued_tokens=4, **FAKE) as engine:
        with ResultFile(tmp_path / "out.jsonl") as results:
            assert (await generate_file(engine, PromptFile(prompts), results)).num_done == 6
        assert len(await engine.generate_many([[1, 2, 3]] * 4, progress=False, params=greedy(1))) == 4


@pytest.mark.usefixtures("no_tasks_left")
async def test_no_more_lines_are_read_than_the_engine_is_asked(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "in.jsonl", 200, max_tokens=3)
    read_lines: list[int] = []

    class Watched(PromptFile):
        def __iter__(self) -> Any:
            for line in super().__iter__():
                read_lines.append(line.line)
                yield line

    ahead: list[int] = []
    async with Engine("fake", max_num_seqs=4, **FAKE) as engine:
        with ResultFile(tmp_path / "out.jsonl") as results:
            done = iter(range(1, 1000))
            await generate_file(
                engine, Watched(prompts), results, on_result=lambda _: ahead.append(len(read_lines) - next(done))
            )
    assert len(read_lines) == 200 and max(ahead) <= 8, "two for each slot"
