"""Attention of single positions to keys of their own: every position brings the rows that it may see.

Knows nothing of where the rows come from. One row is key and value for all heads. Products have one fixed shape, and
tiles of keys are added up in their order: the bits of a position depend on its own keys alone, and tiles behind them
that hide every key add exact zeros.

Legend: `T` positions, `H` heads, `D` head dim, `K` keys, `L` keys a tile.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

KEY_TILE: Final = 64
PIECE: Final = 64
"""Positions at a time: bounds what is gathered, and has no influence on bits."""
MOST_GATHERED: Final = 1 << 26
"""Numbers at a time on a GPU, where every launch counts."""


def piece_size(device: torch.device, numbers: int) -> int:
    """Positions at a time, where each gathers up to so many `numbers`."""
    return PIECE if device.type == "cpu" else max(PIECE, MOST_GATHERED // numbers)


def pad_keys(index: Tensor, is_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`index`, `is_hidden` [T, K] up to whole tiles: what is added is hidden, and names the last key once more."""
    num_pad = -index.shape[1] % KEY_TILE
    if not num_pad:
        return index, is_hidden
    padding = index[:, -1:].expand(-1, num_pad)
    return torch.cat((index, padding), 1), torch.nn.functional.pad(is_hidden, (0, num_pad), value=True)


def attend(queries: Tensor, keys: Tensor, is_hidden: Tensor, sinks: Tensor) -> Tensor:
    """`queries` [T, H, D] on `keys` [T, K, D], K whole tiles; `sinks` [H] take part in the denominators: [T, H, D].

    Every position sees a key.
    """
    scale = queries.shape[-1] ** -0.5
    scores = score_tiles(queries, keys) * scale  # [tiles, T, H, L]
    hidden = is_hidden.unflatten(1, (-1, KEY_TILE)).transpose(0, 1)[:, :, None]  # [tiles, T, 1, L]
    scores = scores.masked_fill(hidden, -torch.inf)
    peaks = torch.maximum(scores.amax((0, 3)), sinks)  # [T, H]
    weights = (scores - peaks[..., None]).exp()
    total = (sinks - peaks).exp()
    out = torch.zeros_like(queries)
    for tile, tile_weights in enumerate(weights):
        total = total + tile_weights.sum(-1)
        out = out + torch.bmm(tile_weights, keys[:, tile * KEY_TILE : (tile + 1) * KEY_TILE])
    return out / total[..., None]


def score_tiles(queries: Tensor, keys: Tensor) -> Tensor:
    """Products of `queries` [T, H, D] with `keys` [T, K, D], tile by tile: [tiles, T, H, L]."""
    tiles = keys.split(KEY_TILE, 1)
    return torch.stack([torch.bmm(queries, tile.transpose(1, 2)) for tile in tiles])
