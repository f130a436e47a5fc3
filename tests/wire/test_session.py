"""What a server decides, frame by frame, with a clock of our own and no engine."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from typing import Final, TypeGuard, TypeVar

import msgspec
import pytest

from deepinfer import InvalidRequest, Logprob, Overloaded, TokenChunk, TokenLogprob, WorkerLost
from deepinfer.wire.session import (
    MAX_ENDED,
    MAX_SESSIONS,
    WRONG_TOKENS,
    Abort,
    Action,
    Drop,
    Load,
    Pull,
    Send,
    ServerSession,
    Settings,
    Start,
)
from deepinfer_protocol import SamplingParams, pack_int32
from deepinfer_protocol.client import (
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
    ServerMessage,
    Submit,
    Welcome,
    decode_server,
    encode,
)
from protocol.client_cases import WELCOME

M = TypeVar("M", bound=Action)
SETTINGS: Final = Settings(max_unacked_tokens=8, retention_s=30.0, slow_consumer_s=60.0, idle_s=10.0)
A, B = b"a", b"b"


class Server:
    """A session, its clock, and what it has said and wanted."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.session = ServerSession(WELCOME, settings, lambda: Load(5, 1, 2))
        self.now = 100.0
        self.actions: list[Action] = []

    def say(self, connection: bytes, *messages: ClientMessage, user: str = "") -> list[ServerMessage]:
        """What `connection` hears back."""
        for message in messages:
            self.session.receive(connection, [encode(message)], user, self.now)
        return self.heard(connection)

    def heard(self, connection: bytes) -> list[ServerMessage]:
        self.actions = self.session.take_actions()
        while self.session.is_behind:
            self.session.resend()
            self.actions += self.session.take_actions()
        return [decode_server(action.frame) for action in self.actions if action[0] == connection and is_send(action)]

    def wanted(self, kind: type[M]) -> list[M]:
        return [action for action in self.actions if isinstance(action, kind)]

    def feed(self, num_chunks: int, key: int = 0, *, to: bytes = A) -> list[ServerMessage]:
        """As many chunks of one token as are pulled, at most `num_chunks`."""
        heard: list[ServerMessage] = []
        for _ in range(num_chunks):
            if not self.is_pulled(key):
                break
            at = self.session._by_key[key][1].num_tokens
            self.session.chunk(key, TokenChunk("x", (at,), at), self.now)
            heard += self.heard(to)
        return heard

    def is_pulled(self, key: int = 0) -> bool:
        return self.session._by_key[key][1].is_pulled

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)


def is_send(action: Action) -> bool:
    return isinstance(action, Send)


def is_reject(message: ServerMessage) -> TypeGuard[Reject]:
    return isinstance(message, Reject)


def hello(session: str = "a-session-of-tests", token: str = "") -> Hello:
    return Hello(min_version=1, max_version=1, session=session, token=token)


def submit(id: str = "r1", *, credit: int = 100, resumable: bool = False, n: int = 1) -> Submit:
    sampling = SamplingParams(n=n)
    return Submit(id=id, token_ids=pack_int32([1]), credit=credit, resumable=resumable, sampling=sampling)


@pytest.fixture
def server() -> Server:
    """With one connection that is welcome."""
    server = Server()
    assert server.say(A, hello()) == [WELCOME]
    return server


def deltas(messages: list[ServerMessage]) -> list[int]:
    return [message.seq for message in messages if isinstance(message, Delta)]


def test_a_stream_runs_to_its_end(server: Server) -> None:
    assert server.say(A, submit()) == []
    assert server.wanted(Start) == [Start(0, submit())] and server.wanted(Pull) == [Pull(0)]
    server.now += 0.5
    assert deltas(server.feed(3)) == [0, 1, 2]
    server.session.chunk(0, TokenChunk("!", (9,), 3, finish_reason="stop", stop_reason="END"), server.now)
    (last,) = server.heard(A)
    assert last == Delta(id="r1", seq=3, index=3, token_ids=pack_int32([9]), text="!", reason="stop", stop="END")
    server.session.end(0, 1, 0, 2, server.now + 0.25)
    (finish,) = server.heard(A)
    assert isinstance(finish, Finish) and (finish.reason, finish.seq) == ("stop", 4)
    assert (finish.usage.generated_tokens, finish.usage.preemptions) == (4, 2)
    assert (finish.timings.first_token_us, finish.timings.total_us) == (500_000, 750_000)
    assert server.session.num_open == 0


