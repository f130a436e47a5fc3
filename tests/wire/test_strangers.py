"""Whatever a peer sends, it gets its code, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest
import zmq

from deepinfer import Client, Engine, connect
from deepinfer.wire.keys import ServerKeys, read_clients, read_pair, write_keys
from deepinfer.wire.server import WireServer
from deepinfer.wire.session import Settings
from deepinfer_protocol import pack_int32, unpack_int32
from deepinfer_protocol.client import (
    Bye,
    Cancel,
    ClientMessage,
    Delta,
    Error,
    ErrorCode,
    Finish,
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
from deepinfer_protocol.client.limits import MAX_FRAME_BYTES
from doubles.reading import PROMPT, greedy, tokens_of, wanted
from protocol.client_frames import read_golden
from protocol.mutate import mutate

HELLO: Final = Hello(min_version=1, max_version=1, session="a-session-of-tests")
SUBMIT: Final = Submit(id="r1", token_ids=pack_int32(PROMPT), sampling=greedy(20))
BAD: Final = [frame for frame in read_golden()[1] if frame.sender == "client" and frame.verdict != "ok"]


class Peer:
    """A DEALER in the hands of somebody who does as he likes."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def send_all(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            self.send(frame)

    def say(self, message: ClientMessage) -> None:
        self.send(encode(message))

    async def hear(self) -> ServerMessage:
        """The next message, within five seconds."""
        async with asyncio.timeout(5):
            while not self._socket.poll(0):  # noqa: ASYNC110 (a blocking socket, on purpose: another implementation)
                await asyncio.sleep(0.002)
        return decode_server(self._socket.recv())

    async def ask(self, message: ClientMessage) -> ServerMessage:
        self.say(message)
        return await self.hear()


