"""More text of the kind that the corpus holds, written by another small chat model through the engine.

    python -m examples.train_nano.write_text WRITER OUT [--parts N] [--answers N] [--most-tokens N]

WRITER is a model that `Engine` takes, with a chat template: SmolLM2-135M-Instruct wrote the corpus. OUT gets
text_NN.jsonl.xz, lines as `corpus` reads them. Parts that are there already are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import lzma
import random
import re
from collections.abc import Mapping
from pathlib import Path

from deepinfer import Engine, SamplingParams

_TEMPLATES = (
    "Tell me a very short story about {name} and {other} and a {quality} {thing}.",
    "Write a short story about a {quality} {thing} and a {quality2} {thing2}.",
    'Tell me a very short story with the words "{thing}", "{thing2}" and "{quality}".',
    'Write one sentence with the words "{thing}" and "{thing2}".',
    "Give me three short tips about {topic}.",
    "Tell me something interesting about {topic}.",
    "Why do people like {topic}? Answer briefly.",
    "Describe a {quality} {thing} in two sentences.",
    "What would {name} do with a {quality} {thing}?",
    "Say hello to {name}, who likes {topic}.",
)
_NAMES = (
    "Ana",
    "Ben",
    "Chidi",
    "Dora",
    "Emil",
    "Fatima",
    "Goro",
    "Hana",
    "Ivan",
    "Lucy",
    "Maria",
    "Omar",
    "Sam",
    "Tess",
)
_QUALITIES = ("blue", "brave", "broken", "gentle", "hungry", "lonely", "lost", "lucky", "old", "quiet", "small", "warm")
_THINGS = ("boat", "bridge", "cat", "clock", "dragon", "forest", "garden", "hat", "house", "lamp", "letter", "river")
_TOPICS = (
    "books",
    "birds",
    "cooking",
    "dreams",
    "flowers",
    "friends",
    "mountains",
    "music",
    "rain",
    "roads",
    "the sea",
)
_SENTENCE_END = re.compile(r"[.!?][\"”']?(?=\s|$)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("writer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=2_000, help="of a part")
    parser.add_argument("--most-tokens", type=int, default=200, help="of an answer")
    arguments = parser.parse_args()
    write_text(arguments.writer, arguments.out, arguments.parts, arguments.answers, arguments.most_tokens)


def write_text(writer: str | Path, out: Path, num_parts: int, num_answers: int, most: int) -> None:
    """Writes the parts that are missing in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {part: out / f"text_{part:02}.jsonl.xz" for part in range(num_parts)}
    missing = {part: path for part, path in paths.items() if not path.exists()}
    if missing:
        asyncio.run(_write(writer, missing, num_answers, most))


async def _write(writer: str | Path, paths: Mapping[int, Path], num_answers: int, most: int) -> None:
    async with Engine(writer) as engine:
        for part, path in paths.items():
            asked = prompts(part, num_answers)
            params = [SamplingParams(temperature=1.0, max_tokens=most, seq_seed=index) for index in range(len(asked))]
            chats = [[{"role": "user", "content": prompt}] for prompt in asked]
            answers = await engine.generate_many(chats, params, progress=False)
            found = [
                line(prompt, answer.samples[0].text, is_cut=answer.finish_reason != "stop")
                for prompt, answer in zip(asked, answers, strict=True)
            ]
            draft = path.with_suffix(".draft")
            with lzma.open(draft, "wt", encoding="utf-8") as lines:
                lines.writelines(text + "\n" for text in found if text is not None)
            draft.replace(path)
            print(f"{path.name}: {sum(text is not None for text in found)} answers", flush=True)


def prompts(seed: int, most: int) -> list[str]:
    """Random fillings of the templates; the same for the same seed."""
    source = random.Random(seed)

    def filled() -> str:
        name, other = source.sample(_NAMES, 2)
        thing, thing2 = source.sample(_THINGS, 2)
        quality, quality2 = source.sample(_QUALITIES, 2)
        return source.choice(_TEMPLATES).format(
            name=name,
            other=other,
            thing=thing,
            thing2=thing2,
            quality=quality,
            quality2=quality2,
            topic=source.choice(_TOPICS),
        )

    return [filled() for _ in range(most)]


def line(prompt: str, text: str, *, is_cut: bool) -> str | None:
    """Of the corpus; an answer that ran out of tokens ends behind its last whole sentence, `None` where it has none."""
    text = text.strip()
    if is_cut:
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        text = text[: ends[-1]] if ends else ""
    if not text:
        return None
    return json.dumps({"p": prompt, "a": text} | ({"cut": 1} if is_cut else {}), ensure_ascii=False)


if __name__ == "__main__":
    main()
