"""What grows out of chunks."""

from __future__ import annotations

import time

from deepinfer.result import Completion
from deepinfer.stream import Logprob, TokenChunk, TokenLogprob


def chunk(index: int, sample_index: int = 0) -> TokenChunk:
    entry = TokenLogprob(index, -1.0, (Logprob(index, -1.0),), 1)
    return TokenChunk(f"{index} ", (index,), index, sample_index, (entry,), None)


def test_one_by_one_and_together_give_the_same() -> None:
    chunks = [chunk(place // 2, place % 2) for place in range(40)]
    single, together = Completion("a"), Completion("a")
    for each in chunks:
        single.add(each)
    together.add(*chunks[:25])
    together.add(*chunks[25:])
    assert single == together and single.samples[1].text == " ".join(map(str, range(20))) + " "
    assert single.samples[1].logprobs is not None and len(single.samples[1].logprobs) == 20


def test_log_probabilities_grow_in_proportion() -> None:
    def cpu_time(num_chunks: int) -> float:
        completion, chunks = Completion("a"), [chunk(index) for index in range(num_chunks)]
        started_s = time.process_time()
        for each in chunks:
            completion.add(each)
        return time.process_time() - started_s

    short, long = (min(cpu_time(num_chunks) for _ in range(3)) for num_chunks in (1000, 10_000))
    assert long / short < 40, (short, long)  # 10 if linear, 100 if quadratic
