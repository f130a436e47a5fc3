"""The engine's end of the worker wire, as the core sees it. Knows nothing of scheduling."""

from __future__ import annotations

from typing import Protocol

from deepinfer_protocol import AnyMessage


class LinkListener(Protocol):
    """Who hears what the workers say."""

    def on_message(self, rank: int, message: AnyMessage) -> None:
        """`message` came from `rank`; messages of one rank come in order."""

    def on_lost(self, rank: int, reason: str) -> None:
        """`rank` is gone, and with it the group."""


class WorkerLink(Protocol):
    """Ordered messages to and from a group of workers. `send` never blocks."""

    @property
    def num_ranks(self) -> int: ...

    def listen(self, listener: LinkListener) -> None:
        """Deliver everything from here on to `listener`."""

    def send(self, rank: int, message: AnyMessage) -> None:
        """Queue `message` for `rank`."""

    def close(self) -> None:
        """Nothing is delivered from here on."""
