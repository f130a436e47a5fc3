"""`deepinfer serve --http`, as a process with signals of its own."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deepinfer import SamplingParams, connect
from doubles.command import Running, run_command, running

FAKE: Final = ("serve", "fake", "--http", "127.0.0.1:0", "--set", "fake_step_s=0.01", "--set", "fake_vocab_size=97")
ASKED: Final = {"model": "fake", "prompt": [1, 2], "ignore_eos": True, "stream": True, "logprobs": 0}


@contextmanager
def serving(*options: str) -> Iterator[tuple[Running, int]]:
    """The command, and the port it listens on."""
    with running(*FAKE, *options) as server:
        while (found := re.search(r"listening on http://127\.0\.0\.1:(\d+)\n", server.written)) is None:
            server.read_until("\n", times=server.written.count("\n") + 1)
        yield server, int(found[1])


def begin(port: int, max_tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream, from its first event on."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({**ASKED, "max_tokens": max_tokens})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    return connection, response


def rest_of(response: http.client.HTTPResponse) -> bytes:
    """What comes, also of a response that is cut off."""
    try:
        return response.read()
    except http.client.IncompleteRead as cut:
        return cut.partial


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass  # it was in the queue of the listener that closed
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_streams_end_and_nobody_else_in(number: signal.Signals) -> None:
    with serving() as (server, port):
        connection, response = begin(port, 150)
        server.process.send_signal(number)
        server.read_until("finishing what is open")
        while not is_refused(port):
            pass  # the listener is closed a moment later
        rest = rest_of(response)
        assert rest.endswith(b"data: [DONE]\n\n") and rest.count(b'"token_logprobs"') >= 140
        connection.close()
        assert server.end() == 0
        assert "POST /v1/completions 200" in server.written and "stopped" in server.written


def test_a_second_signal_does_not_wait() -> None:
    with serving() as (server, port):
        connection, response = begin(port, 30_000)
        server.process.terminate()
        server.read_until("finishing what is open")
        server.process.terminate()
        assert server.end() == 0
        assert b"[DONE]" not in rest_of(response)
        connection.close()


def test_what_is_open_for_too_long_is_cut_off() -> None:
    with serving("--drain-s", "1") as (server, port):
        connection, response = begin(port, 30_000)
        server.process.terminate()
        assert server.end() == 0
        assert b"[DONE]" not in rest_of(response)
        connection.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--http", "0.0.0.0:0"), "http: 0.0.0.0 can be reached from other machines: --api-keys FILE says who may"),
        (("--http", "[::]:0"), "http: :: can be reached from other machines"),
        (("--http", "example.org:80"), "http: example.org can be reached from other machines"),
        (("--http", "8000"), "http: '8000': HOST:PORT is expected"),
        (("--http", "127.0.0.1:99999"), "http: '127.0.0.1:99999': HOST:PORT is expected"),
        (("--http", "127.0.0.1:x"), "HOST:PORT is expected"),
        (("--served-name", "x"), "http: --served-name, --api-keys and --traces are for --http HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_is_refused_before_anything_is_loaded(options: tuple[str, ...], said: str) -> None:
    done = run_command("serve", "no-such-model", *options)
    assert done.returncode == 2 and said in done.stderr, done


def test_the_client_wire_is_open_beside_it() -> None:
    async def ask(url: str) -> list[int]:
        async with connect(url) as client:
            return (await client.generate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True))).token_ids

    with serving() as (server, port):
        found = re.search(r"listening on (ipc://\S+)\n", server.written)
        assert found is not None and len(asyncio.run(ask(found[1]))) == 5
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as scrape:
            assert b"\ndeepinfer:wire_streams 0.0\n" in scrape.read()
        connection, response = begin(port, 100)
        server.process.terminate()
        assert rest_of(response).endswith(b"data: [DONE]\n\n")
        connection.close()
        assert server.end() == 0 and not Path(found[1].removeprefix("ipc://")).exists()


def test_keys_come_from_a_file_and_are_looked_at(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("short\n")
    done = run_command(*FAKE, "--api-keys", str(keys))
    assert done.returncode == 2 and "api_keys: a key has at least 16 characters" in done.stderr
    keys.write_text("sk-0123456789abcdef\n")
    with serving("--api-keys", str(keys), "--no-log") as (server, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for headers, status in (({}, 401), ({"authorization": "Bearer sk-0123456789abcdef"}, 200)):
            connection.request("GET", "/v1/models", headers=headers)
            response = connection.getresponse()
            assert response.status == status and response.read()
        connection.close()
        server.process.terminate()
        assert server.end() == 0 and "/v1/models" not in server.written


@pytest.mark.parametrize("option", ["--api-keys", "--token-file"])
@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b" \n\t\n", "is empty"), (b"\xff" * 16, "text in UTF-8 is expected")],
)
def test_a_file_of_secrets_that_has_none_is_refused(option: str, content: bytes, said: str, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_bytes(content)
    done = run_command("serve", "no-such-model", "--http", "127.0.0.1:0", option, str(secrets))
    field = option.removeprefix("--").replace("-", "_")
    assert done.returncode == 2 and f"{field}: " in done.stderr and said in done.stderr, done


def test_a_token_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 257)
    done = run_command("serve", "no-such-model", "--token-file", str(token))
    assert done.returncode == 2 and "token: 257 characters, at most 256" in done.stderr, done


class _Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        server: Any = self.server
        server.received.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def test_spans_are_sent_to_a_collector_at_the_latest_at_the_end() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as collector:
        received: list[bytes] = []
        collector.received = received  # type: ignore[attr-defined]
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with serving("--traces", f"http://127.0.0.1:{collector.server_address[1]}/v1/traces") as (server, port):
                connection, response = begin(port, 5)
                assert rest_of(response)
                connection.close()
                server.process.terminate()
                assert server.end() == 0, server.written
        finally:
            collector.shutdown()
            thread.join()
    request = ExportTraceServiceRequest.FromString(b"".join(received))
    [resource] = request.resource_spans
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert names == ["text_completion fake"]
    assert {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"] == "deepinfer"


def test_a_collector_that_is_none_is_refused() -> None:
    done = run_command("serve", "fake", "--http", "127.0.0.1:0", "--traces", "localhost:4317")
    assert done.returncode == 2 and "traces: 'localhost:4317': an http(s) URL is expected" in done.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = run_command("serve", "fake", "--http", address)
    assert done.returncode == 2 and f"http: {address}: Address already in use" in done.stderr
