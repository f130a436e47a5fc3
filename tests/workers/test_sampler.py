"""Each sampling parameter against its definition in float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_protocol import SlotSampling, pack_int32
from deepinfer_workers.sampler import best_logprobs, unpack_masks
from doubles.sampling import OneRow, sample, token_by_definition

VOCAB = 3001


def row(position: int = 5, stop_ids: tuple[int, ...] = (), **params: Any) -> OneRow:
    return OneRow(SlotSampling(stop_ids=pack_int32(list(stop_ids)), **params), position)


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [700, 90, 2000]] = 1.0
    assert sample(logits, [row(), row()]).tolist() == [90, 0]


@pytest.mark.parametrize("top_k", [0, 1, 2, 40, 1500, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
def test_tokens_are_those_of_the_definition(top_k: int, top_p: float, temperature: float) -> None:
    logits = random_logits(8, seed=top_k % 1000)
    rows = [row(p, temperature=temperature, top_k=top_k, top_p=top_p, seed=77 + p) for p in range(8)]
    assert sample(logits, rows).tolist() == [token_by_definition(logits[i].numpy(), rows[i]) for i in range(8)]


@pytest.mark.parametrize("limits", [{}, {"top_k": 40}, {"top_p": 0.9}], ids=["all", "top_k", "top_p"])
@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-200, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float, limits: dict[str, Any]) -> None:
    logits = torch.cat([random_logits(4), random_logits(4, seed=1) - 100, random_logits(4, seed=2, scale=1e30)])
    rows = [row(p, temperature=temperature, seed=p, **limits) for p in range(12)]
    assert sample(logits, rows).tolist() == logits.argmax(-1).tolist()
    masked = torch.rand(12, VOCAB, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed = logits.masked_fill(~masked, -torch.inf)
    assert sample(logits, rows, masked).tolist() == allowed.argmax(-1).tolist()


def test_top_k_cuts_ties_by_the_lower_id() -> None:
    logits = torch.zeros(1, VOCAB)
    found = {sample(logits, [row(p, temperature=1.0, top_k=2)]).item() for p in range(40)}
    assert found == {0, 1}


def test_rows_of_all_kinds_do_not_depend_on_each_other() -> None:
    logits = random_logits(24, vocab=49_152)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 30.0, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 20}, {"temperature": 2.0, "top_k": 2000, "top_p": 0.5},
    ]  # fmt: skip
    rows = [row(i, seed=i, **kinds[i % 6]) for i in range(24)]
    together = sample(logits, rows).tolist()
    assert [sample(logits[i : i + 1], [rows[i]]).item() for i in range(24)] == together
    assert sample(logits.flip(0), rows[::-1]).tolist() == together[::-1]


def test_samples_have_the_distribution_of_the_softmax() -> None:
    """Chi-square over 12 tokens and 20,000 positions of one seed; the seed is fixed, so is the outcome."""
    logits = random_logits(1, seed=3, vocab=12, scale=1.0)
    num_samples = 20_000
    rows = [row(p, temperature=0.8, seed=11) for p in range(num_samples)]
    counts = np.bincount(sample(logits.expand(num_samples, -1), rows).numpy(), minlength=12)
    expected = torch.softmax(logits[0].double() / 0.8, -1).numpy() * num_samples
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 31.3  # 11 degrees of freedom: exceeded once in a thousand seeds


def test_stop_ids_are_banned_up_to_the_minimum_length() -> None:
    logits = random_logits(1)
    best, second = logits[0].argsort(descending=True)[:2].tolist()
    stops = (best,)
    assert sample(logits, [row(9, stops, min_length=10)]).item() == second  # the length would be 10
    assert sample(logits, [row(10, stops, min_length=10)]).item() == best
    assert logits[0].argmax() == best  # the model's logits stay as they were


def test_a_mask_allows_only_its_tokens() -> None:
    logits = random_logits(2)
    allowed = torch.zeros(2, VOCAB, dtype=torch.bool)
    allowed[0, [5, 9]] = True
    allowed[1, 17] = True
    first = 5 if logits[0, 5] >= logits[0, 9] else 9
    rows = [row(), row(temperature=1.0, top_k=3, top_p=0.5)]
    assert sample(logits, rows, allowed).tolist() == [first, 17]


def test_a_mask_of_stop_tokens_alone_wins_over_the_minimum_length() -> None:
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool)
    allowed[0, 17] = True
    assert sample(random_logits(1), [row(0, (17,), min_length=10)], allowed).item() == 17


def test_masks_are_unpacked_least_significant_bit_first() -> None:
    bits = bytes([0b0000_0101, 0, 0, 0x80, 1, 0xFF, 0xFF, 0xFF])
    assert unpack_masks(bits, 1, 33, torch.device("cpu"))[0].nonzero().flatten().tolist() == [0, 2, 31, 32]


def test_logprobs_are_the_log_softmax_and_the_best_by_rank() -> None:
    logits = random_logits(3)
    logits[1, [40, 30, 20]] = 50.0  # equals: the lower id first
    tokens = torch.tensor([7, 30, 2])
    values = logits.double().log_softmax(-1).numpy()
    for num_best in (4, 0):
        found = best_logprobs(logits, tokens, num_best)
        for found_ids, found_values, rank, token, value in zip(*found, tokens.tolist(), values, strict=True):
            assert rank == list(np.argsort(-value, kind="stable")).index(token) + 1
            ids = [token, *np.argsort(-value, kind="stable")[:num_best]]
            assert found_ids.tolist() == ids
            np.testing.assert_allclose(found_values, value[ids], atol=1e-4)