def test_credit_pauses_a_stream_and_only_grows(server: Server) -> None:
    server.say(A, submit(credit=2))
    assert deltas(server.feed(10)) == [0, 1]
    server.say(A, Grant(id="r1", limit=1))
    assert server.feed(10) == []
    server.say(A, Grant(id="r1", limit=5))
    assert deltas(server.feed(10)) == [2, 3, 4]


def test_an_end_needs_no_credit(server: Server) -> None:
    server.say(A, submit(credit=0))
    assert server.wanted(Start) == [Start(0, submit(credit=0))] and server.wanted(Pull) == []
    server.session.over(0, server.now)
    server.session.over(0, server.now)
    server.heard(A)
    assert server.wanted(Pull) == [Pull(0)]
    server.session.fail(0, InvalidRequest("top_p", "7"), server.now)
    (error,) = server.heard(A)
    assert isinstance(error, Error) and error.field == "top_p"


def test_a_stream_without_credit_ends_as_a_slow_consumer(server: Server) -> None:
    server.say(A, submit(credit=1))
    server.feed(1)
    for _ in range(13):
        server.after(5.0)
        server.session.receive(A, [encode(Ping())], "", server.now)
    (error,) = [message for message in server.heard(A) if isinstance(message, Error)]
    assert error.code == ErrorCode.E_SLOW_CONSUMER and server.wanted(Drop) == [Drop(0)]


def test_what_was_not_acked_pauses_a_resumable_stream(server: Server) -> None:
    server.say(A, submit(resumable=True))
    assert deltas(server.feed(20)) == list(range(8))
    server.say(A, Grant(id="r1", limit=100, ack=5))
    assert deltas(server.feed(20)) == list(range(8, 13))


def test_a_resume_sends_again_what_is_missing_and_goes_on(server: Server) -> None:
    server.say(A, submit(resumable=True))
    first = server.feed(5)
    server.session.lose(A, server.now)
    assert server.feed(2) == []  # it goes on, unheard
    server.now += 29.0
    assert server.say(B, hello()) == [WELCOME]
    again = server.say(B, Resume(id="r1", next=3, limit=100))
    assert deltas(again) == [3, 4, 5, 6] and again[:2] == first[3:]
    assert deltas(server.feed(2, to=B)) == [7, 8]


def resumed(server: Server, num_streams: int, num_kept: int) -> None:
    """B has asked for all that A missed."""
    for number in range(num_streams):
        server.say(A, submit(f"r{number}", resumable=True))
        server.feed(1, number)
    server.session.lose(A, server.now)
    for number in range(num_streams):
        server.feed(num_kept, number)
    server.say(B, hello())
    for number in range(num_streams):
        server.session.receive(B, [encode(Resume(id=f"r{number}", next=1, limit=100))], "", server.now)


def turn(server: Server) -> list[tuple[str, int]]:
    """Ids and numbers of the deltas that are sent at once."""
    server.session.resend()
    sent = [decode_server(action.frame) for action in server.session.take_actions() if isinstance(action, Send)]
    return [(message.id, message.seq) for message in sent if isinstance(message, Delta)]


def test_many_resumes_take_turns_and_leave_turns_to_others(server: Server) -> None:
    resumed(server, 50, 7)
    turns = list[list[tuple[str, int]]]()
    while server.session.is_behind:
        turns.append(turn(server))
    assert [len(sent) for sent in turns] == [64] * 5 + [50 * 7 - 5 * 64]
    assert sorted({id for id, _ in turns[0]}) == sorted(f"r{number}" for number in range(50))
    for number in range(50):
        assert [seq for sent in turns for id, seq in sent if id == f"r{number}"] == list(range(1, 8))


def test_what_is_new_comes_after_what_was_missed(server: Server) -> None:
    resumed(server, 1, 5)
    server.session.take_actions()
    server.session.receive(B, [encode(Grant(id="r0", limit=100, ack=4))], "", server.now)
    server.session.chunk(0, TokenChunk("!", (9,), 6, finish_reason="stop"), server.now)
    server.session.end(0, 1, 0, 0, server.now)
    assert [action for action in server.session.take_actions() if is_send(action)] == []
    heard = server.heard(B)
    assert deltas(heard) == [4, 5, 6] and isinstance(heard[-1], Finish) and len(heard) == 4


