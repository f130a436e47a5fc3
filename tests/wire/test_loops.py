"""A client does the same on every loop: asyncio's, uvloop's and trio's. Its server is on a loop of another thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import pytest
import uvloop

from clients.proxy import Proxy
from deepinfer import (
    Client,
    Completion,
    ConnectionLost,
    ConnectionRejected,
    Engine,
    EngineClosed,
    InvalidRequest,
    SamplingParams,
    WrongLoop,
    connect,
)
from deepinfer.home import OwnThread
from deepinfer.stream import TokenStream
from deepinfer.wire.server import WireServer
from deepinfer.wire.session import Settings
from doubles.reading import PROMPT, greedy, plain, tokens_of, wanted

T = TypeVar("T")
Run = Callable[[Callable[[], Awaitable[T]]], T]
LOOPS: Final[dict[str, dict[str, Any]]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"loop_factory": uvloop.new_event_loop}},
    "trio": {"backend": "trio"},
}
SETTINGS: Final = Settings(ping_s=0.1, idle_s=2.0, retention_s=5.0, max_streams=12, token="sesame")
open_client: Final = partial(connect, token="sesame")


class Served:
    """An engine over a fake worker and its server, on a loop of their own."""

    def __init__(self) -> None:
        self._home = OwnThread()
        self.call(self._open())

    async def _open(self) -> None:
        self.engine = Engine("fake", fake_step_s=0.001, fake_vocab_size=97, block_size=4, max_num_seqs=32)
        await self.engine.open()
        self.server = WireServer(self.engine, "tcp://127.0.0.1:*", settings=SETTINGS)
        await self.server.open()
        self.url = self.server.url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def generate(self, prompt: list[int], params: SamplingParams) -> Completion:
        return self.call(self.engine.generate(prompt, params))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._home.loop).result(20)

    def wait_until_idle(self) -> None:
        """No stream is open here, and the engine has nothing to do."""
        deadline_s = time.monotonic() + 10
        while self.server.num_open or not self.engine._core.is_idle:
            assert time.monotonic() < deadline_s, f"{self.server.num_open} streams are open"
            time.sleep(0.01)

    def close(self) -> None:
        self.call(self.server.aclose())
        self.call(self.engine.aclose())
        self._home.close()


@pytest.fixture
def served(nothing_left: None) -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture(params=list(LOOPS))
def run(request: pytest.FixtureRequest) -> Run[Any]:
    """Runs a test's work on each loop, within 30 seconds."""

    def run(work: Callable[[], Awaitable[T]]) -> T:
        async def bounded() -> T:
            with anyio.fail_after(30):
                return await work()

        return anyio.run(bounded, **LOOPS[request.param])

    return run


# ---- what comes


@pytest.mark.parametrize(
    "params",
    [
        greedy(1),
        greedy(300),
        SamplingParams(max_tokens=60, n=3, seq_seed=7),
        SamplingParams(max_tokens=20, temperature=0.0, logprobs=3),
    ],
)
def test_a_completion_is_that_of_the_engine(run: Run[None], served: Served, params: SamplingParams) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            ours = await client.generate(PROMPT, params)
            assert plain(ours) == plain(served.generate(PROMPT, params))

    run(work)


