"""The HTTP server under bad input, bad clients and load, over a fake worker: each has its code, nobody else notices."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace
from starlette.responses import Response

from deepinfer import ConfigError, ContextLengthExceeded, Engine
from deepinfer.http import HttpConfig, app, fields
from deepinfer.text import TextPipeline
from doubles.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from doubles.serving import Served, post_head, read_head, serving

KEY: Final = "sk-0123456789abcdef"
ASKED: Final[dict[str, Any]] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 8}
FOR_LONG: Final = {**ASKED, "max_tokens": 3000, "ignore_eos": True, "stream": True}
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.fixture
async def engine(no_tasks_left: None, word_model: str) -> AsyncIterator[Engine]:
    """With a tokenizer, so that its tokens are text; one step at a time takes a millisecond."""
    settings: dict[str, Any] = {"fake_vocab_size": 97, "block_size": 4, "max_num_seqs": 8, "max_queued_requests": 8}
    async with Engine("fake", tokenizer=word_model, fake_step_s=0.001, **settings) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture
async def served(engine: Engine) -> AsyncIterator[Served]:
    async with serving(engine) as served:
        yield served


@asynccontextmanager
async def begun(served: Served, **fields: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A long stream, from its first event on."""
    async with served.connected() as (reader, writer):
        body = json.dumps({**FOR_LONG, **fields}).encode()
        writer.write(post_head("/v1/completions", len(body)).encode() + body)
        status, headers = await read_head(reader)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        await reader.readuntil(b"data: ")
        yield reader, writer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)


# ---- bad input

BROKEN: Final = {
    "nothing": (b"", "invalid_json"),
    "no JSON": (b"hello", "invalid_json"),
    "cut off": (b'{"model": "fake", "prompt": ', "invalid_json"),
    "more behind it": (b'{"model": "fake", "prompt": "x"} {', "invalid_json"),
    "no UTF-8": (b'{"model": "\xff\xfe"}', "invalid_json"),
    "NaN": (b'{"model": "fake", "temperature": NaN}', "invalid_json"),
    "null": (b"null", "invalid_param"),
    "a list": (b"[1]", "invalid_param"),
    "a string": (b'"hello"', "invalid_param"),
    "no model": (b"{}", "invalid_param"),
    "a model that is a number": (b'{"model": 7}', "invalid_param"),
    "a model of a megabyte": (b'{"model": "' + b"x" * (1 << 20) + b'"}', "invalid_param"),
    "another model": (b'{"model": "other", "prompt": "x", "messages": [], "input": ""}', "model_not_found"),
    "a huge number": (b'{"model": "fake", "prompt": "x", "top_k": 99999999999999999999999}', "invalid_param"),
    "a huge exponent": (b'{"model": "fake", "prompt": "x", "min_p": 1e400}', None),
    "nested": (b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "nested where nobody looks": (b'{"model": "fake", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "a lone surrogate": (rb'{"model": "\ud800"}', None),
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_broken_body_gets_its_code_and_nobody_else_notices(path: str, served: Served) -> None:
    async with begun(served) as (reader, _):
        for name, (body, code) in BROKEN.items():
            reply = await served.post(path, body)
            error = reply.json()["error"]
            assert 400 <= reply.status < 500, (name, reply)
            assert code in (None, error["code"]), (name, error)
            assert ("type" in reply.json()) == (path == "/v1/messages"), "the error has the API's own form"
            assert reply.headers["x-request-id"] and error["message"]
            assert len(error["message"]) <= 500
        await reader.readuntil(b"data: ")


OUT_OF_BOUNDS: Final[list[tuple[str, Any]]] = [
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [1, "x"]),
    ("prompt", [["x"]]),
    ("prompt", [-1]),
    ("prompt", [97]),
    ("prompt", [1] * 70_000),
    ("prompt", ["w1"] * 1000),
    ("prompt", [[5], "x"]),
    ("prompt", {"a": 1}),
    ("prompt", None),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("n", 0),
    ("n", 10**9),
    ("temperature", -1),
    ("temperature", "hot"),
    ("top_p", 2),
    ("seed", -1),
    ("logprobs", 21),
    ("stop", [""]),
    ("stop", ["x"] * 1000),
    ("stop", 5),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 1000}),
    ("min_tokens", 100),
    ("suffix", "and so on"),
    ("best_of", 4),
    ("response_format", {"type": "json_object"}),
    ("stream", 1),
]