def test_a_full_connection_holds_its_resumable_streams_back_and_nobody_else(server: Server) -> None:
    server.say(A, submit("r0", resumable=True), submit("r1"))
    server.say(B, hello("another-session-of-tests"), submit("r0", resumable=True))
    server.session.hold(A)
    assert (server.feed(3, 0), deltas(server.feed(1, 1))) == ([], [0])
    assert deltas(server.feed(3, 2, to=B)) == [0, 1, 2]
    server.session.release(A)
    assert deltas(server.heard(A)) == [0, 1, 2] and deltas(server.feed(1, 0)) == [3]


def test_a_lost_connection_ends_what_is_not_resumable_at_once_and_the_rest_in_time(server: Server) -> None:
    server.say(A, submit("r1"), submit("r2", resumable=True))
    server.session.lose(A, server.now)
    server.heard(A)
    assert server.wanted(Drop) == [Drop(0)]
    server.after(29.0)
    assert server.session.num_open == 1
    server.after(2.0)
    server.heard(A)
    assert server.wanted(Drop) == [Drop(1)]
    server.say(B, hello())
    assert [
        message.name for message in server.say(B, Resume(id="r2", next=0, limit=9)) if isinstance(message, Error)
    ] == ["E_NOT_FOUND"]


def test_what_was_acked_cannot_be_resumed(server: Server) -> None:
    server.say(A, submit(resumable=True))
    server.feed(5)
    server.say(A, Grant(id="r1", limit=100, ack=4))
    (error,) = server.say(A, Resume(id="r1", next=2, limit=100))
    assert isinstance(error, Error) and error.code == ErrorCode.E_NOT_FOUND


def test_a_silent_connection_is_lost(server: Server) -> None:
    server.after(9.0)
    assert server.say(A, Ping(nonce=3)) == [Pong(nonce=3, steps=5, running=1, waiting=2)]
    server.after(9.0)
    assert server.session.num_connections == 1
    server.after(2.0)
    assert server.session.num_connections == 0
    (error,) = server.say(A, Ping())
    assert isinstance(error, Error) and error.code == ErrorCode.E_HELLO


def test_a_cancel_is_always_answered_by_a_finish(server: Server) -> None:
    assert server.say(A, Cancel(id="unknown")) == [Finish(id="unknown", reason="abort")]
    server.say(A, submit(credit=1))
    server.feed(1)
    assert server.say(A, Cancel(id="r1"), Cancel(id="r1")) == []
    assert server.wanted(Abort) == [Abort(0)] and server.wanted(Pull) == [Pull(0)]  # without credit
    server.session.chunk(0, TokenChunk("", (), 1, finish_reason="abort"), server.now)
    server.session.end(0, 1, 0, 0, server.now)
    assert [type(message) for message in server.heard(A)] == [Delta, Finish]
    assert server.say(A, Cancel(id="r1")) == [Finish(id="r1", reason="abort", seq=2)]
    server.say(A, submit("r2"))
    server.session.fail(1, WorkerLost("gone"), server.now)
    server.heard(A)
    assert server.say(A, Cancel(id="r2")) == [Finish(id="r2", reason="abort")]


def test_an_id_is_free_again_after_its_retention(server: Server) -> None:
    server.say(A, submit())
    server.session.fail(0, InvalidRequest("prompt", "is empty"), server.now)
    (error,) = server.heard(A)
    assert isinstance(error, Error) and (error.field, error.detail) == ("prompt", "is empty")
    other = msgspec.structs.replace(submit(), priority=1)
    assert [type(message) for message in server.say(A, other)] == [Error]
    server.session.receive(A, [encode(Ping())], "", server.now + 25)
    server.after(31.0)
    assert [message for message in server.say(A, other) if not isinstance(message, Pong)] == []
    assert server.wanted(Start) == [Start(1, other)]


