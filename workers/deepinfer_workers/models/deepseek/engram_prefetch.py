"""Fetches a step's Engram rows on a thread of its own, while the device runs the step before. Computes nothing.

The host knows the tokens that came with an admission, which are prompts; a token that was sampled is known on the
device alone, and the rows of its position are fetched when the step is launched.

Legend: `T` positions of a step, padded; `K` those of which the host knows the tokens; `N` longest n-gram; `S` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_workers.batch import DeviceBatch, Ints
from deepinfer_workers.models.deepseek.engram_hash import EngramHash, ngrams
from deepinfer_workers.models.deepseek.engram_table import EngramRows, EngramTable


class EngramSource(NamedTuple):
    """Where one layer's rows come from."""

    hash: EngramHash
    table: EngramTable

    def fetch(self, tokens: Ints) -> EngramRows:
        """Rows for `tokens` [T, N], newest first."""
        return self.table.fetch(self.hash.rows(tokens))


class KnownPositions(NamedTuple):
    """Positions of a step whose tokens the host knows."""

    places: Ints
    """[K]: indices among the step's positions, rising."""
    rows: Ints
    """[K]: the row of each."""
    tokens: Ints
    """[K, N]: the n-gram of each, newest first."""


class KnownTokens:
    """The tokens that every slot was admitted with. Belongs to the host thread; knows no files."""

    def __init__(self, num_slots: int, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._num_known = np.zeros(num_slots, np.int64)
        self._tokens: dict[int, Ints] = {}  # by slot

    def apply(self, batch: DeviceBatch, starts: Ints) -> KnownPositions:
        """Retire, admit, then look what is known of the rows, which begin at `starts` [S]."""
        self._num_known[batch.retired] = 0
        for slot in batch.retired.tolist():
            self._tokens.pop(slot, None)
        for admission in batch.admissions:
            self._num_known[admission.slot] = len(admission.tokens)
            self._tokens[admission.slot] = admission.tokens
        return self._positions(batch, starts)

    def _positions(self, batch: DeviceBatch, starts: Ints) -> KnownPositions:
        counts = np.clip(self._num_known[batch.slots] - starts, 0, batch.counts)  # [S]
        firsts = np.cumsum(batch.counts) - batch.counts  # [S]
        places, tokens = [np.empty(0, np.int64)], [np.empty((0, self._max_ngram), np.int64)]
        rows = np.repeat(np.arange(len(counts)), counts)
        for row in np.flatnonzero(counts).tolist():
            count = int(counts[row])
            places.append(np.arange(firsts[row], firsts[row] + count))
            tokens.append(ngrams(self._tokens[int(batch.slots[row])], int(starts[row]), count, self._max_ngram))
        return KnownPositions(np.concatenate(places), rows, np.concatenate(tokens))


class EngramPrefetcher:
    """Has one thread, which ends with `close`."""

    def __init__(self, sources: Sequence[EngramSource], num_slots: int) -> None:
        """`sources` are those of the layers, in their order; `num_slots` are those that plans may name."""
        self._sources = tuple(sources)
        self._known = KnownTokens(num_slots, self._sources[0].hash.max_ngram)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engram")

    def submit(self, batch: DeviceBatch, starts: Ints) -> EngramPrefetch:
        """Host thread, in the order of the plans: begin to fetch for a step whose rows begin at `starts` [S]."""
        known = self._known.apply(batch, starts)
        future = self._executor.submit(self._fetch, known.tokens) if known.places.size else None
        return EngramPrefetch(self._sources, known, batch.counts, batch.num_positions, future)

    def close(self) -> None:
        """Finish what has begun, and end the thread. Steps that were submitted can still be launched."""
        self._executor.shutdown(cancel_futures=True)

    def _fetch(self, tokens: Ints) -> list[EngramRows]:
        return [source.fetch(tokens) for source in self._sources]


class EngramPrefetch:
    """The rows of one step, on their way."""

    def __init__(
        self,
        sources: Sequence[EngramSource],
        known: KnownPositions,
        counts: Ints,
        num_positions: int,
        future: Future[list[EngramRows]] | None,
    ) -> None:
        self.missing: Ints
        """Places in the step whose tokens the host does not know, rising; padding is among them."""
        self._sources = sources
        self._known = known
        self._counts = counts
        self._future = future
        self._find_missing(num_positions)

    def settle(self, counts: Ints, num_positions: int) -> None:
        """The rows have `counts` [S] positions after all, of T: those that verify drafts became longer."""
        known = self._known
        if num_positions == self._num_positions and np.array_equal(counts, self._counts):
            return
        shifts = np.cumsum(counts - self._counts) - (counts - self._counts)  # [S]: of the rows' first positions
        self._known = known._replace(places=known.places + shifts[known.rows])
        self._counts = counts
        self._find_missing(num_positions)

    def _find_missing(self, num_positions: int) -> None:
        is_missing = np.ones(num_positions, np.bool_)
        is_missing[self._known.places] = False
        self.missing = np.flatnonzero(is_missing)
        self._num_positions = num_positions

    def take(self, tokens: Ints) -> list[EngramRows]:
        """Rows of every layer for all T positions. `tokens` [T - K, N] are the n-grams of `missing`, newest first.

        Device thread, once. Raises what the thread raised.
        """
        future, known = self._future, self._known
        if future is not None and not future.cancel():
            fetched = future.result()
        else:  # it has not begun: fetch here, and do not wait for what the thread does for others
            fetched = [source.fetch(known.tokens) for source in self._sources]
        rest = [source.fetch(tokens) for source in self._sources]
        return [self._merge(*parts) for parts in zip(fetched, rest, strict=True)]

    def _merge(self, fetched: EngramRows, rest: EngramRows) -> EngramRows:
        codes = self._scatter(fetched.codes, rest.codes)
        if fetched.scales is None or rest.scales is None:
            return EngramRows(codes, None)
        return EngramRows(codes, self._scatter(fetched.scales, rest.scales))

    def _scatter(self, fetched: Tensor, rest: Tensor) -> Tensor:
        """Both parts at their places, [T, R, width]."""
        if not len(rest):
            return fetched
        if not len(fetched):
            return rest
        merged = rest.new_empty(self._num_positions, *rest.shape[1:]).view(torch.uint8)
        merged.numpy()[self._known.places] = fetched.view(torch.uint8).numpy()
        merged.numpy()[self.missing] = rest.view(torch.uint8).numpy()
        return merged.view(rest.dtype)
