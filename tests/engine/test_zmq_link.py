"""The engine's end of the worker wire against a raw peer: nothing is lost, nobody is trusted, nothing listens."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import zmq

from deepinfer import Engine, SamplingParams
from deepinfer.config import EngineConfig
from deepinfer.errors import WorkerStartError
from deepinfer.group import WorkerGroup
from deepinfer.zmq_link import ZmqWorkerLink
from deepinfer_protocol import AnyMessage, Hello, Progress, Shutdown, StepPlan, decode, encode
from deepinfer_protocol.limits import MAX_MESSAGE_BYTES

EPOCH: Final = 7
NUM_FRAMES: Final = 300
WATCHDOG_S: Final = 5.0
"""A wake-up that is lost is lost for ever; this only says when to stop waiting for it."""
PATIENCE_S: Final = 20.0


class Ears:
    """Implements `LinkListener`: keeps what it hears, and wakes who waits for it."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, AnyMessage]] = []
        self.lost: list[tuple[int, str]] = []
        self.on_progress: Callable[[int], object] = lambda done: None
        self._heard = asyncio.Event()

    def on_message(self, rank: int, message: AnyMessage) -> None:
        self.messages.append((rank, message))
        if isinstance(message, Progress):
            self.on_progress(message.done)
        self._heard.set()

    def on_lost(self, rank: int, reason: str) -> None:
        self.lost.append((rank, reason))
        self._heard.set()

    async def wait(self, is_enough: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_enough():
                self._heard.clear()
                await self._heard.wait()


class Wire:
    """A link, who listens to it, and any number of peers."""

    def __init__(self, home: Path, num_ranks: int = 1) -> None:
        self.endpoint = f"ipc://{home}/w.sock"
        self.link = ZmqWorkerLink(self.endpoint, EPOCH, num_ranks)
        self.ears = Ears()
        self.link.listen(self.ears)
        self.context = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []

    def peer(self, identity: str = f"{EPOCH}:0") -> zmq.Socket[bytes]:
        peer = self.context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, identity.encode())
        peer.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        peer.setsockopt(zmq.RECONNECT_IVL, 10)
        peer.connect(self.endpoint)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        self.link.close()
        for peer in self._peers:
            peer.close(linger=0)
        self.context.term()

    async def greeted(self, identity: str = f"{EPOCH}:0") -> zmq.Socket[bytes]:
        """A peer that the link has heard of."""
        peer, known = self.peer(identity), len(self.ears.messages)
        peer.send(encode(progress(0)))
        await self.ears.wait(lambda: len(self.ears.messages) > known)
        del self.ears.messages[known:]
        return peer

    async def hears(self, *messages: AnyMessage) -> None:
        """These arrive from rank 0, and nothing else has."""
        await self.ears.wait(lambda: len(self.ears.messages) >= len(messages) or bool(self.ears.lost))
        assert self.ears.messages == [(0, message) for message in messages]
        assert self.ears.lost == []

    async def loses(self, rank: int, reason: str) -> None:
        await self.ears.wait(lambda: bool(self.ears.lost))
        assert self.ears.lost[0][0] == rank
        assert reason in self.ears.lost[0][1]


@asynccontextmanager
async def wired(home: Path, num_ranks: int = 1) -> AsyncIterator[Wire]:
    wire = Wire(home, num_ranks)
    try:
        yield wire
    finally:
        wire.close()


def progress(done: int, rank: int = 0) -> Progress:
    return Progress(EPOCH, rank, done, NUM_FRAMES)


def plan(step_id: int) -> StepPlan:
    return StepPlan(EPOCH, step_id, 0, 0, b"", [], b"", b"")


# Nothing is lost


async def drain_in_a_thread(peer: zmq.Socket[bytes], handle: Callable[[bytes], None], count: int) -> None:
    def drain() -> None:
        for _ in range(count):
            handle(peer.recv())

    await asyncio.get_running_loop().run_in_executor(None, drain)


async def test_two_answers_to_every_frame_all_wake_the_loop(runtime_home: Path) -> None:
    """Answers come while the next frames are sent, and sending eats the edge that would announce them."""
    async with wired(runtime_home) as wire:
        peer = await wire.greeted()

        def answer_twice(frame: bytes) -> None:
            message = decode(frame)
            assert isinstance(message, StepPlan)
            for half in range(2):
                peer.send(encode(progress(2 * message.step_id + half)))

        peer_work = asyncio.create_task(drain_in_a_thread(peer, answer_twice, NUM_FRAMES))
        for step_id in range(NUM_FRAMES):
            wire.link.send(0, plan(step_id))
            await asyncio.sleep(0)
        heard = wire.ears.messages
        await wire.ears.wait(lambda: len(heard) == 2 * NUM_FRAMES, timeout_s=WATCHDOG_S)
        await peer_work
        assert heard == [(0, progress(done)) for done in range(2 * NUM_FRAMES)]


