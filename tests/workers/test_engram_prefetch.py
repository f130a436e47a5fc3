"""A step's Engram rows, fetched ahead: the right ones at every place, whoever fetched them; nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest
import torch

from deepinfer_workers.batch import DeviceBatch, Ints, Limits
from deepinfer_workers.models.deepseek.config import EngramConfig
from deepinfer_workers.models.deepseek.engram_hash import layer_hashes, ngrams
from deepinfer_workers.models.deepseek.engram_prefetch import EngramPrefetch, EngramPrefetcher, EngramSource
from deepinfer_workers.models.deepseek.engram_table import EngramRows, EngramTable
from doubles.driver import admit, plan

CONFIG: Final = EngramConfig((1, 4), (420, 508), 3, 101, 2, 32, 2, 128)
LIMITS: Final = Limits(
    num_slots=8, num_blocks=64, block_size=16, max_len=128, vocab_size=256, max_batch_positions=128, row_multiple=16
)


class WatchedTable(EngramTable):
    """Counts what other threads read; those wait for `gate`, and raise `error`."""

    def __init__(self, num_rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randn(num_rows, CONFIG.head_dim, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.randint(120, 135, (num_rows, 1), dtype=torch.uint8, generator=generator)
        super().__init__(codes, scales.view(torch.float8_e8m0fnu))
        self.gate = threading.Event()
        self.gate.set()
        self.error: OSError | None = None
        self.num_ahead = 0
        """Positions that were fetched by another thread than the test's."""
        self._is_read = threading.Event()

    def wait_until_read(self) -> None:
        """Until another thread has begun to fetch since the last call."""
        assert self._is_read.wait(30)
        self._is_read.clear()

    def fetch(self, rows: Ints) -> EngramRows:
        if threading.current_thread() is not threading.main_thread():
            self._is_read.set()
            assert self.gate.wait(30)
            if self.error is not None:
                raise self.error
            self.num_ahead += len(rows)
        return super().fetch(rows)


@pytest.fixture
def tables() -> list[WatchedTable]:
    return [WatchedTable(num_rows, seed) for seed, num_rows in enumerate(CONFIG.table_rows)]


@pytest.fixture
def sources(tables: list[WatchedTable]) -> list[EngramSource]:
    compressed = np.arange(256) // 2
    return [
        EngramSource(hash_, table) for hash_, table in zip(layer_hashes(CONFIG, compressed, 77), tables, strict=True)
    ]


@pytest.fixture
def prefetcher(sources: list[EngramSource]) -> Iterator[EngramPrefetcher]:
    before = set(threading.enumerate())
    prefetcher = EngramPrefetcher(sources, LIMITS.num_slots)
    yield prefetcher
    prefetcher.close()
    assert set(threading.enumerate()) == before


class Sequences:
    """Steps over sequences of random tokens, and what the device would know of them."""

    def __init__(self, prefetcher: EngramPrefetcher) -> None:
        self.prefetcher = prefetcher
        self.tokens = np.random.default_rng(0).integers(0, 256, (LIMITS.num_slots, LIMITS.max_len))
        self.lengths = np.zeros(LIMITS.num_slots, np.int64)
        self.batch: DeviceBatch
        self.starts: Ints

    def submit(
        self, rows: list[tuple[int, int]], admitted: dict[int, int] | None = None, retired: tuple[int, ...] = ()
    ) -> EngramPrefetch:
        """A step with `rows` (slot, positions); `admitted` slots with so many known tokens."""
        admits = [admit(slot, self.tokens[slot, :count].tolist(), []) for slot, count in (admitted or {}).items()]
        self.lengths[list(admitted or {})] = 0
        self.batch = DeviceBatch.from_plan(
            plan([(slot, 1, count, 0) for slot, count in rows], admits, retired=retired), LIMITS
        )
        self.starts = self.lengths[self.batch.slots]
        self.lengths[self.batch.slots] += self.batch.counts
        return self.prefetcher.submit(self.batch, self.starts)

    def ngrams(self) -> Ints:
        """Of every place of the last step, [T, N]; padding has no tokens."""
        found = np.full((self.batch.num_positions, CONFIG.max_ngram), -1)
        for place, (row, offset) in enumerate(zip(self.batch.row_of, self.batch.offset_of, strict=True)):
            tokens = self.tokens[self.batch.slots[row]]
            found[place] = ngrams(tokens, int(self.starts[row] + offset), 1, CONFIG.max_ngram)
        return found


def assert_rows(taken: list[EngramRows], tokens: Ints, sources: list[EngramSource]) -> None:
    assert len(taken) == len(sources)
    for rows, source in zip(taken, sources, strict=True):
        assert torch.equal(rows.dequantize(), source.fetch(tokens).dequantize())


