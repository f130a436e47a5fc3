"""Many prompts through one engine, as many at once as it serves well, with a progress bar.

Knows only the engine's public face.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepinfer.config import EngineConfig
from deepinfer.errors import InvalidRequest, Overloaded
from deepinfer.loop import pause, run_together
from deepinfer.progress import ProgressBar
from deepinfer.result import Completion
from deepinfer_protocol import SamplingParams


class Generator(Protocol):
    """An engine, or a client of one."""

    async def generate(self, prompt: Any, params: SamplingParams | None, **options: Any) -> Completion: ...


async def generate_many(
    engine: Generator,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    at_once: int,
    progress: bool,
    options: dict[str, Any],
) -> list[Completion]:
    """See `Engine.generate_many`. `at_once`: how many requests are open at a time."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"a {type(prompts).__name__} came, a list of prompts is expected")
    _check_countable(prompts)
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequest("params", f"{len(each)} came for {len(prompts)} prompts")
    completions: list[Completion | None] = [None] * len(prompts)
    places = iter(range(len(prompts)))

    with ProgressBar(len(prompts), progress) as bar:

        async def work() -> None:
            for place in places:
                completions[place] = done = await _generate_one(engine, prompts[place], each[place], options)
                bar.advance(done.num_generated_tokens)

        await run_all([work() for _ in range(min(len(prompts), at_once))])
    return [completion for completion in completions if completion is not None]


def _check_countable(prompts: Sequence[Any]) -> None:
    try:
        len(prompts)
    except OverflowError:
        raise InvalidRequest("prompts", f"a {type(prompts).__name__} of too many items came") from None


def num_at_once(config: EngineConfig) -> int:
    """Enough to fill every slot twice over, and never more than the queue takes."""
    return min(2 * config.max_num_seqs * config.num_workers, config.max_queued_requests)


async def _generate_one(
    engine: Generator, prompt: Any, params: SamplingParams | None, options: dict[str, Any]
) -> Completion:
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        return await generate_in_turn(engine, None, params, messages=prompt, **options)
    return await generate_in_turn(engine, prompt, params, **options)


async def generate_in_turn(engine: Generator, prompt: Any, params: SamplingParams | None, **options: Any) -> Completion:
    """`Engine.generate`, again and again while more waits than the engine admits: long prompts, or others' requests."""
    while True:
        try:
            return await engine.generate(prompt, params, **options)
        except Overloaded as error:
            await pause(error.retry_after_s)


async def run_all(works: list[Any]) -> None:
    """All of them, or the first error, with the rest ended."""
    try:
        await run_together(works)
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
