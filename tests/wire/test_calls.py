"""What a client says, frame by frame, to a server's own decisions, with a clock of our own and no sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import pytest
from msgspec.structs import replace

from deepinfer import TokenChunk
from deepinfer.errors import DuplicateRequestId
from deepinfer.stream import Mailbox
from deepinfer.wire.calls import ClientSession
from deepinfer.wire.session import Load, Pull, Send, ServerSession, Settings
from deepinfer_protocol import SamplingParams, pack_int32
from deepinfer_protocol.client import (
    ClientMessage,
    Delta,
    Error,
    ErrorCode,
    Hello,
    Ping,
    Reject,
    Resume,
    ServerMessage,
    Submit,
    decode_client,
    encode,
)
from protocol.client_cases import WELCOME

M = TypeVar("M", bound=ClientMessage)
SETTINGS: Final = Settings()
STRANGER: Final = Error.of(ErrorCode.E_HELLO)


class Pair:
    """A client and a server. Frames go to and fro at once; `pulled` streams wait for a chunk of the engine."""

    def __init__(self) -> None:
        self.client = ClientSession()
        self.server = ServerSession(
            replace(WELCOME, limits=SETTINGS.limits, engine="one"), SETTINGS, lambda: Load(1, 1, 1)
        )
        self.connection = b"first"
        self.now = 100.0
        self.said: list[ClientMessage] = []
        self.num_heard = 0
        self.pulled: deque[int] = deque()
        self.client.hello(self.now)
        self.settle()

    def settle(self) -> None:
        """Deliver until both are silent."""
        while (frames := self.client.take_frames()) or (actions := self.server.take_actions()):
            for frame in frames:
                self.said.append(decode_client(frame))
                self.server.receive(self.connection, [frame], "", self.now)
            if not frames:
                self.deliver(self.sent_of(actions))
            if self.server.is_behind:
                self.server.resend()

    def deliver(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self.num_heard += 1
            self.client.receive([frame], self.now)

    def sent_of(self, actions: Iterable[object]) -> Iterator[bytes]:
        for action in actions:
            if isinstance(action, Pull):
                self.pulled.append(action.key)
            elif isinstance(action, Send):
                yield action.frame

    def submit(self, id: str = "a", *, n: int = 1, credit: int = 1024, resumable: bool = True) -> Mailbox:
        mailbox = Mailbox(None, n)
        sampling = SamplingParams(n=n)
        self.client.submit(Submit(id=id, prompt="x", credit=credit, resumable=resumable, sampling=sampling), mailbox)
        return mailbox

    def make(self, num_chunks: int) -> list[bytes]:
        """The frames of as many chunks of one token as are pulled, undelivered."""
        frames: list[bytes] = []
        for _ in range(num_chunks):
            key = self.pulled.popleft()
            at = self.server._by_key[key][1].num_tokens
            self.server.chunk(key, TokenChunk("x", (1,), at), self.now)
            frames += self.sent_of(self.server.take_actions())
        return frames

    def hear(self, message: ServerMessage) -> list[ClientMessage]:
        """What the client says to it."""
        self.client.receive([encode(message)], self.now)
        return self.spoken()

    def spoken(self) -> list[ClientMessage]:
        """But pings."""
        messages = [decode_client(frame) for frame in self.client.take_frames()]
        return [message for message in messages if not isinstance(message, Ping)]

    def num_said(self, kind: type[M]) -> int:
        return sum(isinstance(message, kind) for message in self.said)


def hellos_over(client: ClientSession, *, seconds: int) -> int:
    """How often it has said so by then, ticking ten times a second."""
    num_hellos = 0
    for tick in range(10 * seconds + 1):
        client.tick(tick / 10)
        num_hellos += len(client.take_frames())
    return num_hellos


def reject(*, retryable: bool, retry_after_ms: int = 0) -> Reject:
    return Reject(
        code=20,
        name="E_OVERLOADED",
        text="full",
        min_version=1,
        max_version=1,
        retryable=retryable,
        retry_after_ms=retry_after_ms,
    )


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_new_connection_costs_one_hello_however_many_messages_were_under_way(pair: Pair) -> None:
    mailboxes = {f"r{index}": pair.submit(f"r{index}") for index in range(64)}
    pair.settle()
    pair.connection = b"second"  # ZeroMQ made it without a word
    pair.said.clear()
    for id, mailbox in mailboxes.items():
        mailbox.num_taken += 600
        pair.client.grant(id)
    pair.settle()
    assert pair.num_said(Hello) == 1 and pair.client.num_reconnects == 1
    assert len([message for message in pair.said if not isinstance(message, Ping)]) == 64 + 1 + 64


def test_hello_is_repeated_every_second_until_there_is_a_welcome_and_then_every_ping(pair: Pair) -> None:
    client = ClientSession()
    client.hello(0.0)
    assert hellos_over(client, seconds=10) == 1 + 10
    pair.client.lose(0.0)
    pair.client.take_frames()
    assert hellos_over(pair.client, seconds=10) == round(10 / SETTINGS.ping_s)


def test_a_server_that_is_full_says_when_and_one_that_refuses_hears_nothing_more() -> None:
    client = ClientSession()
    client.hello(0.0)
    client.receive([encode(reject(retryable=True, retry_after_ms=7000))], 0.5)
    assert hellos_over(client, seconds=7) == 1
    assert hellos_over(client, seconds=9) == 1 + 1
    client.receive([encode(reject(retryable=False))], 9.5)
    assert hellos_over(client, seconds=60) == 0
    client.lose(60.0)
    assert client.take_frames() == []


def test_a_stream_that_is_not_resumable_is_lost_once(pair: Pair) -> None:
    """A second WELCOME to the same connection would end what was said after the first one."""
    mailbox = pair.submit(resumable=False)
    pair.settle()
    assert [type(message) for message in pair.hear(STRANGER)] == [Hello]
    assert pair.hear(STRANGER) == [] and not mailbox.is_closed


def test_a_gap_is_closed_by_one_resume(pair: Pair) -> None:
    pair.submit()
    pair.settle()
    frames = pair.make(101)
    pair.said.clear()
    pair.num_heard = 0
    pair.deliver(frames[1:])
    pair.settle()
    assert pair.num_said(Resume) == 1 and pair.num_heard == 100 + 101
    assert pair.client._calls["a"].num_deltas == 101
    pair.deliver(pair.make(2)[1:])
    pair.settle()
    assert pair.num_said(Resume) == 2, "a second gap is another one"


def test_a_cancelled_stream_is_not_resumed(pair: Pair) -> None:
    pair.submit()
    pair.settle()
    frames = pair.make(3)
    pair.client.cancel("a")
    pair.client.take_frames()
    pair.deliver(frames[1:])
    assert pair.spoken() == []


@pytest.mark.parametrize("window", [2, 1024, 4096, 8192, 8193, 1 << 20])
def test_a_stream_that_is_read_goes_on_whatever_the_window(pair: Pair, window: int) -> None:
    mailbox = pair.submit(credit=window)
    pair.settle()
    for _ in range(3 * SETTINGS.max_unacked_tokens):
        pair.deliver(pair.make(1))
        mailbox.take()
        if mailbox.is_paused:
            mailbox.is_paused = False
            pair.client.grant("a")
        pair.settle()
    assert mailbox.num_taken == 3 * SETTINGS.max_unacked_tokens


def test_a_cancel_out_of_reach_ends_the_samples_that_had_not_ended(pair: Pair) -> None:
    mailbox = pair.submit(n=3)
    pair.hear(Delta(id="a", seq=0, sample=1, token_ids=pack_int32([7]), reason="stop"))
    pair.client.lose(pair.now)
    pair.client.cancel("a")
    ends = {chunk.sample_index: chunk.finish_reason for chunk in iter(mailbox.take, None)}
    assert ends == {1: "stop", 0: "abort", 2: "abort"}
    assert mailbox.is_closed and pair.client.num_open == 0


def test_the_id_of_a_cancel_that_nobody_has_heard_is_taken(pair: Pair) -> None:
    """Told after the next WELCOME, it would end another request of this id."""
    pair.submit()
    pair.client.lose(pair.now)
    pair.client.cancel("a")
    with pytest.raises(DuplicateRequestId):
        pair.submit()
