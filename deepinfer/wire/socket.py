"""A ZeroMQ socket whose messages are read through its file descriptor on the running loop.

The descriptor is edge-triggered, and sending can eat an edge: after sends, and after every capped read, the socket's
events are looked at again, once for all that one turn of the loop sends. Knows nothing of what the messages mean.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from time import monotonic
from typing import Final, NamedTuple

import zmq

from deepinfer.loop import running_loop

MAX_READS_AT_ONCE: Final = 64
MAX_READ_S: Final = 0.005
"""How long messages are read and handled before others have their turn; one may take longer."""
MAX_PARTS_KEPT: Final = 3
"""Of a message: what comes behind them is counted, not kept."""
_LAST_PART: Final = int(zmq.NOBLOCK)
_PART: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

log = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """One message."""

    parts: list[bytes]
    user: str
    """Who the transport says sent it; empty where it does not say."""


class Offer(Enum):
    """What became of a message that was to be sent."""

    TAKEN = auto()
    FULL = auto()
    """Nobody reads, or, of a socket that waits for its peer, nobody is there."""
    GONE = auto()


class LoopSocket:
    """Lives on the loop that runs when it is made."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        options: Mapping[int, int | bytes],
        on_message: Callable[[Arrival], None],
        *,
        has_users: bool = False,
    ) -> None:
        """`has_users`: the transport knows who sent a message."""
        self._loop = running_loop()
        self._on_message = on_message
        self._has_users = has_users
        self._is_look_due = False
        self._socket = context.socket(kind)
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        # Before any finalizer of pyzmq's own, which would wait for ever for a socket that is garbage like its context.
        self._finalizer = weakref.finalize(self, _abandon, context, self._socket, os.getpid())
        self._finalizer.atexit = False
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    def bind(self, endpoint: str) -> str:
        """The endpoint that it got: of `tcp://host:*`, with the port."""
        self._socket.bind(endpoint)
        self._look_soon()
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)
        self._look_soon()

    def send(self, parts: Sequence[bytes]) -> bool:
        """False: nobody is there, or nobody reads, and nothing was sent."""
        return self.offer(parts) is Offer.TAKEN

    def offer(self, parts: Sequence[bytes]) -> Offer:
        """Send it, if it can be sent at once."""
        if self._socket.closed:
            return Offer.GONE
        try:
            for part in parts[:-1]:
                self._socket.send(part, _PART)
            self._socket.send(parts[-1], _LAST_PART)
        except zmq.Again:
            return Offer.FULL
        except zmq.ZMQError:
            return Offer.GONE
        finally:
            self._look_soon()
        return Offer.TAKEN

    def close(self) -> None:
        """Nothing is delivered from here on."""
        if not self._socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._finalizer.detach()
            self._socket.close(linger=0)

    def _look_soon(self) -> None:
        if not self._is_look_due:
            self._is_look_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_look_due = False
        if not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._read()

    def _read(self) -> None:
        until_s = monotonic() + MAX_READ_S
        for _ in range(MAX_READS_AT_ONCE):
            if self._socket.closed:
                return
            try:
                arrival = self._receive()
            except zmq.Again:
                return
            try:
                self._on_message(arrival)
            except Exception:  # those behind it are read all the same: no further edge would tell of them
                log.exception("a message could not be handled")
            if monotonic() >= until_s:
                break
        if not self._socket.closed:
            self._look_soon()

    def _receive(self) -> Arrival:
        parts: list[bytes] = []
        user = ""
        while True:
            if self._has_users:
                part = self._socket.recv(zmq.NOBLOCK, copy=False)
                user, data = str(part.get("User-Id")), part.bytes
            else:
                data = self._socket.recv(zmq.NOBLOCK)
            if len(parts) < MAX_PARTS_KEPT:
                parts.append(data)
            if not self._socket.getsockopt(zmq.RCVMORE):
                return Arrival(parts, user)


def _abandon(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], pid: int) -> None:
    """Of a socket that nobody has closed."""
    if os.getpid() == pid:  # a forked child leaves its parent's alone
        socket.close(linger=0)
        context.destroy(linger=0)
