"""What is remembered of one request while it is answered, for the log and for traces: never what was said."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any, Final, NamedTuple

from deepinfer.http.metrics import Progress
from deepinfer.stream import TokenChunk, TokenStream
from deepinfer_protocol import SamplingParams

QUIET_PATHS: Final = frozenset({"/stats"})
"""Asked for every second by every page that is open: logged for debugging only, unless they are refused."""
MAX_LOGGED_CHARACTERS: Final = 128


class Asked(NamedTuple):
    """What a request wants of the model."""

    operation: str
    """As OpenTelemetry calls it."""
    model: str
    params: SamplingParams
    is_stream: bool
    response_id: str


class Note:
    """On one request."""

    def __init__(self, scope: Any, progress: Progress) -> None:
        self.progress = progress
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id = secrets.token_hex(12)
        self.status = 0
        self.error = ""
        """The code of what went wrong."""
        self.asked: Asked | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_completion_tokens = 0
        self.finish_reasons: list[str] = []
        self.first_token_s: float | None = None

    def begin(self, stream: TokenStream) -> None:
        """One of its streams has its first chunk."""
        self.num_prompt_tokens += stream.num_prompt_tokens
        self.num_cached_tokens += stream.num_cached_tokens
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()

    def take(self, chunk: TokenChunk) -> None:
        self.num_completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.finish_reasons.append(chunk.finish_reason)

    def end(self, num_samples: int) -> None:
        """Of a stream of so many samples all is said. What the model has not ended itself a stop string has."""
        self.finish_reasons += ["stop"] * (num_samples - len(self.finish_reasons))

    @property
    def level(self) -> int:
        """Of its line in the log."""
        return logging.DEBUG if self.path in QUIET_PATHS and self.status == 200 else logging.INFO

    @property
    def told_path(self) -> str:
        """As much of it as logs and traces get: anybody may ask for anything."""
        return self.path[:MAX_LOGGED_CHARACTERS]

    def line(self) -> str:
        path = self.told_path.encode("unicode_escape").decode()
        took_ms = 1e3 * self.progress.took_s
        counts = f"prompt={self.num_prompt_tokens} completion={self.num_completion_tokens}"
        return f"{self.request_id} {self.method} {path} {self.status} {took_ms:.0f}ms {counts}"
