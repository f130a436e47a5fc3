"""CostTable: what steps take on a device, by their size. From what a worker has measured, or from a file.

Measured times waver, but a larger step is never faster: a size takes at least what smaller ones take. Between two
measured sizes times lie on a straight line; where steps are padded, a table says so by naming the smallest and the
largest size of each flat stretch. Beyond the largest size, times rise as they do from half of it on. Knows nothing of
what is done with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Final, Self

import msgspec
from msgspec import Struct

from deepinfer.errors import ConfigError
from deepinfer_protocol import StepCosts, unpack_float32, unpack_int32
from deepinfer_protocol.limits import INT32_MAX, MAX_COSTS

MAX_FILE_BYTES: Final = 1 << 20
MIN_STEP_US: Final = 0.001
"""A step takes some time, or no rate could be told."""
_SETTING: Final = "cost_table"


class CostFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table as JSON. Sizes rise; times are in microseconds."""

    accelerator: str
    device: str = ""
    """For people, as `model`: what was measured."""
    model: str = ""
    positions: list[int]
    forward_us: list[float]
    """Forward and sampling of a step of so many positions."""
    draft_rows: list[int] = []
    draft_us: list[float] = []
    """The draft blocks of so many rows."""


class CostTable:
    """Times of steps in microseconds, for any size."""

    def __init__(
        self,
        positions: Sequence[int],
        forward_us: Sequence[float],
        draft_rows: Sequence[int] = (),
        draft_us: Sequence[float] = (),
    ) -> None:
        """Sizes must rise. Without `draft_us` drafts take no time. Raises `ConfigError`."""
        if not positions:
            raise ConfigError(_SETTING, "positions: at least one size is expected")
        self._forward = _Curve("positions", positions, "forward_us", forward_us, MIN_STEP_US)
        self._draft = _Curve("draft_rows", draft_rows, "draft_us", draft_us, 0.0)
        self._dense: list[float] = []

    @classmethod
    def of(cls, costs: StepCosts) -> Self:
        """What a worker has measured. Raises `ConfigError` where that is no table."""
        columns = unpack_int32(costs.positions), unpack_float32(costs.forward_us)
        return cls(*columns, unpack_int32(costs.draft_rows), unpack_float32(costs.draft_us))

    @classmethod
    def read(cls, path: Path, accelerator: str) -> Self:
        """A file, of steps on `accelerator`. Raises `ConfigError`, which names the file, the field and the limit."""
        file = _read(path)
        if file.accelerator != accelerator:
            raise ConfigError(
                _SETTING, f"{path}: accelerator: measured on {file.accelerator!r}, this is {accelerator!r}"
            )
        columns = file.positions, file.forward_us, file.draft_rows, file.draft_us
        try:
            return cls(*columns)
        except ConfigError as error:
            raise ConfigError(_SETTING, f"{path}: {str(error).removeprefix(f'{_SETTING}: ')}") from None

    def file(self, *, accelerator: str, device: str, model: str) -> CostFile:
        """As it is written. What was measured comes back, but for times below those of smaller sizes."""
        return CostFile(
            accelerator=accelerator,
            device=device,
            model=model,
            positions=self._forward.sizes,
            forward_us=[round(us, 1) for us in self._forward.times_us],
            draft_rows=self._draft.sizes,
            draft_us=[round(us, 1) for us in self._draft.times_us],
        )

    @property
    def forward_points(self) -> list[tuple[int, float]]:
        """Sizes that were measured, and their times."""
        return list(zip(self._forward.sizes, self._forward.times_us, strict=True))

    @property
    def draft_points(self) -> list[tuple[int, float]]:
        return list(zip(self._draft.sizes, self._draft.times_us, strict=True))

    def forward_us(self, num_positions: int) -> float:
        """Forward and sampling of a step of so many positions."""
        return self._forward.at(num_positions)

    def draft_us(self, num_rows: int) -> float:
        """The draft blocks of so many rows."""
        return self._draft.at(num_rows)

    def forward_range(self, start: int, count: int) -> list[float]:
        """`forward_us` of `count` sizes from `start` on, at the price of a copy."""
        dense = self._dense
        if len(dense) < start + count:
            dense += [self._forward.at(size) for size in range(len(dense), 2 * (start + count))]
        return dense[start : start + count]


class _Curve:
    """Times by sizes, rising."""

    def __init__(
        self, sizes_name: str, sizes: Sequence[int], times_name: str, times_us: Sequence[float], least_us: float
    ) -> None:
        if len(sizes) != len(times_us):
            raise ConfigError(_SETTING, f"{times_name}: {len(times_us)} times for {len(sizes)} sizes")
        if len(sizes) > MAX_COSTS:
            raise ConfigError(_SETTING, f"{sizes_name}: {len(sizes)} sizes, the limit is {MAX_COSTS}")
        for before, size in zip((0, *sizes), sizes, strict=False):
            if not before < size <= INT32_MAX:
                raise ConfigError(_SETTING, f"{sizes_name}: {size} behind {before}: sizes rise, up to {INT32_MAX}")
        for us in times_us:
            if not (isfinite(us) and us >= least_us):
                raise ConfigError(_SETTING, f"{times_name}: {us} is no time: at least {least_us} us are expected")
        self.sizes = list(sizes)
        self.times_us = list(accumulate(map(float, times_us), max))
        self._slope = self._last_slope()

    def at(self, size: int) -> float:
        sizes, times_us = self.sizes, self.times_us
        above = bisect_left(sizes, size)
        if not sizes:
            return 0.0
        if above == len(sizes):
            return times_us[-1] + (size - sizes[-1]) * self._slope
        if above == 0 or sizes[above] == size:
            return times_us[above]
        share = (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return times_us[above - 1] + share * (times_us[above] - times_us[above - 1])

    def _last_slope(self) -> float:
        """Microseconds for one more, beyond the largest; of a single size: its share."""
        sizes, times_us = self.sizes, self.times_us
        if len(sizes) < 2:
            return times_us[0] / sizes[0] if sizes else 0.0
        low = min(bisect_left(sizes, sizes[-1] / 2), len(sizes) - 2)
        return (times_us[-1] - times_us[low]) / (sizes[-1] - sizes[low])


def _read(path: Path) -> CostFile:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(_SETTING, f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(_SETTING, f"{path}: more than {MAX_FILE_BYTES} bytes are no table")
    try:
        return msgspec.json.decode(content, type=CostFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(_SETTING, f"{path}: {error}") from None
