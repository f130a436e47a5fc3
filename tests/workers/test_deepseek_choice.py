"""Which rows are chosen: as a full stable sort would have it, at released sizes too, however many are scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_workers.models.deepseek import indexer
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.indexer import row_scores
from deepinfer_workers.models.deepseek.selection import best_blocks, best_rows, keep_blocks, stacked
from doubles.deepseek_sequences import Sequences, random_tokens
from doubles.tiny_deepseek import tiny_v41

pytestmark = pytest.mark.usefixtures("one_thread")


# The definitions, position by position.


def sorted_best(scores: Tensor, most: int) -> list[int]:
    """Of `scores` [n], ties to the older, minus infinity never."""
    values, order = scores.sort(descending=True, stable=True)
    return sorted(order[:most][values[:most] > -torch.inf].tolist())


def sorted_blocks(scores: Tensor, num_visible: int, size: int, most: int) -> list[int]:
    peaks = torch.stack([block.max() for block in scores.split(size)])
    if num_visible:
        peaks[(num_visible - 1) // size] = torch.inf
    return sorted_best(peaks, most)


def with_blocks(scores: Tensor, blocks: list[int], size: int) -> Tensor:
    kept = torch.full_like(scores, -torch.inf)
    for block in blocks:
        kept[block * size : (block + 1) * size] = scores[block * size : (block + 1) * size]
    return kept


def chosen(rows: Tensor) -> list[list[int]]:
    """Without what stands behind the last."""
    return [[row for row in some if row >= 0] for some in rows.tolist()]


def random_scores(num_visible: Tensor, seed: int, spread: float) -> Tensor:
    """Many ties, and the zeros that `relu` makes; minus infinity where nothing is visible."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(num_visible.max())
    scores = (torch.randn(len(num_visible), num_rows, generator=generator) * spread).round() / spread
    return scores.masked_fill_(torch.arange(num_rows) >= num_visible[:, None], -torch.inf)


def check(scores: Tensor, later: Tensor, num_visible: Tensor, size: int, most_blocks: int, most: int) -> None:
    """A source that publishes, and a later one that is bounded by it."""
    blocks = best_blocks(scores, num_visible, size, most_blocks)
    expected = [sorted_blocks(row, int(n), size, most_blocks) for row, n in zip(scores, num_visible, strict=True)]
    assert chosen(blocks) == expected
    allowed = keep_blocks(later, blocks, size)
    for row, kept, of_blocks in zip(later, allowed, expected, strict=True):
        assert torch.equal(kept, with_blocks(row, of_blocks, size))
    for each in (scores, allowed):
        rows = best_rows(each, most)
        assert chosen(rows) == [sorted_best(row, most) for row in each]
        assert all(row == sorted(row, key=lambda number: (number < 0, number)) for row in rows.tolist())


def test_candidates_and_rows_at_released_sizes() -> None:
    """2048 blocks of 8 rows bound 512 rows: below, at and above 16,384 visible ones."""
    num_visible = torch.tensor([511, 513, 16_384, 16_385, 16_391, 40_003])
    for spread in (3.0, 1000.0):
        scores, later = (random_scores(num_visible, seed, spread) for seed in (1, 2))
        check(scores, later, num_visible, 8, 2048, 512)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(any),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 100),
    st.sampled_from([0.5, 2.0, 50.0]),
    st.integers(0, 1 << 30),
)
def test_candidates_and_rows_of_any_size(
    visible: list[int], size: int, most_blocks: int, most: int, spread: float, seed: int
) -> None:
    num_visible = torch.tensor(visible)
    scores, later = (random_scores(num_visible, seed + index, spread) for index in range(2))
    check(scores, later, num_visible, size, most_blocks, most)


def test_choices_of_several_widths() -> None:
    assert stacked([torch.tensor([[0, 2]]), torch.tensor([[5], [-1]])]).tolist() == [[0, 2], [5, -1], [-1, -1]]


def test_scores_are_those_of_single_positions_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    num_visible = torch.tensor([1, 64, 65, 4095, 4097, 4200])
    keys = torch.randn(4200, 32, generator=generator)
    queries, weights = torch.randn(6, 16, 32, generator=generator), torch.randn(6, 16, generator=generator)
    store = torch.cat((keys, torch.zeros(1, 32)))  # row -1 is no row
    scores = row_scores(queries, weights, num_visible, lambda rows: store[rows])
    for query, weight, visible, found in zip(queries, weights, num_visible.tolist(), scores, strict=True):
        tiles = torch.nn.functional.pad(keys[:visible], (0, 0, 0, -visible % 64)).split(64)
        products = [torch.bmm(query[None], tile.T[None]).relu() for tile in tiles]
        expected = torch.cat([(product * weight[:, None]).sum(1)[0] for product in products])
        assert torch.equal(found[:visible], expected[:visible])
        assert bool((found[visible:] == -torch.inf).all())


def test_how_much_is_scored_at_once_has_no_influence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tiny_v41(vocab_size=512), tmp_path)
    sequences = Sequences(tmp_path)
    pieces = ((0, 60), (1, 3), (3, 1), (2, 40))  # slot 3 sees no row of two tokens yet
    outs, sizes = [], list[int]()

    def watched(scores: Tensor, most: int) -> Tensor:
        sizes.append(scores.numel())
        return best_rows(scores, most)

    monkeypatch.setattr(indexer, "best_rows", watched)
    for most_scores in (1 << 22, 100):
        monkeypatch.setattr(indexer, "SCORES_AT_ONCE", most_scores)
        sizes.clear()
        for slot, count in pieces:
            sequences.start(slot, random_tokens(count + 20, slot, 512))
        outs.append(torch.cat(sequences.run(*pieces) + sequences.run((2, 1), (0, 3))))
    sequences.close()
    assert torch.equal(*outs)
    assert 0 < max(sizes) <= 100
