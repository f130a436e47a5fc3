"""Connections to the HTTP server that are no HTTP, never come to an end, or end when nobody expects it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import pytest

from deepinfer import Engine
from deepinfer.http.connection import LINGER_S
from doubles.serving import Reply, Served, post_head, read_head, serving

JSON: Final = "host: localhost\r\ncontent-type: application/json\r\n"
POST: Final = f"POST /v1/completions HTTP/1.1\r\n{JSON}"
CHUNKED: Final = f"{POST}transfer-encoding: chunked\r\n\r\n"
ASKED: Final[dict[str, Any]] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 8, "seed": 5}
FOR_LONG: Final = {**ASKED, "max_tokens": 10_000, "ignore_eos": True, "logprobs": 0}
"""Without a tokenizer there is no text: the log probabilities are what a stream has."""


@pytest.fixture
async def engine(no_tasks_left: None) -> AsyncIterator[Engine]:
    """One step at a time takes a millisecond."""
    settings: dict[str, Any] = {"fake_vocab_size": 97, "block_size": 4, "max_num_seqs": 8}
    async with Engine("fake", fake_step_s=0.001, **settings) as engine:
        yield engine
        engine.check_integrity()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)


def asked(body: Any, path: str = "/v1/completions") -> bytes:
    """A whole request on a connection that stays open."""
    raw = json.dumps(body).encode()
    return post_head(path, len(raw)).replace("connection: close\r\n", "").encode() + raw


@asynccontextmanager
async def undisturbed(served: Served) -> AsyncIterator[None]:
    """Another's stream goes on meanwhile."""
    async with served.connected() as (reader, writer):
        writer.write(asked({**FOR_LONG, "stream": True}))
        assert (await read_head(reader))[0] == 200
        await reader.readuntil(b"data: ")
        yield
        for _ in range(3):
            await reader.readuntil(b"data: ")


# ---- what is no HTTP

NO_HTTP: Final[dict[str, tuple[bytes, int, str]]] = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), 400, "invalid_http"),
    "words": (b"hello\r\n\r\n", 400, "invalid_http"),
    "zeros": (b"\0" * 1000 + b"\r\n\r\n", 400, "invalid_http"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "two hosts": (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, "invalid_http"),
    "a header without a colon": (b"GET /health HTTP/1.1\r\nhost: a\r\nfoo\r\n\r\n", 400, "invalid_http"),
    "a blank before a colon": (b"GET /health HTTP/1.1\r\nhost: a\r\nfoo : b\r\n\r\n", 400, "invalid_http"),
    "a zero in a header": (b"GET /health HTTP/1.1\r\nhost: a\r\nfoo: b\0c\r\n\r\n", 400, "invalid_http"),
    "less than nothing": (f"{POST}content-length: -1\r\n\r\n".encode(), 400, "invalid_http"),
    "a length in words": (f"{POST}content-length: some\r\n\r\n".encode(), 400, "invalid_http"),
    "two lengths": (f"{POST}content-length: 1\r\ncontent-length: 2\r\n\r\n".encode(), 400, "invalid_http"),
    "another coding": (f"{POST}transfer-encoding: gzip\r\n\r\n".encode(), 400, "invalid_http"),
    "a chunk of no size": (CHUNKED.encode() + b"size\r\n\r\n", 400, "invalid_http"),
    "a chunk of any size": (CHUNKED.encode() + b"f" * 40 + b"\r\n\r\n", 400, "invalid_http"),
    "a chunk that goes on": (CHUNKED.encode() + b"2\r\n{}{}", 400, "invalid_http"),
    "a long header": (b"GET /health HTTP/1.1\r\nhost: a\r\nfoo: " + b"x" * 400_000, 431, "head_too_large"),
    "a header just too long": (
        b"GET /health HTTP/1.1\r\nhost: a\r\nfoo: " + b"x" * 66_000 + b"\r\n\r\n",
        431,
        "head_too_large",
    ),
    "a long path": (b"GET /" + b"x" * 400_000, 431, "head_too_large"),
    "many headers": (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 12_000 + b"\r\n", 431, "head_too_large"),
}


