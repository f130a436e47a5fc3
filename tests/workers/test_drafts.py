"""Drafts and what becomes of them: tokens follow the target, whatever is drafted, however much of it is verified.

A target and a drafter that are tables of logits by the token before; thousands of slots walk along them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from deepinfer.budget import best_budget
from deepinfer.costs import CostTable
from deepinfer_kernels import Ops, select_ops
from deepinfer_protocol import LogitShaping, SlotSampling, StepCosts, pack_float32, pack_int32
from deepinfer_workers import acceptance, drafts, noise, sampler, sampling_state
from deepinfer_workers.batch import Admission, Ints
from deepinfer_workers.drafts import DraftState, VerifyRows, draft_slot_bytes
from deepinfer_workers.sampling_state import SamplingState
from doubles import draws
from doubles.waiting import NoWaiting, no_waits

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB: Final = 5
WINDOW: Final = 4
"""Tokens whose joint distribution is looked at."""
NUM_SAMPLES: Final = 200_000
FEWER: Final = 40_000
AT_ONCE: Final = 20_000
NO_IDS: Final = np.array([], np.int64)
SURE: Final = 6.0
"""Standard deviations beyond which a distribution is another one; and below `FAIR` it may be the same."""
FAIR: Final = 4.0
Lengths = Callable[[DraftState, Ints, Ints], Ints]


class Tables:
    """Logits by the token before, [V, V] each, and how sure the drafter is of the next draft, [V]."""

    block_size = 3
    hidden_flat = None
    allowed: Tensor | None = None
    """[V, V] bool: what a grammar lets follow each token."""

    def __init__(self, seed: int, vocab: int = VOCAB, block_size: int = 3, spread: float = 1.5) -> None:
        self.block_size = block_size
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randn(vocab, vocab, generator=generator) * spread
        self.draft = self.target + torch.randn(vocab, vocab, generator=generator)
        self.sureness = torch.rand(vocab, generator=generator)

    def to(self, device: torch.device) -> Tables:
        """These very tables, on the device."""
        tables = copy(self)
        for name in ("target", "draft", "sureness"):
            setattr(tables, name, getattr(self, name).to(device))
        return tables

    def hidden(self, slots: Ints, positions: Tensor, tokens: Tensor) -> Tensor:
        places = torch.arange(self.block_size, dtype=torch.float32, device=positions.device)
        return places[None, :, None].expand(len(slots), -1, 1)

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return self.draft[previous]

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return self.sureness[previous]


def admissions(samplings: list[SlotSampling]) -> list[Admission]:
    return [
        Admission(slot, 1, 0, 0, NO_IDS, NO_IDS, one, np.frombuffer(one.stop_ids, "<i4").astype(np.int64))
        for slot, one in enumerate(samplings)
    ]


class Walk:
    """Slots that all start from token 0 at position 0."""

    def __init__(
        self, tables: Tables, samplings: list[SlotSampling], num_tokens: int, *, at_once: bool = False
    ) -> None:
        """`at_once`: as a device goes about it that draws rows of plain sampling in one launch."""
        self.tables, self.num_tokens = tables, num_tokens
        num_slots, vocab = len(samplings), len(tables.target)
        width = num_tokens + tables.block_size + 2
        self.tokens = torch.zeros(num_slots + 1, width, dtype=torch.int32)
        draw, verify = (draws.draw, draws.verify) if at_once else (None, None)
        self.sampling = SamplingState(self.tokens, vocab, draw)
        self.sampling.admit(admissions(samplings))
        device = torch.device("cpu")
        self.state = DraftState(num_slots + 1, tables.block_size, vocab, self.sampling, device, draw, verify)
        self.anchors = np.zeros(num_slots, np.int64)
        self.has_drafts = False

    def run(self, lengths: Lengths, num_drafts: int = 3) -> Tensor:
        """[slots, tokens]: the first tokens that each says."""
        while (self.anchors < self.num_tokens).any():
            self.step(np.flatnonzero(self.anchors < self.num_tokens), lengths, num_drafts)
        return self.tokens[:-1, 1 : 1 + self.num_tokens].long()

    def step(self, slots: Ints, lengths: Lengths, num_drafts: int) -> None:
        """Verify what is drafted, and draft anew."""
        most = np.full(len(slots), num_drafts if self.has_drafts else 0)
        counts = lengths(self.state, slots, most) if self.has_drafts else most
        anchors = self.anchors[slots]
        owners = np.repeat(np.arange(len(slots)), counts + 1)
        offsets = np.arange(len(owners)) - (np.cumsum(counts + 1) - counts - 1)[owners]
        places = anchors[owners] + 1 + offsets
        is_draft = offsets < counts[owners]
        if is_draft.any():
            drafted = self.state.tokens(slots, counts).to(torch.int32)
            self.tokens[slots[owners[is_draft]], places[is_draft]] = drafted
        before = self.tokens[slots[owners], places - 1].long()
        rows = VerifyRows(slots, counts, torch.from_numpy(places), places + 1)
        allowed = None if self.tables.allowed is None else self.tables.allowed[before]
        verdict = self.state.judge(self.tables.target[before], rows, allowed)
        if allowed is not None:  # now and then there are fewer masks than drafts
            verdict = verdict._replace(num_tokens=verdict.num_tokens.clamp(max=1 + int(self.anchors.sum()) % 4))
        self.tokens[slots[owners], places] = verdict.tokens.to(torch.int32)
        self.anchors[slots] += verdict.num_tokens.numpy()
        newest = torch.from_numpy(self.anchors[slots])
        self.state.propose(self.tables, slots, newest, self.tokens[slots, newest].long(), num_drafts)
        self.has_drafts = True


def everything(state: DraftState, slots: Ints, most: Ints) -> Ints:
    return most


def half(state: DraftState, slots: Ints, most: Ints) -> Ints:
    """The likelier half."""
    return state.lengths(slots, most, int(most.sum()) // 2)


@contextmanager
def wide() -> Iterator[None]:
    """Rows go through the device by the thousand, which the memory of a small vocabulary allows."""
    with (
        mock.patch.multiple(drafts, ROWS_AT_ONCE=1 << 20, _ROWS_AT_ONCE=1 << 20),
        mock.patch.object(sampling_state, "ROWS_AT_ONCE", 1 << 20),
    ):
        yield


def sampled(
    tables: Tables,
    lengths: Lengths,
    num_tokens: int,
    num_drafts: int = 3,
    *,
    count: int = NUM_SAMPLES,
    at_once: bool = False,
    **params: Any,
) -> Tensor:
    """`count` walks."""
    parts = []
    with wide():
        for start in range(0, count, AT_ONCE):
            samplings = [SlotSampling(seed=start + index, **params) for index in range(AT_ONCE)]
            parts.append(Walk(tables, samplings, num_tokens, at_once=at_once).run(lengths, num_drafts))
    return torch.cat(parts)


def target_probabilities(tables: Tables, num_tokens: int, params: dict[str, Any], num_before: int = 0) -> Tensor:
    """Of every sequence of so many tokens behind the first `num_before`, by the definition of the parameters."""
    target = tables.target.double()
    target = target if tables.allowed is None else target.masked_fill(~tables.allowed, -torch.inf)
    table = torch.stack([_filtered(row, params) for row in target])
    found = table.matrix_power(num_before)[0] @ table  # of the first, [V]
    for _ in range(num_tokens - 1):
        found = (found.view(-1, len(table), 1) * table).flatten()
    return found


def _filtered(logits: Tensor, params: dict[str, Any]) -> Tensor:
    p = (logits / params["temperature"]).softmax(-1)
    p = torch.where(p < params.get("min_p", 0.0) * p.max(), 0.0, p)
    order = p.argsort(descending=True)
    if params.get("top_k"):
        p[order[params["top_k"] :]] = 0.0
    p = p / p.sum()
    before = p[order].cumsum(-1) - p[order]
    p[order[before >= params.get("top_p", 1.0)]] = 0.0
    return p / p.sum()


def deviation(walks: Tensor, probabilities: Tensor, vocab: int = VOCAB) -> float:
    """How many standard deviations chi-square is above what it is of `probabilities` (Wilson and Hilferty, 1931)."""
    codes = (walks * vocab ** torch.arange(walks.shape[1] - 1, -1, -1)).sum(-1)
    counts = codes.bincount(minlength=len(probabilities)).double()
    assert not counts[probabilities == 0].any(), "what cannot be was said"
    kept = probabilities > 0
    wanted = probabilities[kept] * len(walks)
    chi, freedom = float(((counts[kept] - wanted) ** 2 / wanted).sum()), int(kept.sum()) - 1
    spread = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


CASES: Final[list[tuple[dict[str, Any], Lengths, int]]] = [
    ({"temperature": 1.0}, everything, 5),
    ({"temperature": 1.0}, half, 5),
    ({"temperature": 0.7, "top_p": 0.8}, everything, 3),
    ({"temperature": 1.3, "top_k": 3, "min_p": 0.1}, half, 2),
]


@pytest.mark.parametrize("rejects", [True, False], ids=["reject", "match"])
@pytest.mark.parametrize(("case", "at_once"), [*((case, False) for case in range(len(CASES))), (1, True)])
def test_tokens_are_distributed_as_the_target_says(rejects: bool, case: int, at_once: bool) -> None:
    """The first tokens of a walk together, and the last: those that a whole block may reach, and the one behind it."""
    params, lengths, num_drafts = CASES[case]
    tables = Tables(case, block_size=num_drafts)
    num_tokens = max(num_drafts + 2, WINDOW)  # the first step has no drafts
    walks = sampled(tables, lengths, num_tokens, num_drafts, at_once=at_once, rejects=rejects, **params)
    for num_before in {0, num_tokens - WINDOW}:
        wanted = target_probabilities(tables, WINDOW, params, num_before)
        assert deviation(walks[:, num_before : num_before + WINDOW], wanted) < FAIR


@pytest.mark.parametrize("rejects", [True, False], ids=["reject", "match"])
@pytest.mark.parametrize("lengths", [everything, half])
def test_under_masks_they_are_distributed_as_the_masked_target_says(rejects: bool, lengths: Lengths) -> None:
    """Drafts know nothing of masks: many are refused, and what follows a refusal is still the target's."""
    params: dict[str, Any] = {"temperature": 1.0}
    tables = Tables(4, spread=0.5)
    tables.allowed = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)) < 0.6
    assert tables.allowed.any(1).all() and not tables.allowed.all(1).any()
    walks = sampled(tables, lengths, 6, rejects=rejects, **params)
    for num_before in (0, 2):
        wanted = target_probabilities(tables, WINDOW, params, num_before)
        assert deviation(walks[:, num_before : num_before + WINDOW], wanted) < FAIR


