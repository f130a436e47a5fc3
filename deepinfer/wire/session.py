"""The server's side of the client wire, without IO: frames and the time go in, frames and calls of an engine come out.

Holds who is connected, which streams are open, what each may still send and what of it may have to be sent again.
Knows nothing of sockets, tasks or engines. docs/wire.md says what is due when; the names are its names.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

from msgspec import Struct

from deepinfer.errors import ConfigError
from deepinfer.stream import TokenChunk
from deepinfer.wire.allowance import Allowance
from deepinfer.wire.deltas import deltas_of
from deepinfer.wire.refusals import to_wire
from deepinfer_protocol.client import (
    CLIENT_VERSION,
    RETRYABLE,
    TEXTS,
    Bye,
    Cancel,
    Error,
    ErrorCode,
    Finish,
    GoAway,
    Grant,
    Hello,
    Limits,
    Ping,
    Pong,
    Reason,
    Reject,
    Resume,
    ServerMessage,
    Submit,
    Timings,
    Usage,
    Welcome,
    WireError,
    decode_client,
    decode_hello,
    encode,
)
from deepinfer_protocol.client.limits import MAX_FRAME_BYTES, MAX_NAME_CHARACTERS, MAX_PARTS

MAX_SESSIONS: Final = 4096
MAX_ENDED: Final = 1024
"""Ended streams that a session keeps: the oldest make room."""
MAX_RESENT_AT_ONCE: Final = 64
"""Frames that are sent again before others have their turn."""
RETRY_AFTER_MS: Final = 1000
WRONG_TOKENS: Final = 20
"""Whoever guesses has so many tries at once, all clients together,"""
WRONG_TOKENS_A_SECOND: Final = 2.0
"""and so many a second; meanwhile no token is looked at, but of sessions that are known: their names are secrets."""


class Send(NamedTuple):
    """A frame for a connection."""

    connection: bytes
    frame: bytes


class Start(NamedTuple):
    """A request for the engine. Its first chunk is read after a `Pull`."""

    key: int
    submit: Submit


class Pull(NamedTuple):
    """Read the next chunk of a stream, and say so by `chunk`, `end` or `fail`."""

    key: int


class Abort(NamedTuple):
    """End a request; what it still brings is read."""

    key: int


class Drop(NamedTuple):
    """End a request; nobody wants what it still brings."""

    key: int


Action = Send | Start | Pull | Abort | Drop


class Load(NamedTuple):
    """What a `Pong` says of the engine."""

    steps: int
    running: int
    waiting: int


class Settings(Struct, frozen=True, kw_only=True):
    """How a server holds its clients. Times in seconds."""

    max_streams: int = 256
    max_unacked_tokens: int = 4096
    retention_s: float = 30.0
    slow_consumer_s: float = 60.0
    ping_s: float = 1.0
    idle_s: float = 10.0
    token: str = ""
    """If it is not empty, a HELLO must carry it."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a token that no HELLO can carry."""
        if len(self.token) > MAX_NAME_CHARACTERS:
            raise ConfigError("token", f"{len(self.token)} characters, at most {MAX_NAME_CHARACTERS} can be sent")

    @property
    def limits(self) -> Limits:
        return Limits(
            max_frame_bytes=MAX_FRAME_BYTES,
            max_streams=self.max_streams,
            retention_ms=_millis(self.retention_s),
            max_unacked_tokens=self.max_unacked_tokens,
            ping_ms=_millis(self.ping_s),
            idle_ms=_millis(self.idle_s),
        )


class Kept(NamedTuple):
    """A delta that may have to be sent again."""

    seq: int
    frame: bytes
    num_tokens: int