def take(sequences: Sequences, step: EngramPrefetch, sources: list[EngramSource]) -> Ints:
    """Take the last step, check its rows, and return the places that were missing."""
    tokens = sequences.ngrams()
    assert_rows(step.take(tokens[step.missing]), tokens, sources)
    return step.missing


def test_prompts_are_fetched_ahead_and_the_rest_at_the_launch(
    prefetcher: EngramPrefetcher, sources: list[EngramSource], tables: list[WatchedTable]
) -> None:
    sequences = Sequences(prefetcher)
    steps: list[tuple[list[tuple[int, int]], dict[int, int], list[int]]] = [
        ([(0, 5), (1, 7)], {0: 12, 1: 7}, [12, 13, 14, 15]),  # a first chunk beside a whole prompt, padded to 16
        ([(1, 1), (0, 7)], {}, [0, *range(8, 16)]),  # a sampled token beside a second chunk
        ([(0, 1), (1, 1), (3, 16)], {3: 17}, [0, 1, *range(18, 32)]),
        ([(3, 1), (1, 1)], {}, list(range(1, 16))),  # the last known token, and a sampled one
        ([(0, 1), (1, 1), (3, 1)], {}, list(range(16))),
        ([], {}, []),
    ]
    num_known = 0
    for rows, admitted, missing in steps:
        step = sequences.submit(rows, admitted)
        num_ahead = len(sequences.ngrams()) - len(missing)
        if num_ahead:
            tables[0].wait_until_read()
        num_known += num_ahead
        assert take(sequences, step, sources).tolist() == missing
        assert [table.num_ahead for table in tables] == [num_known] * 2


def test_a_slot_that_is_taken_again_reads_the_new_tokens(
    prefetcher: EngramPrefetcher, sources: list[EngramSource]
) -> None:
    sequences = Sequences(prefetcher)
    take(sequences, sequences.submit([(2, 9)], {2: 20}), sources)
    sequences.tokens[2] = sequences.tokens[5]
    assert take(sequences, sequences.submit([(2, 6)], {2: 6}, retired=(2,)), sources).tolist() == list(range(6, 16))
    sequences.submit([], retired=(2,))
    step = sequences.submit([(2, 3)])  # no plan names a retired slot; if one did, nothing old would be read
    assert len(step.missing) == 16


def test_what_has_not_begun_when_the_step_is_launched_is_not_waited_for(
    prefetcher: EngramPrefetcher, sources: list[EngramSource], tables: list[WatchedTable]
) -> None:
    sequences = Sequences(prefetcher)
    tables[0].gate.clear()
    first = sequences.submit([(0, 5)], {0: 5})
    first_tokens = sequences.ngrams()
    tables[0].wait_until_read()
    second = sequences.submit([(1, 7)], {1: 7})
    take(sequences, second, sources)  # while the thread is held in the first step
    tables[0].gate.set()
    assert_rows(first.take(first_tokens[first.missing]), first_tokens, sources)
    assert tables[0].num_ahead == 5


def test_an_error_of_the_thread_is_raised_at_the_launch(
    prefetcher: EngramPrefetcher, sources: list[EngramSource], tables: list[WatchedTable]
) -> None:
    sequences = Sequences(prefetcher)
    tables[0].error = OSError("the disk is gone")
    step = sequences.submit([(0, 5)], {0: 5})
    tables[0].wait_until_read()
    with pytest.raises(OSError, match="the disk is gone"):
        step.take(sequences.ngrams()[step.missing])
    tables[0].error = None
    take(sequences, sequences.submit([(1, 5)], {1: 5}), sources)


def test_a_close_ends_the_thread_and_leaves_steps_to_be_launched(
    prefetcher: EngramPrefetcher, sources: list[EngramSource], tables: list[WatchedTable]
) -> None:
    sequences = Sequences(prefetcher)
    tables[0].gate.clear()
    sequences.submit([(0, 5)], {0: 5})
    tables[0].wait_until_read()
    step = sequences.submit([(1, 7)], {1: 7})
    tables[0].gate.set()
    prefetcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engram")]
    take(sequences, step, sources)


def test_rows_of_prompts_move_when_rows_before_them_verify_drafts(
    prefetcher: EngramPrefetcher, sources: list[EngramSource]
) -> None:
    sequences = Sequences(prefetcher)
    take(sequences, sequences.submit([(0, 4)], {0: 4}), sources)
    step = sequences.submit([(1, 3), (0, 1), (2, 5)], {1: 3, 2: 9})
    sequences.batch = sequences.batch.with_drafts(np.array([0, 12, 0]), LIMITS)  # settled after the fetch has begun
    step.settle(sequences.batch.counts, sequences.batch.num_positions)
    assert take(sequences, step, sources).tolist() == [*range(3, 16), *range(21, 32)]