def _accept_too_much(
    p: Tensor, q: Tensor, drafted: Tensor, counts: Tensor, uniform: Tensor, gumbel: Tensor
) -> tuple[Tensor, Tensor]:
    return acceptance.reject(p, 0.8 * q, drafted, counts, uniform, gumbel)


def _forget_what_was_drawn(
    p: Tensor, q: Tensor, drafted: Tensor, counts: Tensor, uniform: Tensor, gumbel: Tensor
) -> tuple[Tensor, Tensor]:
    """The token behind a rejection is one of the target, as if nothing had been rejected."""
    num_accepted, _ = acceptance.reject(p, q, drafted, counts, uniform, gumbel)
    at = num_accepted[:, None, None].expand(-1, 1, p.shape[2])
    return num_accepted, (p.gather(1, at)[:, 0].log() + gumbel).argmax(-1)


def _follow_the_wrong_row(
    p: Tensor, q: Tensor, drafted: Tensor, counts: Tensor, uniform: Tensor, gumbel: Tensor
) -> tuple[Tensor, Tensor]:
    num_accepted, last = acceptance.reject(p, q, drafted, counts, uniform, gumbel)
    return num_accepted, torch.where(num_accepted == counts, (p[:, 0].log() + gumbel).argmax(-1), last)


WRONG: Final[dict[str, dict[str, Any]]] = {
    "accepts too much": {"reject": _accept_too_much},
    "forgets what was drawn": {"reject": _forget_what_was_drawn},
    "follows the wrong row": {"reject": _follow_the_wrong_row},
    "decides by the noise of the draft before": {"_FOLLOWS": 0, "DRAWS": 0, "PLACES": 1},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_test_of_the_distribution_can_fail(wrong: str) -> None:
    params: dict[str, Any] = {"temperature": 1.0}
    tables = Tables(0)
    with mock.patch.multiple(drafts, **WRONG[wrong]):
        walks = sampled(tables, everything, 4, 2, count=FEWER, rejects=True, **params)
    assert deviation(walks, target_probabilities(tables, 4, params)) > SURE


def test_rejection_uses_no_noise_twice() -> None:
    """Over a walk that is longer than noise tells places apart."""
    used: list[tuple[int, int]] = []

    def watched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watch(seeds: Tensor, positions: Tensor, *others: int) -> Tensor:
            used.extend(zip(seeds.tolist(), positions.tolist(), strict=True))
            return function(seeds, positions, *others)

        return watch

    walk = Walk(Tables(1), [SlotSampling(temperature=1.0, seed=seed, rejects=True) for seed in range(5)], 200)
    with (
        mock.patch.object(sampler, "gumbel_noise", watched(noise.gumbel_noise)),
        mock.patch.object(drafts, "gumbel_noise", watched(noise.gumbel_noise)),
        mock.patch.object(drafts, "uniform_noise", watched(noise.uniform_noise)),
    ):
        walk.run(everything)
    assert len(used) > 5 * 200
    assert len(set(used)) == len(used)


# ---- a scheduler that looks at what it is about to verify


class Counterexample(Tables):
    """Of the DSpark paper: the first draft is accepted with 0.8, the second surely or never, by what the first one is.

    Steps with one, two and three positions come at rates of 1, 0.5 and 0.45 a second.
    """

    block_size = 2
    rates = (1.0, 0.5, 0.45)

    def __init__(self) -> None:
        self.target = torch.tensor([[0.7, 0.3]] * 2).log()
        self.draft = torch.tensor([[0.5, 0.5]] * 2).log()
        self.sureness = torch.tensor([1.0, 0.0])

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor:
        return torch.where(hidden[:, 0] == 0, 0.8, self.sureness[previous])

    @property
    def costs(self) -> CostTable:
        times = pack_float32([1e6 / rate for rate in self.rates])
        return CostTable.of(StepCosts(pack_int32([1, 2, 3]), times, pack_int32([1]), pack_float32([1e-3])))


def peeking(tables: Counterexample) -> Lengths:
    def lengths(state: DraftState, slots: Ints, most: Ints) -> Ints:
        found = state.survivals(slots).numpy()
        expected = np.stack((np.ones(len(slots)), 1 + found[:, 0], 1 + found.sum(-1)))
        best: Ints = (expected * np.array(tables.rates)[:, None]).argmax(0).astype(np.int64)
        return best

    return lengths


def by_older_ones(tables: Counterexample) -> Lengths:
    """The engine's way: a budget by survivals of the step before, which is spent by those of now."""
    older = np.full((AT_ONCE, 2), 255, np.uint8)
    budgets: dict[bytes, int] = {}

    def best(survivals: bytes) -> int:
        if survivals not in budgets:
            budgets[survivals] = best_budget(survivals, 1, 0, tables.costs, 2)
        return budgets[survivals]

    def lengths(state: DraftState, slots: Ints, most: Ints) -> Ints:
        budget = sum(best(survivals.tobytes()) for survivals in older[slots])
        chosen = state.lengths(slots, most, budget)
        older[slots] = state.survivals(slots).mul(255).round().byte().numpy()
        return chosen

    return lengths


@pytest.mark.parametrize("is_peeking", [True, False])
def test_a_scheduler_may_not_look_at_what_it_is_about_to_verify(is_peeking: bool) -> None:
    tables = Counterexample()
    params: dict[str, Any] = {"temperature": 1.0}
    parts = []
    with wide():
        for start in range(0, NUM_SAMPLES, AT_ONCE):
            samplings = [SlotSampling(seed=start + index, rejects=True, **params) for index in range(AT_ONCE)]
            lengths = peeking(tables) if is_peeking else by_older_ones(tables)
            parts.append(Walk(tables, samplings, 2).run(lengths, 2))
    walks = torch.cat(parts)
    probabilities = target_probabilities(tables, 2, params)
    if is_peeking:
        assert deviation(walks, probabilities, 2) > SURE
        share = float((walks[:, 1] == 0).double().mean())  # the first token comes from a prompt: nothing was drafted
        assert abs(share - 0.85) < 0.01
    else:
        assert deviation(walks, probabilities, 2) < FAIR


# ---- tokens that may not change


def mixed(number: int) -> SlotSampling:
    """Greedy and seeded slots with everything that shapes logits."""
    shapings = [
        None,
        LogitShaping(repetition_penalty=1.3),
        LogitShaping(presence_penalty=0.4, frequency_penalty=0.3),
        LogitShaping(bias_ids=pack_int32([1, 2]), bias_values=pack_float32([1.5, float("-inf")])),
        LogitShaping(allowed_bits=b"\x0e\0\0\0"),
        LogitShaping(bad_words=pack_int32([2, 1, 3, 1, 2])),
    ]
    return SlotSampling(
        temperature=(0.0, 0.8, 1.2)[number % 3],
        top_p=(1.0, 0.9)[number % 2],
        top_k=(0, 3)[number // 2 % 2],
        min_p=(0.0, 0.05)[number // 4 % 2],
        seed=number,
        min_length=(0, 4)[number // 5 % 2],
        stop_ids=pack_int32([0]),
        num_prompt=1,
        shaping=shapings[number % len(shapings)],
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.randoms(use_true_random=False))
def test_tokens_of_slots_that_match_do_not_depend_on_drafts(seed: int, num_drafts: int, drawn: Any) -> None:
    tables = Tables(seed, vocab=5)
    samplings = [mixed(seed + number) for number in range(90)]

    def none(state: DraftState, slots: Ints, most: Ints) -> Ints:
        return np.zeros_like(most)

    def any_number(state: DraftState, slots: Ints, most: Ints) -> Ints:
        return np.array([drawn.randint(0, most_of_it) for most_of_it in most.tolist()], np.int64)

    at_once = bool(seed % 2)
    wanted = Walk(tables, samplings, 6, at_once=at_once).run(none)
    walk = Walk(tables, samplings, 6, at_once=at_once)
    assert torch.equal(walk.run(any_number, num_drafts), wanted)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("rejects", [False, True])
def test_a_row_does_not_depend_on_its_company(rejects: bool, at_once: bool) -> None:
    tables = Tables(7)
    samplings = [
        SlotSampling(temperature=0.9, seed=number, rejects=rejects, top_p=(1.0, 0.9)[number % 2])
        for number in range(70)
    ]
    together = Walk(tables, samplings, 5, at_once=at_once).run(everything)
    for number in (0, 1, 33, 69):
        alone = Walk(tables, samplings[number : number + 1], 5, at_once=at_once)
        assert torch.equal(alone.run(everything)[0], together[number])


@pytest.mark.parametrize("rejects", [False, True])
def test_drawn_at_once_or_not_tokens_are_the_same(rejects: bool) -> None:
    """Of plain rows among others; what a float64 rounds is not seen in a small vocabulary."""
    tables = Tables(9)
    samplings = [structs.replace(one, rejects=rejects and one.temperature > 0) for one in kinds()]
    wanted, found = (Walk(tables, samplings, 9, at_once=at_once).run(half) for at_once in (False, True))
    assert torch.equal(found, wanted)


def test_a_good_draft_is_accepted_more_often_by_rejection_than_by_matching() -> None:
    accepted = []
    for rejects in (False, True):
        tables = Tables(3)
        walk = Walk(tables, [SlotSampling(temperature=1.0, seed=n, rejects=rejects) for n in range(4000)], 4)
        with wide():
            slots = np.arange(4000)
            walk.step(slots, everything, 3)
            before = walk.anchors.copy()
            walk.step(slots, everything, 3)
        accepted.append(float((walk.anchors - before).mean()))
    assert 1.0 < accepted[0] < accepted[1] < 4.0


def test_the_budget_goes_to_the_likeliest_and_equals_to_earlier_places_and_rows() -> None:
    walk = Walk(Tables(1), [SlotSampling() for _ in range(4)], 4)
    table = torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.9, 0.9], [0.2, 0.2, 0.2], [0.9, 0.5, 0.4]])
    walk.state._survivals[:4] = table
    slots, most = np.arange(4), np.array([3, 3, 3, 2])
    for budget, wanted in (
        (0, [0, 0, 0, 0]), (1, [1, 0, 0, 0]), (3, [1, 1, 0, 1]), (5, [1, 3, 0, 1]), (6, [2, 3, 0, 1]),
        (7, [2, 3, 0, 2]), (8, [2, 3, 1, 2]), (99, [3, 3, 3, 2]),
    ):  # fmt: skip
        assert walk.state.lengths(slots, most, budget).tolist() == wanted


def test_a_survival_that_is_no_number_takes_nothing_from_other_rows() -> None:
    walk = Walk(Tables(1), [SlotSampling() for _ in range(3)], 4)
    nan = float("nan")
    walk.state._survivals[:3] = torch.tensor([[0.9, nan, nan], [0.5, 0.4, 0.3], [0.2, 0.1, 0.0]])
    slots, most = np.arange(3), np.array([3, 2, 0])
    for budget, wanted in ((1, [1, 0, 0]), (3, [1, 2, 0]), (4, [2, 2, 0]), (99, [3, 2, 0])):
        assert walk.state.lengths(slots, most, budget).tolist() == wanted


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(1, 6), st.integers(0, 60))
def test_a_budget_is_spent_on_prefixes_and_within_limits(seed: int, num_rows: int, longest: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    walk = Walk(Tables(1, block_size=longest), [SlotSampling() for _ in range(num_rows)], 2)
    survivals = (rng.integers(1, 4, (num_rows, longest)) / 4).cumprod(1)  # with many equals
    walk.state._survivals[:num_rows] = torch.from_numpy(survivals)
    most = rng.integers(0, longest + 1, num_rows)
    entries = [(-survivals[row, place], place, row) for row in range(num_rows) for place in range(most[row])]
    chosen = [row for _, _, row in sorted(entries)[:budget]]
    assert (
        walk.state.lengths(np.arange(num_rows), most, budget).tolist()
        == np.bincount(chosen, minlength=num_rows).tolist()
    )


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("rejects", [True, False])
def test_drafts_of_the_target_itself_are_accepted(rejects: bool, at_once: bool) -> None:
    """So drafts are filtered, biased and drawn as the target's tokens are; only the last of a block can be refused."""
    tables = Tables(4)
    tables.draft = tables.target
    fixed = [one for one in map(mixed, range(300)) if one.shaping is None or not _is_moved(one.shaping)]
    samplings = [structs.replace(one, rejects=rejects, min_length=0) for one in fixed]
    walk, slots = Walk(tables, samplings, 9, at_once=at_once), np.arange(len(samplings))
    assert len({one.shaping for one in samplings}) > 2
    for num_steps in range(3):
        walk.step(slots, everything, 3)
        assert (walk.anchors == 1 + 4 * num_steps).all()


def _is_moved(shaping: LogitShaping) -> bool:
    """By what was said: drafts do without that."""
    penalties = shaping.repetition_penalty, shaping.presence_penalty, shaping.frequency_penalty
    return penalties != (1.0, 0.0, 0.0) or bool(shaping.bad_words)


def kinds() -> list[SlotSampling]:
    """Slots of every kind, in one batch."""
    rejecting = [
        SlotSampling(temperature=0.8, seed=number, rejects=True, top_k=number % 3, top_p=(1.0, 0.9)[number % 2])
        for number in range(60)
    ]
    return [*map(mixed, range(60)), *rejecting]


class OneStep:
    """Of slots of every kind: new drafts, of which 0 to 3 are judged. All that it takes is on the device before."""

    def __init__(self, device: torch.device, ops: Ops) -> None:
        samplings = kinds()
        self.slots = np.arange(len(samplings))
        self.rejecting = [slot for slot, sampling in enumerate(samplings) if sampling.rejects]
        self.counts = self.slots % 4
        self.tables = Tables(5).to(device)
        starts = self.slots % 3 + 1
        places = np.concatenate([start + 1 + np.arange(1 + self.counts[row]) for row, start in enumerate(starts)])
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.randn(len(places), VOCAB, generator=generator).to(device)
        held = torch.randint(0, VOCAB, (len(samplings) + 1, 9), generator=generator, dtype=torch.int32).to(device)
        self.anchors, self.newest = torch.from_numpy(starts).to(device), held[self.slots, starts].long()
        self.rows = VerifyRows(self.slots, self.counts, torch.from_numpy(places).to(device), places)
        sampling = SamplingState(held, VOCAB, ops.draw)
        sampling.admit(admissions(samplings))
        self.state = DraftState(len(samplings) + 1, 3, VOCAB, sampling, device, ops.draw, ops.verify)

    def run(self) -> tuple[Tensor, Tensor, drafts.Verdict]:
        survivals = self.state.propose(self.tables, self.slots, self.anchors, self.newest, 3)
        predicted = self.state.predicted(self.slots, self.counts)
        self.state.tokens(self.slots, self.counts)
        return survivals, predicted, self.state.judge(self.logits, self.rows)


def test_drafts_and_their_verdict_wait_for_no_device() -> None:
    """On a CPU, with a vocabulary so small that it takes the way of every device."""
    step = OneStep(torch.device("cpu"), select_ops("cpu", batch_invariant=True))
    with NoWaiting():  # type: ignore[no-untyped-call]
        _, _, verdict = step.run()
    assert set(verdict.num_tokens.tolist()) == {1, 2, 3, 4}


def test_memory_of_a_slot_is_what_it_says() -> None:
    state = Walk(Tables(1), [SlotSampling()], 2).state
    held = [*state._drafts, state._survivals]
    assert {id(one) for one in vars(state).values() if isinstance(one, Tensor)} <= set(map(id, held))
    assert sum(tensor.nbytes for tensor in held) == 2 * draft_slot_bytes(3, VOCAB)


@pytest.mark.gpu
def test_a_gpu_drafts_and_judges_as_a_cpu_does_and_is_not_waited_for() -> None:
    on_cpu = OneStep(torch.device("cpu"), select_ops("cpu", batch_invariant=True))
    on_gpu = OneStep(torch.device("cuda"), select_ops("nvidia", batch_invariant=False))
    on_gpu.run()  # kernels are loaded at their first use
    with no_waits():
        found = on_gpu.run()
    wanted = on_cpu.run()
    torch.testing.assert_close(found[0].cpu(), wanted[0])
    torch.testing.assert_close(found[1].cpu(), wanted[1])
    assert torch.equal(on_gpu.state._tokens.cpu(), on_cpu.state._tokens)
    torch.testing.assert_close(  # the rows of those drawn at once are not normed
        on_gpu.state._drawn_from[on_gpu.rejecting].cpu().log_softmax(-1), on_cpu.state._drawn_from[on_gpu.rejecting]
    )
    assert torch.equal(found[2].num_tokens.cpu(), wanted[2].num_tokens)
    firsts = np.cumsum(on_cpu.counts + 1) - on_cpu.counts - 1
    for first, count in zip(firsts.tolist(), wanted[2].num_tokens.tolist(), strict=True):
        assert torch.equal(found[2].tokens[first : first + count].cpu(), wanted[2].tokens[first : first + count])
