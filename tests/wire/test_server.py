"""How the shell of a server sends: a full queue waits, one that is gone is left alone, and turns are short."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import zmq

from deepinfer import Client, Engine, InvalidRequest, SamplingParams, connect
from deepinfer.stream import Mailbox
from deepinfer.wire import socket
from deepinfer.wire.server import MAX_WAITING, WireServer
from deepinfer.wire.session import Send
from deepinfer.wire.socket import Offer
from deepinfer_protocol import pack_int32
from deepinfer_protocol.client import Hello, Submit, encode
from doubles.reading import PROMPT, greedy, tokens_of, wanted
from wire.conftest import QUICK
from wire.proxy import Proxy

A, B = b"a", b"b"
SHORTLY_S = 3.0


class Queues:
    """In place of a socket: what each connection was sent."""

    def __init__(self, server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offers: dict[bytes, Offer] = {}
        self.sent: dict[bytes, list[bytes]] = {A: [], B: []}
        self.num_offered = Counter[bytes]()
        self._session = server._session
        monkeypatch.setattr(server._socket, "offer", self.offer)
        for connection in (A, B):
            hello = Hello(min_version=1, max_version=1, session=f"a-session-of-tests-{connection.decode()}")
            self._session.receive(connection, [encode(hello)], "", server._now())
        server._act()
        server._send_all()
        self.sent = {A: [], B: []}
        self.num_offered.clear()

    def offer(self, parts: tuple[bytes, bytes]) -> Offer:
        connection, frame = parts
        self.num_offered[connection] += 1
        offer = self.offers.get(connection, Offer.TAKEN)
        if offer is Offer.TAKEN:
            self.sent[connection].append(frame)
        return offer

    def send(self, server: WireServer, connection: bytes, *frames: bytes) -> None:
        """All of it in one turn."""
        self._session._actions += [Send(connection, frame) for frame in frames]
        server._act()
        server._send_all()


@pytest.fixture
async def queues(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> Queues:
    return Queues(server, monkeypatch)


async def test_what_a_full_connection_is_sent_waits_in_its_order(server: WireServer, queues: Queues) -> None:
    queues.offers[A] = Offer.FULL
    queues.send(server, A, b"1", b"2")
    queues.send(server, B, b"1")
    assert queues.sent == {A: [], B: [b"1"]} and server.num_connections == 2
    queues.offers[A] = Offer.TAKEN
    queues.send(server, A, b"3")
    async with asyncio.timeout(5):
        while len(queues.sent[A]) < 3:  # noqa: ASYNC110 (a timer)
            await asyncio.sleep(0.005)
    queues.send(server, A, b"4")
    assert queues.sent[A] == [b"1", b"2", b"3", b"4"]


async def test_a_connection_that_stays_full_is_lost(server: WireServer, queues: Queues) -> None:
    queues.offers[A] = Offer.FULL
    queues.send(server, A, *[b"x"] * MAX_WAITING)
    assert server.num_connections == 2
    queues.send(server, A, *[b"x"] * 1000)
    assert server.num_connections == 1
    await asyncio.sleep(0.05)
    assert server._full == {}


async def test_a_connection_that_was_lost_is_not_sent_the_rest(server: WireServer, queues: Queues) -> None:
    queues.offers[A] = Offer.GONE
    queues.send(server, A, *[b"x"] * 1000)
    assert queues.num_offered[A] == 1 and server.num_connections == 1


async def test_a_resume_of_many_streams_costs_one_connection(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    options = WireServer._options
    monkeypatch.setattr(WireServer, "_options", lambda server: options(server) | {zmq.SNDHWM: 16})
    async with (
        WireServer(engine, "tcp://127.0.0.1:*", settings=QUICK) as server,
        Proxy(int(server.url.rpartition(":")[2])) as proxy,
        connect(f"tcp://127.0.0.1:{proxy.port}", window=4096) as client,
    ):
        streams = [client.stream([*PROMPT, index], greedy(300)) for index in range(16)]
        readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        await asyncio.sleep(0.1)
        proxy.cut()
        async with asyncio.timeout(10):
            while server.num_open:  # noqa: ASYNC110 (they go on unheard)
                await asyncio.sleep(0.02)
        proxy.mend()
        async with asyncio.timeout(20):
            for index, reader in enumerate(readers):
                assert await reader == wanted(300, [*PROMPT, index])
        assert client.num_reconnects == 1


@pytest.mark.parametrize(
    ("timeout_ms", "params"), [(None, SamplingParams(top_p=7.0)), (50, SamplingParams(max_tokens=5))]
)
async def test_an_end_is_told_without_credit(
    engine: Engine, client: Client, timeout_ms: int | None, params: SamplingParams
) -> None:
    """Of a request that is refused, and of one that waits behind 32 others until its time is over."""
    others = [client.stream(PROMPT, greedy(20_000)) for _ in range(32)]
    await asyncio.gather(*[anext(stream) for stream in others])
    submit = Submit(id="r", token_ids=pack_int32(PROMPT), sampling=params, credit=0, timeout_ms=timeout_ms)
    mailbox = Mailbox(asyncio.get_running_loop())
    client._session.submit(submit, mailbox)
    client._flush()
    async with asyncio.timeout(SHORTLY_S):
        while not mailbox.is_closed:  # noqa: ASYNC110 (it has no reader)
            await asyncio.sleep(0.01)
    if timeout_ms is None:
        assert isinstance(mailbox.error, InvalidRequest) and mailbox.error.field == "top_p"
    else:
        chunk = mailbox.take()
        assert mailbox.error is None and chunk is not None and chunk.finish_reason == "timeout"


async def test_what_takes_long_to_read_leaves_turns_to_others(
    server: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that a message moves by 2 ms, and turns that we give."""
    clock = [0.0]
    monkeypatch.setattr(socket, "monotonic", lambda: clock[0])
    read = list[socket.Arrival]()

    def arrive(arrival: socket.Arrival) -> None:
        read.append(arrival)
        clock[0] += 0.002

    reader = server._socket
    monkeypatch.setattr(reader, "_on_message", arrive)
    monkeypatch.setattr(reader, "_look", lambda: None)
    asyncio.get_running_loop().remove_reader(reader._fd)
    turns = list[int]()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(server.url)
        for _ in range(40):
            dealer.send(b"x")
        async with asyncio.timeout(5):
            while len(read) < 40:
                await asyncio.sleep(0.001)
                before = len(read)
                reader._read()
                turns.append(len(read) - before)
    assert max(turns) <= 3


async def test_what_one_peer_can_have_in_the_memory_of_a_server_is_bounded(server: WireServer) -> None:
    options = server._options()
    assert (options[zmq.RCVHWM], options[zmq.MAXMSGSIZE]) == (16, 4 * 1024 * 1024)


async def test_a_close_that_is_cancelled_closes_all_the_same(engine: Engine, tmp_path: Path) -> None:
    listen = f"ipc://{tmp_path}/s"
    server = WireServer(engine, listen)
    assert server.metrics() == {}
    await server.open()
    async with connect(server.url):
        assert server.metrics()["wire_connections"].value == 1
        closing = asyncio.create_task(server.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    async with WireServer(engine, listen) as again, connect(again.url) as client:
        assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)
