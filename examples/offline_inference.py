"""Answer several prompts at once, and say how fast: what `make demo` runs.

    python examples/offline_inference.py [--model NAME_OR_PATH] [--max-tokens NUMBER] [--no-thinking] [PROMPT ...]

The model is V4.1-Nano, which comes with the packages: a small one with every part of DeepSeek-V4.1-Flash. It drafts
several tokens ahead and verifies them in one forward; the last lines say what came of that.
`DEEPINFER_HF_MODEL_DIR=DIR` serves the model folder DIR instead, one of DeepSeek-V4.1 for instance. Where weights or
memory are missing, it says which and how much.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time

from deepinfer import DeepInferError, Engine, SamplingParams

PROMPTS = [
    "What does a librarian do?",
    "Tell me a short story about a lost dog.",
    "Write one sentence about the sea.",
    "Write a letter to a friend about the garden.",
    "Why do leaves fall in autumn?",
    "What is a bakery?",
]


async def answer(model: str, prompts: list[str], max_tokens: int, thinking: bool | None) -> None:
    say(f"starting {model}")
    started_s = time.perf_counter()
    engine = await Engine.start(model, on_progress=say)
    try:
        say(f"ready after {time.perf_counter() - started_s:.1f} s")
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        started_s = time.perf_counter()
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        completions = await engine.generate_many(chats, params, thinking=thinking)
        elapsed_s = time.perf_counter() - started_s
        drafts = engine.stats().core.drafts
    finally:
        await engine.aclose()
    for prompt, completion in zip(prompts, completions, strict=True):
        print(f"\n> {prompt}\n{completion.text.strip()}")
    num_tokens = sum(completion.num_generated_tokens for completion in completions)
    num_prompt_tokens = sum(completion.num_prompt_tokens for completion in completions)
    print(
        f"\n{len(completions)} answers, {num_prompt_tokens} prompt tokens, {num_tokens} new tokens "
        f"in {elapsed_s:.1f} s: {num_tokens / elapsed_s:.1f} tokens/s"
    )
    if drafts.num_steps:  # the model has draft stages, and they are on
        print(*drafts.lines(), sep="\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, metavar="PROMPT")
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "v41-nano")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    help_text = "of models that can: think first (the model's own choice if not given)"
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=None, help=help_text)
    arguments = parser.parse_args()
    try:
        asyncio.run(answer(arguments.model, arguments.prompts, arguments.max_tokens, arguments.thinking))
    except DeepInferError as error:
        say(f"offline_inference: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
