"""WireServer: an engine behind a ROUTER socket. The thin shell around `ServerSession`: sockets, tasks and the clock.

Knows nothing of credits, resumes or what messages mean.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import zmq

from deepinfer.engine import Engine
from deepinfer.errors import ConfigError, DeepInferError
from deepinfer.metrics import Metric
from deepinfer.runtime_dir import RuntimeDir
from deepinfer.stream import TokenStream
from deepinfer.wire.address import check_listen
from deepinfer.wire.allow_list import AllowList
from deepinfer.wire.keys import ServerKeys, server_options
from deepinfer.wire.session import Abort, Action, Drop, Load, Pull, Send, ServerSession, Settings, Start
from deepinfer.wire.socket import Arrival, LoopSocket, Offer
from deepinfer_protocol import VERSION, unpack_int32
from deepinfer_protocol.client import CLIENT_VERSION, Submit, Welcome
from deepinfer_protocol.client.limits import MAX_FRAME_BYTES, MAX_NAME_CHARACTERS

TICK_S: Final = 0.25
FAREWELL_S: Final = 0.05
"""How long the last frames have to leave."""
FULL_S: Final = 0.01
"""How soon a connection whose queue is full is tried again."""
MAX_WAITING: Final = 1024
"""Frames that wait for such a connection: with more it is lost."""
_SOCKET_NAME: Final = "c.sock"

log = logging.getLogger(__name__)


class WireServer:
    """Serves an open engine, on the loop that runs at `open`: `async with WireServer(engine) as server: server.url`."""

    def __init__(
        self,
        engine: Engine,
        listen: str | None = None,
        *,
        keys: ServerKeys | None = None,
        model: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """`listen`: `ipc:///folder/name`, `tcp://host:port` (`*`: any port), or None: ipc in a folder of its own.

        Raises `ConfigError` for a place beyond loopback without `keys`.
        """
        if listen is not None:
            check_listen(listen, has_keys=keys is not None)
        self._engine = engine
        self._listen = listen
        self._keys = keys
        self._model = (model or engine.config.model)[:MAX_NAME_CHARACTERS]
        self._settings = settings or Settings()
        self._streams: dict[int, _Reading] = {}
        self._is_acting = False
        self._is_resend_due = False
        self._outgoing: list[Send] = []
        self._full: dict[bytes, deque[bytes]] = {}  # what waits for connections whose queues are full
        self._idle = asyncio.Event()
        self._closing = ExitStack()
        self.url = ""

    # ---- life

    async def open(self) -> None:
        """Listen. Raises `ConfigError` for a place that is taken, or that cannot be listened on."""
        self._loop = asyncio.get_running_loop()
        self._session = ServerSession(self._welcome(), self._settings, self._load)
        with ExitStack() as stack:
            listen = self._listen or f"ipc://{self._own_folder(stack) / _SOCKET_NAME}"
            if self._listen is not None and listen.startswith("ipc://"):
                path = Path(listen.removeprefix("ipc://"))
                _lock(path.with_name(f"{path.name}.lock"), stack)
                stack.callback(path.unlink, missing_ok=True)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.destroy, linger=0)
            if self._keys is not None:
                stack.callback(AllowList(context, self._keys).close)
            has_users = self._keys is not None
            self._socket = LoopSocket(context, zmq.ROUTER, self._options(), self._arrive, has_users=has_users)
            stack.callback(self._socket.close)
            try:
                self.url = self._socket.bind(listen)
            except zmq.ZMQError as error:
                raise ConfigError("listen", f"{listen}: {error.strerror}") from None
            self._ticking = asyncio.create_task(self._tick())
            self._closing = stack.pop_all()

    def _own_folder(self, stack: ExitStack) -> Path:
        folder = RuntimeDir(self._engine.config.runtime_dir)
        stack.callback(folder.close)
        return folder.path

    def _options(self) -> dict[int, int | bytes]:
        options: dict[int, int | bytes] = {
            zmq.ROUTER_MANDATORY: 1,  # a message for a peer that is gone is an error, not lost in silence
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.SNDHWM: 4096,
            zmq.RCVHWM: 16,  # messages of a peer in memory, each of up to 4 MiB: those behind them stay with it
            zmq.HEARTBEAT_IVL: 1000,
            zmq.HEARTBEAT_TIMEOUT: 5000,
            zmq.HANDSHAKE_IVL: 5000,
            zmq.IPV6: 1,
        }
        return options | dict(server_options(self._keys)) if self._keys is not None else options

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def drain(self, deadline_s: float) -> None:
        """Take no further request; return when the open streams have ended, after `deadline_s` at the latest."""
        self._session.drain(self._now(), deadline_s)
        self._act()
        self._idle.clear()
        if self._session.num_open:
            await self._idle.wait()

    async def aclose(self) -> None:
        """End every stream with `E_SHUTDOWN`, tell the clients, stop listening. The engine stays open."""
        if not self.url:
            return
        self.url = ""
        self._session.drain(self._now(), 0.0)
        self._session.tick(self._now() + TICK_S)
        self._act()
        tasks = [self._ticking, *(reading.task for reading in self._streams.values())]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(FAREWELL_S if self._session.num_connections else 0)
        finally:
            self._closing.close()  # also for a task that is cancelled
        await asyncio.sleep(0)  # the allow-list's task ends

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return self._session.num_open

    @property
    def num_connections(self) -> int:
        return self._session.num_connections

    def metrics(self) -> dict[str, Metric]:
        """What there is and was of it, by name, as `Engine.metrics` has the engine's. Nothing while it is not open."""
        if not self.url:
            return {}
        found = (
            Metric("wire_connections", "gauge", "Clients of the wire that are connected.", {"": self.num_connections}),
            Metric("wire_streams", "gauge", "Streams of the wire that have not ended.", {"": self.num_open}),
            Metric(
                "wire_errors",
                "counter",
                "ERROR and REJECT: of messages, and of streams that ended so.",
                dict(self._session.num_errors),
                "code",
            ),
        )
        return {each.name: each for each in found}

    # ---- what is told of the engine

    def _welcome(self) -> Welcome:
        limits = self._engine.limits
        return Welcome(
            version=CLIENT_VERSION,
            engine=secrets.token_hex(8),
            server=f"deepinfer {VERSION}",
            model=Path(self._model).name or self._model,
            vocab_size=limits.vocab_size,
            max_length=limits.max_length,
            limits=self._settings.limits,
            has_tokenizer=limits.has_tokenizer,
            has_chat=self._engine.has_chat_template,
        )

    def _load(self) -> Load:
        stats = self._engine.stats()
        return Load(stats.core.num_steps, stats.scheduler.num_running, stats.scheduler.num_waiting)

    # ---- in and out

    def _now(self) -> float:
        return time.monotonic()

    def _arrive(self, arrival: Arrival) -> None:
        connection, *parts = arrival.parts
        self._session.receive(connection, parts, arrival.user, self._now())
        self._act()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for key, reading in self._streams.items():
                if reading.stream.is_over:
                    self._session.over(key, self._now())
            self._session.tick(self._now())
            self._act()

    def _act(self) -> None:
        """Whatever the session wants done, and what comes of that."""
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while actions := self._session.take_actions():
                for action in actions:
                    self._do(action)
        finally:
            self._is_acting = False
        if self._session.is_behind and not self._is_resend_due:
            self._is_resend_due = True
            self._loop.call_soon(self._resend)
        if not self._session.num_open:
            self._idle.set()

    def _resend(self) -> None:
        self._is_resend_due = False
        self._session.resend()
        self._act()

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                if not self._outgoing:
                    self._loop.call_soon(self._send_all)
                self._outgoing.append(action)
            case Pull(key):
                if key in self._streams:
                    self._streams[key].gate.set()
            case Start(key, submit):
                self._start(key, submit)
            case Abort(key):
                if key in self._streams:
                    self._streams[key].stream.abort()
            case Drop(key):
                if (reading := self._streams.pop(key, None)) is not None:
                    reading.stream.abort()
                    reading.task.cancel()

    def _send_all(self) -> None:
        """What one turn of the loop has brought, most often a step's deltas: ZeroMQ then writes them together."""
        outgoing, self._outgoing = self._outgoing, []
        lost = set[bytes]()
        for connection, frame in outgoing:
            if connection not in lost and not self._send(connection, frame):
                lost.add(connection)
                self._session.lose(connection, self._now())
        self._act()

    def _send(self, connection: bytes, frame: bytes) -> bool:
        """Now, or when there is room. False: it will not be sent."""
        waiting = self._full.get(connection)
        if waiting is not None:
            waiting.append(frame)
            self._session.hold(connection)  # also where it was welcomed anew meanwhile
            return len(waiting) <= MAX_WAITING
        offer = self._socket.offer((connection, frame))
        if offer is not Offer.FULL or not self._session.is_welcome(connection):
            return offer is Offer.TAKEN
        if not self._full:
            self._loop.call_later(FULL_S, self._retry)
        self._full[connection] = deque([frame])
        self._session.hold(connection)
        return True

    def _retry(self) -> None:
        """Send what waits, as far as there is room."""
        for connection, waiting in list(self._full.items()):
            offer = Offer.TAKEN if self._session.is_welcome(connection) else Offer.GONE
            while waiting and offer is Offer.TAKEN:
                offer = self._socket.offer((connection, waiting[0]))
                if offer is Offer.TAKEN:
                    waiting.popleft()
            if offer is Offer.GONE:
                self._session.lose(connection, self._now())
            if offer is not Offer.FULL:
                del self._full[connection]
                self._session.release(connection)
        if self._full:
            self._loop.call_later(FULL_S, self._retry)
        self._act()

    def _start(self, key: int, submit: Submit) -> None:
        try:
            self._streams[key] = _Reading(self, key, submit)
        except Exception as error:  # whatever it is, it is this request's alone
            log.exception("a request could not be made")
            self._session.fail(key, error, self._now())


