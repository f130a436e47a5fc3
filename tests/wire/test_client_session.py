"""What a client decides, frame by frame, with a clock of our own and no server."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from deepinfer import ConnectionLost, ConnectionRejected, EngineClosed, EngineError
from deepinfer.stream import Mailbox
from deepinfer.wire.calls import ClientSession
from deepinfer_protocol import SamplingParams, pack_int32
from deepinfer_protocol.client import (
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
    ServerMessage,
    Submit,
    Welcome,
    decode_client,
    encode,
)
from protocol.client_cases import WELCOME, changed

OTHER: Final = Welcome(1, "another-run", "deepinfer", "m", 97, 100, WELCOME.limits)
PING_S: Final = WELCOME.limits.ping_ms / 1000


class Client:
    """A session, its clock, and what it says."""

    def __init__(self) -> None:
        self.session = ClientSession(give_up_s=30.0)
        self.now = 100.0
        self.session.hello(self.now)
        assert [type(message) for message in self.said()] == [Hello]

    def hear(self, *messages: ServerMessage | bytes) -> list[ClientMessage]:
        for message in messages:
            frame = message if isinstance(message, bytes) else encode(message)
            self.session.receive([frame], self.now)
        return self.said()

    def said(self) -> list[ClientMessage]:
        return [decode_client(frame) for frame in self.session.take_frames()]

    def after(self, seconds: float) -> list[ClientMessage]:
        self.now += seconds
        self.session.tick(self.now)
        return self.said()

    def ask(self, id: str = "r1", *, n: int = 1, resumable: bool = True, credit: int = 100) -> Mailbox:
        mailbox = Mailbox(None, n)
        sampling = SamplingParams(n=n)
        self.session.submit(Submit(id, prompt="x", sampling=sampling, resumable=resumable, credit=credit), mailbox)
        return mailbox


@pytest.fixture
def client() -> Client:
    """That is welcome."""
    client = Client()
    assert client.hear(WELCOME) == [Ping()]
    return client


def delta(seq: int, *, id: str = "r1", reason: str | None = None) -> Delta:
    return Delta(id, seq, index=seq, token_ids=pack_int32([seq]), text=str(seq), reason=reason)  # type: ignore[arg-type]


def tokens_in(mailbox: Mailbox) -> list[int]:
    tokens: list[int] = []
    while (chunk := mailbox.take()) is not None:
        tokens += chunk.token_ids
    return tokens


def test_a_repetition_is_dropped_and_one_resume_closes_a_gap(client: Client) -> None:
    mailbox = client.ask()
    assert [type(message) for message in client.said()] == [Submit]
    assert client.hear(delta(0), delta(1), delta(1), delta(0)) == []
    assert client.hear(delta(3), delta(4), Finish("r1", "length", seq=5)) == [Resume("r1", next=2, limit=100)]
    assert client.hear(delta(2), delta(3), delta(4, reason="length"), Finish("r1", "length", seq=5)) == []
    assert tokens_in(mailbox) == [0, 1, 2, 3, 4] and mailbox.is_closed and mailbox.error is None


def test_a_gap_is_closed_again_after_the_next_cut(client: Client) -> None:
    client.ask()
    client.hear(delta(0), delta(2))
    again = client.hear(Error.of(ErrorCode.E_HELLO), WELCOME)
    assert [type(message) for message in again] == [Hello, Ping, Resume]
    assert client.hear(delta(3)) == [Resume("r1", next=1, limit=100)]  # it may be the answer to the second
    assert client.hear(delta(1)) == []
    assert client.hear(delta(3)) == [Resume("r1", next=2, limit=100)]


def test_an_end_that_came_too_early_is_asked_for_again(client: Client) -> None:
    mailbox = client.ask()
    client.said()
    assert client.hear(delta(0), Error.of(ErrorCode.E_WORKER_LOST, "r1", seq=3)) == [Resume("r1", 1, limit=100)]
    client.hear(delta(1), delta(2), Error.of(ErrorCode.E_WORKER_LOST, "r1", seq=3))
    assert tokens_in(mailbox) == [0, 1, 2] and isinstance(mailbox.error, EngineError)


def test_a_stream_that_cannot_be_resumed_ends_at_a_gap(client: Client) -> None:
    mailbox = client.ask(resumable=False)
    client.said()
    assert client.hear(delta(0), delta(2)) == [Cancel("r1")]
    assert tokens_in(mailbox) == [0] and isinstance(mailbox.error, ConnectionLost)


def test_what_is_no_message_is_skipped(client: Client) -> None:
    mailbox = client.ask()
    client.said()
    client.session.receive([encode(delta(0)), b"more"], client.now)
    assert client.hear(b"", b"\xc1", encode(Ping()), changed(delta(0), kind="later"), changed(delta(0), seq=-1)) == []
    assert client.hear(changed(delta(0), later="unknown")) == []
    assert tokens_in(mailbox) == [0]


@pytest.mark.parametrize(
    "behind", [delta(2), Finish("r1", "length", seq=2), Error.of(ErrorCode.E_WORKER_LOST, "r1", seq=2)]
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_cannot_be_read_either_when_it_comes_again_ends_its_stream(
    is_cut: bool, behind: ServerMessage, client: Client
) -> None:
    mailbox = client.ask()
    client.said()
    unreadable = changed(delta(1), reason="of a later version")
    client.hear(delta(0))
    if is_cut:
        assert client.hear(Error.of(ErrorCode.E_HELLO), WELCOME)[-1] == Resume("r1", next=1, limit=100)
    assert client.hear(unreadable, behind) == [Resume("r1", next=1, limit=100)]
    assert client.hear(unreadable, behind) == [Cancel("r1")]
    assert tokens_in(mailbox) == [0] and isinstance(mailbox.error, ConnectionLost)


def test_credit_is_granted_when_half_of_the_window_is_used(client: Client) -> None:
    mailbox = client.ask(credit=4)
    client.said()
    assert client.hear(delta(0)) == []
    assert tokens_in(mailbox) == [0]
    assert client.hear(delta(1)) == [Grant("r1", limit=5, ack=2)]
    assert client.hear(delta(2), delta(3)) == [] and mailbox.is_paused
    assert tokens_in(mailbox) == [1, 2, 3]
    client.session.grant("r1")
    assert client.said() == [Grant("r1", limit=8, ack=4)]


def test_after_a_cut_everything_that_is_open_is_said_again(client: Client) -> None:
    unheard, heard, other, cancelled, brief = (
        client.ask("a"), client.ask("b"), client.ask("c", resumable=False), client.ask("d"),
        client.ask("e", resumable=False),
    )  # fmt: skip
    submits = client.said()
    client.hear(delta(0, id="b"), delta(0, id="c"))
    client.session.cancel("d")
    client.said()
    assert client.hear(Error.of(ErrorCode.E_HELLO)) != []
    assert client.hear(WELCOME) == [Ping(), submits[0], Resume("b", next=1, limit=100), Cancel("d"), submits[4]]
    assert isinstance(other.error, ConnectionLost)
    assert not unheard.is_closed and not heard.is_closed and not brief.is_closed
    client.hear(Finish("d", "abort"))
    assert cancelled.is_closed and cancelled.error is None


def test_another_run_of_the_server_has_nothing_of_what_was_heard(client: Client) -> None:
    unheard, heard = client.ask("a"), client.ask("b")
    submits = client.said()
    client.hear(delta(0, id="b"))
    assert client.hear(OTHER) == [Ping(), submits[0]]
    assert isinstance(heard.error, ConnectionLost) and not unheard.is_closed


def test_another_run_with_less_room_has_its_acks_in_time(client: Client) -> None:
    mailbox = client.ask(credit=100)
    client.said()
    limits = msgspec.structs.replace(WELCOME.limits, max_unacked_tokens=4)
    client.hear(msgspec.structs.replace(OTHER, limits=limits))
    client.hear(delta(0), delta(1), delta(2), delta(3))
    assert tokens_in(mailbox) == [0, 1, 2, 3]
    client.session.grant("r1")
    assert client.said() == [Grant("r1", limit=8, ack=4)]


def test_what_is_cancelled_during_a_cut_is_told_after_it(client: Client) -> None:
    mailbox = client.ask()
    client.said()
    client.hear(delta(0), Error.of(ErrorCode.E_HELLO))
    client.session.cancel("r1")
    assert mailbox.is_closed and client.said() == []
    assert client.hear(WELCOME) == [Cancel("r1"), Ping()]


def test_a_silent_server_is_pinged_then_greeted_then_given_up(client: Client) -> None:
    mailbox = client.ask()
    client.said()
    said = [type(message) for _ in range(8) for message in client.after(PING_S / 2)]
    assert said[:3] == [Ping, Ping, Ping] and said[-1] is Hello and not mailbox.is_closed
    for _ in range(70):
        client.after(0.5)
    assert isinstance(mailbox.error, ConnectionLost)


def test_an_answer_to_a_ping_keeps_the_connection(client: Client) -> None:
    for _ in range(20):
        assert all(isinstance(message, Ping) for message in client.after(PING_S))
        client.hear(Pong(steps=7))
    assert client.session.is_welcome and client.session.pong == Pong(steps=7)


def test_a_rejection_ends_everything_and_one_for_a_while_nothing(client: Client) -> None:
    mailbox = client.ask()
    client.hear(Reject(20, "E_OVERLOADED", "later", 1, 1, retryable=True, retry_after_ms=5))
    assert not mailbox.is_closed and client.session.last_reject == "E_OVERLOADED: later"
    client.hear(Reject(3, "E_AUTH", "no", 1, 1))
    assert isinstance(mailbox.error, ConnectionRejected)


def test_a_deadline_is_of_one_connection(client: Client) -> None:
    mailbox = client.ask()
    client.hear(GoAway(deadline_ms=5000))
    assert client.session.deadline_s == client.now + 5.0
    client.hear(Error.of(ErrorCode.E_SHUTDOWN, "r1"))
    assert isinstance(mailbox.error, EngineClosed)
    client.hear(WELCOME)
    assert client.session.deadline_s is None
