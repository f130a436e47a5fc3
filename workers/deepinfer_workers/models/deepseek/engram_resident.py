"""A layer's Engram table on the device, for those that are small beside its memory: nobody waits for the host.

Legend: `T` positions, `N` longest n-gram, `R` rows that a position reads, `D` width of a row.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.engram_hash import NO_TOKEN, EngramHash
from deepinfer_workers.models.deepseek.engram_table import EngramRows

MOST_SHARE: Final = 1 / 16
"""Of a device's memory, for all tables together."""
_ROWS_AT_ONCE: Final = 1 << 18


def fits(num_rows: int, width: int, device: torch.device) -> bool:
    """Whether tables of so many rows together belong on the device. On a CPU they stay in their file."""
    if device.type != "cuda":
        return False
    return num_rows * width * torch.bfloat16.itemsize <= MOST_SHARE * torch.cuda.mem_get_info(device)[1]


class ResidentTable:
    """What is launched depends on the number of positions alone, and the host is asked for nothing."""

    def __init__(self, hash_: EngramHash, codes: Tensor, scales: Tensor | None, device: torch.device) -> None:
        """`codes` and `scales` as an `EngramTable` takes them."""
        parts = torch.arange(len(codes)).split(_ROWS_AT_ONCE)
        # Three bits of an FP8 number and a power of two: bfloat16 holds their product as it is.
        dtype = codes.dtype if scales is None else torch.bfloat16
        self._values = torch.cat([_values(codes, scales, part).to(device, dtype) for part in parts])  # [rows, D]
        self._compressed, self._multipliers, self._primes, self._offsets = (
            torch.from_numpy(column).to(device)
            for column in (hash_.compressed, hash_.multipliers, hash_.primes, hash_.offsets)
        )
        self._pad = int(hash_.pad)

    def embeddings(self, tokens: Tensor) -> Tensor:
        """Of the n-grams `tokens` [T, N], newest first: [T, R * D] float32."""
        rows = self.rows(tokens)
        return self._values.index_select(0, rows.flatten()).float().view(len(rows), -1)

    def rows(self, tokens: Tensor) -> Tensor:
        """As `EngramHash.rows`, of `tokens` [T, N]: [T, R]."""
        ids = torch.where(tokens == NO_TOKEN, NO_TOKEN, self._compressed[tokens.clamp(min=0)])
        ids = torch.where((ids == NO_TOKEN).cumsum(1) > 0, self._pad, ids)
        mixed = ids * self._multipliers
        for column in range(1, mixed.shape[1]):
            mixed[:, column] ^= mixed[:, column - 1]
        buckets = mixed[:, 1:, None] % self._primes  # [T, N - 1, heads]
        return buckets.flatten(1) + self._offsets


def _values(codes: Tensor, scales: Tensor | None, part: Tensor) -> Tensor:
    """Of the rows `part`, as a table holds them."""
    first, last = int(part[0]), int(part[-1]) + 1
    rows = EngramRows(codes[first:last, None], None if scales is None else scales[first:last, None])
    return rows.dequantize()
