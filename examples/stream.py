"""The shortest program: one prompt, its tokens as they come.

    python examples/stream.py [--model NAME_OR_PATH] [PROMPT]

`DEEPINFER_HF_MODEL_DIR=DIR` serves the model folder DIR instead of v41-nano, which came with the workers.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from deepinfer import Engine


async def stream(model: str, prompt: str) -> None:
    async with Engine(model) as engine:
        async for tok in engine.stream(messages=[{"role": "user", "content": prompt}]):
            print(tok.text, end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Tell me a short story about a lost dog.", metavar="PROMPT")
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "v41-nano")
    arguments = parser.parse_args()
    asyncio.run(stream(arguments.model, arguments.prompt))


if __name__ == "__main__":
    main()
