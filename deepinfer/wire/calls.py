"""The client's side of the client wire, without IO: calls, frames and the time go in, frames and pieces come out.

Knows nothing of sockets, tasks or who reads a stream: it fills mailboxes.
"""

from __future__ import annotations

import secrets
from math import inf
from typing import Final

from deepinfer.errors import ConnectionLost, ConnectionRejected, DeepInferError, DuplicateRequestId
from deepinfer.stream import Mailbox
from deepinfer.wire.deltas import pieces_of
from deepinfer.wire.refusals import from_wire
from deepinfer_protocol import VERSION
from deepinfer_protocol.client import (
    CLIENT_VERSION,
    Bye,
    Cancel,
    ClientMessage,
    Delta,
    Error,
    ErrorCode,
    Finish,
    GoAway,
    Grant,
    Hello,
    Ping,
    Pong,
    Reject,
    Resume,
    Submit,
    Welcome,
    WireError,
    decode_client,
    decode_server,
    encode,
)
from deepinfer_protocol.client.limits import MAX_SAMPLES

NUM_SILENT_PINGS: Final = 3
"""After so many without a word the connection counts as lost."""
HELLO_S: Final = 1.0
"""How often HELLO is said while no server has told its `ping_ms`."""


class Call:
    """One request of a client."""

    __slots__ = (
        "frame",
        "gap",
        "id",
        "is_cancelled",
        "is_resumable",
        "last",
        "limit",
        "mailbox",
        "num_deltas",
        "unfinished",
        "window",
    )

    def __init__(self, submit: Submit, frame: bytes, mailbox: Mailbox, window: int) -> None:
        self.id = submit.id
        self.frame = frame
        """Its SUBMIT."""
        self.mailbox = mailbox
        self.window = window
        self.is_resumable = submit.resumable
        self.unfinished = set(range(min(submit.sampling.n, MAX_SAMPLES)))  # of more the server makes none
        """Samples whose end the reader does not have."""
        self.is_cancelled = False
        self.gap: int | None = None
        """The number behind a gap, which a RESUME that is under way closes: it comes again."""
        self.limit = window
        """Pieces that may have been pushed: what was granted."""
        self.num_deltas = 0
        self.last: Delta | None = None
        """The end of its last sample; it waits for FINISH."""


