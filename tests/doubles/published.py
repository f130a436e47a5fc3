"""Are the rows that others may adopt what they are said to be? Looks into a rank's pool and into its fake worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from deepinfer.rank import Rank
from deepinfer.request import Request, Sequence
from deepinfer_workers.fake import FakeRunner
from doubles.oracle import Prefix


class Published(NamedTuple):
    """Blocks of some requests that can be adopted, counted once for each sequence that knows them."""

    num_exact: int
    num_marked: int
    num_off: int
    """Marked blocks whose rows are not those of a run without a hit."""


def check_published(
    ranks: list[Rank], runners: list[FakeRunner], requests: Iterable[Request], window: int
) -> Published:
    """Every block without a mark has the rows that a run without a hit gives it. Raises `AssertionError`."""
    exact: list[bool] = []
    marked: list[bool] = []
    for request in requests:
        for seq in request.samples:
            prefix = Prefix(seq.tokens, window)
            for rank, runner in zip(ranks, runners, strict=True):
                exact += _is_as_computed(seq, seq.block_hashes, prefix, rank, runner)
                marked += _is_as_computed(seq, seq.marked_hashes, prefix, rank, runner)
    assert all(exact), f"{exact.count(False)} of {len(exact)} blocks without a mark are off"
    return Published(len(exact), len(marked), marked.count(False))


def _is_as_computed(
    seq: Sequence, hashes: list[bytes], prefix: Prefix, rank: Rank, runner: FakeRunner
) -> Iterable[bool]:
    size = rank.shape.block_size
    for index, block_hash in enumerate(hashes):
        block = rank.pool.find(block_hash)
        if block is not None:
            rows = [runner.kv.hash_at([block], offset + 1) for offset in range(size)]
            yield rows == prefix.hashes[index * size : (index + 1) * size]
