"""Documents side by side in rows of one length. Knows nothing of what the ids mean.

A document lies in one row whole, and begins at a multiple of `ALIGNMENT`: so groups of its tokens, which a model makes
from the start of a sequence, are groups of the row's places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint16]
ALIGNMENT = 8
_MOST_OPEN = 64


class RowPacker:
    """Each document goes into the fullest row that has room for it."""

    def __init__(self, length: int, pad: int) -> None:
        self._length, self._pad = length, pad
        self._open: list[list[int]] = []
        self._full: list[list[int]] = []

    def add(self, document: Sequence[int]) -> None:
        """What does not fit a whole row is cut off."""
        document = document[: self._length]
        fitting = [row for row in self._open if len(row) + len(document) <= self._length]
        if fitting:
            row = max(fitting, key=len)
        else:
            row = []
            self._open.append(row)
        row.extend(document)
        row.extend([self._pad] * (-len(row) % ALIGNMENT))
        if len(self._open) > _MOST_OPEN:
            fullest = max(self._open, key=len)
            self._open.remove(fullest)
            self._full.append(fullest)

    def rows(self) -> Rows:
        """[rows, length]"""
        rows = np.full((len(self._full) + len(self._open), self._length), self._pad, np.uint16)
        for index, row in enumerate((*self._full, *self._open)):
            rows[index, : len(row)] = row
        return rows
