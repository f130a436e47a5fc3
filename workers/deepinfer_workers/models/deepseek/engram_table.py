"""A layer's Engram table where it lies: in a mapped file far larger than memory. Knows nothing of tokens or hashes.

Legend: `T` positions, `R` rows that a position reads, `D` width of a row, `G` scales of a row.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import dequantize_fp8_rows
from deepinfer_workers.batch import Ints


class EngramRows(NamedTuple):
    """Rows as they are stored, in memory of their own."""

    codes: Tensor
    """[T, R, D]"""
    scales: Tensor | None
    """[T, R, G]; `None`: the codes are the values."""

    def dequantize(self) -> Tensor:
        """Those of a position side by side, [T, R * D] float32."""
        values = self.codes.float() if self.scales is None else dequantize_fp8_rows(self.codes, self.scales)
        return values.flatten(1)


class EngramTable:
    """Reads single rows. Any thread may, several at once."""

    def __init__(self, codes: Tensor, scales: Tensor | None) -> None:
        """`codes` [rows, D] float8_e4m3fn with `scales` [rows, G] of a byte each, or plain values without."""
        self._codes = _StoredRows(codes)
        self._scales = None if scales is None else _StoredRows(scales)

    def fetch(self, rows: Ints) -> EngramRows:
        """Copy the rows [T, R] out of the file, and touch no others. Computes nothing. Raises `IndexError`."""
        scales = None if self._scales is None else self._scales.take(rows)
        return EngramRows(self._codes.take(rows), scales)


class _StoredRows:
    """A mapped tensor [rows, width], read as bytes.

    numpy takes, not torch: it leaves the interpreter to others meanwhile, and has no team of threads that would stand
    in the way of those that compute.
    """

    def __init__(self, data: Tensor) -> None:
        self._data = data  # keeps the mapping
        self._bytes = data.view(torch.uint8).numpy()  # [rows, bytes of a row]
        _expect_single_pages(data)

    def take(self, rows: Ints) -> Tensor:
        """[T, R, width], of the mapped tensor's dtype."""
        if not rows.size:  # numpy gives nothing strides that torch does not take
            return self._data.new_empty(*rows.shape, self._data.shape[1])
        return torch.from_numpy(np.take(self._bytes, rows, axis=0)).view(self._data.dtype)


def _expect_single_pages(data: Tensor) -> None:
    """Have the kernel read the page of a row alone, and not the 32 around it. A hint: without it things go on."""
    madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    first = -(-data.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (data.data_ptr() + data.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and size > 0:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_RANDOM)
