"""Frames that nobody wrote, for every decoder and for both ends of the client wire, and what may come of them.

    cd tests && python -m protocol.fuzz --frames 10000000

prints how far it is and by which words it goes on from there. Frames come in blocks; all that is random in a block
follows from the seed and from its number. Of a frame nothing may come but a message, a `ProtocolError` or, from a
server, the error with its code; it takes no longer than `MAX_FRAME_S`, and nobody else notices.
"""

from __future__ import annotations

import argparse
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from deepinfer.errors import InvalidRequest, WorkerLost
from deepinfer.stream import Mailbox, TokenChunk
from deepinfer.wire.calls import ClientSession
from deepinfer.wire.session import MAX_ENDED, Abort, Drop, Load, Pull, Send, ServerSession, Settings, Start
from deepinfer_protocol import ProtocolError, SamplingParams, decode_config, encode_config, pack_int32
from deepinfer_protocol import decode as decode_worker
from deepinfer_protocol import encode as encode_worker
from deepinfer_protocol.client import (
    Bye,
    Cancel,
    Delta,
    Error,
    ErrorCode,
    Finish,
    GoAway,
    Grant,
    Hello,
    Ping,
    Pong,
    Resume,
    Submit,
    WireError,
    decode_client,
    decode_hello,
    decode_server,
    encode,
)
from deepinfer_protocol.client.structure import read_kind
from protocol import client_frames, frames
from protocol.cases import CONFIG
from protocol.client_cases import WELCOME
from protocol.mutate import mutate

BLOCK: Final = 1000
"""Frames of one block."""
MAX_FRAME_S: Final = 0.005
"""Of CPU, for one frame of at most some kilobytes."""
NUM_TRIES: Final = 5
"""A frame that took too long is tried again: the collector may have had its turn."""

Fates = Counter[str]
WORKER: Final = [frame.data for frame in frames.read_golden()[1] if not frame.name.startswith("config")]
SMALL_WORKER: Final = [data for data in WORKER if len(data) < 1000]
CLIENT: Final = [frame for frame in client_frames.read_golden()[1] if len(frame.data) < 1000]


class FuzzFailure(AssertionError):
    """A frame did what none may. Says which one, and how it is met again."""


# ---- decoders


def worker_fate(data: bytes) -> str:
    """The kind of the message, or `refused`. A message that was taken in must be one that can be sent again."""
    try:
        message = decode_worker(data)
    except ProtocolError as error:
        assert str(error)
        return "refused"
    assert decode_worker(encode_worker(message)) == message
    return type(message).__name__


def config_fate(data: bytes) -> str:
    try:
        decode_config(data)
    except ProtocolError as error:
        assert str(error)
        return "refused"
    return "config"


def client_fate(sender: str, data: bytes) -> str:
    """The kind of the message, or the code. A message that was taken in must be one that can be sent again."""
    decode: Any = decode_client if sender == "client" else decode_server
    try:
        message = decode(data)
    except WireError as error:
        return error.code.name
    assert decode(encode(message)) == message
    read_kind(data)  # also where a decoder has not looked: no `StructureError`
    return type(message).__name__


def fuzz_worker_wire(rng: random.Random) -> Fates:
    body = encode_config(CONFIG)[4:]
    fates = Fates()
    for index in range(BLOCK):
        if index % 20 == 1:
            fates[checked(config_fate, mutate(body, rng))] += 1
        else:
            seeds = WORKER if index % 20 == 0 else SMALL_WORKER
            fates[checked(worker_fate, mutate(rng.choice(seeds), rng))] += 1
    return fates


def fuzz_client_wire(rng: random.Random) -> Fates:
    fates = Fates()
    for _ in range(BLOCK):
        frame = rng.choice(CLIENT)
        fates[checked(partial(client_fate, frame.sender), mutate(frame.data, rng))] += 1
    return fates


# ---- a server