def test_streams_read_by_many_tasks_have_their_own_tokens(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client, anyio.create_task_group() as group:
            for index in range(10):
                group.start_soon(read, client, [*PROMPT, index])

    async def read(client: Client, prompt: list[int]) -> None:
        num_read = 0
        async with client.stream(prompt, greedy(200)) as stream:
            async for chunk in stream:
                assert chunk.first_index == num_read
                num_read += len(chunk.token_ids)
        assert num_read == 200
        assert await tokens_of(client.stream(prompt, greedy(100))) == wanted(100, prompt)

    run(work)


def test_what_came_while_the_loop_was_kept_is_read_without_a_further_message(run: Run[None], served: Served) -> None:
    """More than one reading of the socket takes: the descriptor tells of it once."""

    async def work() -> None:
        async with open_client(served.url) as client:
            streams = [client.stream([*PROMPT, index], greedy(100)) for index in range(10)]
            await anext(streams[0])
            served.wait_until_idle()  # keeps this loop: every delta waits in the socket
            with anyio.fail_after(0.7):  # a ping looks at the socket as well, ten times a second
                for index, stream in enumerate(streams):
                    tokens = await tokens_of(stream)
                    assert tokens == wanted(100, [*PROMPT, index])[100 - len(tokens) :]

    run(work)


def test_many_prompts_in_their_order_and_no_more_at_once_than_the_server_lets(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            prompts = [[*PROMPT, index] for index in range(40)]
            completions = await client.generate_many(prompts, greedy(20), progress=False)
            assert [completion.token_ids for completion in completions] == [wanted(20, prompt) for prompt in prompts]
            with pytest.raises(InvalidRequest, match="prompt"):
                await client.generate_many([*prompts[:5], [97]], greedy(2000), progress=False)
            stats = client.stats()
            assert stats.core.num_steps <= served.engine.stats().core.num_steps
        served.wait_until_idle()

    run(work)


def test_progress_is_told(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            stream = client.stream(PROMPT, greedy(20_000))
            async for _ in stream:
                if client.stats().core.num_steps > 50:
                    break
            assert client.stats().scheduler.num_running == 1
            stream.abort()

    run(work)
    with pytest.raises(EngineClosed):
        open_client(served.url).stats()


def test_refusals_are_raised_by_the_first_read(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            for params, field in (
                (SamplingParams(temperature=-1.0), "temperature"),
                (SamplingParams(n=1000), "n"),
                (SamplingParams(max_tokens=40_000), "max_tokens"),
            ):
                with pytest.raises(InvalidRequest) as caught:
                    await client.generate(PROMPT, params)
                assert caught.value.field == field
            assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)

    run(work)


# ---- reading


def test_a_read_that_timed_out_loses_nothing(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            stream = client.stream(PROMPT, greedy(300))
            tokens, num_timeouts = list[int](), 0
            while len(tokens) < 300:
                with anyio.move_on_after(0.0002) as scope:
                    tokens += (await anext(stream)).token_ids
                num_timeouts += scope.cancelled_caught
            assert tokens == wanted(300) and num_timeouts > 3

    run(work)


def test_a_stream_has_one_reader_at_a_time(run: Run[None], served: Served) -> None:
    """Of two, whichever finds the other reading is refused; the other reads on."""
    refused: list[str] = []

    async def work() -> None:
        async with open_client(served.url, window=16) as client, anyio.create_task_group() as group:
            stream = client.stream(PROMPT, greedy(20_000))

            async def read() -> None:
                try:
                    await tokens_of(stream)
                except RuntimeError as error:
                    refused.append(str(error))
                    stream.abort()

            group.start_soon(read)
            group.start_soon(read)

    run(work)
    assert refused == ["this stream is being read already"]


def test_a_slow_reader_pauses_its_stream_and_misses_nothing(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url, window=16) as client:
            stream = client.stream(PROMPT, greedy(200))
            tokens = list((await anext(stream)).token_ids)
            await anyio.sleep(0.3)
            (held,) = [stream for _, stream in served.server._session._by_key.values()]
            assert held.num_tokens < 100
            assert tokens + await tokens_of(stream) == wanted(200)

    run(work)


# ---- ends


def leave(stream: TokenStream) -> None:
    """An end from a thread that runs no loop."""
    thread = threading.Thread(target=stream.abort)
    thread.start()
    thread.join()


@pytest.mark.parametrize("how", ["abort", "abort elsewhere", "abort by id", "async with", "last reference"])
def test_every_end_frees_the_engine(run: Run[None], served: Served, how: str) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            stream = client.stream(PROMPT, greedy(30_000), request_id="r1")
            await anext(stream)
            if how == "async with":
                async with stream:
                    await anext(stream)
            elif how == "last reference":
                del stream
                gc.collect()
            else:
                if how == "abort by id":
                    await client.abort("r1")
                else:
                    (leave if how == "abort elsewhere" else TokenStream.abort)(stream)
                reasons = [chunk.finish_reason async for chunk in stream]
                assert reasons[-1] == "abort"
            await anyio.sleep(0.2)
            served.wait_until_idle()
            assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)

    run(work)


def test_a_cancelled_reader_leaves_its_stream(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            async with anyio.create_task_group() as group:
                group.start_soon(read, client)
                await anyio.sleep(0.1)
                group.cancel_scope.cancel()
            await anyio.sleep(0.2)
            served.wait_until_idle()

    async def read(client: Client) -> None:
        async with client.stream(PROMPT, greedy(30_000)) as stream:
            async for _ in stream:
                pass

    run(work)


def test_closing_the_client_ends_its_streams(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            stream = client.stream(PROMPT, greedy(30_000))
            await anext(stream)
        with pytest.raises(EngineClosed):
            await tokens_of(stream)
        with pytest.raises(EngineClosed):
            await client.generate(PROMPT, greedy(1))
        await client.aclose()

    run(work)
    served.wait_until_idle()


def test_a_client_that_is_cancelled_while_it_closes_is_closed(run: Run[None], served: Served) -> None:
    async def work() -> None:
        with anyio.CancelScope() as scope:
            async with open_client(served.url) as client:
                assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)
                scope.cancel()
                await anyio.sleep(1)
        assert client._socket._socket.closed

    run(work)


def test_a_client_may_be_opened_and_closed_by_different_tasks(run: Run[None], served: Served) -> None:
    async def work() -> None:
        client = open_client(served.url)
        for step in (client.open, partial(use, client), client.aclose):
            async with anyio.create_task_group() as group:
                group.start_soon(step)

    async def use(client: Client) -> None:
        assert await tokens_of(client.stream(PROMPT, greedy(50))) == wanted(50)

    run(work)


# ---- cuts


@pytest.mark.parametrize("cut_s", [0.0, 0.5])
def test_streams_survive_cuts_without_a_lost_or_doubled_token(run: Run[None], served: Served, cut_s: float) -> None:
    async def work(proxy: Proxy) -> None:
        async with open_client(f"tcp://127.0.0.1:{proxy.port}") as client:
            async with anyio.create_task_group() as group:
                for index in range(4):
                    group.start_soon(read, client, [*PROMPT, index])
                for _ in range(2):
                    await anyio.sleep(0.15)
                    proxy.cut()
                    await anyio.sleep(cut_s)
                    proxy.mend()
            assert client.num_reconnects >= 1

    async def read(client: Client, prompt: list[int]) -> None:
        assert await tokens_of(client.stream(prompt, greedy(600))) == wanted(600, prompt)

    with Proxy(served.port) as proxy:
        run(partial(work, proxy))
    served.wait_until_idle()


def test_a_server_that_goes_away_says_by_when_and_ends_what_is_open(run: Run[None], served: Served) -> None:
    async def work() -> None:
        async with open_client(served.url) as client:
            stream = client.stream(PROMPT, greedy(20_000))
            await anext(stream)
            deadlines = [client.deadline_s]
            draining = threading.Thread(target=lambda: served.call(served.server.drain(0.5)))
            draining.start()
            with pytest.raises(EngineClosed):
                await tokens_of(stream)
            deadlines.append(client.deadline_s)
            assert deadlines[0] is None and deadlines[1] is not None and abs(deadlines[1] - time.monotonic()) < 1.0
            with pytest.raises(EngineClosed):
                await client.generate(PROMPT, greedy(3))
            draining.join()

    run(work)


# ---- nobody, or nobody for us


def test_nobody_answers(run: Run[None], nothing_left: None, runtime_home: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConnectionLost, match="no answer"):
            await connect(f"ipc://{runtime_home}/nobody.sock", timeout_s=0.1).open()
        with anyio.move_on_after(0.1) as scope:
            async with connect(f"ipc://{runtime_home}/nobody.sock"):
                raise AssertionError("it is open")
        assert scope.cancelled_caught

    run(work)


def test_a_wrong_token_is_rejected(run: Run[None], served: Served) -> None:
    async def work() -> None:
        with pytest.raises(ConnectionRejected, match="E_AUTH"):
            await connect(served.url, token="sesam").open()

    run(work)


def test_a_client_belongs_to_the_loop_that_opened_it(run: Run[None], served: Served) -> None:
    client = open_client(served.url)
    streams = list[TokenStream]()

    async def opening() -> None:
        await client.open()
        streams.append(client.stream(PROMPT, greedy(5)))
        elsewhere = threading.Thread(target=lambda: run(other))
        elsewhere.start()
        while elsewhere.is_alive():  # noqa: ASYNC110 (the other loop has its own events)
            await anyio.sleep(0.01)
        await client.aclose()

    async def other() -> None:
        for stream in (streams[0], client.stream(PROMPT, greedy(5))):
            with pytest.raises(WrongLoop) as caught:
                await anext(stream)
            told.append(str(caught.value))

    told = list[str]()
    run(opening)
    assert len(told) == 2
    with pytest.raises(EngineClosed):
        run(client.open)
