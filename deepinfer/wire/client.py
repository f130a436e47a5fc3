"""Client: an engine elsewhere, with the streams of one here. The thin shell around `ClientSession`.

Knows nothing of credits, resumes or what messages mean. Runs on asyncio, uvloop and trio.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import zmq
from msgspec.structs import replace

from deepinfer.chat import as_json
from deepinfer.errors import ConfigError, ConnectionLost, DeepInferError, EngineClosed, InvalidRequest, WrongLoop
from deepinfer.home import call_threadsafe
from deepinfer.intake import Messages, Prompt
from deepinfer.loop import Timer, Waiter, pause, running_loop, wake
from deepinfer.many import generate_many
from deepinfer.migrating import plain_prompt, rename_options
from deepinfer.result import Completion
from deepinfer.stream import Mailbox, TokenChunk, TokenStream
from deepinfer.wire.address import check_connect
from deepinfer.wire.calls import ClientSession
from deepinfer.wire.keys import client_options, read_pair, read_public
from deepinfer.wire.socket import Arrival, LoopSocket
from deepinfer_protocol import SamplingParams, pack_int32
from deepinfer_protocol.client import Pong, Submit, Welcome, WireError
from deepinfer_protocol.client.limits import MAX_FRAME_BYTES, MAX_TIMEOUT_MS

TICK_S: Final = 0.1
RETRY_S: Final = 0.05
"""How soon HELLO is tried again while ZeroMQ still connects."""
FAREWELL_S: Final = 0.05
"""How long the last frames have to leave."""
_OUR_NAMES: Final = {"token_ids": "prompt", "timeout_ms": "timeout_s", "queue_timeout_ms": "queue_timeout_s"}
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class SchedulerLoad(NamedTuple):
    """Of `SchedulerStats`, what travels."""

    num_waiting: int
    num_running: int


class CoreProgress(NamedTuple):
    """Of `CoreStats`, what travels."""

    num_steps: int


class ClientStats(NamedTuple):
    """Of `EngineStats`, what travels; all 0 until the server has said something."""

    scheduler: SchedulerLoad
    core: CoreProgress


def connect(
    url: str,
    *,
    key: str | os.PathLike[str] | None = None,
    server_key: str | os.PathLike[str] | None = None,
    token: str = "",
    timeout_s: float = 10.0,
    give_up_s: float = 30.0,
    window: int = 1024,
    resumable: bool = True,
) -> Client:
    """A client of the server at `url`: `async with deepinfer.connect(url) as client`. Nothing is opened yet.

    `key` (a .key_secret file of our own) and `server_key` (the server's .key file) are for servers with CURVE, `token`
    for servers that ask for one. `window`: how many tokens may be ahead of what was read. Streams that are `resumable`
    survive a cut of up to `give_up_s` seconds. Raises `ConfigError`.
    """
    check_connect(url)
    if (key is None) != (server_key is None):
        raise ConfigError("key", "a server with keys needs both, the client's own and the server's public one")
    if not 2 <= window <= 1 << 20:
        raise ConfigError("window", f"{window}, 2 to {1 << 20} is expected")
    options: Mapping[int, int | bytes] = {}
    if key is not None and server_key is not None:
        options = client_options(read_pair(key), read_public(server_key))
    return Client(url, options, ClientSession(token=token, give_up_s=give_up_s), timeout_s, window, resumable)


class Client:
    """Made by `connect`. Belongs to the loop that opens it."""

    def __init__(
        self,
        url: str,
        options: Mapping[int, int | bytes],
        session: ClientSession,
        timeout_s: float,
        window: int,
        resumable: bool,
    ) -> None:
        self.url = url
        self._options = options
        self._session = session
        self._timeout_s = timeout_s
        self._wanted_window = window
        self._resumable = resumable
        self._is_open = False
        self._is_closed = False
        self._is_retrying = False
        self._welcoming: Waiter | None = None
        self._ticking: Timer | None = None

    # ---- life

    async def open(self) -> None:
        """Connect and be welcomed.

        Raises `ConnectionRejected`, and `ConnectionLost` when there is no answer in time: nobody is there, or, of a
        server with keys, it does not know ours.
        """
        if self._is_open or self._is_closed:
            raise EngineClosed("a client is opened once")
        self._loop = running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        options = {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,  # nothing waits in a pipe that leads nowhere
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 1000,
            zmq.HEARTBEAT_IVL: 1000,
            zmq.HEARTBEAT_TIMEOUT: 5000,
            zmq.IPV6: 1,
        }
        self._socket = LoopSocket(self._context, zmq.DEALER, options | dict(self._options), self._arrive)
        self._is_open = True
        try:
            self._socket.connect(self.url)
            self._session.hello(self._now())
            self._flush()
            self._ticking = self._loop.call_later(TICK_S, self._tick)
            await self._wait_welcome()
        except BaseException:
            await self.aclose()
            raise

    async def _wait_welcome(self) -> None:
        self._welcoming = self._loop.create_future()
        late = self._loop.call_later(self._timeout_s, partial(wake, self._welcoming))
        try:
            await self._welcoming
        finally:
            late.cancel()
        self._raise_rejection()
        if not self._session.is_welcome:
            told = self._session.last_reject or "no answer"
            raise ConnectionLost(f"{self.url}: {told} in {self._timeout_s:g} s")

    def _raise_rejection(self) -> None:
        if self._session.rejection is not None:
            raise self._session.rejection

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every open stream with `EngineClosed`, and the connection. Callable twice."""
        if not self._is_open or self._is_closed:
            return
        self._is_closed = True
        was_welcome = self._session.is_welcome
        self._session.fail_all(EngineClosed("the client is closed"))
        self._session.bye()
        for frame in self._session.take_frames():
            self._socket.send((frame,))
        if self._ticking is not None:
            self._ticking.cancel()
        try:
            await pause(FAREWELL_S if was_welcome else 0.0)
        finally:  # also for a task that is cancelled
            self._socket.close()
            self._context.destroy(linger=0)

    # ---- requests

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
        **elsewhere: Any,
    ) -> TokenStream:
        """As `Engine.stream`. An id has letters, digits, `_` and `-`; prompt logprobs do not travel."""
        options: dict[str, Any] = {
            "prompt": prompt,
            "params": params,
            "messages": messages,
            "thinking": thinking,
            "reasoning_effort": reasoning_effort,
            "tools": tools,
            "tool_choice": tool_choice,
            "request_id": request_id,
            "priority": priority,
            "queue_timeout_s": queue_timeout_s,
            "timeout_s": timeout_s,
            "traceparent": traceparent,
        }
        mailbox = Mailbox(None)
        id = secrets.token_hex(8) if request_id is None else request_id
        abort: Callable[[], None] = _do_nothing
        resume: Callable[[], None] = _do_nothing
        try:
            self._check_usable()
            submit = self._submit(id, rename_options(options, elsewhere) if elsewhere else options)
            mailbox.loop, mailbox.num_unfinished = self._loop, submit.sampling.n
            self._send_submit(submit, mailbox)
            abort = partial(self._soon, partial(self._cancel, id))
            resume = partial(self._soon, partial(self._grant, id))
        except WireError as error:
            field = error.field.removeprefix("sampling.")
            mailbox.close(InvalidRequest(_OUR_NAMES.get(field, field or "request"), str(error)))
        except DeepInferError as error:
            mailbox.close(error)
        return TokenStream(id, mailbox, abort, resume, self._window // 2)

    async def generate(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """All samples of one request, whole. Takes what `stream` takes and raises what reading it raises."""
        async with self.stream(prompt, params, **options) as stream:
            completion = Completion(stream.request_id)
            chunks: list[TokenChunk] = [chunk async for chunk in stream]
            completion.add(*chunks)
            completion.num_prompt_tokens = stream.num_prompt_tokens
            completion.num_cached_tokens = stream.num_cached_tokens
            completion.num_preemptions = stream.num_preemptions
            return completion

    async def generate_many(
        self,
        prompts: Sequence[Prompt | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """As `Engine.generate_many`. Half of the streams that the server lets a client have are left to others."""
        self._check_usable()
        at_once = max(self.welcome.limits.max_streams // 2, 1)
        return await generate_many(self, prompts, params, at_once=at_once, progress=progress, options=options)

    async def abort(self, request_id: str) -> None:
        """End the open request of this id, if there is one. Its reader gets a last chunk, `abort`."""
        self._check_usable()
        self._cancel(request_id)

    @property
    def welcome(self) -> Welcome:
        """What the server said of itself, its model and its limits. Raises `EngineClosed` before `open`."""
        if self._session.welcome is None:
            raise EngineClosed("the client is not open")
        return self._session.welcome

    def stats(self) -> ClientStats:
        """What the server last said, which it does at every ping. Raises `EngineClosed` before `open`."""
        if self._session.welcome is None:
            raise EngineClosed("the client is not open")
        pong = self._session.pong or Pong()
        return ClientStats(
            SchedulerLoad(num_waiting=pong.waiting, num_running=pong.running), CoreProgress(num_steps=pong.steps)
        )

    @property
    def pong(self) -> Pong | None:
        """What the server last said of its engine's progress."""
        return self._session.pong

    @property
    def deadline_s(self) -> float | None:
        """Until when, by `time.monotonic`, open streams may run: the server goes away. `None`: it does not."""
        return self._session.deadline_s

    @property
    def is_connected(self) -> bool:
        return self._session.is_welcome

    @property
    def num_reconnects(self) -> int:
        return self._session.num_reconnects

    @property
    def _window(self) -> int:
        return self._session.window(self._wanted_window)

    def _check_usable(self) -> None:
        if not self._is_open or self._is_closed:
            raise EngineClosed("the client is not open")
        try:
            loop = running_loop()
        except RuntimeError:
            raise WrongLoop("stream() needs a running event loop") from None
        if loop is not self._loop:
            raise WrongLoop("this client belongs to the loop that opened it")
        self._raise_rejection()

    def _send_submit(self, submit: Submit, mailbox: Mailbox) -> None:
        try:
            self._session.submit(submit, mailbox)
        except InvalidRequest:
            raise
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # of something inside it
            raise InvalidRequest("request", f"cannot be written as msgpack: {error}") from None
        self._flush()

    def _submit(self, id: str, options: Mapping[str, Any]) -> Submit:
        """Raises `InvalidRequest` for what cannot be written; the rest is the server's to refuse."""
        prompt, params = options["prompt"], options["params"]
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise InvalidRequest("request_id", "1 to 64 letters, digits, _ and - are expected")
        if not isinstance(params, SamplingParams | None):
            raise InvalidRequest("params", f"a {type(params).__name__} came, SamplingParams is expected")
        if isinstance(prompt, Mapping):
            prompt = plain_prompt(prompt)
        if (prompt is None) == (options["messages"] is None):
            raise InvalidRequest("prompt", "give a prompt or messages, and not both")
        try:
            return Submit(
                id=id,
                prompt=prompt if isinstance(prompt, str) else None,
                token_ids=None if prompt is None or isinstance(prompt, str) else _packed(prompt),
                messages=None if options["messages"] is None else [dict(message) for message in options["messages"]],
                sampling=_portable(params or SamplingParams()),
                thinking=options["thinking"],
                reasoning_effort=options["reasoning_effort"],
                tools=None if options["tools"] is None else [dict(tool) for tool in options["tools"]],
                tool_choice=options["tool_choice"],
                priority=options["priority"],
                queue_timeout_ms=_millis("queue_timeout_s", options["queue_timeout_s"]),
                timeout_ms=_millis("timeout_s", options["timeout_s"]),
                resumable=self._resumable,
                credit=self._window,
                traceparent=options["traceparent"],
            )
        except InvalidRequest:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest("prompt" if options["messages"] is None else "messages", str(error)) from None

    # ---- in and out

    def _now(self) -> float:
        return time.monotonic()

    def _soon(self, callback: Callable[[], None]) -> None:
        """From any thread, at any point: a finalizer calls it."""
        call_threadsafe(self._loop, callback)

    def _cancel(self, id: str) -> None:
        if not self._is_closed:
            self._session.cancel(id)
            self._flush()

    def _grant(self, id: str) -> None:
        if not self._is_closed:
            self._session.grant(id)
            self._flush()

    def _arrive(self, arrival: Arrival) -> None:
        session = self._session
        session.receive(arrival.parts, self._now())
        if self._welcoming is not None and (session.is_welcome or session.rejection is not None):
            wake(self._welcoming)
        self._flush()

    def _tick(self) -> None:
        self._session.tick(self._now())
        self._flush()
        self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _flush(self) -> None:
        """Send what is due. What cannot be sent is lost with the connection, which is made again."""
        for frame in self._session.take_frames():
            if not self._socket.send((frame,)):
                if self._session.is_welcome:
                    self._session.lose(self._now())
                    self._session.take_frames()
                if not self._is_retrying:
                    self._is_retrying = True
                    self._loop.call_later(RETRY_S, self._retry)
                return

    def _retry(self) -> None:
        self._is_retrying = False
        if not self._is_closed and not self._session.is_welcome and self._session.rejection is None:
            self._session.hello(self._now())
            self._flush()


def _portable(params: SamplingParams) -> SamplingParams:
    """With keys, lists and schemas as the wire has them. Raises `InvalidRequest` for what it does not have."""
    for field in params.__struct_fields__:
        if isinstance(value := getattr(params, field), float) and not isfinite(value):
            raise InvalidRequest(field, f"{value}, a finite number is expected")
    changes: dict[str, Any] = {}
    if isinstance(params.logit_bias, Mapping):
        changes["logit_bias"] = {
            str(key) if type(key) is int else key: value for key, value in params.logit_bias.items()
        }
    for field in ("allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        if isinstance(ids := getattr(params, field), array):
            changes[field] = ids.tolist()
    if isinstance(params.json_schema, Mapping):  # as text: a schema may be deeper than a message
        changes["json_schema"] = as_json("json_schema", params.json_schema).decode()
    return replace(params, **changes) if changes else params


def _packed(token_ids: Sequence[int]) -> bytes:
    return pack_int32(token_ids if isinstance(token_ids, list | array) else list(token_ids))


def _millis(field: str, seconds: Any) -> int | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidRequest(field, f"{seconds!r}, a number of seconds is expected")
    return min(round(1000 * seconds), MAX_TIMEOUT_MS) if seconds < MAX_TIMEOUT_MS else MAX_TIMEOUT_MS


def _do_nothing() -> None:
    """For a stream whose request was refused."""
