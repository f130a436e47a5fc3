"""How often something may happen: several times at once, and at a rate in the long run. Knows nothing of what it is."""

from __future__ import annotations


class Allowance:
    """`burst` at once, and one more every 1/`per_s` seconds, up to `burst` again."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_s")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._since_s = 0.0

    def is_spent(self, now: float) -> bool:
        """Must it wait? `now` in seconds, of a clock that does not go back."""
        self._left = min(self._left + (now - self._since_s) * self._per_s, self._burst)
        self._since_s = now
        return self._left < 1.0

    def spend(self) -> None:
        """It has happened once."""
        self._left -= 1.0