async def test_two_frames_for_every_message_keep_the_loop_awake(runtime_home: Path) -> None:
    """The same the other way round: the peer's next messages come while the loop sends its answers."""
    async with wired(runtime_home) as wire:
        peer = await wire.greeted()
        loop = asyncio.get_running_loop()
        seen: list[int] = []

        def answer_twice(done: int) -> None:
            wire.link.send(0, plan(2 * done))
            loop.call_soon(wire.link.send, 0, plan(2 * done + 1))

        def ask_and_drain() -> None:
            for done in range(NUM_FRAMES):
                peer.send(encode(progress(done)))
            for _ in range(2 * NUM_FRAMES):
                message = decode(peer.recv())
                assert isinstance(message, StepPlan)
                seen.append(message.step_id)

        wire.ears.on_progress = lambda done: loop.call_soon(answer_twice, done)
        peer_work = loop.run_in_executor(None, ask_and_drain)
        await wire.ears.wait(lambda: len(wire.ears.messages) == NUM_FRAMES, timeout_s=WATCHDOG_S)
        await peer_work
        assert sorted(seen) == list(range(2 * NUM_FRAMES))


async def test_a_message_whose_edge_was_eaten_by_a_send_is_read(runtime_home: Path) -> None:
    """Between its arrival and the loop's next look, sends take the descriptor's readiness away."""
    async with wired(runtime_home) as wire:
        peer = await wire.greeted()
        for done in range(30):
            peer.send(encode(progress(done)))
            assert is_readable(wire.link._fd, PATIENCE_S)
            while is_readable(wire.link._fd, 0):
                wire.link.send(0, plan(done))
            await wire.ears.wait(lambda done=done: len(wire.ears.messages) > done, WATCHDOG_S)  # type: ignore[misc]
        assert wire.ears.messages == [(0, progress(done)) for done in range(30)]


def is_readable(fd: int, timeout_s: float) -> bool:
    """Looks without the loop."""
    return bool(select.select([fd], [], [], timeout_s)[0])


async def test_more_than_is_read_at_once_arrives_without_a_new_edge(runtime_home: Path) -> None:
    async with wired(runtime_home) as wire:
        peer = await wire.greeted()
        for done in range(NUM_FRAMES):
            peer.send(encode(progress(done)))
        await wire.hears(*[progress(done) for done in range(NUM_FRAMES)])


async def test_a_hello_of_the_right_worker_is_delivered(runtime_home: Path) -> None:
    async with wired(runtime_home) as wire:
        hello = Hello("0.1.0+wire1", EPOCH, 0, os.getpid())
        peer = wire.peer()
        peer.send(encode(hello))
        await wire.hears(hello)
        wire.link.send(0, plan(1))
        assert decode(await asyncio.get_running_loop().run_in_executor(None, peer.recv)) == plan(1)


# Nobody is trusted


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"garbage"], "sent what is no message: not a message of the worker wire"),
        ([b""], "not a message of the worker wire"),
        ([encode(plan(1))[:-1]], "not a message of the worker wire"),
        ([encode(plan(1)), b"more"], "a message of 2 frames"),
        ([b"", encode(plan(1))], "a message of 2 frames"),
        ([b"x"] * 1000, "a message of 1000 frames"),
    ],
)
async def test_garbage_of_a_worker_is_a_lost_worker(runtime_home: Path, frames: list[bytes], reason: str) -> None:
    async with wired(runtime_home, num_ranks=2) as wire:
        peer = await wire.greeted(f"{EPOCH}:1")
        peer.send_multipart(frames)
        await wire.loses(1, reason)
        assert wire.ears.messages == []


@pytest.mark.parametrize("identity", [f"{EPOCH + 1}:0", f"{EPOCH}:1", f"{EPOCH}:00", "stranger"])
async def test_who_is_not_of_this_epoch_is_not_heard(runtime_home: Path, identity: str) -> None:
    async with wired(runtime_home) as wire:
        for frames in ([encode(progress(1))], [b"garbage"], [b"a", b"b"]):
            wire.peer(identity).send_multipart(frames)
        peer = await wire.greeted()
        while wire.link.num_strange_frames == 0:  # another connection: it may come later
            peer.send(encode(progress(2)))
            await wire.hears(progress(2))
            wire.ears.messages.clear()
        assert wire.ears.lost == []


