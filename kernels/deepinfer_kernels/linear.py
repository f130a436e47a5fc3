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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

TILE_ROWS: Final = 16
"""The yardstick. Below 16 rows libraries switch to matrix-vector loops, which round differently."""
TALL_TILES: Final = (256, 64)
SAMPLED_HEIGHTS: Final = (*range(1, 18), 23, 31, 33, 48, 64, 100, 128, 200, 256)
"""What is tried before a product is said to give the same bits at any height up to the tallest tile."""
TELLING_ROWS: Final = 64
SAMPLED_SHIFTS: Final = (1, 2, 5, 8, 13, 15)
MOST_WEIGHTS: Final = 1 << 26
"""Of one product: a larger weight is cut in halves by its outputs. Proving and packing take a few times the memory of a
part, and a part is proven once for all of them: the head of 129280 x 5120 in 1 s and 0.6 GB, not in 15 s and 5.6 GB."""
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


class Tiling(NamedTuple):
    """Into which heights rows are cut, so that a row's bits do not depend on how many there are."""

    heights: tuple[int, ...]
    """Falling; empty: all rows go in one piece, and nothing is promised."""
    floor: int = 0
    """0: rows are padded to a multiple of the last height. Else a rest may have any height, but for fewer rows than
    this, which are padded to it."""


UNTILED: Final = Tiling(())


@dataclass(frozen=True)
class LinearWeight:
    """A weight [F, C] in the layout that its device likes."""

    packed: Any
    multiply: Multiply
    tiling: Tiling = UNTILED


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """`x` [T, C] times the transposed weight [F, C]: [T, F]."""
    num_rows = x.shape[0]
    if not weight.tiling.heights:
        return weight.multiply(x, weight.packed)
    tiles = tile_heights(num_rows, weight.tiling)
    num_pad = sum(tiles) - num_rows
    if num_pad:
        x = torch.cat((x, x.new_zeros(num_pad, x.shape[1])))
    if len(tiles) == 1:
        out = weight.multiply(x, weight.packed)
    else:
        out = torch.cat([weight.multiply(tile, weight.packed) for tile in torch.split(x, tiles)])
    return out[:num_rows] if num_pad else out


def tile_heights(num_rows: int, tiling: Tiling) -> list[int]:
    """Heights that hold `num_rows` and the padding behind them, the tallest first."""
    tiles: list[int] = []
    for height in tiling.heights:
        tiles += [height] * (num_rows // height)
        num_rows %= height
    if num_rows:
        tiles.append(max(num_rows, tiling.floor) if tiling.floor else tiling.heights[-1])
    return tiles


def pack_linear(weight: Tensor, *, batch_invariant: bool) -> LinearWeight:
    """`weight` [F, C] of any float dtype for the CPU in float32, widened part by part.

    The result keeps no reference to it where oneDNN can pack.
    """
    return pack_with(_float32_backend(), weight, batch_invariant=batch_invariant)


def pack_with(backend: Backend, weight: Tensor, *, batch_invariant: bool) -> LinearWeight:
    """`weight` [F, C] for `backend`, tiled so that its rows are independent if that is asked for.

    Where the backend cannot keep them so, the product is float32's, rounded to what the backend's results would be.
    """
    parts = weight.chunk(num_parts(*weight.shape))
    tiling: Tiling | None = UNTILED
    if batch_invariant:
        num_out, num_in = parts[0].shape
        tiling = proven_tiling(num_out, num_in, torch.get_num_threads(), backend)
    if tiling is None:
        exact = pack_with(_float32_backend(), weight, batch_invariant=True)
        return LinearWeight(exact.packed, _rounded(exact.multiply, backend.dtype), exact.tiling)
    packed = [backend.pack(part.float()) for part in parts]
    if len(packed) == 1:
        return LinearWeight(packed[0], backend.multiply, tiling)
    return LinearWeight(packed, _side_by_side(backend.multiply), tiling)


def num_parts(num_out: int, num_in: int) -> int:
    """Equal parts of a weight [F, C] with `MOST_WEIGHTS` at most, as far as F can be halved."""
    parts = 1
    while num_out * num_in > parts * MOST_WEIGHTS and num_out % (2 * parts) == 0:
        parts *= 2
    return parts


def _side_by_side(multiply: Multiply) -> Multiply:
    return lambda x, packed: torch.cat([multiply(x, part) for part in packed], 1)


def _rounded(multiply: Multiply, dtype: torch.dtype) -> Multiply:
    return lambda x, packed: multiply(x.float(), packed).to(dtype)


@lru_cache(maxsize=256)
def proven_tiling(num_out: int, num_in: int, num_threads: int, backend: Backend | None = None) -> Tiling | None:
    """The tiling that gives a row of a [num_out, num_in] product the same bits, measured. A pure memo.

    `None`: a row's bits depend on its place in a tile (never for float32, which has nothing to fall back to).
    """
    backend = backend or _float32_backend()
    x, weight = _telling_data(num_out, num_in, num_threads)
    packed = backend.pack(weight)
    expected = torch.cat([backend.multiply(tile, packed) for tile in torch.split(x, TILE_ROWS)])  # [256, F]
    if backend != _float32_backend() and not all(
        torch.equal(backend.multiply(x[:TILE_ROWS].roll(shift, 0), packed), expected[:TILE_ROWS].roll(shift, 0))
        for shift in SAMPLED_SHIFTS
    ):
        return None

    def is_equal(height: int) -> bool:
        """For rows of every place: as many as tell, and whole tiles of them."""
        num_rows = max(TELLING_ROWS // height, 1) * height
        tiles = torch.split(x[:num_rows], height)
        return torch.equal(torch.cat([backend.multiply(tile, packed) for tile in tiles]), expected[:num_rows])

    if backend.takes_any_height:
        unequal = [height for height in SAMPLED_HEIGHTS if not is_equal(height)]
        if max(unequal, default=0) < TILE_ROWS:
            return Tiling(TALL_TILES[:1], 1 + max(unequal, default=0))
    return Tiling((*(height for height in TALL_TILES if is_equal(height)), TILE_ROWS))


def _telling_data(num_out: int, num_in: int, seed: int) -> tuple[Tensor, Tensor]:
    """`x` [256, C] and a weight [F, C] whose large products cancel.

    What is left is so small that the order in which they are added up shows, even behind a rounding to bfloat16.
    """
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(num_out, -(-num_in // 2), generator=generator)
    weight = torch.cat((half, half), 1)[:, :num_in]
    terms = torch.randn(TALL_TILES[0], half.shape[1], generator=generator)
    x = torch.cat((terms, -terms * (1 + 2.0**-7)), 1)[:, :num_in]
    return x.contiguous(), weight.contiguous()


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
