"""From a file of prompts to a file of results through one engine, as many at once as it serves well.

Knows only the engine's public face, and nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from deepinfer.errors import DeepInferError, InvalidRequest
from deepinfer.many import generate_in_turn, num_at_once, run_all
from deepinfer.prompt_file import BadLine, PromptFile, PromptLine
from deepinfer.result import Completion, Sample
from deepinfer.result_file import ResultFile
from deepinfer.stream import TokenLogprob

if TYPE_CHECKING:
    from deepinfer.engine import Engine


class Totals(Struct):
    """What one run did."""

    num_done: int = 0
    num_bad: int = 0
    num_tokens: int = 0


async def generate_file(
    engine: Engine,
    prompts: PromptFile,
    results: ResultFile,
    *,
    skip_bad: bool = False,
    on_result: Callable[[int], None] = lambda num_tokens: None,
) -> Totals:
    """Answer the lines of `prompts` that `results` does not have; `on_result` hears of each one's tokens.

    What is wrong with a line ends the run with an `InvalidRequest` that names the line, or becomes a line that says
    so (`skip_bad`). Holds no more lines than the engine is asked at once.
    """
    totals = Totals()
    missing = _missing(prompts, results)

    async def work() -> None:
        for line in missing:
            record = await _answer(engine, line)
            if "error" in record:
                if not skip_bad:
                    raise InvalidRequest(f"line {line.line}", record["error"]["message"])
                totals.num_bad += 1
            else:
                totals.num_done += 1
            num_tokens = record.get("num_generated_tokens", 0)
            totals.num_tokens += num_tokens
            results.write(record)
            on_result(num_tokens)

    await run_all([work() for _ in range(num_at_once(engine.config))])
    return totals


def _missing(prompts: PromptFile, results: ResultFile) -> Iterator[PromptLine | BadLine]:
    return (line for line in prompts if not results.has(line.line, line.crc))


async def _answer(engine: Engine, line: PromptLine | BadLine) -> dict[str, Any]:
    if isinstance(line, BadLine):
        return _error(line, line.code, line.reason)
    try:
        done = await generate_in_turn(engine, line.prompt, line.params, messages=line.messages, **line.chat)
    except InvalidRequest as error:
        return _refused(line, error)
    return _record(line, done)


def _refused(line: PromptLine, error: DeepInferError) -> dict[str, Any]:
    return _error(line, error.code, str(error))


def _head(line: PromptLine | BadLine) -> dict[str, Any]:
    return {"line": line.line, "id": line.id, "crc": line.crc}


def _error(line: PromptLine | BadLine, code: str, message: str) -> dict[str, Any]:
    return {**_head(line), "error": {"code": code, "message": message}}


def _record(line: PromptLine, done: Completion) -> dict[str, Any]:
    record: dict[str, Any] = {**_head(line), **_sample(done.samples[0])}
    if len(done.samples) > 1:
        record["samples"] = [_sample(sample) for sample in done.samples]
    if done.prompt_token_logprobs is not None:
        record["prompt_logprobs"] = [None if each is None else _logprob(each) for each in done.prompt_token_logprobs]
    if done.drafts.num_steps:
        record["drafts"] = {"verified": done.drafts.num_verified, "accepted": done.drafts.num_accepted}
    return record | {
        "num_prompt_tokens": done.num_prompt_tokens,
        "num_cached_tokens": done.num_cached_tokens,
        "num_generated_tokens": done.num_generated_tokens,
    }


def _sample(sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {"text": sample.text, "token_ids": sample.token_ids, "finish_reason": sample.finish_reason}
    if sample.stop_reason is not None:
        record["stop_reason"] = sample.stop_reason
    if sample.logprobs is not None:
        record["logprobs"] = [_logprob(each) for each in sample.logprobs]
    return record


def _logprob(each: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": other.token_id, "logprob": other.logprob} for other in each.top]
    return {"token_id": each.token_id, "logprob": each.logprob, "rank": each.rank, "top": top}