class Recorder:
    """What a careful reader makes of a stream's messages, whatever comes twice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_deltas = 0

    def take(self, message: ServerMessage) -> bool:
        """False: it is the end."""
        if isinstance(message, Delta) and message.seq == self.num_deltas:
            self.num_deltas += 1
            self.tokens += unpack_int32(message.token_ids)
        return not isinstance(message, Finish | Error)


@contextmanager
def peer_of(url: str) -> Iterator[Peer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(url)
    try:
        yield Peer(socket)
    finally:
        context.destroy(linger=0)


async def finish_of(peer: Peer) -> Finish | Error:
    """What ends the only stream of `peer`."""
    while not isinstance(message := await peer.hear(), Finish | Error):
        pass
    return message


def code_of(message: ServerMessage) -> str:
    assert isinstance(message, Error | Reject), message
    assert message.name == ErrorCode(message.code).name
    return message.name


@pytest.fixture
async def other(client: Client) -> Client:
    """A client beside, in the middle of its work."""
    return client


async def test_nothing_but_hello_is_read_from_a_stranger(server: WireServer, other: Client) -> None:
    stream = other.stream(PROMPT, greedy(400))
    with peer_of(server.url) as peer:
        for message in (
            SUBMIT,
            Cancel(id="r1"),
            Grant(id="r1", limit=5),
            Ping(),
            Resume(id="r1", next=0, limit=1),
            Bye(),
        ):
            assert code_of(await peer.ask(message)) == "E_HELLO"
        peer.send(b"")
        assert code_of(await peer.hear()) == "E_DECODE"
        peer.send(encode(HELLO), b"more")
        assert code_of(await peer.hear()) == "E_HELLO"
        peer.send(bytes(5000))
        assert code_of(await peer.hear()) == "E_HELLO"
        assert isinstance(await peer.ask(HELLO), Welcome)
    assert await tokens_of(stream) == wanted(400)


async def test_versions_are_negotiated(server: WireServer) -> None:
    with peer_of(server.url) as peer:
        refused = await peer.ask(msgspec.structs.replace(HELLO, min_version=2, max_version=9))
        assert code_of(refused) == "E_VERSION" and isinstance(refused, Reject) and refused.max_version == 1
        welcome = await peer.ask(msgspec.structs.replace(HELLO, max_version=9))
        assert isinstance(welcome, Welcome) and welcome.version == 1


async def test_every_bad_vector_gets_its_code_and_the_connection_lives(server: WireServer, other: Client) -> None:
    stream = other.stream(PROMPT, greedy(1500))
    with peer_of(server.url) as peer:
        assert isinstance(await peer.ask(HELLO), Welcome)
        for frame in BAD:
            peer.send(frame.data)
            assert code_of(await peer.hear()) == frame.verdict, frame.name
        pong = await peer.ask(Ping(nonce=7))
        assert isinstance(pong, Pong) and pong.nonce == 7 and pong.steps > 0
        peer.say(SUBMIT)
        assert isinstance(await finish_of(peer), Finish)
    assert await tokens_of(stream) == wanted(1500)
    assert server.metrics()["wire_errors"].value == len(BAD) and server.metrics()["wire_connections"].value == 2


async def test_several_parts_and_a_frame_beyond_the_limit_hurt_only_their_sender(
    server: WireServer, other: Client
) -> None:
    stream = other.stream(PROMPT, greedy(1000))
    with peer_of(server.url) as peer:
        assert isinstance(await peer.ask(HELLO), Welcome)
        peer.send(encode(Ping()), encode(Ping()))
        assert code_of(await peer.hear()) == "E_PROTOCOL"
        peer.send(*[bytes(1000)] * 1000)
        assert code_of(await peer.hear()) == "E_PROTOCOL"
        peer.send(bytes(MAX_FRAME_BYTES + 1))  # which costs the connection, and ZeroMQ makes another one
        await asyncio.sleep(0.3)
        assert code_of(await peer.ask(Ping())) == "E_HELLO"
        assert isinstance(await peer.ask(HELLO), Welcome)
    assert await tokens_of(stream) == wanted(1000)


async def test_mutated_frames_leave_the_others_alone(server: WireServer, other: Client) -> None:
    rng = random.Random(3)
    seeds = [frame.data for frame in read_golden()[1] if frame.sender == "client" and len(frame.data) < 500]
    stream = other.stream(PROMPT, greedy(1500))
    with peer_of(server.url) as peer:
        assert isinstance(await peer.ask(HELLO), Welcome)
        for index in range(3000):
            peer.send(mutate(rng.choice(seeds), rng))
            if index % 50 == 0:
                await asyncio.sleep(0.002)
    assert await tokens_of(stream) == wanted(1500)


async def test_no_session_reaches_into_another(server: WireServer, other: Client) -> None:
    stream = other.stream(PROMPT, greedy(1000), request_id="mine")
    tokens = list((await anext(stream)).token_ids)
    with peer_of(server.url) as peer:
        assert isinstance(await peer.ask(HELLO), Welcome)
        assert code_of(await peer.ask(Resume(id="mine", next=0, limit=9))) == "E_NOT_FOUND"
        assert await peer.ask(Cancel(id="mine")) == Finish(id="mine", reason="abort")
        peer.say(msgspec.structs.replace(SUBMIT, id="mine"))
        assert isinstance(await finish_of(peer), Finish)
    assert tokens + await tokens_of(stream) == wanted(1000)


async def test_frames_that_come_twice_bring_a_stream_once(server: WireServer) -> None:
    heard = Recorder()
    with peer_of(server.url) as peer:
        submit = msgspec.structs.replace(SUBMIT, resumable=True, sampling=greedy(200), credit=50)
        for message in (HELLO, HELLO, submit, submit, Grant("r1", limit=200), Grant("r1", limit=200)):
            peer.say(message)
        while heard.take(await peer.hear()):
            if heard.num_deltas % 20 == 10:
                peer.say(Resume("r1", next=heard.num_deltas, limit=200))
    assert heard.tokens == wanted(200)


async def test_a_stream_is_resumed_within_its_retention_and_not_after_it(engine: Engine) -> None:
    settings = Settings(retention_s=1.0, ping_s=0.1, idle_s=5.0)
    submit = msgspec.structs.replace(SUBMIT, resumable=True, sampling=greedy(300), credit=1000)
    async with WireServer(engine, settings=settings) as server:
        heard = Recorder()
        with peer_of(server.url) as peer:
            assert isinstance(await peer.ask(HELLO), Welcome)
            peer.say(submit)
            while heard.num_deltas < 20:
                heard.take(await peer.hear())
        await asyncio.sleep(0.3)
        with peer_of(server.url) as peer:
            assert isinstance(await peer.ask(HELLO), Welcome)
            peer.say(Resume("r1", next=heard.num_deltas, limit=1000))
            while heard.take(await peer.hear()):
                pass
        assert heard.tokens == wanted(300)
        await asyncio.sleep(1.6)
        with peer_of(server.url) as peer:
            assert isinstance(await peer.ask(HELLO), Welcome)
            assert code_of(await peer.ask(Resume("r1", next=20, limit=1000))) == "E_NOT_FOUND"
            peer.say(submit)  # its id is free again
            again = Recorder()
            while again.take(await peer.hear()):
                pass
            assert again.tokens == wanted(300)


async def test_peers_that_vanish_in_every_state_leave_nothing(
    server: WireServer, engine: Engine, other: Client
) -> None:
    stream = other.stream(PROMPT, greedy(1500))
    endless = msgspec.structs.replace(SUBMIT, sampling=greedy(20_000), credit=30_000)
    states: list[list[ClientMessage]] = [
        [], [HELLO], [HELLO, endless], [HELLO, endless, Cancel("r1")], [SUBMIT], [HELLO, Bye()],
        [HELLO, msgspec.structs.replace(endless, credit=1)], [HELLO, endless, Ping()],
    ]  # fmt: skip
    for said in states:
        for _ in range(3):
            with peer_of(server.url) as peer:
                for message in said:
                    peer.say(message)
                await asyncio.sleep(0.02)
    assert await tokens_of(stream) == wanted(1500)
    async with asyncio.timeout(10):
        while server.num_open or server.num_connections > 1:  # noqa: ASYNC110 (silent ones are lost in time)
            await asyncio.sleep(0.05)
    assert len(server._session._sessions) == 1


NOT_ZMTP: Final = {
    "nothing": b"",
    "a request of HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a greeting": b"\xff\0\0\0\0\0\0\0\1\x7f\3",
    "a greeting of a later version": b"\xff\0\0\0\0\0\0\0\1\x7f\x09\0NULL" + bytes(48),
    "a greeting and a large frame": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48) + b"\2" + b"\xff" * 8,
    "zeros": bytes(100_000),
}


@pytest.mark.parametrize("has_keys", [False, True])
async def test_whoever_does_not_speak_zeromq_is_not_heard(engine: Engine, tmp_path: Path, has_keys: bool) -> None:
    keys = None
    own: Path | None = None
    public: Path | None = None
    if has_keys:
        public, secret = write_keys(tmp_path, "server")
        write_keys(tmp_path / "clients", "known")
        keys = ServerKeys(read_pair(secret), read_clients(tmp_path / "clients"))
        own = tmp_path / "clients" / "known.key_secret"
    rng = random.Random(5)
    noise = [rng.randbytes(rng.randrange(1, 300)) for _ in range(200)]
    async with (
        WireServer(engine, "tcp://127.0.0.1:*", keys=keys) as server,
        connect(server.url, key=own, server_key=public) as client,
    ):
        stream = client.stream(PROMPT, greedy(1500))
        with ExitStack() as left:
            for data in (*NOT_ZMTP.values(), *noise):
                address = "127.0.0.1", int(server.url.rpartition(":")[2])
                left.enter_context(socket.create_connection(address)).send(data)
            assert await tokens_of(stream) == wanted(1500)
        assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)
        assert server.num_connections == 1
        assert not has_keys or server.metrics()["wire_errors"].value == 0  # without, some of it is the ZMTP of long ago


NUM_LARGEST: Final = 30
LARGEST: Final[dict[str, Callable[[int], bytes]]] = {
    "values": lambda _: msgspec.msgpack.encode({"kind": "ping", "a": [{}] * 16_000}),
    "bytes": lambda place: encode(Submit(f"r{place}", token_ids=pack_int32([5]) * (MAX_FRAME_BYTES // 4 - 100))),
    "depth": lambda _: b"\x82\xa4kind\xa4ping\xa1a" + b"\x91" * 3_000_000,
}
"""By the place in a flood of so many."""


@pytest.mark.parametrize("what", LARGEST)
async def test_no_flood_keeps_the_loop_for_long(server: WireServer, what: str) -> None:
    """What a turn of the loop takes of this thread, which is more than the server's work: 20 ms at most."""
    longest_s, is_over = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        while not is_over:
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)

    with peer_of(server.url) as peer:
        assert isinstance(await peer.ask(HELLO), Welcome)
        frames = [LARGEST[what](place) for place in range(NUM_LARGEST)]
        flood = threading.Thread(target=peer.send_all, args=(frames,))
        flood.start()
        watching = asyncio.create_task(watch())
        codes = {code_of(await peer.hear()) for _ in frames}
        is_over = True
        await watching
        flood.join()
    assert codes == {"E_CONTEXT_LENGTH" if what == "bytes" else "E_DECODE"}
    assert longest_s < 0.02, f"{1e3 * longest_s:.1f} ms"


