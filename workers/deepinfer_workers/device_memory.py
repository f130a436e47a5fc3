"""How much memory a device has left. Knows nothing of what it is wanted for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

_MEMINFO: Final = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be had now, on a CPU without swapping; `None` where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = _MEMINFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return None
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(value) * 1024 for _, value, _ in found), None)
