"""The shortest program: one prompt, its tokens as they come.

    python examples/stream.py [--model NAME_OR_PATH] [PROMPT]

`DEEPINFER_HF_MODEL_DIR=DIR` serves the model folder DIR instead of the small one that is fetched by name.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from deepinfer import Engine, SamplingParams


async def stream(model: str, prompt: str) -> None:
    async with Engine(model) as engine:
        async for tok in engine.stream(prompt, SamplingParams(max_tokens=32)):
            print(tok.text, end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="The capital of France is", metavar="PROMPT")
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "smollm2-135m")
    arguments = parser.parse_args()
    asyncio.run(stream(arguments.model, arguments.prompt))


if __name__ == "__main__":
    main()