class ClientSession:
    """Everything that one client has said and heard. After every call `take_frames` says what is to be sent."""

    def __init__(self, *, token: str = "", give_up_s: float = 30.0) -> None:
        """`give_up_s`: how long a server may be out of reach before open streams end with `ConnectionLost`."""
        self.session = secrets.token_urlsafe(24)
        self.welcome: Welcome | None = None
        """The last one."""
        self.rejection: DeepInferError | None = None
        self.last_reject = ""
        """What the server said, if it was not WELCOME."""
        self.is_welcome = False
        self.pong: Pong | None = None
        self.deadline_s: float | None = None
        """The server goes away: until when open streams may run."""
        self.num_reconnects = 0
        self._token = token
        self._give_up_s = give_up_s
        self._calls: dict[str, Call] = {}
        self._untold: list[str] = []  # that were cancelled while nobody could be told
        self._frames: list[bytes] = []
        self._heard_s = -inf
        self._said_s = -inf
        self._lost_s = inf  # since when the server is out of reach
        self._hello_not_before_s = -inf  # a server that is full has said so

    def take_frames(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        return frames

    @property
    def num_open(self) -> int:
        return len(self._calls)

    # ---- what the user does

    def hello(self, now: float) -> None:
        """Say who we are: at the start, and again whenever the server does not know us, unless it wants no HELLO."""
        if self.rejection is not None or now < self._hello_not_before_s:
            return
        self._said_s = now
        self._lost_s = min(self._lost_s, now)
        hello = Hello(
            min_version=CLIENT_VERSION,
            max_version=CLIENT_VERSION,
            session=self.session,
            client=f"deepinfer-python {VERSION}",
            token=self._token,
        )
        self._say(hello)

    def window(self, wanted: int) -> int:
        """As much of `wanted` as a stream can use: a server waits for acks, which come when half of it was read."""
        most = wanted if self.welcome is None else self.welcome.limits.max_unacked_tokens
        return max(min(wanted, most), 2)

    def submit(self, submit: Submit, mailbox: Mailbox) -> None:
        """`credit` is the stream's window. Raises `WireError` for what is no SUBMIT, `DuplicateRequestId`."""
        if submit.id in self._calls or submit.id in self._untold:
            raise DuplicateRequestId("request_id", f"{submit.id} is open")
        frame = encode(submit)
        decode_client(frame)  # what a server could not read it could not answer either
        window = self.window(submit.credit)
        self._calls[submit.id] = Call(submit, frame, mailbox, window)
        if self.is_welcome:
            self._frames.append(frame)

    def cancel(self, id: str) -> None:
        call = self._calls.get(id)
        if call is not None and not call.is_cancelled:
            call.is_cancelled = True
            if self.is_welcome:
                self._say(Cancel(id=id))
            else:  # nobody to tell now, and nobody waits for it
                self._untold.append(id)
                self._end(call, None)

    def grant(self, id: str) -> None:
        """The reader of a stream has read on: let it go on."""
        call = self._calls.get(id)
        if call is not None and self.is_welcome:
            limit = call.mailbox.num_taken + call.window
            if limit > call.limit:
                call.limit = limit
                self._say(Grant(id=id, limit=limit, ack=call.num_deltas))

    def bye(self) -> None:
        """The end: nothing that is open goes on."""
        if self.is_welcome:
            self._say(Bye())
        self.is_welcome = False

    def lose(self, now: float) -> None:
        """The server cannot be reached, or does not know this connection."""
        if self.is_welcome:
            self.is_welcome = False
            self._lost_s = now
        self.hello(now)

    def fail_all(self, error: DeepInferError) -> None:
        for call in list(self._calls.values()):
            self._end(call, error)

    # ---- what the server says

    def receive(self, parts: list[bytes], now: float) -> None:
        """A message came. What is none is skipped: a gap that it leaves shows by the next one."""
        if len(parts) != 1:
            return
        try:
            message = decode_server(parts[0])
        except WireError:
            return
        self._heard_s = now
        match message:
            case Delta():
                self._delta(message)
            case Finish():
                self._finish(message)
            case Error():
                self._error(message, now)
            case Welcome():
                self._welcomed(message)
            case Reject():
                self._rejected(message, now)
            case Pong():
                self.pong = message
            case GoAway():
                self.deadline_s = now + message.deadline_ms / 1000

    def _delta(self, delta: Delta) -> None:
        call = self._calls.get(delta.id)
        if call is None or delta.seq < call.num_deltas:
            return
        if delta.seq > call.num_deltas:
            if not call.is_cancelled:
                self._close_gap(call, delta.seq)
            return
        call.gap = None
        call.num_deltas += 1
        mailbox = call.mailbox
        if delta.stop is not None:
            mailbox.stop_reasons[delta.sample] = delta.stop
        if delta.reason is not None and len(call.unfinished) == 1:
            call.last = delta  # the reader is at its end with it, and then knows what FINISH says
            return
        self._push(call, delta)
        num_unread = mailbox.num_pushed - mailbox.num_taken
        if num_unread > call.window // 2:
            mailbox.is_paused = True  # its reader will ask for more
        elif call.limit - mailbox.num_pushed <= call.window // 2:
            self.grant(call.id)

    def _push(self, call: Call, delta: Delta) -> None:
        for piece in pieces_of(delta):
            call.mailbox.num_pushed += 1
            call.mailbox.push(piece)
        if delta.reason is not None:
            call.unfinished.discard(delta.sample)

    def _finish(self, finish: Finish) -> None:
        call = self._calls.get(finish.id)
        if call is None:
            return
        if finish.seq > call.num_deltas and not call.is_cancelled:
            self._close_gap(call, finish.seq)
            return
        mailbox = call.mailbox
        mailbox.num_prompt_tokens = finish.usage.prompt_tokens
        mailbox.num_cached_tokens = finish.usage.cached_tokens
        mailbox.num_preemptions = finish.usage.preemptions
        self._end(call, None)

    def _error(self, error: Error, now: float) -> None:
        if error.code == ErrorCode.E_HELLO:
            if self.is_welcome:  # else a HELLO is under way
                self.lose(now)
            return
        call = self._calls.get(error.id)
        if call is not None:
            if error.seq > call.num_deltas and error.code != ErrorCode.E_NOT_FOUND and not call.is_cancelled:
                self._close_gap(call, error.seq)
            else:
                self._end(call, from_wire(error))

    def _close_gap(self, call: Call, seq: int) -> None:
        """What came has the number `seq`, and what is before it did not come, or could not be read."""
        if call.is_resumable and call.gap is None:
            call.gap = seq
            self._resume(call)
        elif not call.is_resumable or call.gap == seq:  # it came again, and what is before it did not
            self._say(Cancel(id=call.id))
            self._end(call, ConnectionLost("a part of the stream was lost"))

    def _resume(self, call: Call) -> None:
        call.limit = max(call.limit, call.mailbox.num_taken + call.window)
        self._say(Resume(id=call.id, next=call.num_deltas, limit=call.limit))

    def _welcomed(self, welcome: Welcome) -> None:
        is_same = self.welcome is None or self.welcome.engine == welcome.engine
        self.num_reconnects += self.welcome is not None
        self.welcome, self.is_welcome, self.deadline_s = welcome, True, None
        self._lost_s = inf
        for id in self._untold:
            self._say(Cancel(id=id))
        self._untold.clear()
        self._say(Ping())  # how the engine does is known from the start
        for call in list(self._calls.values()):
            call.gap = None
            if call.is_cancelled:
                self._say(Cancel(id=call.id))
            elif not call.num_deltas:
                call.window = call.limit = self.window(call.window)
                self._frames.append(call.frame)
            elif is_same and call.is_resumable:
                self._resume(call)
            else:
                self._end(call, ConnectionLost("the stream was lost with the connection"))

    def _rejected(self, reject: Reject, now: float) -> None:
        self.is_welcome = False
        self._lost_s = min(self._lost_s, now)
        self.last_reject = f"{reject.name}: {reject.text}"
        if reject.retryable:
            self._hello_not_before_s = now + reject.retry_after_ms / 1000
            return
        self.rejection = ConnectionRejected(self.last_reject)
        self.fail_all(self.rejection)

    # ---- time

    def tick(self, now: float) -> None:
        """To be called a few times a second."""
        ping_s = HELLO_S if self.welcome is None else self.welcome.limits.ping_ms / 1000
        if not self.is_welcome:
            if now - self._said_s >= ping_s:
                self.hello(now)
            if now - self._lost_s > self._give_up_s:
                self.fail_all(ConnectionLost(f"the server was out of reach for {self._give_up_s:g} s"))
            return
        if now - self._heard_s > NUM_SILENT_PINGS * ping_s and now - self._said_s < 2 * ping_s:
            self.lose(now)
        elif now - self._said_s >= ping_s:
            self._said_s = now
            self._say(Ping())

    # ---- bookkeeping

    def _end(self, call: Call, error: DeepInferError | None) -> None:
        self._calls.pop(call.id, None)
        if call.last is not None:
            self._push(call, call.last)
        if error is None and not call.mailbox.is_closed:  # cancelled, and what was on its way is not waited for
            for sample in sorted(call.unfinished):
                call.mailbox.push((sample, None, "", None, "abort"))
        call.mailbox.close(error)

    def _say(self, message: ClientMessage) -> None:
        self._frames.append(encode(message))
