"""Stop strings in a text that comes in pieces. Knows nothing of tokens.

The stop that is complete first wins, so the outcome depends on the text only, never on how it was cut into pieces, and
nothing has to be generated after it. Of stops that are complete at the same character the longest wins: the one that
starts first.
"""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.errors import InvalidRequest


class Released(NamedTuple):
    """What a piece of text let out."""

    text: str  # can no longer be part of a stop
    stop: str | None  # the stop that follows `text`; the output ends there


class StopMatcher:
    """Looks for stop strings in one growing text; holds back only an end that may become one."""

    __slots__ = ("_first_chars", "_held", "_patterns")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise InvalidRequest("stop", "a stop string is empty")
        # Longest first: so the first pattern found complete at a character is the longest one.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""

    def fresh(self) -> StopMatcher:
        """Another one for the same stops and another text. Shares what is computed of the stops."""
        other = StopMatcher(())
        other._patterns = [pattern.fresh() for pattern in self._patterns]
        other._first_chars = self._first_chars
        return other

    def push(self, text: str) -> Released:
        """Take the next piece of text. After a match the rest of the text is of no interest: push no more."""
        if not self._held and self._first_chars.isdisjoint(text):
            return Released(text, None)
        seen = self._held + text
        for position in range(len(self._held), len(seen)):
            stop = self._advance(seen[position])
            if stop is not None:
                self._held = ""
                return Released(seen[: position + 1 - len(stop)], stop)
        num_released = len(seen) - max(pattern.num_matched for pattern in self._patterns)
        self._held = seen[num_released:]
        return Released(seen[:num_released], None)

    def flush(self) -> str:
        """Return what was held: the text is over, so it became no stop."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for pattern in self._patterns:
            if pattern.advance(char) and found is None:
                found = pattern.stop
        return found


class _Pattern:
    """Knuth, Morris and Pratt: time in proportion to the text, however it repeats itself."""

    __slots__ = ("_fallbacks", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # the length of the longest start of `stop` that ends the text
        self._fallbacks = [0]  # for each start of `stop`: the longest shorter start that ends it
        for char in stop[1:]:
            self._fallbacks.append(self._next(self._fallbacks[-1], char))

    def fresh(self) -> _Pattern:
        other = _Pattern("")
        other.stop, other._fallbacks = self.stop, self._fallbacks
        return other

    def advance(self, char: str) -> bool:
        """Whether `char` completes the stop."""
        self.num_matched = self._next(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def _next(self, num_matched: int, char: str) -> int:
        stop = self.stop
        while num_matched and stop[num_matched] != char:
            num_matched = self._fallbacks[num_matched - 1]
        return num_matched + 1 if stop[num_matched] == char else 0