async def test_a_frame_beyond_the_limit_costs_its_connection_and_nothing_else(runtime_home: Path) -> None:
    async with wired(runtime_home) as wire:
        peer = await wire.greeted()
        peer.send(bytes(MAX_MESSAGE_BYTES + 1), copy=False)
        while not wire.ears.messages:  # the first may go down with the connection
            peer.send(encode(progress(1)))
            try:
                await wire.ears.wait(lambda: bool(wire.ears.messages or wire.ears.lost), timeout_s=0.1)
            except TimeoutError:
                pass
        assert {message for _, message in wire.ears.messages} == {progress(1)}
        assert wire.ears.lost == []


async def test_sending_to_a_peer_that_has_gone_is_a_lost_worker(runtime_home: Path) -> None:
    async with wired(runtime_home) as wire:
        peer = await wire.greeted()
        wire.link.send(0, plan(1))
        peer.close(linger=0)
        async with asyncio.timeout(PATIENCE_S):
            while not wire.ears.lost:
                wire.link.send(0, plan(2))
                await asyncio.sleep(0)
        await wire.loses(0, "cannot be reached")


async def test_sending_to_a_peer_that_never_came_is_a_lost_worker(runtime_home: Path) -> None:
    async with wired(runtime_home) as wire:
        wire.link.send(0, Shutdown(EPOCH))
        assert wire.ears.lost == []  # told from the loop, not from within `send`
        await wire.loses(0, "cannot be reached")


async def test_a_closed_link_is_silent(runtime_home: Path) -> None:
    async with wired(runtime_home) as wire:
        peer = await wire.greeted()
        wire.link.send(0, plan(1))
        peer.send(encode(progress(1)))
        wire.link.close()
        wire.link.close()
        wire.link.lose(0, "late")
        await asyncio.sleep(0)
        assert (wire.ears.messages, wire.ears.lost) == ([], [])


async def test_a_worker_of_another_version_does_not_start() -> None:
    group = WorkerGroup(EngineConfig(model="fake"), "", "0.0.9+wire0")
    with pytest.raises(WorkerStartError, match=r"version 0\.1\.0\+wire\d+, this engine of 0\.0\.9\+wire0"):
        await group.wait_ready(PATIENCE_S)
    assert group.supervisor.pids == []


# Nothing listens


def listening_inodes() -> set[str]:
    """Sockets of this machine's TCP that listen."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[9] for line in lines if line[3] == "0A"}


def socket_inodes(pid: int) -> set[str]:
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def folders_in(home: Path) -> list[Path]:
    return [path for path in home.iterdir() if path.is_dir()]


def test_the_listening_sockets_of_a_process_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert socket_inodes(os.getpid()) & listening_inodes()


async def test_an_engine_listens_on_nothing_but_a_socket_in_a_private_folder(runtime_home: Path) -> None:
    before = socket_inodes(os.getpid()) & listening_inodes()
    async with Engine("fake", num_workers=2) as engine:
        (private,) = folders_in(runtime_home)
        assert os.stat(private).st_mode & 0o7777 == 0o700
        assert stat.S_ISSOCK(os.stat(f"{private}/w.sock").st_mode)
        assert len(engine.worker_pids) == 2
        for pid in (os.getpid(), *engine.worker_pids):
            assert socket_inodes(pid) & listening_inodes() <= before
    assert folders_in(runtime_home) == []


async def test_a_pickle_runs_nothing(runtime_home: Path) -> None:
    """Sent as a stranger, and as a second peer with a worker's identity; the engine goes on."""
    marker = runtime_home / "marker"
    pickled = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    async with Engine("fake") as engine:
        (private,) = folders_in(runtime_home)
        with zmq.Context() as context:
            for identity in ("stranger", f"{engine._group.epoch}:0"):
                with context.socket(zmq.DEALER) as peer:
                    peer.setsockopt(zmq.IDENTITY, identity.encode())
                    peer.setsockopt(zmq.LINGER, 1000)
                    peer.connect(f"ipc://{private}/w.sock")
                    for frames in ([pickled], [b"", pickled], [pickled, pickled]):
                        peer.send_multipart(frames)
            while engine._group.link.num_strange_frames < 3:
                await engine.generate([1, 2, 3], SamplingParams(max_tokens=2, detokenize=False))
        done = await engine.generate([1, 2, 3], SamplingParams(max_tokens=5, detokenize=False, ignore_eos=True))
        assert len(done.samples[0].token_ids) == 5
    assert "marker" not in os.listdir(runtime_home)