async def test_a_field_out_of_bounds_is_named(served: Served) -> None:
    for field, value in OUT_OF_BOUNDS:
        reply = await served.post("/v1/completions", {**ASKED, field: value})
        assert reply.status == 400, (field, value, reply)
        assert str(reply.json()["error"]["param"]).startswith(field), reply.json()


async def test_a_body_that_says_it_is_too_large_is_not_read(engine: Engine) -> None:
    async with serving(engine, max_body_bytes=1000) as served:
        reply = await served.send(post_head("/v1/completions", 1001))  # the body never comes
        assert (reply.status, reply.json()["error"]["code"]) == (413, "body_too_large")
        reply = await served.send(post_head("/v1/messages", 10**18))
        assert (reply.status, reply.json()["error"]["type"]) == (413, "request_too_large")


async def test_a_body_that_grows_too_large_is_cut_off(engine: Engine) -> None:
    async with serving(engine, max_body_bytes=1000) as served:
        head = post_head("/v1/completions", 0).replace("content-length: 0", "transfer-encoding: chunked")
        reply = await served.send(head, b"258\r\n" + b" " * 600 + b"\r\n258\r\n" + b" " * 600 + b"\r\n")
        assert (reply.status, reply.json()["error"]["code"]) == (413, "body_too_large")


async def test_bodies_together_have_a_limit(engine: Engine) -> None:
    async with serving(engine, max_buffered_bytes=1000) as served:
        async with served.connected() as (_, writer):
            writer.write(post_head("/v1/completions", 900).encode() + b" " * 800)
            async with asyncio.timeout(10):
                while (reply := await served.post("/v1/completions", b" " * 300)).status != 429:
                    assert reply.json()["error"]["code"] == "invalid_json", "the other has not come yet"
        assert reply.headers["retry-after"] == "1"
        async with asyncio.timeout(10):
            while (reply := await served.post("/v1/completions", {**ASKED, "user": "x" * 300})).status != 200:
                assert reply.status == 429, "the other has not been forgotten yet"


async def test_a_body_that_does_not_come_is_given_up(engine: Engine) -> None:
    async with serving(engine, body_timeout_s=0.05) as served:
        reply = await served.send(post_head("/v1/completions", 100), b'{"model"')
        assert (reply.status, reply.json()["error"]["code"]) == (408, "body_timeout")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_what_a_page_of_another_site_can_send_is_not_read(kind: str, served: Served) -> None:
    reply = await served.post("/v1/completions", ASKED, content_type=kind)
    assert (reply.status, reply.json()["error"]["code"]) == (415, "not_json")


async def test_a_compressed_body_is_not_read(served: Served) -> None:
    assert (await served.post("/v1/completions", ASKED, content_encoding="gzip")).status == 415