def test_what_is_said_again_after_its_end_comes_again_is_refused_or_is_a_new_try(server: Server) -> None:
    server.say(A, submit("whole", resumable=True), submit("acked", resumable=True), submit("brief"), submit("refused"))
    for key in range(3):
        server.feed(2, key)
        server.session.over(key, server.now)
        server.session.end(key, 1, 0, 0, server.now)
    server.session.fail(3, Overloaded("full", 1.0), server.now)
    server.heard(A)
    server.say(A, Grant(id="acked", limit=100, ack=2))
    assert [type(message) for message in server.say(A, submit("whole", resumable=True))] == [Delta, Delta, Finish]
    for spent in (submit("acked", resumable=True), submit("brief")):
        [error] = server.say(A, spent)
        assert isinstance(error, Error) and error.code == ErrorCode.E_DUPLICATE
    assert server.say(A, submit("refused")) == [] and server.wanted(Start) == [Start(4, submit("refused"))]


def test_log_probabilities_that_are_no_numbers_can_be_sent(server: Server) -> None:
    server.say(A, submit())
    known = (TokenLogprob(1, nan, (Logprob(1, nan), Logprob(2, -inf)), 1),)
    server.session.chunk(0, TokenChunk("x", (1,), 0, logprobs=known), server.now)
    [delta] = server.heard(A)
    assert isinstance(delta, Delta) and delta.logprobs is not None and delta.logprobs[0].logprob < -1e30


def test_what_ended_and_was_not_asked_for_is_kept_for_the_newest_alone(server: Server) -> None:
    for key in range(MAX_ENDED + 50):
        server.say(A, submit(f"r{key}", resumable=True))
        server.session.fail(key, InvalidRequest("prompt", "is empty"), server.now)
        server.heard(A)
    (session,) = server.session._sessions.values()
    assert len(session.streams) == len(session.ended) == MAX_ENDED
    (gone,) = server.say(A, Resume(id="r49", next=0, limit=9))
    (kept,) = server.say(A, Resume(id="r50", next=0, limit=9))
    assert isinstance(gone, Error) and gone.code == ErrorCode.E_NOT_FOUND
    assert isinstance(kept, Error) and kept.code == ErrorCode.E_INVALID_PARAM


def test_more_sessions_than_may_be_are_rejected_for_a_while(server: Server) -> None:
    for number in range(MAX_SESSIONS - 1):
        server.say(b"%d" % number, hello(f"a-session-of-tests-{number}"))
    (reject,) = server.say(B, hello("one-session-too-many"))
    assert isinstance(reject, Reject) and reject.code == ErrorCode.E_OVERLOADED and reject.retry_after_ms > 0
    assert server.say(B, hello()) == [WELCOME]  # one that is known already
    server.session.lose(b"7", server.now)
    assert server.say(b"c", hello("one-session-too-many")) == [WELCOME]


def test_who_guesses_tokens_has_few_tries_and_welcome_sessions_do_not_notice() -> None:
    server = Server(Settings(token="sesame"))
    assert isinstance(server.say(A, hello(token="sesame"))[0], Welcome)
    codes = Counter(
        reject.name
        for guess in range(200)
        for reject in server.say(B, hello("a-guess-of-tests", str(guess)))
        if is_reject(reject)
    )
    assert codes == {"E_AUTH": WRONG_TOKENS, "E_OVERLOADED": 200 - WRONG_TOKENS} == server.session.num_errors
    [told] = server.say(B, hello("another-session-of-tests", "sesame"))
    assert isinstance(told, Reject) and told.retryable and told.retry_after_ms > 0
    assert isinstance(server.say(A, Ping())[0], Pong)
    assert server.say(b"d", hello(token="sesame")) == [WELCOME]  # of a session that is known
    assert [reject.name for reject in server.say(b"e", hello(token="x")) if is_reject(reject)] == ["E_AUTH"]
    server.now += 2 * told.retry_after_ms / 1000
    assert isinstance(server.say(B, hello("another-session-of-tests", "sesame"))[0], Welcome)
    server.now += 1e6
    answers = [server.say(b"c", hello("one-more-session-of-tests", "no")) for _ in range(WRONG_TOKENS + 1)]
    assert [reject.name for [reject] in answers if is_reject(reject)][-2:] == ["E_AUTH", "E_OVERLOADED"]


def test_what_was_refused_is_counted_by_its_code(server: Server) -> None:
    server.say(A, hello(), submit("r1"), Resume(id="unknown", next=3, limit=10))
    server.session.receive(A, [b"garbage"], "", server.now)
    server.session.receive(B, [encode(Ping())], "", server.now)
    server.session.fail(0, WorkerLost("its worker died"), server.now)
    expected = {"E_NOT_FOUND": 1, "E_DECODE": 1, "E_HELLO": 1, "E_WORKER_LOST": 1}
    assert server.session.num_errors == expected