async def told(served: Served, raw: bytes) -> Reply:
    async with served.connected() as (reader, writer):
        writer.write(raw)
        status, headers = await read_head(reader)
        return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))


async def test_what_is_no_http_is_told_so_and_nobody_else_notices(engine: Engine) -> None:
    async with serving(engine, body_timeout_s=0.2) as served, undisturbed(served):
        for name, (raw, status, code) in NO_HTTP.items():
            async with asyncio.timeout(10):
                reply = await told(served, raw)
            assert (reply.status, reply.json()["error"]["code"]) == (status, code), name
        assert (await served.post("/v1/completions", ASKED)).status == 200


async def test_two_lengths_of_one_body_are_not_chosen_from(engine: Engine) -> None:
    """A proxy may choose the other one, and see two requests where there is one."""
    async with serving(engine) as served:
        head = post_head("/v1/completions", 5, transfer_encoding="chunked")
        reply = await served.send(head, b"0\r\n\r\n")
        assert (reply.status, reply.json()["error"]["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "text/json"},
        {"content_type": "multipart/form-data; boundary=application/json"},
        {"content_type": "application/json; charset=utf-16"},
        {"content_type": "application/json;charset=latin-1"},
        {"content_encoding": "br"},
        {"content_encoding": "identity, gzip"},
    ],
    ids=lambda headers: next(iter(headers.values())),
)
async def test_other_types_and_encodings_are_not_read(headers: dict[str, str], engine: Engine) -> None:
    async with serving(engine) as served:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/tokenize"):
            assert (await served.post(path, ASKED, **headers)).status == 415
        same = {"content_type": 'Application/JSON; charset="UTF-8"', "content_encoding": "identity"}
        assert (await served.post("/v1/completions", ASKED, **same)).status == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
async def test_json_that_is_not_utf8_is_none(encoding: str, engine: Engine) -> None:
    async with serving(engine) as served:
        reply = await served.post("/v1/completions", json.dumps(ASKED).encode(encoding))
        assert (reply.status, reply.json()["error"]["code"]) == (400, "invalid_json")


# ---- what never comes to an end


async def drip(writer: asyncio.StreamWriter, raw: bytes, pause_s: float) -> None:
    """A byte at a time, until the other side has enough."""
    with suppress(ConnectionError, RuntimeError):  # uvloop has the latter for a transport that is closed
        for byte in raw:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(pause_s)


async def test_heads_that_drip_are_given_up_while_others_are_answered(engine: Engine) -> None:
    async def ask_slowly(before: bytes) -> int:
        async with served.connected() as (reader, writer):
            writer.write(before)
            if before:
                await reader.readexactly(int((await read_head(reader))[1]["content-length"]))
            dripping = asyncio.create_task(drip(writer, b"GET /health HTTP/1.1\r\nhost: " + b"x" * 10_000, 0.01))
            try:
                status, headers = await read_head(reader)
                body = await reader.readexactly(int(headers["content-length"]))
            finally:
                dripping.cancel()
            assert headers["connection"] == "close" and json.loads(body)["error"]["code"] == "head_timeout"
        return status

    async with serving(engine, head_timeout_s=0.3) as served, undisturbed(served):
        began = asyncio.get_running_loop().time()
        slow = [asyncio.create_task(ask_slowly(before)) for before in [b"", asked(ASKED)] * 16]
        for _ in range(5):
            assert (await served.post("/v1/completions", ASKED)).status == 200
        assert await asyncio.gather(*slow) == [408] * 32
        assert asyncio.get_running_loop().time() - began < 5


async def test_a_connection_that_says_nothing_is_closed(engine: Engine) -> None:
    async with serving(engine, head_timeout_s=0.1) as served, served.connected() as (reader, _):
        assert await reader.read() == b""