async def test_a_submit_is_idempotent(server: WireServer) -> None:
    submit = msgspec.structs.replace(SUBMIT, resumable=True)
    with peer_of(server.url) as peer:
        assert isinstance(await peer.ask(HELLO), Welcome)
        peer.say(submit)
        peer.say(submit)
        last = await finish_of(peer)
        assert isinstance(last, Finish) and last.usage.generated_tokens == 20
        assert code_of(await peer.ask(msgspec.structs.replace(submit, priority=1))) == "E_DUPLICATE"
        assert await peer.ask(Cancel(id="r1")) == Finish(id="r1", reason="length", seq=last.seq)
    assert server.num_open == 0


async def test_a_peer_that_vanishes_leaves_nothing_running(server: WireServer, engine: Engine) -> None:
    with peer_of(server.url) as peer:
        assert isinstance(await peer.ask(HELLO), Welcome)
        peer.say(msgspec.structs.replace(SUBMIT, sampling=greedy(20_000), credit=30_000))
        await peer.hear()
        assert server.num_open == 1
    async with asyncio.timeout(5):
        while server.num_open:  # noqa: ASYNC110 (the next delta finds out)
            await asyncio.sleep(0.01)


async def test_more_streams_than_a_session_may_have_are_refused_for_a_while(engine: Engine) -> None:
    async with WireServer(engine, settings=Settings(max_streams=3)) as server:
        with peer_of(server.url) as peer:
            assert isinstance(await peer.ask(HELLO), Welcome)
            for place in range(4):
                peer.say(Submit(id=f"r{place}", token_ids=pack_int32(PROMPT), sampling=greedy(20_000), credit=1))
            refused = await finish_of(peer)
            assert code_of(refused) == "E_OVERLOADED" and isinstance(refused, Error) and refused.retry_after_ms
            peer.say(Bye())
        async with connect(server.url) as client:
            assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)


async def test_a_peer_that_does_not_read_its_socket_loses_its_connection_and_nobody_else_anything(
    no_tasks_left: None,
) -> None:
    async with (
        Engine("fake", fake_step_s=0.0, fake_vocab_size=97, block_size=16) as engine,
        WireServer(engine) as server,
        connect(server.url) as client,
    ):
        with peer_of(server.url) as peer:
            assert isinstance(await peer.ask(HELLO), Welcome)
            for place in range(8):
                peer.say(Submit(id=f"r{place}", token_ids=pack_int32(PROMPT), sampling=greedy(3000), credit=2**31 - 1))
            assert await tokens_of(client.stream(PROMPT, greedy(3000))) == wanted(3000)
            async with asyncio.timeout(20):
                while server.num_open:  # noqa: ASYNC110 (its queues fill)
                    await asyncio.sleep(0.05)
            assert server.num_connections == 1  # the other's
