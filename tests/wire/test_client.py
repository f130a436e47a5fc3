"""A client's streams are the engine's own: the same chunks, the same ends, the same errors, also across cuts."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer import (
    Client,
    ConfigError,
    ConnectionLost,
    ConnectionRejected,
    DeepInferError,
    Engine,
    EngineClosed,
    GrammarError,
    InvalidRequest,
    SamplingParams,
    SlowConsumer,
    connect,
)
from deepinfer.trace import Trace
from deepinfer.wire.keys import ServerKeys, read_clients, read_pair, write_keys
from deepinfer.wire.server import WireServer
from deepinfer.wire.session import Settings
from deepinfer.wire.socket import LoopSocket
from doubles.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from doubles.reading import PROMPT, greedy, plain, tokens_of, wanted
from wire.conftest import QUICK
from wire.proxy import Proxy

Settle = Callable[[Engine], Awaitable[None]]


@pytest.mark.parametrize(
    "params",
    [
        greedy(1),
        greedy(300),
        SamplingParams(max_tokens=60, n=3, seq_seed=7),
        SamplingParams(max_tokens=20, temperature=0.0, logprobs=3),
        SamplingParams(max_tokens=300, temperature=0.0, logprobs=20, n=2, seq_seed=1),
        SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=[wanted(20)[7]]),
        SamplingParams(max_tokens=40, temperature=0.0, logit_bias={5: 90.0}, bad_words=[[5, 5]], banned_token_ids=[3]),
    ],
)
async def test_a_completion_is_that_of_the_engine(engine: Engine, client: Client, params: SamplingParams) -> None:
    assert plain(await client.generate(PROMPT, params)) == plain(await engine.generate(PROMPT, params))


async def test_text_is_that_of_the_engine(no_tasks_left: None, word_model: str) -> None:
    async with (
        Engine("fake", tokenizer=word_model, fake_step_s=0.0, fake_vocab_size=97, block_size=4) as engine,
        WireServer(engine) as server,
        connect(server.url) as client,
    ):
        assert client.welcome.has_tokenizer
        for stop in ("", "w2"):
            params = SamplingParams(max_tokens=100, temperature=0.0, stop=stop or None)
            ours, theirs = await client.generate("word w3 w9", params), await engine.generate("word w3 w9", params)
            assert plain(ours) == plain(theirs)
            assert len(ours.text) > (3 if stop else 200)


@pytest.fixture
async def spelling(no_tasks_left: None, tmp_path: Path) -> AsyncIterator[tuple[Engine, Client]]:
    """An engine whose tokens are bytes, and a client of it."""
    tokenizer = save_byte_tokenizer(tmp_path)
    async with (
        Engine("fake", tokenizer=tokenizer, fake_vocab_size=VOCAB_SIZE, fake_step_s=0.0, block_size=4) as engine,
        WireServer(engine) as server,
        connect(server.url) as client,
    ):
        yield engine, client


def deep(levels: int) -> dict[str, Any]:
    """A schema that is deeper than a message may be."""
    schema: dict[str, Any] = {"enum": ["x"]}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return schema


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json_schema": {"enum": ["a", 7, None]}}, r'"a"|7|null'),
        ({"json_schema": '{"const": "a"}'}, '"a"'),
        ({"json_schema": deep(40)}, r'[\[\s]{40,}"x"[\]\s]{40,}'),
        ({"regex": r"\d{4}-\d{2}"}, r"\d{4}-\d{2}"),
        ({"choice": ("yes", "no")}, "yes|no"),
        ({"grammar": 'start: ("a" | "b")~3 "."'}, r"[ab]{3}\."),
    ],
)
async def test_structured_output_is_that_of_the_engine(
    spelling: tuple[Engine, Client], asked: dict[str, Any], expected: str
) -> None:
    engine, client = spelling
    params = SamplingParams(**asked, seq_seed=3, max_tokens=1000)
    ours, theirs = await client.generate([1, 2], params), await engine.generate([1, 2], params)
    assert plain(ours) == plain(theirs)
    assert ours.finish_reason == "stop" and re.fullmatch(expected, ours.text), ours.text


@pytest.mark.parametrize(
    "asked", [{"json_schema": {"not": {}}}, {"regex": "("}, {"choice": []}, {"grammar": "start: x"}]
)
async def test_what_cannot_be_enforced_is_told_as_by_the_engine(
    spelling: tuple[Engine, Client], asked: dict[str, Any]
) -> None:
    told = list[str]()
    for server in spelling:
        with pytest.raises(GrammarError) as caught:
            await server.generate([1, 2], SamplingParams(**asked))
        assert caught.value.field in asked
        told.append(" ".join(str(caught.value).split())[:300])
    assert told[0] == told[1]


async def test_chunks_are_deltas_without_gaps(client: Client) -> None:
    tokens = list[int]()
    async for chunk in client.stream(PROMPT, greedy(200)):
        assert chunk.first_index == len(tokens)
        tokens += chunk.token_ids
        await asyncio.sleep(0.003 if len(tokens) % 9 == 0 else 0)  # now and then, tokens pile up
    assert tokens == wanted(200)


async def test_many_streams_run_together(engine: Engine, client: Client) -> None:
    streams = [client.stream([*PROMPT, index], greedy(40)) for index in range(24)]
    for index, stream in enumerate(streams):
        assert await tokens_of(stream) == wanted(40, [*PROMPT, index])
    assert engine.stats().core.num_steps < 4 * 40


@pytest.mark.parametrize(
    "options",
    [
        {"params": SamplingParams(temperature=-1.0)},
        {"params": SamplingParams(top_p=float("nan"))},
        {"params": SamplingParams(max_tokens="many")},  # type: ignore[arg-type]
        {"params": SamplingParams(max_tokens=2**40)},
        {"params": SamplingParams(n=1000)},
        {"params": SamplingParams(max_tokens=40_000)},
        {"params": SamplingParams(stop_token_ids=[97])},
        {"params": "greedy"},
        {"prompt": []},
        {"prompt": [97]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"prompt": "text"},
        {"prompt": 5},
        {"prompt": None, "messages": [{"role": "user", "content": "Hello"}]},
        {"prompt": None},
        {"priority": 2_000_000},
        {"timeout_s": -1.0},
        {"traceparent": "00-1-2-01"},
        {"thinking": True},
    ],
)
async def test_refusals_are_those_of_the_engine(engine: Engine, client: Client, options: dict[str, object]) -> None:
    def told(error: DeepInferError) -> tuple[object, ...]:
        return type(error), getattr(error, "field", "")

    request = {"prompt": PROMPT, "params": greedy(3)} | options
    with pytest.raises(DeepInferError) as theirs:
        await engine.generate(**request)  # type: ignore[arg-type]
    with pytest.raises(DeepInferError) as ours:
        await client.generate(**request)  # type: ignore[arg-type]
    assert told(ours.value) == told(theirs.value)
    assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)


async def test_the_engines_trace_names_the_callers(no_tasks_left: None, tmp_path: Path) -> None:
    ours = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with Trace(tmp_path / "trace.json") as trace:
        async with (
            Engine("fake", fake_step_s=0.0, fake_vocab_size=97, block_size=4, observers=[trace]) as engine,
            WireServer(engine) as server,
            connect(server.url) as client,
        ):
            await client.generate(PROMPT, greedy(3), traceparent=ours)
            await client.generate(PROMPT, greedy(3))
    events = json.loads(trace.path.read_bytes())
    begun = [event["args"] for event in events if event["name"] == "request" and event["ph"] == "b"]
    assert [args.get("traceparent") for args in begun] == [ours, None]


async def test_what_does_not_travel_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        await client.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=1))


async def test_an_id_is_one_of_the_wire_and_used_once_at_a_time(client: Client) -> None:
    first = client.stream(PROMPT, greedy(2000), request_id="mine")
    await anext(first)
    with pytest.raises(InvalidRequest):
        await client.generate(PROMPT, greedy(3), request_id="mine")
    with pytest.raises(InvalidRequest, match="request_id"):
        await client.generate(PROMPT, greedy(3), request_id="a b")
    assert (await anext(first)).token_ids
    first.abort()


# ---- ends


async def test_an_abort_gives_a_last_chunk_and_frees_the_engine(engine: Engine, client: Client, settle: Settle) -> None:
    stream = client.stream(PROMPT, greedy(5000))
    tokens = list((await anext(stream)).token_ids)
    stream.abort()
    stream.abort()
    reasons = []
    async for chunk in stream:
        tokens += chunk.token_ids
        reasons.append(chunk.finish_reason)
    assert reasons[-1] == "abort"
    assert tokens == wanted(len(tokens)) and len(tokens) < 5000
    await settle(engine)


async def test_leaving_with_and_losing_the_last_reference_free_the_engine(
    engine: Engine, server: WireServer, client: Client, settle: Settle
) -> None:
    async with client.stream(PROMPT, greedy(5000)) as stream:
        await anext(stream)
    stream = client.stream(PROMPT, greedy(5000))
    await anext(stream)
    del stream
    gc.collect()
    await settle(engine)
    async with asyncio.timeout(5):
        while server.num_open:  # noqa: ASYNC110 (the end travels)
            await asyncio.sleep(0.01)


async def test_a_timeout_is_a_finish_reason(client: Client) -> None:
    assert (await client.generate(PROMPT, greedy(30_000), timeout_s=0.05)).finish_reason == "timeout"


async def test_closing_the_client_ends_its_streams_on_both_sides(
    engine: Engine, server: WireServer, settle: Settle
) -> None:
    async with connect(server.url) as client:
        stream = client.stream(PROMPT, greedy(20_000))
        await anext(stream)
    with pytest.raises(EngineClosed):
        await tokens_of(stream)
    with pytest.raises(EngineClosed):
        await client.generate(PROMPT, greedy(1))
    await settle(engine)


async def test_closing_the_server_ends_streams_and_says_so(engine: Engine) -> None:
    async with WireServer(engine) as server:
        client = connect(server.url, give_up_s=0.5)
        await client.open()
        stream = client.stream(PROMPT, greedy(20_000))
        await anext(stream)
    with pytest.raises((EngineClosed, ConnectionLost)):
        await tokens_of(stream)
    await client.aclose()


# ---- credits


async def test_a_slow_reader_pauses_its_stream_and_nobody_else(engine: Engine, server: WireServer) -> None:
    async with connect(server.url, window=16) as slow, connect(server.url) as quick:
        stream = slow.stream(PROMPT, greedy(500))
        tokens = list((await anext(stream)).token_ids)
        assert await tokens_of(quick.stream(PROMPT, greedy(300))) == wanted(300)
        held = next(stream for _, stream in server._session._by_key.values())
        assert held.num_tokens <= 2 * 16 + engine.config.max_unread_tokens // 100
        tokens += await tokens_of(stream)
        assert tokens == wanted(500)


async def test_a_reader_that_stays_away_is_a_slow_consumer(engine: Engine, settle: Settle) -> None:
    settings = Settings(slow_consumer_s=0.3, ping_s=0.1)
    async with WireServer(engine, settings=settings) as server, connect(server.url, window=16) as client:
        stream = client.stream(PROMPT, greedy(5000))
        await asyncio.sleep(1.0)
        with pytest.raises(SlowConsumer):
            await tokens_of(stream)
        await settle(engine)
        assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)


# ---- cuts


def port_of(server: WireServer) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.parametrize("cut_s", [0.0, 0.6])
async def test_streams_survive_cuts_without_a_lost_or_doubled_token(
    engine: Engine, settle: Settle, cut_s: float
) -> None:
    async with (
        WireServer(engine, "tcp://127.0.0.1:*", settings=QUICK) as server,
        Proxy(port_of(server)) as proxy,
        connect(f"tcp://127.0.0.1:{proxy.port}") as client,
    ):
        streams = [client.stream([*PROMPT, index], greedy(800)) for index in range(4)]
        readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        for _ in range(3):
            await asyncio.sleep(0.15)
            proxy.cut()
            await asyncio.sleep(cut_s)
            proxy.mend()
        async with asyncio.timeout(30):
            for index, reader in enumerate(readers):
                assert await reader == wanted(800, [*PROMPT, index])
        assert client.num_reconnects >= 1
        await settle(engine)


async def test_a_request_made_during_a_cut_is_served_after_it(engine: Engine) -> None:
    async with (
        WireServer(engine, "tcp://127.0.0.1:*", settings=QUICK) as server,
        Proxy(port_of(server)) as proxy,
        connect(f"tcp://127.0.0.1:{proxy.port}") as client,
    ):
        proxy.cut()
        reading = asyncio.create_task(tokens_of(client.stream(PROMPT, greedy(50))))
        await asyncio.sleep(0.5)
        proxy.mend()
        async with asyncio.timeout(10):
            assert await reading == wanted(50)


async def test_streams_that_are_not_resumable_end_with_the_connection(engine: Engine, settle: Settle) -> None:
    async with (
        WireServer(engine, "tcp://127.0.0.1:*", settings=QUICK) as server,
        Proxy(port_of(server)) as proxy,
        connect(f"tcp://127.0.0.1:{proxy.port}", resumable=False) as client,
    ):
        stream = client.stream(PROMPT, greedy(20_000))
        await anext(stream)
        proxy.cut()
        await asyncio.sleep(0.2)
        proxy.mend()
        with pytest.raises(ConnectionLost):
            await tokens_of(stream)
        await settle(engine)
        assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)


async def test_another_server_at_the_same_place_has_forgotten_the_streams(engine: Engine, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s.sock"
    first = WireServer(engine, url, settings=QUICK)
    await first.open()
    async with connect(url) as client:
        stream = client.stream(PROMPT, greedy(20_000))
        await anext(stream)
        first._session.take_actions = list  # type: ignore[method-assign]  # it ends without a word
        await first.aclose()
        async with WireServer(engine, url, settings=QUICK):
            with pytest.raises(ConnectionLost):
                await tokens_of(stream)
            assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)


async def test_a_server_that_stays_away_is_given_up(no_tasks_left: None, runtime_home: Path) -> None:
    with pytest.raises(ConnectionLost, match="no answer"):
        await connect(f"ipc://{runtime_home}/nobody.sock", timeout_s=0.2).open()


async def test_a_server_out_of_reach_is_tried_every_50_ms(
    no_tasks_left: None, runtime_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = list[object]()
    monkeypatch.setattr(LoopSocket, "send", lambda socket, parts: frames.append(parts))
    with pytest.raises(ConnectionLost, match="no answer"):
        await connect(f"ipc://{runtime_home}/nobody.sock", timeout_s=1.6).open()
    assert len(frames) <= 1.6 / 0.05 + 2


# ---- who may


async def test_a_server_with_keys_admits_its_clients_and_no_stranger(engine: Engine, tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path, "server")
    write_keys(tmp_path / "clients", "known")
    _, known = (tmp_path / "clients" / name for name in ("known.key", "known.key_secret"))
    _, stranger = write_keys(tmp_path, "stranger")
    keys = ServerKeys(read_pair(secret), read_clients(tmp_path / "clients"))
    assert secret.stat().st_mode & 0o077 == 0
    async with WireServer(engine, "tcp://127.0.0.1:*", keys=keys, settings=QUICK) as server:
        async with connect(server.url, key=known, server_key=public) as client:
            assert await tokens_of(client.stream(PROMPT, greedy(30))) == wanted(30)
            for refused in (
                connect(server.url, key=stranger, server_key=public, timeout_s=0.5),
                connect(server.url, key=known, server_key=tmp_path / "stranger.key", timeout_s=0.5),
                connect(server.url, timeout_s=0.5),
            ):
                with pytest.raises(ConnectionLost, match="no answer"):
                    await refused.open()
            assert await tokens_of(client.stream(PROMPT, greedy(30))) == wanted(30)
        assert server.metrics()["wire_errors"].value == 0


async def test_a_token_is_asked_for(engine: Engine) -> None:
    async with WireServer(engine, settings=Settings(token="s3cret")) as server:
        for token in ("", "s3cre", "S3cret"):
            with pytest.raises(ConnectionRejected, match="E_AUTH"):
                await connect(server.url, token=token).open()
        async with connect(server.url, token="s3cret") as client:
            assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)


@pytest.mark.parametrize(
    "listen",
    [
        "tcp://0.0.0.0:*",
        "tcp://*:5555",
        "tcp://192.0.2.1:5555",
        "tcp://[::]:5555",
        "tcp://example.org:5555",
        "ipc://relative.sock",
        "ipc:///tmp/open.sock",
        "ipc:///nowhere/at/all/s.sock",
        f"ipc:///{'x' * 120}/s.sock",
        "inproc://here",
        "tcp://127.0.0.1",
        "",
    ],
)
async def test_a_place_that_others_could_reach_is_refused_before_anything_listens(engine: Engine, listen: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        await WireServer(engine, listen).open()


async def test_a_place_is_not_taken_from_another_server(engine: Engine, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s.sock"
    async with WireServer(engine, url), connect(url) as client:
        with pytest.raises(ConfigError, match="another server"):
            await WireServer(engine, url).open()
        assert await tokens_of(client.stream(PROMPT, greedy(5))) == wanted(5)


@pytest.mark.parametrize("is_link", [False, True])
async def test_what_is_no_socket_is_not_deleted_to_listen_there(engine: Engine, tmp_path: Path, is_link: bool) -> None:
    notes, place = tmp_path / "notes.txt", tmp_path / ("link" if is_link else "notes.txt")
    notes.write_text("mine")
    if is_link:
        place.symlink_to(notes)
    with pytest.raises(ConfigError, match="no socket"):
        await WireServer(engine, f"ipc://{place}").open()
    assert place.read_text() == "mine" and place.is_symlink() == is_link


def test_a_client_s_stream_takes_what_an_engine_s_takes() -> None:
    assert inspect.signature(Client.stream) == inspect.signature(Engine.stream)


# ---- drain


async def test_a_drain_lets_open_streams_end_and_takes_no_more(server: WireServer, client: Client) -> None:
    stream = client.stream(PROMPT, greedy(300))
    first = await anext(stream)
    draining = asyncio.create_task(server.drain(20.0))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineClosed):
        await client.generate(PROMPT, greedy(3))
    assert [*first.token_ids, *await tokens_of(stream)] == wanted(300)
    await draining


async def test_a_drain_ends_what_takes_too_long(server: WireServer, client: Client) -> None:
    stream = client.stream(PROMPT, greedy(30_000))
    await anext(stream)
    await server.drain(0.2)
    with pytest.raises(EngineClosed):
        await tokens_of(stream)


async def test_progress_is_told(client: Client) -> None:
    await client.generate(PROMPT, greedy(100))
    await asyncio.sleep(0.4)
    assert client.pong is not None and client.pong.steps >= 100