def test_after_a_rejection_only_a_hello_is_read(server: Server) -> None:
    later = msgspec.structs.replace(hello(), min_version=2, max_version=2)
    (reject,) = server.say(B, later)
    assert isinstance(reject, Reject) and reject.code == ErrorCode.E_VERSION
    for message in (submit(), Cancel(id="r1"), Ping(), Bye()):
        (error,) = server.say(B, message)
        assert isinstance(error, Error) and error.code == ErrorCode.E_HELLO
    assert server.wanted(Start) == [] and server.session.num_connections == 1
    assert server.say(B, hello("another-session-of-tests")) == [WELCOME]


def test_frames_said_twice_change_nothing(server: Server) -> None:
    first = submit(resumable=True, credit=2)
    assert server.say(A, hello(), hello()) == [WELCOME, WELCOME]
    assert server.say(A, first, first) == []
    assert deltas(server.feed(5)) == [0, 1]
    server.say(A, Grant(id="r1", limit=4, ack=1), Grant(id="r1", limit=4, ack=1), Grant(id="r1", limit=2, ack=0))
    assert deltas(server.feed(5)) == [2, 3]
    again = server.say(A, Resume(id="r1", next=2, limit=4), Resume(id="r1", next=2, limit=4))
    assert deltas(again) == [2, 3]  # the second came before anything was sent for the first
    assert server.say(A, Bye(), Bye())[-1:] == [Error.of(ErrorCode.E_HELLO)]
    assert server.session.num_open == 0


def test_a_session_that_is_replayed_by_somebody_else_is_his_own(server: Server) -> None:
    said: list[ClientMessage] = [
        submit(resumable=True),
        Grant(id="r1", limit=9, ack=1),
        Cancel(id="r1"),
        Resume(id="r1", next=0, limit=9),
    ]
    server.say(A, said[0])
    server.feed(2)
    server.say(B, hello("another-session-of-tests"), *said)
    assert server.session._by_key[0][1].num_acked == 0 and not server.session._by_key[0][1].is_cancelled
    assert deltas(server.feed(2)) == [2, 3]


def test_sessions_of_other_keys_are_others(server: Server) -> None:
    server.say(A, submit(resumable=True))
    server.feed(1)
    server.say(B, hello(), user="another key")
    (error,) = server.say(B, Resume(id="r1", next=0, limit=9), user="another key")
    assert isinstance(error, Error) and error.code == ErrorCode.E_NOT_FOUND
    assert deltas(server.feed(1)) == [1]


def test_bye_ends_everything(server: Server) -> None:
    server.say(A, submit("r1", resumable=True), submit("r2"))
    assert server.say(A, Bye()) == []
    assert server.wanted(Drop) == [Drop(0), Drop(1)]
    assert (server.session.num_open, server.session.num_connections, server.session._sessions) == (0, 0, {})


def test_a_drain_ends_what_is_open_at_its_deadline(server: Server) -> None:
    server.say(A, submit("r1"))
    server.session.drain(server.now, 5.0)
    assert server.heard(A) == [GoAway(deadline_ms=5000)]
    (error,) = server.say(A, submit("r2"))
    assert isinstance(error, Error) and error.code == ErrorCode.E_SHUTDOWN and error.retryable
    assert [type(message) for message in server.say(B, hello("another-session-of-tests"))] == [Welcome, GoAway]
    assert deltas(server.feed(1)) == [0]
    server.after(5.5)
    (error,) = server.heard(A)
    assert isinstance(error, Error) and (error.id, error.code) == ("r1", ErrorCode.E_SHUTDOWN)


def test_errors_quote_nobody_else(server: Server) -> None:
    server.say(A, submit("r1"), submit("r2"))
    server.session.fail(0, RuntimeError("/secret/path"), server.now)
    quoting = InvalidRequest("messages", "the chat template says /secret/path")
    quoting.__cause__ = RuntimeError("/secret/path")
    server.session.fail(1, quoting, server.now)
    errors = server.heard(A)
    assert [message.code for message in errors if isinstance(message, Error)] == [
        ErrorCode.E_INTERNAL,
        ErrorCode.E_INVALID_PARAM,
    ]
    assert "secret" not in repr(errors)