async def test_a_place_that_is_not_there_says_so_in_the_form_of_the_api(served: Served) -> None:
    reply = await served.get("/v1/embeddings")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")
    reply = await served.get("/v1/messages")
    assert (reply.status, reply.json()["error"]["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "post"
    assert reply.json()["type"] == "error"


async def test_without_keys_another_name_for_this_machine_is_refused(engine: Engine) -> None:
    def asked(host: str) -> str:
        return f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"

    ours, others = (
        ("127.0.0.1", "localhost:80", "[::1]:8000", "LOCALHOST"),
        ("rebound.example", "127.0.0.1.example:80", ""),
    )
    async with serving(engine, hosts=("Proxy.example",)) as served:
        for host in (*ours, "proxy.example:443", "PROXY.example"):
            assert (await served.send(asked(host))).status == 200, host
        for host in others:
            reply = await served.send(asked(host))
            assert (reply.status, reply.json()["error"]["code"]) == (421, "unknown_host"), host
        assert (await served.send("GET /v1/models HTTP/1.0\r\n\r\n")).status == 200, "no browser"
    async with serving(engine, api_keys=(KEY,)) as served:
        request = asked("rebound.example").replace("connection", f"x-api-key: {KEY}\r\nconnection")
        assert (await served.send(request)).status == 200
    async with serving(engine, hosts=("*",)) as served:
        assert (await served.send(asked("rebound.example"))).status == 200


# ---- keys


async def test_every_place_asks_for_a_key(engine: Engine) -> None:
    wrong: tuple[dict[str, str], ...] = (
        {},
        {"authorization": "Bearer wrong"},
        {"x_api_key": KEY[:-1]},
        {"authorization": KEY},
    )
    right = ({"authorization": f"Bearer {KEY}"}, {"x_api_key": KEY + "2"})
    async with serving(engine, api_keys=(KEY, KEY + "2")) as served:
        for path in (*PATHS, "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/nowhere", "//health"):
            for headers in wrong:
                reply = await served.post(path, ASKED, **headers)
                assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key"), (path, headers)
            for headers in right:
                assert (await served.post(path, ASKED, **headers)).status != 401, (path, headers)


@pytest.mark.parametrize("given", ["", KEY[:-1], "x" + KEY[1:], KEY, KEY + "2", "é" * 99])
async def test_every_key_is_compared_in_constant_time(
    given: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return compare_digest(first, second)

    compare_digest = hmac.compare_digest
    async with serving(engine, api_keys=(KEY, KEY + "2", KEY + "3")) as served:
        monkeypatch.setattr(hmac, "compare_digest", compare)
        reply = await served.get("/v1/models", x_api_key=given)
    assert compared == [(32, 32)] * 3, "digests of one length, all of them, whichever it is"
    assert (reply.status == 200) == (given in (KEY, KEY + "2"))


async def test_health_asks_for_no_key_and_the_rest_does(engine: Engine) -> None:
    async with serving(engine, api_keys=(KEY,)) as served:
        assert (await served.get("/health")).status == 200
        for path in ("/metrics", "/v1/models", "/v1/models/fake"):
            assert (await served.get(path)).status == 401
            assert (await served.get(path, authorization=f"bearer {KEY}")).status == 200


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        HttpConfig(api_keys=("short",))
    with pytest.raises(ConfigError, match="keep_alive_s"):
        HttpConfig(keep_alive_s=0)


# ---- clients that go, and clients that are slow


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_goes_ends_its_request_at_once(
    is_stream: bool, engine: Engine, served: Served, settle: Callable[[Engine], Awaitable[None]]
) -> None:
    async with served.connected() as (_, writer):
        body = json.dumps({**FOR_LONG, "stream": is_stream}).encode()
        writer.write(post_head("/v1/completions", len(body)).encode() + body)
        await until(lambda: engine.stats().core.num_steps > 5)
        steps = engine.stats().core.num_steps
        writer.transport.abort()
        await settle(engine)
    assert engine.stats().core.num_steps - steps < 100, "of 3000"
    assert engine.metrics()["request_success"].values == {"abort": 1}


async def test_a_client_that_reads_nothing_is_given_up_and_others_go_on(engine: Engine) -> None:
    async with serving(engine, write_timeout_s=0.2, send_buffer_bytes=8192) as served:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop, body = asyncio.get_running_loop(), json.dumps({**FOR_LONG, "logprobs": 20}).encode()
            await loop.sock_connect(sock, ("127.0.0.1", served.port))
            await loop.sock_sendall(sock, post_head("/v1/completions", len(body)).encode() + body)
            await until(lambda: engine.stats().scheduler.num_running > 0)
            for _ in range(5):
                assert (await served.post("/v1/completions", ASKED)).status == 200
            await until(lambda: engine.metrics()["request_success"].values.get("abort") == 1)
        assert engine.stats().core.num_tokens < 3000


async def test_a_stream_without_events_is_kept_alive(no_tasks_left: None, word_model: str) -> None:
    async with (
        Engine("fake", tokenizer=word_model, fake_step_s=0.3, fake_vocab_size=97) as engine,
        serving(engine, keep_alive_s=0.05) as served,
    ):
        reply = await served.post("/v1/completions", {**ASKED, "stream": True, "max_tokens": 1})
        assert reply.body.startswith(b": keep-alive\n\n: keep-alive\n\n")
        assert reply.body.endswith(b"data: [DONE]\n\n")


# ---- more than fits


async def test_of_ten_times_more_than_fit_the_rest_is_told_when_to_come_back(engine: Engine, served: Served) -> None:
    asked = {**ASKED, "max_tokens": 300, "ignore_eos": True, "seed": 7}
    alone = (await served.post("/v1/completions", asked)).json()["choices"]
    replies = await asyncio.gather(*[served.post("/v1/completions", asked) for _ in range(160)])
    counts = {status: sum(reply.status == status for reply in replies) for status in (200, 429)}
    assert counts[200] >= 8 and counts[200] + counts[429] == 160 and counts[429] > 0
    for reply in replies:
        if reply.status == 429:
            assert int(reply.headers["retry-after"]) >= 1 and reply.json()["error"]["code"] == "overloaded"
        else:
            assert reply.json()["choices"] == alone
    assert (await served.post("/v1/completions", ASKED)).status == 200


async def test_open_requests_have_a_limit_of_their_own(engine: Engine) -> None:
    async with serving(engine, max_open_requests=1) as served:
        async with begun(served):
            reply = await served.post("/v1/completions", ASKED)
            assert (reply.status, reply.headers["retry-after"]) == (429, "1")
            assert (await served.get("/health")).status == 200
        await until(lambda: engine.stats().scheduler.num_running == 0)
        assert (await served.post("/v1/completions", ASKED)).status == 200


async def test_a_request_that_takes_too_long_ends(engine: Engine) -> None:
    async with serving(engine, timeout_s=0.05) as served:
        reply = await served.post("/v1/completions", {**FOR_LONG, "stream": False})
        assert (reply.status, reply.json()["error"]["code"]) == (504, "timeout")
        reply = await served.post("/v1/completions", FOR_LONG)
        assert reply.status == 200 and b'"code":"timeout"' in reply.body and b"[DONE]" not in reply.body


# ---- the engine's troubles, and what is told of it


async def test_a_lost_worker_ends_streams_in_words_and_health_says_so(engine: Engine, served: Served) -> None:
    async with begun(served) as (reader, _):
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        rest = await reader.read()
    assert b'"code":"worker_lost"' in rest and b"[DONE]" not in rest
    reply = await served.post("/v1/completions", ASKED)
    assert (reply.status, reply.json()["error"]["code"]) == (503, "worker_lost")
    assert int(reply.headers["retry-after"]) >= 1
    health = await served.get("/health")
    assert (health.status, health.json()["status"]) == (503, "worker_lost")


async def test_health_is_bad_while_a_step_does_not_come_back(no_tasks_left: None, word_model: str) -> None:
    async with (
        Engine("fake", tokenizer=word_model, fake_step_s=0.5, fake_vocab_size=97) as engine,
        serving(engine, stall_s=0.1) as served,
    ):
        assert (await served.get("/health")).json()["status"] == "ok"
        async with asyncio.TaskGroup() as group:
            post = group.create_task(served.post("/v1/completions", {**ASKED, "max_tokens": 1}))
            await until(lambda: engine.health().stalled_s > 0.1)
            health = await served.get("/health")
        assert (health.status, health.json()["status"]) == (503, "stalled")
        assert post.result().status == 200
        assert (await served.get("/health")).status == 200


async def test_metrics_have_the_names_that_operators_know(served: Served) -> None:
    await served.post("/v1/completions", ASKED)
    reply = await served.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert b'deepinfer:request_success_total{engine="0",finished_reason="length",model_name="fake"} 1.0' in reply.body


async def test_the_log_has_no_word_of_what_was_said(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await served.post("/v1/completions", {**ASKED, "prompt": "w5 w6 w7"})
    await served.post("/v1/completions", {**ASKED, "prompt": "w5 w6 w7", "temperature": 999})
    await served.get("/a%0ab%1b[31m" + "x" * 1000)
    await served.post("/v1/completions?prompt=w5", ASKED)
    await served.post("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "w5"}]})
    await served.post("/v1/responses", {"model": "fake", "input": "w5", "text": {"format": {"type": "w5"}}})
    lines = [record.getMessage() for record in caplog.records if record.name == "deepinfer.http.access"]
    assert "POST /v1/completions 200" in lines[0] and "prompt=3 completion=8" in lines[0]
    assert "400" in lines[1] and "404" in lines[2] and "\n" not in lines[2] and len(lines[2]) < 300
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "w5" not in said and "\x1b" not in said


async def test_more_logprobs_of_a_prompt_than_are_written_are_refused(engine: Engine, served: Served) -> None:
    asked = {**ASKED, "prompt": [1] * 7000, "echo": True, "logprobs": 20}
    for is_stream in (False, True):
        reply = await served.post("/v1/completions", {**asked, "stream": is_stream})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "echo")
    reply = await served.post("/v1/completions", {**asked, "logprobs": 1})
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 7008


async def test_tokens_of_text_and_back(engine: Engine, served: Served) -> None:
    reply = await served.post("/tokenize", {"prompt": "w5 word", "return_token_strs": True})
    assert reply.json() == {
        "count": 2,
        "max_model_len": engine.limits.max_length,
        "tokens": [5, 96],
        "token_strs": ["w5", "word"],
    }
    assert (await served.post("/detokenize", {"tokens": [5, 96]})).json() == {"prompt": "w5 word"}
    for ids in ([97], [-1], "5", None):
        assert (await served.post("/detokenize", {"tokens": ids})).json()["error"]["param"].startswith("tokens")
    for asked in ({}, {"prompt": "w5", "messages": []}):
        assert (await served.post("/tokenize", asked)).json()["error"]["param"] == "prompt"


async def test_more_tokens_than_a_completion_may_have_are_not_listed(
    engine: Engine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_IDS", 3)
    monkeypatch.setattr(engine, "_limits", replace(engine.limits, max_model_len=2))
    assert (await served.post("/tokenize", {"prompt": "w5 w5 w5"})).json()["count"] == 3
    reply = await served.post("/tokenize", {"prompt": "w5 w5 w5 w5"})
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_as_many_tokens_as_are_listed_are_spelt(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_IDS", 3)
    monkeypatch.setattr(fields, "MAX_IDS", 3)
    ids = (await served.post("/tokenize", {"prompt": "w5 w6 w7 w8"})).json()["tokens"]
    assert (await served.post("/detokenize", {"tokens": ids})).json() == {"prompt": "w5 w6 w7 w8"}


async def test_texts_of_a_completion_are_encoded_where_its_body_is_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = TextPipeline.encode

    def noted(self: TextPipeline, text: str, *, add_special_tokens: bool) -> list[int]:
        threads.append(threading.current_thread().name.rpartition("_")[0])
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextPipeline, "encode", noted)
    text, ids = "w5 w6 word " * 100, [5, 6, 96] * 100
    asked = {**ASKED, "seed": 3, "n": 2}
    told = (await served.post("/v1/completions", {**asked, "prompt": [text, text]})).json()
    assert threads == ["deepinfer-http"] * 2
    as_ids = (await served.post("/v1/completions", {**asked, "prompt": [ids, ids]})).json()
    assert (told["choices"], told["usage"]) == (as_ids["choices"], as_ids["usage"])
    assert told["usage"]["prompt_tokens"] == 600
    echoed = (await served.post("/v1/completions", {**asked, "prompt": text, "echo": True})).json()["choices"]
    assert [choice["text"] for choice in echoed] == [text + choice["text"] for choice in told["choices"][:2]]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    engine: Engine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: TextPipeline, text: str, *, add_special_tokens: bool) -> list[int]:
        raise AssertionError("it is not encoded")

    monkeypatch.setattr(TextPipeline, "encode", encode)
    text = "w" * (4 * engine.limits.max_length + 1)
    reply = await served.post("/v1/completions", {**ASKED, "prompt": text})
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    with pytest.raises(ContextLengthExceeded, match="can fit the context"):
        await engine.generate(text)


async def test_a_character_of_several_tokens_is_echoed_whole(no_tasks_left: None, tmp_path: Path) -> None:
    said = "a\u00e9 \U0001f980!"
    async with (
        Engine("fake", tokenizer=save_byte_tokenizer(tmp_path), fake_vocab_size=VOCAB_SIZE) as engine,
        serving(engine) as served,
    ):
        ids = (await served.post("/tokenize", {"prompt": said})).json()["tokens"]
        for prompt in (said, ids):
            asked = {**ASKED, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
            choice = (await served.post("/v1/completions", asked)).json()["choices"][0]
            known = choice["logprobs"]
            assert choice["text"].startswith(said)
            assert known["tokens"][:-1] == ["a", *["\ufffd"] * 2, " ", *["\ufffd"] * 4, "!"]
            assert known["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4, 5]


async def test_answers_about_tokens_are_written_where_their_bodies_are_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def json_response(content: Any, status: int = 200) -> Response:
        written.append(threading.current_thread().name)
        return Response(json.dumps(content), status)

    monkeypatch.setattr(app, "_json", json_response)
    await served.post("/tokenize", {"prompt": "w5 " * 1000})
    await served.post("/detokenize", {"tokens": [5] * 1000})
    assert [name.rpartition("_")[0] for name in written] == ["deepinfer-http"] * 2


async def test_an_engine_on_a_thread_of_its_own_is_served_like_any_other(no_tasks_left: None) -> None:
    async with Engine("fake", fake_vocab_size=97, own_thread=True) as engine, serving(engine) as served:
        replies = await asyncio.gather(*[served.post("/v1/completions", ASKED) for _ in range(8)])
        assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [8] * 8


async def test_a_refusal_before_a_stream_begins_has_a_status_of_its_own(engine: Engine) -> None:
    async with serving(engine, queue_timeout_s=0.05) as served:
        asked = {**FOR_LONG, "n": 8}
        async with begun(served, n=8):  # every slot is taken
            reply = await served.post("/v1/completions", asked)
        assert (reply.status, reply.json()["error"]["code"]) == (503, "queue_timeout")
        assert reply.headers["retry-after"] == "1"


# ---- a model with a chat template of its own

TEMPLATE: Final = "{% for message in messages %}{{ message.content }} {% endfor %}word"
SAID: Final[list[dict[str, Any]]] = [{"role": "user", "content": "w5 w6"}]


@pytest.fixture
def templated_model(word_model: str) -> str:
    Path(word_model, "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return word_model


@pytest.fixture
async def templated(no_tasks_left: None, templated_model: str) -> AsyncIterator[Served]:
    async with (
        Engine("fake", tokenizer=templated_model, fake_vocab_size=97, block_size=4) as engine,
        serving(engine, served_names=("words", "w")) as served,
    ):
        yield served


async def test_a_template_serves_all_three_apis(templated: Served) -> None:
    raw = await templated.post("/v1/completions", {"model": "w", "prompt": "w5 w6 word", "max_tokens": 6, "seed": 3})
    text = raw.json()["choices"][0]["text"]
    asked = {"model": "w", "messages": SAID, "max_tokens": 6, "seed": 3}
    chat = (await templated.post("/v1/chat/completions", asked)).json()
    assert chat["choices"][0]["message"]["content"] == text and chat["model"] == "w"
    assert chat["usage"] == chat["usage"] | {"prompt_tokens": 3, "completion_tokens": 6}
    response = await templated.post(
        "/v1/responses", {"model": "words", "input": "w5 w6", "max_output_tokens": 6, "temperature": 0}
    )
    assert response.json()["status"] == "incomplete" and response.json()["usage"]["input_tokens"] == 3
    message = await templated.post("/v1/messages", {"model": "words", "messages": SAID, "max_tokens": 6})
    assert message.json()["stop_reason"] == "max_tokens" and message.json()["usage"]["output_tokens"] == 6


async def test_a_template_has_log_probabilities_too(templated: Served) -> None:
    asked = {"model": "w", "messages": SAID, "max_tokens": 4, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = (await templated.post("/v1/chat/completions", asked)).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == whole["message"]["content"].split()
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    reply = await templated.post("/v1/chat/completions", {**asked, "stream": True})
    chunks = [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    told = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [entry for part in told for entry in part] == entries


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("thinking", {"type": "enabled"}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        ("messages", [*SAID, {"role": "assistant", "content": "w7", "prefix": True}]),
    ],
)
async def test_what_a_template_cannot_do_is_refused(field: str, value: Any, templated: Served) -> None:
    reply = await templated.post("/v1/chat/completions", {"model": "w", "messages": SAID, field: value})
    assert (reply.status, reply.json()["error"]["param"]) == (400, field)
