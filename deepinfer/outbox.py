"""What is on its way from the core to readers: pieces, and ends by an error; once a step, to each loop at once."""

from __future__ import annotations

from deepinfer.errors import DeepInferError
from deepinfer.loop import Loop
from deepinfer.stream import Mailbox, Piece

Delivery = tuple[Mailbox, Piece | DeepInferError]


class Outbox:
    """Gathers deliveries until `publish`. Lives on the core's loop."""

    def __init__(self, home: object) -> None:
        """`home` is the core's loop: its readers get theirs directly."""
        self._home = home
        self._deliveries: list[Delivery] = []
        self.add = self._deliveries.append
        """`add((mailbox, content))`."""

    def publish(self) -> None:
        """Deliver everything: on this loop now, on others by one wake-up each."""
        if not self._deliveries:
            return
        home = self._home
        remote: dict[Loop, list[Delivery]] = {}
        local: list[Delivery] = []
        for delivery in self._deliveries:
            loop = delivery[0].loop
            if loop is home or loop is None:
                local.append(delivery)
            else:
                remote.setdefault(loop, []).append(delivery)
        self._deliveries.clear()
        _deliver(local)
        for loop, deliveries in remote.items():
            try:
                loop.call_soon_threadsafe(_deliver, deliveries)
            except RuntimeError:
                pass  # the readers' loop is closed: their streams end when they are dropped, or as slow consumers


def _deliver(deliveries: list[Delivery]) -> None:
    """On the readers' loop."""
    for mailbox, content in deliveries:
        if isinstance(content, tuple):
            mailbox.push(content)
        else:
            mailbox.close(content)
