"""The shortest program: one prompt, its tokens as they come."""

from __future__ import annotations

import asyncio
import sys

from deepinfer import Engine, SamplingParams


async def main(prompt: str) -> None:
    async with Engine("smollm2-135m") as engine:
        async for tok in engine.stream(prompt, SamplingParams(max_tokens=32)):
            print(tok.text, end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "The capital of France is"))
