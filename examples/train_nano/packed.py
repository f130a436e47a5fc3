"""Rows of several documents: positions, turns, and who sees whom. Knows nothing of layers or weights.

Legend: `B` rows, `T` places of a row, `W` window, `R` compressed rows of a row, `D2` half of the turned dims.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from examples.train_nano.figures import Figures, Yarn

UNLEARNT = 1 << 15
"""As `chat` adds it to ids."""
IGNORED = -100
_ROOM = 16
"""Positions behind the longest row, where the last draft block of it may stand."""


class Turns(NamedTuple):
    cos: Tensor
    """[B, T, D2]"""
    sin: Tensor


class Packed(NamedTuple):
    """What a batch of tokens says without any weight."""

    tokens: Tensor
    """[B, T]"""
    positions: Tensor
    """[B, T]: in their documents."""
    is_real: Tensor
    """[B, T]: no padding."""
    targets: Tensor
    """[B, T]: the next token where it is to be learnt, else `IGNORED`."""
    plain: Turns
    """Of layers with a window alone."""
    stretched: Turns
    """Of layers with compressed rows."""
    window: Tensor
    """[B, T, 2W]: which places of the block of `W` before its own, and of its own, each place sees."""
    decoder_window: Tensor
    """[B, T, 2W]: in the decoder half, which knows nothing below where it was last replayed from."""
    floors: Tensor
    """[B, T]: the place below which the decoder half knows nothing."""
    visible: dict[int, Tensor]
    """By ratio, [B, T, R]: compressed rows of the same document that are complete."""


class Packer:
    """Makes a `Packed` of tokens."""

    def __init__(self, figures: Figures, max_len: int, device: torch.device) -> None:
        self._figures = figures
        self._plain = _table(figures.rope_theta, figures.rope_dim, None, max_len + _ROOM, device)
        self._stretched = _table(figures.compress_theta, figures.rope_dim, figures.yarn, max_len, device)

    def __call__(self, rows: Tensor, is_replayed: Tensor | None = None) -> Packed:
        """`rows` [B, T] int64 as `prepare` writes them, T a multiple of the window; each begins with a document.

        At the places `is_replayed` [B, T] bool the decoder half begins anew, as it does at the end of a long prompt.
        """
        figures = self._figures
        tokens = rows % UNLEARNT
        places = torch.arange(tokens.shape[1], device=tokens.device)
        is_first = tokens == figures.bos
        starts = torch.where(is_first, places, 0).cummax(1).values  # [B, T]
        positions = places - starts
        window = self._window(places, starts)
        decoder_window, floors = window, starts
        if is_replayed is not None:
            floors = torch.where(is_first | is_replayed, places, 0).cummax(1).values
            decoder_window = self._window(places, floors)
        visible = {ratio: self._visible(ratio, places, starts) for ratio in sorted(set(figures.ratios) - {0})}
        return Packed(
            tokens,
            positions,
            tokens != figures.pad,
            _targets(rows, tokens),
            self.plain_turns(positions),
            Turns(*(part[positions] for part in self._stretched)),
            window,
            decoder_window,
            floors,
            visible,
        )

    def plain_turns(self, positions: Tensor) -> Turns:
        """Of `positions` [B, N], of which those of a draft block may lie behind the longest row."""
        return Turns(*(part[positions] for part in self._plain))

    def _window(self, places: Tensor, starts: Tensor) -> Tensor:
        size = self._figures.window
        block = torch.div(places, size, rounding_mode="floor")
        seen = (block[:, None] - 1) * size + torch.arange(2 * size, device=places.device)  # [T, 2W]
        distance = places[:, None] - seen
        is_near = (distance >= 0) & (distance < size)
        return is_near & (seen >= starts[..., None])

    def _visible(self, ratio: int, places: Tensor, starts: Tensor) -> Tensor:
        first = torch.arange(0, len(places), ratio, device=places.device)  # [R]
        is_complete = first + ratio - 1 <= places[:, None]  # [T, R]
        return is_complete & (first >= starts[..., None])


def turn(x: Tensor, turns: Turns, *, back: bool = False) -> Tensor:
    """`x` [B, T, N, D] with its last dims turned, or turned back."""
    rope_dim = 2 * turns.cos.shape[-1]
    head, tail = x.split((x.shape[-1] - rope_dim, rope_dim), -1)
    first, second = tail.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns.cos[:, :, None], turns.sin[:, :, None]
    sin = -sin if back else sin
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), -1)


def _targets(rows: Tensor, tokens: Tensor) -> Tensor:
    targets = torch.where(rows < UNLEARNT, tokens, IGNORED).roll(-1, 1)
    targets[:, -1] = IGNORED
    return targets


def _table(theta: float, rope_dim: int, yarn: Yarn | None, max_len: int, device: torch.device) -> Turns:
    pairs = torch.arange(0, rope_dim, 2, dtype=torch.float32)
    freqs = 1.0 / theta ** (pairs / rope_dim)
    if yarn is not None:

        def pair_of(num_turns: float) -> float:
            return rope_dim * log(yarn.original_len / (num_turns * 2 * pi)) / (2 * log(theta))

        low, high = max(floor(pair_of(yarn.beta_fast)), 0), min(ceil(pair_of(yarn.beta_slow)), rope_dim - 1)
        ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freqs = freqs / yarn.factor * ramp + freqs * (1.0 - ramp)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), freqs)
    return Turns(angles.cos().to(device), angles.sin().to(device))
