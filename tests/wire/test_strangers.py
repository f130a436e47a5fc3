"""Whatever a peer sends, it gets its code, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import pytest
import zmq

from deepinfer import Client, Engine, connect
from deepinfer.wire.server import WireServer
from deepinfer.wire.session import Settings
from deepinfer_protocol import pack_int32
from deepinfer_protocol.client import (
    Bye,
    Cancel,
    ClientMessage,
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
    assert server.num_refused == len(BAD)


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
