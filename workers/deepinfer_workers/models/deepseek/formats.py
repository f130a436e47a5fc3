"""How the caches of a model store their rows. Knows formats, and nothing of layers.

`packed` is the released packing. `float32` and `bfloat16` hold the same numbers in the open, for reference; without the
caches' quantisation there is nothing to pack, and they hold what was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepinfer_kernels import (
    fake_index_row,
    fake_main_row,
    fake_v4_row,
    fake_window_row,
    hadamard,
    index_row_bytes,
    main_row_bytes,
    pack_index_row,
    pack_main_row,
    pack_v4_row,
    pack_window_row,
    unpack_index_row,
    unpack_main_row,
    unpack_v4_row,
    unpack_window_row,
    v4_row_bytes,
    window_row_bytes,
)
from deepinfer_workers.models.deepseek.caches import RowFormat, float_format
from deepinfer_workers.models.deepseek.config import DeepseekConfig

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CacheFormats:
    """One format a kind of row."""

    window: RowFormat
    main: RowFormat
    index: RowFormat

    @property
    def round_index_query(self) -> Callable[[Tensor], Tensor]:
        """Index queries are rounded as index keys are."""
        return self.index.round


def cache_formats(config: DeepseekConfig, cache_format: str, *, quantizes: bool) -> CacheFormats:
    """`cache_format`: `auto`, `packed`, `float32` or `bfloat16`; `auto` packs if there is something to pack."""
    window, main, index = _packed(config)
    if quantizes and cache_format in ("auto", "packed"):
        return CacheFormats(window, main, index)
    dtype = _FLOATS.get(cache_format, torch.float32)
    dims = (config.head_dim, config.head_dim, config.index_dim)
    rounds = (window.round, main.round, index.round) if quantizes else (_as_it_is(dtype),) * 3
    return CacheFormats(*(float_format(dim, dtype, round) for dim, round in zip(dims, rounds, strict=True)))


def pending_format(dim: int) -> RowFormat:
    """Of the states of tokens whose group is not complete."""
    return float_format(dim, torch.float32, _unchanged)


def _packed(config: DeepseekConfig) -> tuple[RowFormat, RowFormat, RowFormat]:
    dim, index_dim = config.head_dim, config.index_dim
    index = RowFormat(index_row_bytes(index_dim), torch.uint8, pack_index_row, unpack_index_row, fake_index_row)
    if config.family == "v4":
        index = _rotated(index)
        bind = partial(partial, rope_dim=config.rope_dim)
        v4 = RowFormat(
            v4_row_bytes(dim, config.rope_dim), torch.uint8, bind(pack_v4_row), bind(unpack_v4_row), bind(fake_v4_row)
        )
        return v4, v4, index
    window = RowFormat(window_row_bytes(dim), torch.uint8, pack_window_row, unpack_window_row, fake_window_row)
    main = RowFormat(main_row_bytes(dim), torch.uint8, pack_main_row, unpack_main_row, fake_main_row)
    return window, main, index


def _rotated(rows: RowFormat) -> RowFormat:
    """`rows`, turned by a Hadamard matrix before they are rounded, as V4 has it (V4.1 does not).

    They come back turned: index keys meet index queries alone, which are turned too.
    """
    return rows._replace(pack=lambda x: rows.pack(hadamard(x)), round=lambda x: rows.round(hadamard(x)))


def _as_it_is(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What a store of `dtype` gives back."""
    return _unchanged if dtype == torch.float32 else lambda x: x.to(dtype).to(torch.float32)


def _unchanged(x: Tensor) -> Tensor:
    return x