HONEST: Final = b"honest"
CHUNK: Final = TokenChunk("x", (7,), 0)
SERVER: Final = Settings(max_streams=8, max_unacked_tokens=64, retention_s=5.0, slow_consumer_s=5.0, idle_s=3.0)


class Attack:
    """A server with one honest client in the middle of a stream, and peers who say whatever they like."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 100.0
        self.server = ServerSession(WELCOME, SERVER, lambda: Load(5, 1, 2))
        self.fates = Fates()
        self.peers = [b"a", b"b", b"c"]
        self.open: dict[int, Submit] = {}  # requests of the peers, at the engine
        self.num_honest = 0
        self.said = [b""]
        self._say(HONEST, Hello(min_version=1, max_version=1, session="an-honest-session"))
        self._say(HONEST, Submit(id="r1", token_ids=pack_int32([1]), credit=2**31 - 1))
        (_, start, pull) = self.server.take_actions()
        assert isinstance(start, Start) and pull == Pull(start.key)
        self.honest_key = start.key

    def run(self) -> None:
        for index in range(BLOCK):
            peer, num_parts = self.rng.choice(self.peers), self.rng.choice((1,) * 50 + (2,))
            self.fates[checked(partial(self.receive, peer, num_parts), self.frame())] += 1
            if index % 10 == 0:
                self.pass_time()
        self.end()

    def frame(self) -> bytes:
        """A golden one, one that suits what goes on, or one that was said before: as it is, or mutated."""
        rng, id = self.rng, f"r{self.rng.randrange(12)}"
        kind = rng.randrange(10)
        if kind < 3:
            data = rng.choice(CLIENT).data
        elif kind < 4:
            data = rng.choice(self.said)
        else:
            resumable = rng.random() < 0.7
            sampling = SamplingParams(n=rng.choice((1, 1, 2)))
            data = encode(
                rng.choice(
                    (
                        Hello(min_version=1, max_version=rng.choice((1, 9)), session=f"session-of-peer-{id:0>3}"),
                        Submit(id, token_ids=b"", sampling=sampling, resumable=resumable, credit=rng.choice((1, 50))),
                        Submit(id, prompt="text", sampling=sampling, resumable=True),
                        Grant(id, limit=rng.randrange(100), ack=rng.randrange(20)),
                        Resume(id, next=rng.randrange(6), limit=rng.randrange(100)),
                        Cancel(id),
                        Ping(),
                        Ping(nonce=rng.getrandbits(53)),
                    )
                )
            )
            data = encode(Bye()) if rng.random() < 0.01 else data
        data = mutate(data, rng) if rng.random() < 0.5 else data
        self.said = [*self.said[-20:], data]
        return data

    def receive(self, peer: bytes, num_parts: int, data: bytes) -> str:
        parts = [data] * num_parts
        was_welcome = peer in self.server._connections
        self.server.receive(peer, parts, "", self.now)
        actions = self.server.take_actions()
        verdict = self._verdict(parts, was_welcome)
        if verdict.startswith("E_"):
            (action,) = actions
            assert isinstance(action, Send) and action.connection == peer
            error = decode_server(action.frame)
            assert isinstance(error, Error) and error.name == verdict, f"{error} for {verdict}"
        self._do(actions)
        return verdict

    def _verdict(self, parts: list[bytes], was_welcome: bool) -> str:
        """What is said of the frame by whoever reads nothing but the frame."""
        try:
            if not was_welcome:
                return "E_HELLO" if len(parts) > 1 else type(decode_hello(parts[0])).__name__
            return "E_PROTOCOL" if len(parts) > 1 else self._kind(decode_client(parts[0]))
        except WireError as error:
            return error.code.name

    def _kind(self, message: object) -> str:
        is_other = isinstance(message, Hello) and not any(
            session.name[1] == message.session for session in self.server._sessions.values() if session.connection
        )
        return "E_PROTOCOL" if is_other else type(message).__name__

    def _do(self, actions: list[Any]) -> None:
        """What a server does; nothing of it may be the honest client's."""
        for action in actions:
            match action:
                case Send(connection, frame):
                    assert connection != HONEST
                    decode_server(frame)
                case Start(key, submit):
                    assert key != self.honest_key
                    self.open[key] = submit
                case Drop(key):
                    del self.open[key]
                case Abort(key) | Pull(key):
                    assert key in self.open

    def pass_time(self) -> None:
        """The engine works, and the honest client gets its token."""
        rng, server = self.rng, self.server
        self.now += rng.random() * 0.3
        for key in sorted(self.open):
            if key in server._by_key and server._by_key[key][1].is_pulled:
                self._advance(key)
        server.lose(rng.choice(self.peers) if rng.random() < 0.05 else b"nobody", self.now)
        self._do(server.take_actions())
        server.tick(self.now)
        self._do(server.take_actions())
        self._say(HONEST, Ping())
        server.chunk(self.honest_key, CHUNK, self.now)
        pong, delta, pull = server.take_actions()
        assert isinstance(pong, Send) and isinstance(decode_server(pong.frame), Pong)
        assert isinstance(delta, Send) and delta.connection == HONEST and pull == Pull(self.honest_key)
        told = decode_server(delta.frame)
        assert isinstance(told, Delta) and told.seq == self.num_honest
        self.num_honest += 1

    def _advance(self, key: int) -> None:
        server, chance = self.server, self.rng.random()
        stream = server._by_key[key][1]
        if not 1 <= self.open[key].sampling.n <= 128:
            server.fail(key, InvalidRequest("n", "1 to 128 is expected"), self.now)
            del self.open[key]
        elif stream.num_unfinished <= 0:
            server.end(key, 1, 0, 0, self.now)
            del self.open[key]
        elif chance < 0.1 or stream.is_cancelled:
            last = TokenChunk("", (), 0, stream.num_unfinished - 1, finish_reason="stop")
            server.chunk(key, last, self.now)
        elif chance < 0.15:
            server.fail(key, WorkerLost("gone"), self.now)
            del self.open[key]
        else:
            server.chunk(key, CHUNK, self.now)
        self._do(server.take_actions())

    def end(self) -> None:
        """What a session may hold is bounded; once the peers are gone, nothing of theirs is left."""
        server = self.server
        for session in server._sessions.values():
            assert session.num_open <= SERVER.max_streams and len(session.ended) <= MAX_ENDED
            assert len(session.streams) <= SERVER.max_streams + MAX_ENDED
            for stream in session.streams.values():
                assert stream.num_unacked_tokens <= SERVER.max_unacked_tokens
        for peer in self.peers:
            server.lose(peer, self.now)
        for _ in range(5):
            self.now += 2.5
            self._say(HONEST, Ping())
            server.tick(self.now)
        self._do([action for action in server.take_actions() if action[0] != HONEST])
        assert list(server._by_key) == [self.honest_key] and not self.open
        assert len(server._sessions) == 1 and server.num_connections == 1

    def _say(self, connection: bytes, message: Any) -> None:
        self.server.receive(connection, [encode(message)], "", self.now)


