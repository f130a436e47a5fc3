"""The text of one sample: token ids in, text out, up to the first stop string. Knows nothing of requests or streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Detokenizer(Protocol):
    """Token ids to text, a piece at a time; never half a character."""

    def push_one(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Matcher(Protocol):
    """Finds stop strings; holds back what may become one."""

    def push(self, text: str) -> tuple[str, str | None]: ...

    def flush(self) -> str: ...


class OutputText:
    """Detokenizes one sample and ends it at a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "_num_unmatched", "has_stops", "keeps_stop", "push", "stop")

    def __init__(
        self,
        detokenizer: Detokenizer,
        matcher: Matcher | None = None,
        num_unmatched: int = 0,
        *,
        keeps_stop: bool = False,
    ) -> None:
        """The text of the first `num_unmatched` tokens is not searched (`min_tokens`).

        With `keeps_stop` the stop string is part of the text, and so is a token that ends the sample.
        """
        self._detokenizer = detokenizer
        self.keeps_stop = keeps_stop
        self._matcher = matcher
        self._num_unmatched = num_unmatched
        self.has_stops = matcher is not None
        self.stop: str | None = None
        """The stop string that has ended the sample."""
        self.push: Callable[[int], str] = self._match if matcher else detokenizer.push_one
        """New text of one more token. Sets `stop` when a stop string is complete."""

    def _match(self, token_id: int) -> str:
        text = self._detokenizer.push_one(token_id)
        if self._num_unmatched > 0:
            self._num_unmatched -= 1
            return text
        assert self._matcher is not None
        released, self.stop = self._matcher.push(text)
        return released + self.stop if self.stop is not None and self.keeps_stop else released

    def flush(self) -> str:
        """What was held back, at the end of the sample; nothing after a stop string."""
        if self.stop is not None:
            return ""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        released, stop = self._matcher.push(rest) if rest else ("", None)
        if stop is None:
            return released + self._matcher.flush()
        return released + stop if self.keeps_stop else released
