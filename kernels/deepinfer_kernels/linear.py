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
from typing import Any, Final

import torch
from torch import Tensor

TILE_ROWS: Final = 16
"""The yardstick. Below 16 rows libraries switch to matrix-vector loops, which round differently."""
TALL_TILES: Final = (256, 64)
SAMPLED_HEIGHTS: Final = (*range(1, 18), 23, 31, 33, 48, 64, 100, 128, 200, 256)
"""What is tried before a product is said to give the same bits at any height up to the tallest tile."""
SAMPLED_SHIFTS: Final = (1, 2, 5, 8, 13, 15)
Multiply = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Backend:
    """How a library multiplies by a constant weight."""

    pack: Callable[[Tensor], Any]
    """A weight [F, C] to the layout that it likes."""
    multiply: Multiply
    takes_any_height: bool = False
    """Worth asking whether its rows come out alike at every height, and not just in tiles."""
    dtype: torch.dtype = torch.float32
    """Of its results."""


@dataclass(frozen=True)
class LinearWeight:
    """A weight [F, C] in the layout that its device likes."""

    packed: Any
    multiply: Multiply
    heights: tuple[int, ...]
    """Tile heights in falling order, down to the one that rows are padded to; empty: all rows go in one piece."""


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """`x` [T, C] times the transposed weight [F, C]: [T, F]."""
    num_rows = x.shape[0]
    heights = weight.heights
    if not heights or (heights[-1] == 1 and num_rows <= heights[0]):
        return weight.multiply(x, weight.packed)
    num_pad = -num_rows % heights[-1]
    if num_pad:
        x = torch.cat((x, x.new_zeros(num_pad, x.shape[1])))  # [T up to a multiple of the last height, C]
    pieces = [weight.multiply(tile, weight.packed) for tile in torch.split(x, tile_heights(x.shape[0], heights))]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out[:num_rows]


def tile_heights(num_rows: int, heights: tuple[int, ...]) -> list[int]:
    """Cut `num_rows`, a multiple of the last height, into tiles, the tallest first. A last height of 1: any rest."""
    tiles: list[int] = []
    for height in heights:
        if height == 1:
            return [*tiles, num_rows] if num_rows else tiles
        tiles += [height] * (num_rows // height)
        num_rows %= height
    return tiles


def pack_linear(weight: Tensor, *, batch_invariant: bool) -> LinearWeight:
    """`weight` [F, C] for the CPU in float32. The result keeps no reference to it where oneDNN can pack."""
    return pack_with(_float32_backend(), weight, batch_invariant=batch_invariant)


def pack_with(backend: Backend, weight: Tensor, *, batch_invariant: bool) -> LinearWeight:
    """`weight` [F, C] for `backend`, and the tile heights that keep its rows independent if that is asked for.

    Where the backend cannot keep them so, the product is float32's, rounded to what the backend's results would be.
    """
    num_out, num_in = weight.shape
    heights = proven_heights(num_out, num_in, torch.get_num_threads(), backend) if batch_invariant else ()
    if heights is None:
        exact = pack_with(_float32_backend(), weight, batch_invariant=True)
        return LinearWeight(exact.packed, _rounded(exact.multiply, backend.dtype), exact.heights)
    return LinearWeight(backend.pack(weight), backend.multiply, heights)


def _rounded(multiply: Multiply, dtype: torch.dtype) -> Multiply:
    return lambda x, packed: multiply(x.float(), packed).to(dtype)


@lru_cache(maxsize=256)
def proven_heights(
    num_out: int, num_in: int, num_threads: int, backend: Backend | None = None
) -> tuple[int, ...] | None:
    """The tile heights that give a row of a [num_out, num_in] product the same bits, measured. A pure memo.

    `None`: a row's bits depend on its place in the tile (never for float32, which has nothing to fall back to).
    """
    generator = torch.Generator().manual_seed(num_threads)
    backend = backend or _float32_backend()
    packed = backend.pack(torch.randn(num_out, num_in, generator=generator))
    x = torch.randn(TALL_TILES[0], num_in, generator=generator)  # [256, C]
    expected = torch.cat([backend.multiply(tile, packed) for tile in torch.split(x, TILE_ROWS)])  # [256, F]

    def is_equal(height: int) -> bool:
        return all(
            torch.equal(backend.multiply(x[start : start + height], packed), expected[start : start + height])
            for start in {0, TALL_TILES[0] - height}
        )

    is_fallback = backend == _float32_backend()
    if not is_fallback and not all(_is_placeless(backend, packed, x[:TILE_ROWS], shift) for shift in SAMPLED_SHIFTS):
        return None
    if backend.takes_any_height and all(is_equal(height) for height in SAMPLED_HEIGHTS):
        return (TALL_TILES[0], 1)
    return (*(height for height in TALL_TILES if is_equal(height)), TILE_ROWS)


def _is_placeless(backend: Backend, packed: Any, tile: Tensor, shift: int) -> bool:
    """Rows of `tile` [16, C] have the same bits when they stand `shift` places further on."""
    moved = backend.multiply(tile.roll(shift, 0), packed)
    return torch.equal(moved, backend.multiply(tile, packed).roll(shift, 0))


@lru_cache(maxsize=1)
def _float32_backend() -> Backend:
    has_onednn: bool = torch.backends.mkldnn.is_available()
    if has_onednn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return Backend(_pack_onednn, _multiply_packed)
    return Backend(Tensor.contiguous, torch.nn.functional.linear)


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE_ROWS)
    return packed


def _multiply_packed(x: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out