def fuzz_server(rng: random.Random) -> Fates:
    attack = Attack(rng)
    attack.run()
    return attack.fates


# ---- a client


def fuzz_client(rng: random.Random) -> Fates:
    """A client with open streams, and a server that says whatever it likes."""
    fates, now, session = Fates(), 100.0, ClientSession()
    for index in range(BLOCK):
        if session.rejection is not None or index == 0:
            session, said = ClientSession(), [encode(WELCOME)]
            session.hello(now)
        while session.num_open < 4:
            submit = Submit(f"r{rng.getrandbits(48)}", prompt="text", resumable=rng.random() < 0.8)
            session.submit(submit, Mailbox(None))
        data = _from_server(session, rng, said)
        said = [*said[-20:], data]
        now += rng.random() * 0.05
        fates[checked(partial(_hear, session, now), data)] += 1
        session.tick(now)
        sent = session.take_frames()
        assert len(sent) <= 16, f"{len(sent)} frames for one"
        for frame in sent:
            decode_client(frame)
    return fates


def _hear(session: ClientSession, now: float, data: bytes) -> str:
    session.receive([data], now)
    try:
        return type(decode_server(data)).__name__
    except WireError as error:
        return error.code.name


def _from_server(session: ClientSession, rng: random.Random, said: list[bytes]) -> bytes:
    id = rng.choice(list(session._calls))
    seq = session._calls[id].num_deltas + rng.choice((0, 0, 0, 0, -1, 1))
    message = rng.choice(
        (
            Delta(id, max(seq, 0), token_ids=pack_int32([7, 8]), text="x"),
            Delta(id, max(seq, 0), token_ids=pack_int32([7]), reason="stop", stop="END"),
            Finish(id, "stop", max(seq, 0)),
            Error.of(rng.choice(list(ErrorCode)), id, seq=max(seq, 0)),
            Pong(steps=5),
            WELCOME,
            GoAway(deadline_ms=5),
        )
    )
    kind = rng.random()
    data = encode(message) if kind < 0.7 else rng.choice(said) if kind < 0.8 else rng.choice(CLIENT).data
    return mutate(data, rng) if rng.random() < 0.6 else data


