"""Text to what training reads: a tokenizer, a configuration, and rows of token ids in files of a size that travels.

    python -m examples.train_nano.prepare OUT CORPUS.jsonl.xz ... [--config FILE] [--most-tokens N]

Writes to OUT: tokenizer.json and tokenizer_config.json; config.json with the figures that hang on the tokenizer;
compressed.npy, the ids that Engram hashes; train_LENGTH_NN.npy and test_LENGTH_00.npy, uint16 [rows, LENGTH], ids as
in `chat`; and test_conversations.jsonl, held-out conversations as messages. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from deepinfer_workers.models.deepseek.engram_hash import compressed_vocabulary
from deepinfer_workers.models.deepseek.random_tokenizer import MIN_VOCAB_SIZE, write_bpe
from examples.train_nano.chat import UNLEARNT, TextEncoder, Turn
from examples.train_nano.corpus import Answer, read_answers
from examples.train_nano.packing import RowPacker, Rows

SHORT, LONG = 640, 2048
"""Two stories fit the first with little room left."""
SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in simple English.",
    "You tell short stories.",
    "Answer briefly.",
    "You are DeepInfer, a small language model.",
)
SEED = 7
_TOKENIZER_TEXTS = 100_000
_BATCH = 5_000
_SYSTEM_SHARE = 0.05
_TALK_SHARE = 0.2
"""Of the answers: turns of conversations."""
_LEAST_TALK, _MOST_TALK = 300, 2_000
_NUM_TEST_TALKS = 200
_PART_BYTES = 28_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("corpus", type=Path, nargs="+")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.json"))
    parser.add_argument("--lengths", type=int, nargs=2, default=(SHORT, LONG), help="of rows")
    parser.add_argument("--most-tokens", type=int, default=48_000_000, help="of the rows to train on")
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.corpus, arguments.config, arguments.most_tokens, tuple(arguments.lengths))


def prepare(out: Path, corpus: Sequence[Path], config: Path, most_tokens: int, lengths: tuple[int, int]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    clock = time.monotonic()
    answers = read_answers(corpus, SEED)
    print(f"{len(answers)} answers after {time.monotonic() - clock:.0f} s", flush=True)
    metadata = json.loads(config.read_text(encoding="utf-8"))
    vocab_size = metadata["text_config"]["vocab_size"]
    if not (out / "tokenizer.json").exists():
        train_tokenizer(out, answers, vocab_size)
        print(f"a tokenizer after {time.monotonic() - clock:.0f} s", flush=True)
    compressed = compressed_vocabulary(out / "tokenizer.json", vocab_size)
    np.save(out / "compressed.npy", compressed)
    metadata["text_config"]["engram_compressed_vocab_size"] = int(compressed.max()) + 1
    (out / "config.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    if (out / f"test_{lengths[1]}_00.npy").exists():
        return
    encoder = TextEncoder(out / "tokenizer.json")
    writer = Writer(encoder, metadata["pad_token_id"], lengths)
    for start in range(0, len(answers), _BATCH):
        writer.add(answers[start : start + _BATCH])
        print(f"{writer.num_tokens} tokens after {time.monotonic() - clock:.0f} s", flush=True)
        if writer.num_tokens >= most_tokens:
            break
    writer.write(out)


def train_tokenizer(out: Path, answers: Sequence[Answer], vocab_size: int) -> None:
    """Byte-level BPE of exactly `vocab_size` ids, the special ones among them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + vocab_size - MIN_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for answer in answers[:_TOKENIZER_TEXTS] for text in (answer.prompt, answer.text))
    backend.train_from_iterator(texts, trainer)
    merges = json.loads(backend.to_str())["model"]["merges"]
    write_bpe(out, [(first, second) for first, second in merges])


class Writer:
    """Splits documents into short and long, trained on and held out."""

    def __init__(self, encoder: TextEncoder, pad: int, lengths: tuple[int, int]) -> None:
        self.num_tokens = 0
        self._encoder, (self._short, self._long) = encoder, lengths
        self._random = random.Random(SEED)
        self._system = encoder.encode(SYSTEM_LINES)
        self._packers = {
            (split, length): RowPacker(length, pad + UNLEARNT) for split in ("train", "test") for length in lengths
        }
        self._talks = {split: Talk(self._random) for split in ("train", "test")}
        self._messages: list[list[dict[str, str]]] = []

    def add(self, answers: Sequence[Answer]) -> None:
        texts = self._encoder.encode([text for answer in answers for text in (answer.prompt, answer.text)])
        for index, answer in enumerate(answers):
            turn = Turn(texts[2 * index], texts[2 * index + 1], answer.is_cut)
            split = "test" if answer.is_held_out else "train"
            if self._random.random() < _TALK_SHARE:
                self._add_turn(split, turn, answer)
            else:
                self._add_document(split, self._short, [turn])

    def _add_turn(self, split: str, turn: Turn, answer: Answer) -> None:
        talk = self._talks[split]
        if not talk.has_room(turn):
            self._add_document(split, self._long, talk.turns)
            if split == "test" and len(self._messages) < _NUM_TEST_TALKS:
                self._messages.append(list(talk.messages()))
            talk = self._talks[split] = Talk(self._random)
        talk.add(turn, answer)

    def _add_document(self, split: str, length: int, turns: Sequence[Turn]) -> None:
        system = self._random.choice(self._system) if self._random.random() < _SYSTEM_SHARE else None
        ids = self._encoder.chat.render(turns, system)
        self._packers[split, length].add(ids)
        self.num_tokens += len(ids) * (split == "train")

    def write(self, out: Path) -> None:
        for (split, length), packer in self._packers.items():
            for index, rows in enumerate(_parts(packer.rows())):
                np.save(out / f"{split}_{length}_{index:02}.npy", rows)
        lines = (json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in self._messages)
        (out / "test_conversations.jsonl").write_text("".join(lines), encoding="utf-8")


class Talk:
    """A conversation of some length that is drawn beforehand."""

    def __init__(self, source: random.Random) -> None:
        self.turns: list[Turn] = []
        self._answers: list[Answer] = []
        self._most = source.randint(_LEAST_TALK, _MOST_TALK)
        self._size = 16  # markers, and a line of the system

    def has_room(self, turn: Turn) -> bool:
        return len(self.turns) < 2 or self._size + _size(turn) <= self._most

    def add(self, turn: Turn, answer: Answer) -> None:
        self.turns.append(turn)
        self._answers.append(answer)
        self._size += _size(turn)

    def messages(self) -> Iterator[dict[str, str]]:
        for answer in self._answers:
            yield {"role": "user", "content": answer.prompt}
            yield {"role": "assistant", "content": answer.text}


def _size(turn: Turn) -> int:
    return len(turn.prompt) + len(turn.answer) + 4


def _parts(rows: Rows) -> Iterator[Rows]:
    """In the order of packing, which is random enough: at most `_PART_BYTES` each."""
    most = max(_PART_BYTES // (2 * rows.shape[1]), 1)
    for start in range(0, max(len(rows), 1), most):
        yield rows[start : start + most]


if __name__ == "__main__":
    main()