class Stream:
    """One request of a session, from its SUBMIT until it is forgotten."""

    __slots__ = (
        "connection",
        "credit",
        "digest",
        "ended_s",
        "first_token_s",
        "id",
        "is_cancelled",
        "is_over",
        "is_pulled",
        "is_resumable",
        "kept",
        "key",
        "last",
        "next_seq",
        "num_acked",
        "num_sent",
        "num_tokens",
        "num_unacked_tokens",
        "num_unfinished",
        "reason",
        "starved_s",
        "submitted_s",
    )

    def __init__(self, key: int, submit: Submit, digest: bytes, connection: bytes, now: float) -> None:
        self.key = key
        self.id = submit.id
        self.digest = digest
        self.is_resumable = submit.resumable
        self.connection: bytes | None = connection  # None: it was lost, and the stream not yet resumed
        self.credit = submit.credit
        self.submitted_s = now
        self.first_token_s = 0.0
        self.starved_s = inf  # since when it has no credit
        self.ended_s = inf
        self.is_pulled = False  # a chunk is being read
        self.is_cancelled = False
        self.is_over = False  # the engine has no more tokens of it
        self.num_tokens = 0
        self.num_unfinished = submit.sampling.n
        self.reason: Reason = "abort"
        self.next_seq = 0
        self.num_acked = 0
        self.num_sent = 0  # deltas, while some of them are sent again
        self.num_unacked_tokens = 0
        self.kept: deque[Kept] = deque()
        self.last: bytes | None = None  # its FINISH or ERROR

    def may_pull(self, max_unacked_tokens: int) -> bool:
        """May more of it be read? The end always may."""
        if self.last is not None or self.is_pulled:
            return False
        if self.is_cancelled or self.is_over or self.num_unfinished <= 0:
            return True
        return self.num_tokens < self.credit and self.num_unacked_tokens < max_unacked_tokens

    @property
    def came_to_nothing(self) -> bool:
        """It was refused, or ended without a word, and this connection knows: who says the same again tries again."""
        return self.last is not None and not self.next_seq and self.connection is not None

    @property
    def is_spent(self) -> bool:
        """It has ended, and its beginning is not here to be sent again."""
        return self.last is not None and self.next_seq > 0 and (self.num_acked > 0 or not self.is_resumable)

    def keep(self, frame: bytes, num_tokens: int) -> None:
        self.kept.append(Kept(self.next_seq - 1, frame, num_tokens))
        self.num_unacked_tokens += num_tokens

    def next_kept(self) -> bytes | None:
        """The next delta that is to be sent again, which then counts as sent. `None`: there is none."""
        if not self.kept or self.num_sent >= self.next_seq:
            return None
        self.num_sent = max(self.num_sent, self.kept[0].seq) + 1
        return self.kept[self.num_sent - 1 - self.kept[0].seq].frame

    def ack(self, num_deltas: int) -> None:
        """Deltas below `num_deltas` were received."""
        self.num_acked = max(self.num_acked, min(num_deltas, self.next_seq))
        while self.kept and self.kept[0].seq < self.num_acked:
            self.num_unacked_tokens -= self.kept.popleft().num_tokens


class Session:
    """Who said one session id, under one key: its streams outlive its connections."""

    __slots__ = ("connection", "ended", "name", "num_open", "streams")

    def __init__(self, name: tuple[str, str]) -> None:
        self.name = name
        self.connection: bytes | None = None
        self.streams: dict[str, Stream] = {}
        self.ended: deque[Stream] = deque()
        self.num_open = 0


class Connection:
    """A peer that was welcomed."""

    __slots__ = ("behind", "heard_s", "is_full", "session")

    def __init__(self, session: Session, now: float) -> None:
        self.session = session
        self.heard_s = now
        self.is_full = False
        self.behind: OrderedDict[int, Stream] = OrderedDict()
        """By key, the streams of which something is to be sent again; what is new of them comes after that."""


