"""Matrix products with a constant weight whose rows do not depend on each other's company. Knows nothing of models.

Legend: `T` rows, `C` inputs, `F` outputs.

A GEMM library picks its loop order by the number of rows, and with it the rounding of a row. So rows are computed in
tiles of a few fixed heights, of which the smallest is the yardstick: a larger height is used only for shapes where it
was seen, on this machine and with this number of threads, to give the same bits. On the CPU the weight is packed for
oneDNN once; at 16 rows that is about four times as fast as `torch.nn.functional.linear`, which packs at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

TILE_ROWS: Final = 16
"""The yardstick. Below 16 rows libraries switch to matrix-vector loops, which round differently."""
TALL_TILES: Final = (256, 64)
Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LinearWeight:
    """A weight [F, C] in the layout that its device likes."""

    packed: Tensor
    multiply: Multiply
    heights: tuple[int, ...]
    """Tile heights in falling order; empty: any number of rows goes in one piece."""


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """`x` [T, C] times the transposed weight [F, C]: [T, F]."""
    if not weight.heights:
        return weight.multiply(x, weight.packed)
    num_rows = x.shape[0]
    num_pad = -num_rows % TILE_ROWS
    if num_pad:
        x = torch.cat((x, x.new_zeros(num_pad, x.shape[1])))  # [T up to a multiple of 16, C]
    pieces = [weight.multiply(tile, weight.packed) for tile in torch.split(x, tile_heights(x.shape[0], weight.heights))]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out[:num_rows]


def tile_heights(num_rows: int, heights: tuple[int, ...]) -> list[int]:
    """Cut `num_rows`, a multiple of the last height, into tiles, the tallest first."""
    tiles: list[int] = []
    for height in heights:
        tiles += [height] * (num_rows // height)
        num_rows %= height
    return tiles


def pack_linear(weight: Tensor, *, batch_invariant: bool) -> LinearWeight:
    """`weight` [F, C] for the CPU. The result keeps no reference to it where oneDNN can pack."""
    multiply, pack = _cpu_backend()
    heights = proven_heights(weight.shape[0], weight.shape[1], torch.get_num_threads()) if batch_invariant else ()
    return LinearWeight(pack(weight), multiply, heights)


@lru_cache(maxsize=256)
def proven_heights(num_out: int, num_in: int, num_threads: int) -> tuple[int, ...]:
    """The tile heights that give a row of a [num_out, num_in] product the same bits, measured. A pure memo."""
    generator = torch.Generator().manual_seed(num_threads)
    multiply, pack = _cpu_backend()
    packed = pack(torch.randn(num_out, num_in, generator=generator))
    x = torch.randn(TALL_TILES[0], num_in, generator=generator)  # [256, C]
    expected = torch.cat([multiply(tile, packed) for tile in torch.split(x, TILE_ROWS)])  # [256, F]

    def is_equal(height: int) -> bool:
        return all(
            torch.equal(multiply(x[start : start + height], packed), expected[start : start + height])
            for start in {0, TALL_TILES[0] - height}
        )

    return (*(height for height in TALL_TILES if is_equal(height)), TILE_ROWS)


def _cpu_backend() -> tuple[Multiply, Callable[[Tensor], Tensor]]:
    has_onednn: bool = torch.backends.mkldnn.is_available()
    if has_onednn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return _multiply_packed, _pack_onednn
    return torch.nn.functional.linear, Tensor.contiguous


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE_ROWS)
    return packed


def _multiply_packed(x: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out