async def test_an_idle_connection_outlives_the_time_for_a_head(engine: Engine) -> None:
    async with serving(engine, head_timeout_s=0.1) as served, served.connected() as (reader, writer):
        for _ in range(2):
            writer.write(asked(ASKED))
            _, headers = await read_head(reader)
            await reader.readexactly(int(headers["content-length"]))
            await asyncio.sleep(0.3)


@pytest.mark.parametrize("piece", [b"1\r\n \r\n", b"1;" + b"x" * 100 + b"=y\r\n \r\n"], ids=["chunks", "extensions"])
async def test_a_chunked_body_without_an_end_is_given_up(piece: bytes, engine: Engine) -> None:
    async with (
        serving(engine, body_timeout_s=0.2) as served,
        undisturbed(served),
        served.connected() as (reader, writer),
    ):
        writer.write(CHUNKED.encode())
        dripping = asyncio.create_task(drip(writer, piece * 1000, 0.001))
        status, headers = await read_head(reader)
        body = await reader.readexactly(int(headers["content-length"]))
        assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
        async with asyncio.timeout(LINGER_S + 5):
            with suppress(ConnectionError):
                await reader.read()  # it goes on, and is cut off
        dripping.cancel()


async def test_who_is_refused_and_sends_for_ever_is_cut_off(engine: Engine) -> None:
    async with (
        serving(engine, max_body_bytes=1000) as served,
        undisturbed(served),
        served.connected() as (reader, writer),
    ):
        writer.write(CHUNKED.encode())
        flood = asyncio.create_task(_flood(writer))
        assert (await read_head(reader))[0] == 413
        async with asyncio.timeout(LINGER_S + 5):
            with suppress(ConnectionError):
                await reader.read()
            await flood


async def _flood(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, RuntimeError):
        while True:
            writer.write(b"400\r\n" + b" " * 0x400 + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)


async def test_a_stream_that_has_nothing_to_say_yet_is_kept_alive(engine: Engine) -> None:
    """Without a tokenizer tokens are no text: they come, and make no events."""
    async with serving(engine, keep_alive_s=0.05) as served:
        silent = {**ASKED, "max_tokens": 400, "ignore_eos": True, "stream": True}
        reply = await served.post("/v1/completions", silent)
        assert reply.status == 200 and reply.body.count(b": keep-alive\n\n") > 2
        assert reply.body.endswith(b"data: [DONE]\n\n")


# ---- what comes too early


async def test_requests_in_advance_are_answered_in_their_order(engine: Engine) -> None:
    async with serving(engine) as served, served.connected() as (reader, writer):
        writer.write(b"".join(asked({**ASKED, "max_tokens": count}) for count in (3, 1, 2)))
        for count in (3, 1, 2):
            status, headers = await read_head(reader)
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            assert (status, body["usage"]["completion_tokens"]) == (200, count)


@pytest.mark.parametrize("num_bytes", [60_000, 70_000, 200_000, 4_000_000])
async def test_a_large_body_is_not_in_advance_of_its_own_answer(num_bytes: int, engine: Engine) -> None:
    """On a connection that stays open, as those of all SDKs do."""
    async with serving(engine) as served, served.connected() as (reader, writer):
        for _ in range(2):
            writer.write(asked({**ASKED, "user": "x" * num_bytes}))
            status, headers = await read_head(reader)
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            assert (status, body["usage"]["completion_tokens"]) == (200, 8)


async def test_who_was_refused_before_his_body_came_may_go_on_for_longer_than_that_may_take(engine: Engine) -> None:
    whole = asked(ASKED)
    head = whole[: whole.index(b"\r\n\r\n") + 4].replace(b"application/json", b"text/plain")
    async with serving(engine) as served, served.connected() as (reader, writer):
        writer.write(head)
        status, headers = await read_head(reader)
        await reader.readexactly(int(headers["content-length"]))
        assert status == 415
        writer.write(whole[len(head) - len("text/plain") + len("application/json") :])
        writer.write(asked({**FOR_LONG, "stream": True}))
        assert (await read_head(reader))[0] == 200
        await asyncio.sleep(LINGER_S + 0.2)
        async with asyncio.timeout(10):
            for _ in range(2000):
                await reader.readuntil(b"data: ")


