"""Arrays of the host on their way to the device. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`: a view on the CPU, else a copy that nobody waits for.

    The copy goes through pinned memory: from pageable memory it would wait for all work that is queued before it.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Parcel:
    """int64 arrays that are packed on one thread and travel to the device together, from another."""

    def __init__(self, arrays: Sequence[npt.NDArray[np.int64]], device: torch.device) -> None:
        self._device = device
        self._shapes = [array.shape for array in arrays]
        self._arrays = arrays
        if device.type != "cpu":
            packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
            with torch.cuda.device(device):  # this thread may have another in mind
                self._pinned = packed.pin_memory()

    def unpack(self) -> list[Tensor]:
        """The arrays on the device; nobody waits for the copy."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in self._arrays]
        packed = self._pinned.to(self._device, non_blocking=True)
        parts = packed.split([int(np.prod(shape)) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
