"""Which drafts are accepted: by hand, by the definition row by row, and by the distribution of what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_workers.acceptance import match, reject

Reject = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
VOCAB: Final = 6
NUM_DRAFTS: Final = 5
NUM_SAMPLES: Final = 200_000
SURE: Final = 8.0
"""Standard deviations beyond which a distribution is another one; and below `FAIR` it may be the same."""
FAIR: Final = 4.0


def test_drafts_match_up_to_the_first_that_does_not() -> None:
    targets = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert match(targets, drafts, torch.tensor([3, 3, 3, 2, 0])).tolist() == [3, 1, 0, 2, 0]


def distributions(generator: torch.Generator, *shape: int) -> Tensor:
    return (torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64) * 1.5).softmax(-1)


def gumbel(generator: torch.Generator, *shape: int) -> Tensor:
    return -torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator).log()


def by_definition(p: Tensor, q: Tensor, drafts: Tensor, count: int, uniform: Tensor, noise: Tensor) -> tuple[int, int]:
    """Of one row, a draft at a time."""
    for place in range(count):
        draft = int(drafts[place])
        if float(uniform[place]) >= min(1.0, float(p[place, draft]) / float(q[place, draft])):
            rest = (p[place] - q[place]).numpy().clip(min=0.0)
            return place, _largest(rest / rest.sum(), noise)
    return count, _largest(p[count].numpy(), noise)


def _largest(probabilities: np.ndarray, noise: Tensor) -> int:
    with np.errstate(divide="ignore"):
        return int((np.log(probabilities) + noise.numpy()).argmax())


@pytest.mark.parametrize("seed", range(20))
def test_rejection_is_that_of_its_definition_whatever_pads_a_row(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows = 30
    p, q = distributions(generator, num_rows, NUM_DRAFTS + 1), distributions(generator, num_rows, NUM_DRAFTS)
    p[:, :, seed % VOCAB] = 0.0  # a token that a filter leaves out
    p /= p.sum(-1, keepdim=True)
    drafts = (q.log() + gumbel(generator, num_rows, NUM_DRAFTS, VOCAB)).argmax(-1)
    counts = torch.arange(num_rows) % (NUM_DRAFTS + 1)
    uniform = torch.rand(num_rows, NUM_DRAFTS, generator=generator, dtype=torch.float64)
    noise = gumbel(generator, num_rows, VOCAB)
    wanted = [
        by_definition(p[row], q[row], drafts[row], int(counts[row]), uniform[row], noise[row])
        for row in range(num_rows)
    ]
    num_accepted, tokens = reject(p, q, drafts, counts, uniform, noise)
    assert list(zip(num_accepted.tolist(), tokens.tolist(), strict=True)) == wanted
    for row, count in enumerate(counts.tolist()):
        p[row, count + 1 :] = p[row, count].clone()
        q[row, count:] = 1.0 / VOCAB
        drafts[row, count:] = 0
    again = reject(p, q, drafts, counts, uniform, noise)
    assert torch.equal(again[0], num_accepted) and torch.equal(again[1], tokens)


def test_a_draft_of_the_target_itself_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    p = distributions(generator, 1000, 3)
    drafts = (p[:, :2].log() + gumbel(generator, 1000, 2, VOCAB)).argmax(-1)
    uniform = torch.rand(1000, 2, generator=generator, dtype=torch.float64)
    noise = gumbel(generator, 1000, VOCAB)
    num_accepted, _ = reject(p, p[:, :2], drafts, torch.full((1000,), 2), uniform, noise)
    assert (num_accepted == 2).all()


def test_what_the_target_never_says_is_never_accepted_and_never_follows() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.0, 0.0], dtype=torch.float64).expand(1000, 2, -1)
    q = torch.tensor([[[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]]], dtype=torch.float64).expand(1000, 1, -1)
    uniform = torch.full((1000, 1), 1e-300, dtype=torch.float64)
    noise = gumbel(generator, 1000, VOCAB)
    num_accepted, tokens = reject(p, q, torch.arange(1000)[:, None] % 2, torch.ones(1000).long(), uniform, noise)
    assert (num_accepted == 0).all()
    assert set(tokens.tolist()) == {2, 3}


def test_where_rounding_leaves_no_rest_the_target_itself_follows() -> None:
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.25 + 1e-12, 0.75]]], dtype=torch.float64)  # so much does rounding do
    uniform = torch.tensor([[1.0 - 1e-15]], dtype=torch.float64)
    noise = torch.zeros(1, 2, dtype=torch.float64)
    num_accepted, tokens = reject(p, q, torch.tensor([[0]]), torch.tensor([1]), uniform, noise)
    assert (num_accepted.tolist(), tokens.tolist()) == ([0], [1])


# ---- the distribution


def said(rejecting: Reject) -> tuple[Tensor, Tensor]:
    """Tokens [samples, drafts + 1] of chains that start at token 0, and the target's table [V, V].

    What a step does not say any more is drawn from the target, a token at a time.
    """
    generator = torch.Generator().manual_seed(3)
    target, draft = distributions(generator, VOCAB), distributions(generator, VOCAB)
    previous = torch.zeros(NUM_SAMPLES, dtype=torch.int64)
    places = []
    for _ in range(NUM_DRAFTS):
        previous = _drawn(draft[previous], generator)
        places.append(previous)
    drafts = torch.stack(places, 1)
    before = torch.nn.functional.pad(drafts, (1, 0))
    counts = torch.randint(0, NUM_DRAFTS + 1, (NUM_SAMPLES,), generator=generator)
    uniform = torch.rand(NUM_SAMPLES, NUM_DRAFTS, generator=generator, dtype=torch.float64)
    noise = gumbel(generator, NUM_SAMPLES, VOCAB)
    num_accepted, follower = rejecting(target[before], draft[before[:, :-1]], drafts, counts, uniform, noise)
    tokens, previous = torch.empty(NUM_SAMPLES, NUM_DRAFTS + 1, dtype=torch.int64), before[:, 0]
    for place in range(NUM_DRAFTS + 1):
        drafted = drafts[:, min(place, NUM_DRAFTS - 1)]
        own = torch.where(num_accepted > place, drafted, follower)
        previous = torch.where(num_accepted >= place, own, _drawn(target[previous], generator))
        tokens[:, place] = previous
    return tokens, target


def _drawn(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(len(probabilities), 1, generator=generator, dtype=torch.float64)
    return (probabilities.cumsum(-1) < uniform).sum(-1).clamp(max=VOCAB - 1)


def deviation(rejecting: Reject) -> float:
    """Standard deviations that chi-square is above what it should be: the larger of the first and the last tokens.

    Three of them together; by the normal approximation of Wilson and Hilferty (1931).
    """
    tokens, table = said(rejecting)
    found: list[float] = []
    for start in (0, NUM_DRAFTS - 2):
        wanted = table.matrix_power(start + 1)[0]
        for _ in range(2):
            wanted = (wanted.view(-1, VOCAB, 1) * table).flatten()
        codes = (tokens[:, start : start + 3] * torch.tensor([VOCAB**2, VOCAB, 1])).sum(-1)
        counts, wanted = codes.bincount(minlength=VOCAB**3).double(), wanted * NUM_SAMPLES
        mean = ((counts - wanted) ** 2 / wanted).sum().item() / (VOCAB**3 - 1)
        spread = 2 / (9 * (VOCAB**3 - 1))
        found.append((mean ** (1 / 3) - (1 - spread)) / spread**0.5)
    return max(found)


def test_what_is_said_is_distributed_as_the_target() -> None:
    assert deviation(reject) < FAIR


def rest_without_a_bound(
    p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, uniform: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Takes |p - q| for max(p - q, 0)."""
    num_accepted, follower = reject(p, q, drafts, counts, uniform, noise)
    row = torch.arange(len(p))
    rest = (p[row, num_accepted] - q[row, num_accepted.clamp(max=NUM_DRAFTS - 1)]).abs()
    return num_accepted, torch.where(num_accepted < counts, (rest.log() + noise).argmax(-1), follower)


def bonus_of_the_row_before(
    p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, uniform: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, follower = reject(p, q, drafts, counts, uniform, noise)
    bonus = (p[torch.arange(len(p)), (counts - 1).clamp(min=0)].log() + noise).argmax(-1)
    return num_accepted, torch.where(num_accepted == counts, bonus, follower)


def noise_twice(
    p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, uniform: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """The token behind is drawn with what decided."""
    reused = noise.clone()
    reused[:, 0] = -(-uniform[:, 0].log()).log()
    return reject(p, q, drafts, counts, uniform, reused)


def ratio_of_the_place_behind(
    p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, uniform: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    return reject(torch.roll(p, -1, 1), q, drafts, counts, uniform, noise)


@pytest.mark.parametrize(
    "wrong", [rest_without_a_bound, bonus_of_the_row_before, noise_twice, ratio_of_the_place_behind]
)
def test_the_test_of_the_distribution_can_fail(wrong: Reject) -> None:
    assert deviation(wrong) > SURE
