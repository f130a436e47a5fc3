"""The drafts of every slot: made by a model's draft stages, kept on the device, judged against the target's logits.

Slots with a seed of their own, and greedy ones, draw their drafts by the very noise that the target's tokens are drawn
by, of the same position, and accept what equals those. The others have drafts and decisions by noise that is used once:
a position may be drafted in several steps, so noise goes by the newest token's position (of which there is one step
only), the place in the block and what it is for. Belongs to the device thread. Knows nothing of plans and forwards.

Legend: `R` rows, `V` vocabulary, `K` drafts, `P` logits of the rows: of each those of its newest token, then those of
its drafts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import DraftedRows, Drafts, Draw, Verify
from deepinfer_workers.acceptance import match, reject
from deepinfer_workers.batch import Ints
from deepinfer_workers.device_layout import DeviceLayout, best_lengths
from deepinfer_workers.models.model import Drafter
from deepinfer_workers.noise import gumbel_noise, uniform_noise
from deepinfer_workers.plain_drafts import DRAWS, PLACES, PlainDrafts
from deepinfer_workers.sampler import ROWS_AT_ONCE, choose
from deepinfer_workers.sampling_state import SamplingState
from deepinfer_workers.upload import to_device


class VerifyRows(NamedTuple):
    """All sampled rows of a step."""

    slots: Ints
    """[R]"""
    counts: Ints
    """[R]: how many drafts each verifies."""
    places: Tensor
    """[P]: where the token of each of the logits is to be stored."""
    num_known: Ints
    """[P]: bounds, known on the host, of `places`."""


class Verdict(NamedTuple):
    """What the target takes."""

    num_tokens: Tensor
    """[R] int64: from 1 to one more than the drafts."""
    tokens: Tensor
    """[P] int64: of each row the accepted drafts, then the token behind them; what follows means nothing."""


_ACCEPTS: Final = 0x369DEA0F31A53F85
_FOLLOWS: Final = 0x27BB2EE687B0B0FD
"""What noise is for, beside `DRAWS`. Mixed into seeds of 63 bits."""
_ROWS_AT_ONCE: Final = 16
"""Rows that are judged together by rejection: several times [rows, K + 1, V] float64."""


def draft_slot_bytes(longest: int, vocab_size: int) -> int:
    """On the device, for one slot."""
    return longest * (8 + 4 + 8 + 4 * vocab_size)


class DraftState:
    """Drafts, their survivals and what they were drawn from, by slot."""

    def __init__(
        self,
        num_slots_with_null: int,
        longest: int,
        vocab_size: int,
        sampling: SamplingState,
        device: torch.device,
        draw: Draw | None = None,
        verify: Verify | None = None,
    ) -> None:
        """`draw`, `verify`: how the device draws and judges rows of plain sampling at once, if it can."""
        self.longest = longest
        self._sampling = sampling
        self._verify = verify
        self._tokens = torch.zeros(num_slots_with_null, longest, dtype=torch.int64, device=device)
        self._survivals = torch.zeros(num_slots_with_null, longest, device=device)
        # Logarithms of what is proportional to probabilities, of slots that reject; sums belong to those drawn at once.
        self._drawn_from = torch.zeros(num_slots_with_null, longest, vocab_size, device=device)
        log_sums = torch.zeros(num_slots_with_null, longest, dtype=torch.float64, device=device)
        self._drafts = Drafts(self._tokens, self._drawn_from, log_sums)
        self._plain = None if draw is None else PlainDrafts(self._drafts, self._survivals, sampling, draw)

    def prepare(self, drafter: Drafter, *, in_graphs: bool) -> None:
        """Compile what judges plain rows at once, and capture what drafts them, before somebody waits."""
        if self._verify is not None:
            zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
            nothing = VerifyRows(np.array([len(self._tokens) - 1]), zero, self._tokens[:1, 0], one)
            self._verify_plain(self._verify, self._drawn_from[0, :1], nothing, _Layout.of(zero), zero)
        if in_graphs and self._plain is not None and drafter.hidden_flat is not None:
            self._plain.capture(drafter, drafter.hidden_flat)

    def propose(self, drafter: Drafter, slots: Ints, anchors: Tensor, tokens: Tensor, num_drafts: int) -> Tensor:
        """Draft behind `tokens` [R], which stand at `anchors` [R]: survivals [R, num_drafts] float32."""
        if self._plain is None:
            hidden, others = drafter.hidden(slots, anchors, tokens), np.arange(len(slots))
        else:
            hidden = self._plain.propose(drafter, slots, anchors, tokens, num_drafts)
            others = np.flatnonzero(~self._sampling.have_plain_drafts(slots))
        if len(others) == len(slots):
            self._propose_some(drafter, hidden, slots, anchors, tokens, num_drafts)
        elif others.size:
            index = to_device(others, anchors.device)
            self._propose_some(
                drafter,
                hidden.index_select(0, index),
                slots[others],
                anchors.index_select(0, index),
                tokens.index_select(0, index),
                num_drafts,
            )
        return self._survivals[to_device(slots, anchors.device), :num_drafts]

    def _propose_some(
        self, drafter: Drafter, hidden: Tensor, slots: Ints, anchors: Tensor, tokens: Tensor, num_drafts: int
    ) -> None:
        at = to_device(slots, anchors.device)
        survival = torch.ones(len(slots), device=anchors.device)
        previous = tokens
        for place in range(num_drafts):
            some = hidden[:, place]
            logits = self._sampling.draft_logits(drafter.logits(some, previous), slots)
            survival = survival * drafter.confidences(some, previous)
            previous = self._draw(logits, slots, anchors, place)
            self._tokens[at, place] = previous
            self._survivals[at, place] = survival

    def _draw(self, logits: Tensor, slots: Ints, anchors: Tensor, place: int) -> Tensor:
        """Drafts of one place in every block: [R]."""
        tokens = logits.argmax(-1)
        rejects = self._sampling.rejects(slots)
        warm = np.flatnonzero(self._sampling.is_warm(slots) & ~rejects)
        for rows in _pieces(warm, ROWS_AT_ONCE):
            index = to_device(rows, logits.device)
            scores = self._sampling.draft_scores(logits.index_select(0, index), slots[rows])
            positions = anchors.index_select(0, index) + 1 + place
            tokens.index_copy_(0, index, choose(scores, self._sampling.seeds(slots[rows]), positions))
        for rows in _pieces(np.flatnonzero(rejects), ROWS_AT_ONCE):
            index = to_device(rows, logits.device)
            scores = self._sampling.draft_scores(logits.index_select(0, index), slots[rows])
            drawn_from = scores.log_softmax(-1).float()
            self._drawn_from[to_device(slots[rows], logits.device), place] = drawn_from
            seeds = self._sampling.seeds(slots[rows]) ^ DRAWS
            moments = anchors.index_select(0, index) * PLACES + place
            tokens.index_copy_(0, index, choose(drawn_from.double(), seeds, moments))
        return tokens

    def lengths(self, slots: Ints, most: Ints, budget: int) -> Ints:
        """How many drafts each verifies, at most `most` [R] and `budget` together: those of the best survivals."""
        found = best_lengths(self.survivals(slots).cpu(), torch.from_numpy(most), min(budget, int(most.sum())))
        lengths: Ints = found.numpy()
        return lengths

    @property
    def are_judged_at_once(self) -> bool:
        """`judge_on_device` can be asked."""
        return self._verify is not None

    def layout(self, slots: Ints, most: Ints, budget: int) -> DeviceLayout:
        """As `lengths`, without waiting for the device. `budget` is at most the sum of `most`."""
        on_device, most_on_device = to_device(np.stack((slots, most)), self._tokens.device).unbind(0)
        counts = best_lengths(self._survivals[on_device], most_on_device, budget)
        return DeviceLayout.of(on_device, counts, len(slots) + budget)

    def tokens_of(self, layout: DeviceLayout, newest: Tensor) -> Tensor:
        """[P]: those of all positions, of which `newest` [R] are the first of each row."""
        drafts = self._tokens[layout.slots[layout.owners], layout.offsets - 1]  # of first ones, any
        return torch.where(layout.offsets > 0, drafts, newest[layout.owners])

    def predicted_of(self, layout: DeviceLayout) -> Tensor:
        """As `predicted`."""
        survivals = self._survivals[layout.slots]  # [R, longest]
        places = torch.arange(self.longest, device=survivals.device)
        return torch.where(places < layout.counts[:, None], survivals, 0.0).sum(0)

    def judge_on_device(self, logits: Tensor, layout: DeviceLayout, slots: Ints, places: Tensor) -> Verdict:
        """As `judge`, of `slots` [R] of plain sampling, without asking how many drafts each has. `places` [P]."""
        assert self._verify is not None
        tokens = self._sampling.sample_plain(logits, layout.slots[layout.owners], places)
        drafts = self._tokens[layout.slots]  # [R, longest]
        num_accepted = match(tokens[layout.padded(self.longest)], drafts, layout.counts)
        rejecting = np.flatnonzero(self._sampling.rejects(slots))
        if rejecting.size:
            some = to_device(rejecting, logits.device)
            of_slots, counts, firsts = layout.slots[some], layout.counts[some], layout.firsts[some]
            accepted, last = self._verify(logits, self._drafted(of_slots, counts, firsts, places))
            num_accepted[some] = torch.where(counts > 0, accepted, 0)
            # Rows without drafts have a token already. Of others the drafts come first, then what follows them.
            follows = torch.full_like(layout.counts, -1)
            follows[some] = torch.where(counts > 0, last, -1)
            follows = follows[layout.owners]  # [P]
            told = drafts[layout.owners, layout.offsets.clamp(max=self.longest - 1)]
            told = torch.where(layout.offsets == num_accepted[layout.owners], follows, told)
            tokens = torch.where(follows >= 0, told, tokens)
        return Verdict(num_accepted + 1, tokens)

    def survivals(self, slots: Ints) -> Tensor:
        """[R, longest] float32: of the newest drafts, how probable it is that each is reached and accepted."""
        return self._survivals[to_device(slots, self._survivals.device)]

    def tokens(self, slots: Ints, counts: Ints) -> Tensor:
        """The first `counts` [R] drafts of `slots` [R], one after another."""
        at, places = self._entries(slots, counts)
        return self._tokens[at, places]

    def predicted(self, slots: Ints, counts: Ints) -> Tensor:
        """[longest] float32: by place, the survivals of these drafts, summed over rows."""
        at, places = self._entries(slots, counts)
        sums = torch.zeros(self.longest, device=self._survivals.device)
        return sums.index_add_(0, places, self._survivals[at, places])

    def judge(self, logits: Tensor, rows: VerifyRows, allowed: Tensor | None = None) -> Verdict:
        """Which drafts are accepted, and the tokens that are taken. `logits` [P, V].

        `allowed` [P, V] bool masks tokens out: of the target, so that a draft that is none of them is never accepted.
        """
        rejects = self._sampling.rejects(rows.slots) & (rows.counts > 0)
        are_plain = rejects & self._sampling.are_plain(rows.slots) & (allowed is None)
        layout = _Layout.of(rows.counts)
        verdict = Verdict(
            torch.ones(len(rows.slots), dtype=torch.int64, device=logits.device), torch.zeros_like(rows.places)
        )
        matching = np.flatnonzero(~rejects)
        if matching.size:
            self._match(logits, rows, layout, matching, allowed, verdict)
        if self._verify is not None and are_plain.any():
            some = np.flatnonzero(are_plain)
            self._take(rows, layout, some, *self._verify_plain(self._verify, logits, rows, layout, some), verdict)
            rejects &= ~are_plain
        for some in _pieces(np.flatnonzero(rejects), _ROWS_AT_ONCE):
            self._take(rows, layout, some, *self._reject(logits, rows, layout, some, allowed), verdict)
        return verdict

    def _match(
        self,
        logits: Tensor,
        rows: VerifyRows,
        layout: _Layout,
        some: Ints,
        allowed: Tensor | None,
        verdict: Verdict,
    ) -> None:
        """Of the rows `some` [R]: into `verdict`."""
        packed = layout.packed(some)
        is_every = len(packed) == len(layout.owners)
        at = to_device(packed, logits.device)
        taken = self._sampling.sample(
            logits if is_every else logits.index_select(0, at),
            rows.slots[layout.owners[packed]],
            rows.places.index_select(0, at),
            allowed if allowed is None or is_every else allowed.index_select(0, at),
            rows.num_known[packed],
        )
        verdict.tokens.index_copy_(0, at, taken)
        num_drafts = int(rows.counts[some].max())
        if num_drafts:
            targets = verdict.tokens[to_device(layout.padded(some, num_drafts), logits.device)]
            drafts = self._tokens[to_device(rows.slots[some], logits.device), :num_drafts]
            num_accepted = match(targets, drafts, to_device(rows.counts[some], logits.device))
            verdict.num_tokens.index_add_(0, to_device(some, logits.device), num_accepted)

    def _verify_plain(
        self, verify: Verify, logits: Tensor, rows: VerifyRows, layout: _Layout, some: Ints
    ) -> tuple[Tensor, Tensor]:
        """As `_reject`, in one launch."""
        columns = np.stack((rows.slots[some], rows.counts[some], layout.firsts[some]))
        slots, counts, firsts = to_device(columns, logits.device).unbind(0)
        return verify(logits, self._drafted(slots, counts, firsts, rows.places))

    def _drafted(self, slots: Tensor, counts: Tensor, firsts: Tensor, places: Tensor) -> DraftedRows:
        """Of `slots` with `counts` drafts, whose logits begin at `firsts`, [R] each; `places` [P]."""
        temperatures, seeds, _ = self._sampling.plain_columns(slots)
        return DraftedRows(
            self._drafts,
            slots,
            counts,
            firsts,
            temperatures,
            accept_seeds=seeds ^ _ACCEPTS,
            follow_seeds=seeds ^ _FOLLOWS,
            anchors=places.index_select(0, firsts) - 1,
            num_moments=PLACES,
        )

    def _reject(
        self, logits: Tensor, rows: VerifyRows, layout: _Layout, some: Ints, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of the rows `some` [R], by rejection sampling: how many drafts are accepted, and what follows, [R] each."""
        slots, counts, num_drafts = rows.slots[some], rows.counts[some], int(rows.counts[some].max())
        packed = layout.packed(some)
        at, slot_index = to_device(packed, logits.device), to_device(slots, logits.device)
        scores = self._sampling.scores(
            logits.index_select(0, at),
            rows.slots[layout.owners[packed]],
            rows.places.index_select(0, at),
            rows.num_known[packed],
            None if allowed is None else allowed.index_select(0, at),
        )
        own = to_device(_Layout.of(counts).padded(np.arange(len(some)), num_drafts + 1), logits.device)
        p, q = scores.softmax(-1)[own], self._drawn_from[slot_index, :num_drafts].double().softmax(-1)
        drafts, seeds = self._tokens[slot_index, :num_drafts], self._sampling.seeds(slots)
        anchors = rows.places.index_select(0, to_device(layout.firsts[some], logits.device)) - 1
        moments = (anchors * PLACES)[:, None] + torch.arange(num_drafts, device=logits.device)
        uniform = uniform_noise((seeds ^ _ACCEPTS).repeat_interleave(num_drafts), moments.flatten()).view_as(moments)
        gumbel = gumbel_noise(seeds ^ _FOLLOWS, anchors, logits.shape[1])
        return reject(p, q, drafts, to_device(counts, logits.device), uniform, gumbel)

    def _take(
        self, rows: VerifyRows, layout: _Layout, some: Ints, num_accepted: Tensor, last: Tensor, verdict: Verdict
    ) -> None:
        """The drafts of the rows `some` [R] that were accepted, and the `last` behind them: into `verdict`."""
        device, counts = last.device, rows.counts[some]
        drafts = self._tokens[to_device(rows.slots[some], device), : int(counts.max())]
        # Behind a row's drafts there is a place for the token that follows the last of them.
        padded = torch.cat((drafts, drafts[:, :1]), 1).scatter(1, num_accepted[:, None], last[:, None])
        packed = layout.packed(some)
        columns = np.stack((packed, np.repeat(np.arange(len(some)), counts + 1), layout.offsets[packed]))
        at, owners, offsets = to_device(columns, device).unbind(0)
        verdict.tokens.index_copy_(0, at, padded[owners, offsets])
        verdict.num_tokens.index_add_(0, to_device(some, device), num_accepted)

    def _entries(self, slots: Ints, counts: Ints) -> tuple[Tensor, Tensor]:
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return to_device(np.repeat(slots, counts), self._tokens.device), to_device(places, self._tokens.device)


class _Layout(NamedTuple):
    """How the logits of rows lie one after another: those of the newest token, then those of the drafts."""

    sizes: Ints
    """[R]"""
    firsts: Ints
    """[R]"""
    owners: Ints
    """[P]"""
    offsets: Ints
    """[P]: places in their rows."""

    @classmethod
    def of(cls, counts: Ints) -> _Layout:
        sizes = counts + 1
        firsts = np.cumsum(sizes) - sizes
        owners = np.repeat(np.arange(len(counts)), sizes)
        return cls(sizes, firsts, owners, np.arange(len(owners)) - firsts[owners])

    def packed(self, rows: Ints) -> Ints:
        """Where the logits of `rows` are, one after another."""
        return np.repeat(self.firsts[rows], self.sizes[rows]) + self.of(self.sizes[rows] - 1).offsets

    def padded(self, rows: Ints, width: int) -> Ints:
        """[R, width]: where the first logits of `rows` are; behind its last, the last again."""
        places = np.minimum(np.arange(width), self.sizes[rows, None] - 1)
        return self.firsts[rows, None] + places


def _pieces(rows: Ints, size: int) -> list[Ints]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
