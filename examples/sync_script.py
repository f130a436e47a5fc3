"""A script without an event loop: questions answered in turn, read by plain `for` loops.

    python examples/sync_script.py [--model NAME_OR_PATH] [QUESTION ...]

Ctrl-C ends the answer, then the engine, and leaves no process behind. `DEEPINFER_HF_MODEL_DIR=DIR` serves the model
folder DIR instead of v41-nano, which came with the workers.
"""

from __future__ import annotations

import argparse
import os
import sys

from deepinfer import SamplingParams, SyncEngine

QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea."]
INTERRUPTED = 130
"""The exit status of a program that Ctrl-C ended, by the shells' convention."""


def answer(model: str, questions: list[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=128)
    with SyncEngine(model) as engine:
        for question in questions:
            print(f"> {question}")
            for tok in engine.stream(messages=[{"role": "user", "content": question}], params=params):
                print(tok.text, end="", flush=True)
            print("\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "v41-nano")
    arguments = parser.parse_args()
    try:
        answer(arguments.model, arguments.questions)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
