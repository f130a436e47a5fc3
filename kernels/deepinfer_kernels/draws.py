"""What tokens are drawn and judged by, in one launch whatever the number of rows. Knows nothing of requests.

The noise of (seed, moment, token) is a pure function, SplitMix64's: `noise` of the workers says it in torch, and
`acceptance` what rejection sampling is.

Legend: `R` rows, `P` logits of them, `V` vocabulary, `N` places to keep scores at, `K` drafts at each.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Kept(NamedTuple):
    """Where the scores of rows are kept: those that their tokens were drawn from."""

    scores: Tensor
    """[N, V] float32, rows of which may lie apart."""
    rows: Tensor
    """[R] int64: which of them are written."""


class Drafts(NamedTuple):
    """Drafts, and what they were drawn from."""

    tokens: Tensor
    """[N, K] int64"""
    scores: Tensor
    """[N, K, V] float32: logarithms of what is proportional to probabilities."""
    log_sums: Tensor
    """[N, K] float64: of the exponentials of these."""


class DraftedRows(NamedTuple):
    """Rows whose drafts are to be judged by rejection sampling."""

    drafts: Drafts
    slots: Tensor
    """[R] int64: where among the drafts."""
    counts: Tensor
    """[R] int64: how many drafts each has."""
    firsts: Tensor
    """[R] int64: the first of its 1 + count logits, which lie one behind the other."""
    temperatures: Tensor
    """[R] float64, above 0."""
    accept_seeds: Tensor
    """[R] int64: seeds of what accepts; its moments are `anchors * num_moments` and the draft's number."""
    follow_seeds: Tensor
    """[R] int64: seeds of what follows; its moments are `anchors`."""
    anchors: Tensor
    """[R] int64"""
    num_moments: int


class Draw(Protocol):
    def __call__(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, moments: Tensor, kept: Kept | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A token for each row of `logits` [R, V] float32: [R] int64.

        At a temperature [R] float64 of 0 the largest logit, else the largest of score + Gumbel noise, where scores are
        (logit - the largest) / temperature; the lowest token among equals. With `kept` these are rounded to float32
        first, and kept; then their `log_sums` [R] float64 come as well. Where the temperature is 0 nothing is kept.
        """


class Verify(Protocol):
    def __call__(self, logits: Tensor, rows: DraftedRows) -> tuple[Tensor, Tensor]:
        """How many drafts of `rows` `logits` [P, V] float32 accept, and the token behind them: both [R] int64."""