# ---- a run


def checked(receive: Callable[[bytes], str], data: bytes) -> str:
    """What comes of `data`. Raises `FuzzFailure` for whatever is raised, and for what takes too long."""
    for _ in range(NUM_TRIES):
        began_s = time.thread_time()
        try:
            fate = receive(data)
        except Exception as error:
            raise FuzzFailure(f"{error!r} from {data.hex()}") from error
        if time.thread_time() - began_s < MAX_FRAME_S:
            return fate
    raise FuzzFailure(f"more than {MAX_FRAME_S} s for {data.hex()}")


class Target(NamedTuple):
    """What frames are thrown at."""

    name: str
    fuzz: Callable[[random.Random], Fates]
    """One block."""
    share: int


TARGETS: Final = (
    Target("worker wire", fuzz_worker_wire, 4),
    Target("client wire", fuzz_client_wire, 4),
    Target("server", fuzz_server, 3),
    Target("client", fuzz_client, 1),
)
TURNS: Final = [target for target in TARGETS for _ in range(target.share)]


def run_block(seed: int, block: int) -> tuple[str, Fates]:
    """The target's name, and how often each fate was met. Raises `FuzzFailure`."""
    target = TURNS[block % len(TURNS)]
    try:
        return target.name, target.fuzz(random.Random(f"{seed}:{block}"))
    except Exception as error:
        raise FuzzFailure(f"{target.name}, --seed {seed} --block {block}: {error}") from error


def run_blocks(seed: int, first: int, num_blocks: int) -> Iterator[tuple[int, dict[str, Fates]]]:
    """After each block its number and all fates so far, by target."""
    fates = {target.name: Fates() for target in TARGETS}
    for block in range(first, first + num_blocks):
        name, met = run_block(seed, block)
        fates[name] += met
        yield block, fates


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m protocol.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000_000, help="how many, from the first block of the seed on")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="default: a new one")
    parser.add_argument("--block", type=int, default=0, help="go on from this one")
    options = parser.parse_args()
    num_blocks, began_s, told_s = -(-options.frames // BLOCK), time.monotonic(), 0.0
    fates: dict[str, Fates] = {}
    for block, met_so_far in run_blocks(options.seed, options.block, num_blocks - options.block):
        fates = met_so_far
        if (now_s := time.monotonic()) - told_s > 10 or block == num_blocks - 1:
            rate = BLOCK * (block + 1 - options.block) / (now_s - began_s)
            print(f"{BLOCK * (block + 1):,} of {options.frames:,} frames, {rate:,.0f}/s; ", end="")
            print(f"to go on: --seed {options.seed} --block {block + 1}", flush=True)
            told_s = now_s
    for name, met in fates.items():
        print(f"{name}: {', '.join(f'{fate} {number:,}' for fate, number in met.most_common())}")


if __name__ == "__main__":
    main()