class _Reading:
    """One stream of the engine, read as far as its client lets."""

    def __init__(self, server: WireServer, key: int, submit: Submit) -> None:
        self.gate = asyncio.Event()
        self.stream = _stream(server._engine, key, submit)
        self.task = asyncio.create_task(self._read(server, key))

    async def _read(self, server: WireServer, key: int) -> None:
        session, now = server._session, server._now
        try:
            while True:
                await self.gate.wait()
                self.gate.clear()
                chunk = await anext(self.stream)
                session.chunk(key, chunk, now())
                server._act()
        except StopAsyncIteration:
            stream = self.stream
            session.end(key, stream.num_prompt_tokens, stream.num_cached_tokens, stream.num_preemptions, now())
        except DeepInferError as error:
            session.fail(key, error, now())
        except Exception as error:
            log.exception("a stream has failed")
            session.fail(key, error, now())
        server._streams.pop(key, None)
        server._act()


def _stream(engine: Engine, key: int, submit: Submit) -> TokenStream:
    """The request of a SUBMIT. Refusals are raised at the first read."""
    return engine.stream(
        unpack_int32(submit.token_ids) if submit.token_ids is not None else submit.prompt,
        submit.sampling,
        messages=submit.messages,
        thinking=submit.thinking,
        reasoning_effort=submit.reasoning_effort,
        tools=submit.tools,
        tool_choice=submit.tool_choice,
        request_id=f"wire-{key}-{submit.id}",
        priority=submit.priority,
        queue_timeout_s=_seconds(submit.queue_timeout_ms),
        timeout_s=_seconds(submit.timeout_ms),
        traceparent=submit.traceparent,
    )


def _seconds(millis: int | None) -> float | None:
    return None if millis is None else millis / 1000


def _lock(path: Path, stack: ExitStack) -> None:
    """To bind the path of another server would take its clients away without a word."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError("listen", f"{path.with_suffix('')}: another server listens there") from None
