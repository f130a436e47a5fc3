"""The worker wire over ZeroMQ: a ROUTER that is read through its file descriptor on the running loop.

The descriptor is edge-triggered, and sending can eat an edge: after every send, and after every capped read, the
socket's events are looked at again. Knows nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import Final

import zmq

from deepinfer.link import LinkListener
from deepinfer_protocol import AnyMessage, ProtocolError, decode, encode
from deepinfer_protocol.limits import MAX_MESSAGE_BYTES

LOSS_GRACE_S: Final = 0.03
_MAX_READS_AT_ONCE: Final = 64


class ZmqWorkerLink:
    """Implements `WorkerLink` for the workers of one epoch. Lives on the loop that runs when it is made."""

    def __init__(self, endpoint: str, epoch: int, num_ranks: int) -> None:
        """Binds `endpoint`."""
        self._loop = asyncio.get_running_loop()
        self._identities = [f"{epoch}:{rank}".encode() for rank in range(num_ranks)]
        self._rank_of = {identity: rank for rank, identity in enumerate(self._identities)}
        self._listener: LinkListener | None = None
        self._is_read_due = False
        self.num_strange_frames = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a message for a peer that is gone is an error, not lost in silence
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        ):
            self._socket.setsockopt(option, value)
        # Before any finalizer of pyzmq's own, which would wait for ever for a socket that is garbage like its context.
        self._finalizer = weakref.finalize(self, _terminate, self._context, self._socket, os.getpid())
        self._finalizer.atexit = False
        self._socket.bind(endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    @property
    def num_ranks(self) -> int:
        return len(self._identities)

    def listen(self, listener: LinkListener) -> None:
        self._listener = listener

    def send(self, rank: int, message: AnyMessage) -> None:
        """Queue `message`. A peer that is gone or does not read is reported as lost."""
        try:
            self._socket.send_multipart((self._identities[rank], encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Its process may be heard to end at any moment, which says more than this does.
            self._loop.call_later(LOSS_GRACE_S, self.lose, rank, f"cannot be reached: {error}")
        self._check_events()

    def read_now(self) -> None:
        """Deliver what has arrived."""
        self._read()

    def close(self) -> None:
        """Nothing is delivered from here on."""
        if not self._socket.closed:
            self._listener = None
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)
            self._finalizer()

    def _check_events(self) -> None:
        if not self._is_read_due and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._is_read_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_read_due = False
        for _ in range(_MAX_READS_AT_ONCE):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(frames)
        if not self._socket.closed:
            self._check_events()

    def _deliver(self, frames: list[bytes]) -> None:
        rank = self._rank_of.get(frames[0])
        if rank is None or self._listener is None:
            self.num_strange_frames += 1
            return
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message of {len(frames) - 1} frames")
            message = decode(frames[1])
        except ProtocolError as error:
            self.lose(rank, f"sent what is no message: {error}")
            return
        self._listener.on_message(rank, message)

    def lose(self, rank: int, reason: str) -> None:
        """Tell the listener that `rank` is gone."""
        if self._listener is not None:
            self._listener.on_lost(rank, reason)


def _terminate(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves its parent's alone
        socket.close(linger=0)
        context.term()
