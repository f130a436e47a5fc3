"""Two engines in one process: one for people who wait, one for work that does not.

    python examples/two_engines.py [--model NAME_OR_PATH] [--bulk-model NAME_OR_PATH]

Each has a worker, a queue and memory of its own, so the answer never queues behind the work, and closing one leaves the
other alone. `DEEPINFER_HF_MODEL_DIR=DIR` serves the model folder DIR instead of v41-nano, which came with the workers.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from deepinfer import Completion, Engine, SamplingParams

THINGS = ["the sea", "a library", "bread", "the moon", "a violin", "winter"]


async def serve(chat_model: str, bulk_model: str) -> None:
    async with Engine(chat_model, num_threads=1) as chat:
        async with Engine(bulk_model, num_threads=1, max_num_seqs=64, kv_cache_bytes=256 << 20) as bulk:
            print(f"workers: {chat.worker_pids} {bulk.worker_pids}")
            _, completions = await asyncio.gather(converse(chat, "What is the capital of France?"), describe(bulk))
        for thing, completion in zip(THINGS, completions, strict=True):
            print(f"{thing}: {completion.text.strip()!r}")
        print(f"workers: {chat.worker_pids} {bulk.worker_pids}")
        await converse(chat, "What is the capital of Italy?")


async def converse(chat: Engine, question: str) -> None:
    print(f"> {question}")
    messages = [{"role": "user", "content": question}]
    async for tok in chat.stream(messages=messages, params=SamplingParams(temperature=0, max_tokens=64)):
        print(tok.text, end="", flush=True)
    print()


async def describe(bulk: Engine) -> list[Completion]:
    chats = [[{"role": "user", "content": f"Describe {thing} in a few words."}] for thing in THINGS]
    return await bulk.generate_many(chats, SamplingParams(temperature=0, max_tokens=16), progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "v41-nano")
    parser.add_argument("--bulk-model", help="the same if not given")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.model, arguments.bulk_model or arguments.model))


if __name__ == "__main__":
    main()
