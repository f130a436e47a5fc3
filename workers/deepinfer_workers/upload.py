"""Arrays of the host on their way to the device. Knows nothing of what they mean."""

from __future__ import annotations

from typing import Any

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