async def test_who_sends_too_much_in_advance_is_cut_off_and_his_request_ends(engine: Engine) -> None:
    async with serving(engine, max_head_bytes=4096) as served, served.connected() as (reader, writer):
        writer.write(asked(FOR_LONG))
        await until(lambda: engine.stats().scheduler.num_running == 1)
        writer.write(asked({**ASKED, "user": "x" * 10_000}))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        await until(lambda: engine.stats().scheduler.num_running == 0)
        assert engine.stats().core.num_tokens < 10_000


async def test_connections_have_a_limit(engine: Engine) -> None:
    async with serving(engine, max_connections=2) as served:
        async with served.connected() as (_, first), served.connected():
            first.write(b"GET")
            reply = await served.send("")
            assert (reply.status, reply.json()["error"]["code"]) == (503, "overloaded")
            assert reply.headers["retry-after"] == "1"
        async with asyncio.timeout(10):
            while (await _status(served)) != 200:  # noqa: ASYNC110 (the others' ends have no event)
                await asyncio.sleep(0.01)


async def _status(served: Served) -> int:
    try:
        return (await served.get("/health")).status
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0  # refused before it had asked


# ---- who goes

SLOW_S: Final = 0.1
"""A step of the model: long enough for all that a server does meanwhile."""


@pytest.fixture
async def slow(no_tasks_left: None, word_model: str) -> AsyncIterator[Engine]:
    settings: dict[str, Any] = {"fake_vocab_size": 97, "block_size": 4, "max_num_seqs": 2}
    async with Engine("fake", tokenizer=word_model, fake_step_s=SLOW_S, **settings) as engine:
        yield engine
        engine.check_integrity()


@pytest.mark.parametrize("advance", [b"", asked(FOR_LONG), b"GET /health HTTP/1.1\r\n"], ids=["", "next", "part"])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_rude", [True, False])
async def test_a_client_that_goes_ends_its_request_within_a_step(
    is_rude: bool, is_stream: bool, advance: bytes, slow: Engine
) -> None:
    """Running ones and one that waits; `advance` is what was sent ahead of the answer."""
    async with serving(slow) as served:
        async with served.connected() as (_, other):
            other.write(asked({**FOR_LONG, "stream": True}))
            await until(lambda: slow.stats().scheduler.num_running == 1)
            async with served.connected() as (_, writer), served.connected() as (_, waiting):
                writer.write(asked({**FOR_LONG, "stream": is_stream}))
                await until(lambda: slow.stats().scheduler.num_running == 2)
                writer.write(advance)
                waiting.write(asked({**FOR_LONG, "stream": is_stream}))
                await until(lambda: slow.stats().scheduler.num_waiting == 1)
                num_steps = slow.stats().core.num_steps
                for going in (waiting, writer):
                    going.transport.abort() if is_rude else going.close()
                await until(lambda: slow.stats().scheduler.num_running == 1)
                assert slow.stats().core.num_steps - num_steps <= 2, "one was under way, and one behind it"
                assert slow.stats().scheduler.num_waiting == 0
        await until(lambda: slow.stats().scheduler.num_running == 0)


async def test_many_that_vanish_at_any_time_leave_nothing(engine: Engine) -> None:
    whole = asked({**ASKED, "max_tokens": 30, "stream": True})

    async def vanish(index: int) -> None:
        async with served.connected() as (reader, writer):
            writer.write(whole[: len(whole) * (index % 10 + 1) // 10])
            await asyncio.sleep(0.001 * (index % 7))
            if index % 10 == 9 and index % 20 == 9:
                await reader.read(10)
            writer.transport.abort()

    async with serving(engine) as served, undisturbed(served):
        await asyncio.gather(*map(vanish, range(100)))
        await until(lambda: engine.stats().scheduler.num_running == 1)
        reply = await served.post("/v1/completions", ASKED)
        assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 8