class ServerSession:
    """All connections and streams of one server. After every call `take_actions` says what is to be done."""

    def __init__(self, welcome: Welcome, settings: Settings, load: Callable[[], Load]) -> None:
        self._welcome = welcome
        self._settings = settings
        self._load = load
        self._connections: dict[bytes, Connection] = {}
        self._behind: OrderedDict[bytes, Connection] = OrderedDict()  # that have streams behind, and room
        self._sessions: dict[tuple[str, str], Session] = {}
        self._by_key: dict[int, tuple[Session, Stream]] = {}  # streams that are open
        self._next_key = 0
        self._actions: list[Action] = []
        self._deadline_s = inf  # of the drain
        self._is_draining = False
        self._guesses = Allowance(WRONG_TOKENS, WRONG_TOKENS_A_SECOND)
        self.num_errors = Counter[str]()
        """ERROR and REJECT, by name: of messages, and of streams that ended so."""

    def take_actions(self) -> list[Action]:
        """What is due, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._by_key)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def is_behind(self) -> bool:
        """Is there something to be sent again?"""
        return bool(self._behind)

    def is_welcome(self, connection: bytes) -> bool:
        return connection in self._connections

    # ---- what a peer does

    def receive(self, connection: bytes, parts: list[bytes], user: str, now: float) -> None:
        """A message came. `user` is who the transport says it is; empty where it does not say."""
        peer = self._connections.get(connection)
        try:
            if peer is None:
                self._greet(connection, parts, user, now)
                return
            peer.heard_s = now
            if len(parts) > MAX_PARTS:
                raise WireError(ErrorCode.E_PROTOCOL, f"{len(parts)} parts")
            self._dispatch(connection, peer, parts[0], user, now)
        except WireError as error:
            self._refuse(connection, peer, error)

    def lose(self, connection: bytes, now: float) -> None:
        """A connection cannot be sent to, or is silent for too long."""
        peer = self._connections.pop(connection, None)
        if peer is None:
            return
        self._behind.pop(connection, None)
        session = peer.session
        session.connection = None
        for stream in list(session.streams.values()):
            stream.connection = None
            if stream.last is None and not stream.is_resumable:
                self._forget(session, stream)
            elif stream.last is None:
                stream.starved_s = now  # from here on: since when nobody is there for it
        self._leave_if_empty(session)

    def _refuse(self, connection: bytes, peer: Connection | None, error: WireError) -> None:
        is_known = peer is not None and error.id in peer.session.streams
        self._send(connection, Error.of(error.code, "" if is_known else error.id, field=error.field))

    def _greet(self, connection: bytes, parts: list[bytes], user: str, now: float) -> None:
        """The first message of a stranger."""
        if len(parts) > MAX_PARTS:
            raise WireError(ErrorCode.E_HELLO, f"{len(parts)} parts")
        hello = decode_hello(parts[0])
        if not hello.min_version <= CLIENT_VERSION <= hello.max_version:
            self._reject(connection, ErrorCode.E_VERSION)
        elif self._settings.token and (user, hello.session) not in self._sessions and self._guesses.is_spent(now):
            self._reject(connection, ErrorCode.E_OVERLOADED, RETRY_AFTER_MS)
        elif not hmac.compare_digest(hello.token.encode(), self._settings.token.encode()):
            self._guesses.spend()
            self._reject(connection, ErrorCode.E_AUTH)
        elif len(self._sessions) >= MAX_SESSIONS and (user, hello.session) not in self._sessions:
            self._reject(connection, ErrorCode.E_OVERLOADED, RETRY_AFTER_MS)
        else:
            self._admit(connection, (user, hello.session), now)

    def _admit(self, connection: bytes, name: tuple[str, str], now: float) -> None:
        session = self._sessions.get(name)
        if session is not None and session.connection is not None:
            self.lose(session.connection, now)  # this one takes its place
        session = self._sessions.setdefault(name, session or Session(name))
        session.connection = connection
        self._connections[connection] = Connection(session, now)
        self._send(connection, self._welcome)
        if self._is_draining:
            self._send(connection, GoAway(deadline_ms=_millis(max(self._deadline_s - now, 0.0))))

    def _reject(self, connection: bytes, code: ErrorCode, retry_after_ms: int = 0) -> None:
        self._send(
            connection,
            Reject(
                code=int(code),
                name=code.name,
                text=TEXTS[code],
                min_version=CLIENT_VERSION,
                max_version=CLIENT_VERSION,
                retryable=code in RETRYABLE,
                retry_after_ms=retry_after_ms,
            ),
        )

    def _dispatch(self, connection: bytes, peer: Connection, frame: bytes, user: str, now: float) -> None:
        message = decode_client(frame)
        session = peer.session
        match message:
            case Grant():
                self._grant(session, message, now)
            case Submit():
                self._submit(connection, session, message, frame, now)
            case Cancel():
                self._cancel(connection, session, message.id, now)
            case Resume():
                self._resume(connection, session, message, now)
            case Ping():
                self._send(connection, Pong(message.nonce, *self._load()))
            case Bye():
                self._end_session(connection, session)
            case Hello() if (user, message.session) == session.name:
                self._admit(connection, session.name, now)  # it thinks that it was cut off
            case Hello():
                raise WireError(ErrorCode.E_PROTOCOL, "a connection has one session")

    def _submit(self, connection: bytes, session: Session, submit: Submit, frame: bytes, now: float) -> None:
        digest = hashlib.sha256(frame).digest()
        known = session.streams.get(submit.id)
        if known is not None and known.digest == digest and known.came_to_nothing:
            self._forget(session, known)
            known = None
        if known is not None:
            if known.digest != digest or known.is_spent:
                self._send(connection, Error.of(ErrorCode.E_DUPLICATE, submit.id, field="id"))
            elif known.connection is None or known.last is not None:
                self._resume(connection, session, Resume(id=submit.id, next=0, limit=submit.credit), now)
        elif self._is_draining:
            self._send(connection, Error.of(ErrorCode.E_SHUTDOWN, submit.id))
        elif submit.sampling.prompt_logprobs is not None:
            detail = "this wire does not carry them"
            refusal = Error.of(ErrorCode.E_INVALID_PARAM, submit.id, field="prompt_logprobs", detail=detail)
            self._send(connection, refusal)
        elif session.num_open >= self._settings.max_streams:
            full = Error.of(ErrorCode.E_OVERLOADED, submit.id, retry_after_ms=RETRY_AFTER_MS)
            self._send(connection, full)
        else:
            stream = Stream(self._next_key, submit, digest, connection, now)
            self._next_key += 1
            session.streams[submit.id] = stream
            session.num_open += 1
            self._by_key[stream.key] = (session, stream)
            self._actions.append(Start(stream.key, submit))
            self._pull(stream, now)

    def _cancel(self, connection: bytes, session: Session, id: str, now: float) -> None:
        stream = session.streams.get(id)
        if stream is None:
            self._send(connection, Finish(id=id, reason="abort"))
        elif stream.last is not None:
            self._send(connection, Finish(id=id, reason=stream.reason, seq=stream.next_seq))
        else:
            stream.connection = connection  # also of a stream that was not resumed: its end is told
            if not stream.is_cancelled:
                stream.is_cancelled = True
                self._actions.append(Abort(stream.key))
            self._pull(stream, now)

    def _grant(self, session: Session, grant: Grant, now: float) -> None:
        stream = session.streams.get(grant.id)
        if stream is None or stream.connection is None:
            return  # it has ended meanwhile, or is resumed first
        stream.ack(grant.ack)
        stream.credit = max(stream.credit, grant.limit)
        self._pull(stream, now)

    def _resume(self, connection: bytes, session: Session, resume: Resume, now: float) -> None:
        stream = session.streams.get(resume.id)
        is_kept = stream is not None and (stream.is_resumable or resume.next == stream.next_seq)
        if stream is None or not is_kept or not stream.num_acked <= resume.next <= stream.next_seq:
            if stream is not None:
                self._forget(session, stream)
            self._send(connection, Error.of(ErrorCode.E_NOT_FOUND, resume.id, seq=resume.next))
            return
        stream.connection = connection
        stream.starved_s = inf
        stream.ack(resume.next)
        stream.credit = max(stream.credit, resume.limit)
        stream.num_sent = resume.next
        self._fall_behind(stream, connection, self._connections[connection])
        self._pull(stream, now)

    def _end_session(self, connection: bytes, session: Session) -> None:
        for stream in list(session.streams.values()):
            self._forget(session, stream)
        session.connection = None
        self._connections.pop(connection, None)
        self._behind.pop(connection, None)
        self._leave_if_empty(session)

    # ---- what is sent again

    def hold(self, connection: bytes) -> None:
        """Its queue is full: what can wait waits."""
        if connection in self._connections:
            self._connections[connection].is_full = True
            self._behind.pop(connection, None)

    def release(self, connection: bytes) -> None:
        """It has room again."""
        peer = self._connections.get(connection)
        if peer is not None:
            peer.is_full = False
            if peer.behind:
                self._behind[connection] = peer

    def resend(self) -> None:
        """Send some of what is missing somewhere, in turn. To be called, between other work, while `is_behind`."""
        for _ in range(MAX_RESENT_AT_ONCE):
            if not self._behind:
                return
            connection, peer = self._behind.popitem(last=False)
            key, stream = peer.behind.popitem(last=False)
            if stream.connection == connection and self._resend_one(stream, connection):
                peer.behind[key] = stream
            if peer.behind:
                self._behind[connection] = peer

    def _resend_one(self, stream: Stream, connection: bytes) -> bool:
        """Is there more?"""
        frame = stream.next_kept()
        is_last = frame is None
        frame = stream.last if frame is None else frame
        if frame is not None:
            self._actions.append(Send(connection, frame))
        return not is_last and (stream.num_sent < stream.next_seq or stream.last is not None)

    def _fall_behind(self, stream: Stream, connection: bytes, peer: Connection) -> None:
        if stream.num_sent < stream.next_seq or stream.last is not None:
            peer.behind[stream.key] = stream
            if not peer.is_full:
                self._behind[connection] = peer

    def _tell(self, stream: Stream, frame: bytes, num_sent: int) -> None:
        """Send what is new of a stream. `num_sent`: deltas before it."""
        if stream.connection is None:
            return
        peer = self._connections[stream.connection]
        if stream.key in peer.behind:
            return
        if peer.is_full and stream.is_resumable:
            stream.num_sent = num_sent
            self._fall_behind(stream, stream.connection, peer)
        else:
            self._actions.append(Send(stream.connection, frame))

    # ---- what an engine does

    def chunk(self, key: int, chunk: TokenChunk, now: float) -> None:
        """What a `Pull` brought."""
        found = self._by_key.get(key)
        if found is None:
            return
        stream = found[1]
        stream.is_pulled = False
        if not stream.num_tokens and chunk.token_ids:
            stream.first_token_s = now
        stream.num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            stream.num_unfinished -= 1
            if chunk.sample_index == 0:
                stream.reason = chunk.finish_reason
        for delta in deltas_of(chunk, stream.id, stream.next_seq):
            frame = encode(delta)
            stream.next_seq += 1
            if stream.is_resumable:
                stream.keep(frame, len(delta.token_ids) // 4)
            self._tell(stream, frame, stream.next_seq - 1)
        self._pull(stream, now)

    def over(self, key: int, now: float) -> None:
        """A stream has ended, all of its tokens were read: its end needs no credit."""
        if key in self._by_key:
            stream = self._by_key[key][1]
            stream.is_over = True
            self._pull(stream, now)

    def end(self, key: int, num_prompt_tokens: int, num_cached_tokens: int, num_preemptions: int, now: float) -> None:
        """A `Pull` found the end of the stream."""
        if key in self._by_key:
            stream = self._by_key[key][1]
            usage = Usage(num_prompt_tokens, num_cached_tokens, stream.num_tokens, num_preemptions)
            first_s = (stream.first_token_s or now) - stream.submitted_s
            timings = Timings(_micros(first_s), _micros(now - stream.submitted_s))
            finish = Finish(id=stream.id, reason=stream.reason, seq=stream.next_seq, usage=usage, timings=timings)
            self._end(key, finish, now)

    def fail(self, key: int, error: Exception, now: float) -> None:
        """The request was refused, or has failed."""
        if key in self._by_key:
            stream = self._by_key[key][1]
            self._end(key, to_wire(error, stream.id, stream.next_seq), now)

    def _end(self, key: int, last: Finish | Error, now: float) -> None:
        session, stream = self._by_key.pop(key)
        session.num_open -= 1
        self._count(last)
        stream.last = encode(last)
        stream.ended_s = now
        self._tell(stream, stream.last, stream.next_seq)
        session.ended.append(stream)
        if len(session.ended) > MAX_ENDED:
            self._forget_ended(session, session.ended.popleft())

    # ---- time

    def tick(self, now: float) -> None:
        """Whatever is over by `now`. To be called a few times a second."""
        settings = self._settings
        for connection in [at for at, peer in self._connections.items() if now - peer.heard_s > settings.idle_s]:
            self.lose(connection, now)
        for key, (session, stream) in list(self._by_key.items()):
            waited_s = now - stream.starved_s
            if stream.connection is None and waited_s > settings.retention_s:
                self._forget(session, stream)
            elif stream.connection is not None and waited_s > settings.slow_consumer_s:
                self._actions.append(Drop(key))
                self._end(key, Error.of(ErrorCode.E_SLOW_CONSUMER, stream.id, seq=stream.next_seq), now)
            elif now > self._deadline_s:
                self._actions.append(Drop(key))
                self._end(key, Error.of(ErrorCode.E_SHUTDOWN, stream.id, seq=stream.next_seq), now)
        for session in list(self._sessions.values()):
            while session.ended and now - session.ended[0].ended_s > settings.retention_s:
                self._forget_ended(session, session.ended.popleft())
            self._leave_if_empty(session)

    def drain(self, now: float, deadline_s: float) -> None:
        """Take no further request; those that are open have `deadline_s` seconds."""
        self._is_draining = True
        self._deadline_s = min(self._deadline_s, now + deadline_s)
        for connection in self._connections:
            self._send(connection, GoAway(deadline_ms=_millis(deadline_s)))

    # ---- bookkeeping

    def _pull(self, stream: Stream, now: float) -> None:
        if stream.may_pull(self._settings.max_unacked_tokens):
            stream.is_pulled = True
            if stream.connection is not None:
                stream.starved_s = inf
            self._actions.append(Pull(stream.key))
        elif stream.last is None and not stream.is_pulled and stream.starved_s == inf:
            stream.starved_s = now

    def _forget(self, session: Session, stream: Stream) -> None:
        """End it without a word to anybody."""
        if self._by_key.pop(stream.key, None) is not None:
            session.num_open -= 1
            self._actions.append(Drop(stream.key))
        else:
            session.ended.remove(stream)
        stream.connection = None
        del session.streams[stream.id]

    def _forget_ended(self, session: Session, stream: Stream) -> None:
        if session.streams.get(stream.id) is stream:
            del session.streams[stream.id]

    def _leave_if_empty(self, session: Session) -> None:
        if session.connection is None and not session.streams and self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    def _send(self, connection: bytes, message: ServerMessage) -> None:
        self._count(message)
        self._actions.append(Send(connection, encode(message)))

    def _count(self, message: ServerMessage) -> None:
        if isinstance(message, Error | Reject):
            self.num_errors[message.name] += 1


def _millis(seconds: float) -> int:
    return min(int(1000 * seconds), 2**31 - 1)


def _micros(seconds: float) -> int:
    return max(int(1e6 * seconds), 0)
