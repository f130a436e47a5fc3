"""The small float formats by definition: tables of what every code means, and the nearest code by search, in float64.

Knows nothing of torch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3: Final[Array] = np.array([_e4m3(code) for code in range(256)])
E2M1: Final[Array] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E8M0: Final[Array] = np.array([*(2.0 ** (code - 127) for code in range(255)), float("nan")])

E4M3_MAGNITUDES: Final[Array] = E4M3[:127]
E2M1_MAGNITUDES: Final[Array] = E2M1[:8]


def nearest(x: Array, magnitudes: Array) -> Array:
    """The codes of `x` among ascending `magnitudes`, without the sign: ties to the even one, no more than the last."""
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(magnitudes, size), 1, len(magnitudes) - 1)
    below = above - 1
    to_above, to_below = magnitudes[above] - size, size - magnitudes[below]
    is_even_above = above % 2 == 0
    is_above = (to_above < to_below) | ((to_above == to_below) & is_even_above)
    return np.asarray(np.where(is_above, above, below))


def fp8_codes(x: Array) -> Array:
    """E4M3 codes of `x`."""
    return np.asarray(nearest(x, E4M3_MAGNITUDES) + 128 * np.signbit(x), dtype=np.uint8)


def fp4_bytes(x: Array) -> Array:
    """E2M1 codes of `x` [..., K], two a byte, the even column low: [..., K / 2]."""
    codes = nearest(x, E2M1_MAGNITUDES) + 8 * np.signbit(x)
    return np.asarray(codes[..., 0::2] + 16 * codes[..., 1::2], dtype=np.uint8)


def power_of_two_codes(amax: Array, limit: float) -> Array:
    """E8M0 codes of the least power of two of which `limit` times reaches `amax`, which is above zero."""
    return np.searchsorted(E8M0[:255] * limit, amax.astype(np.float64)).clip(0, 254).astype(np.uint8)


def groups(x: Array, size: int) -> Array:
    """`x` [..., K] in float64, as [..., K / size, size]."""
    return x.astype(np.float64).reshape(*x.shape[:-1], -1, size)


def amax(x: Array, size: int) -> Array:
    """The largest magnitude of every `size` neighbours of `x` [..., K]: [..., K / size]."""
    return np.asarray(np.abs(groups(x, size)).max(-1))


def scaled(x: Array, scales: Array, size: int) -> Array:
    """`x` [..., K] over the scale of its `size` neighbours [..., K / size]."""
    return np.asarray((groups(x, size) / scales[..., None]).reshape(x.shape))
