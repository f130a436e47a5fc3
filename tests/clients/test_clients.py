"""Clients in other languages, against the golden frames and against a server: every token once, and every end told."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import pytest
import zmq
from msgspec.structs import replace
from tokenizers import Tokenizer

from clients.conftest import Server, start_server, stop_server
from clients.programs import Programs
from clients.proxy import Proxy
from deepinfer.wire.keys import read_pair, write_keys
from deepinfer_protocol.client import (
    ClientMessage,
    Delta,
    Error,
    ErrorCode,
    Finish,
    Grant,
    Hello,
    Limits,
    Reject,
    Resume,
    ServerMessage,
    Submit,
    Welcome,
    decode_client,
    encode,
)
from doubles.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from protocol.client_frames import GOLDEN, read_golden, verdict_of
from protocol.mutate import mutate

TIMEOUT_S: Final = 60.0
PROMPT: Final = "1,2,3"


class Piece(NamedTuple):
    sample: int
    first: int
    token_ids: list[int]
    reason: str


class Told(NamedTuple):
    """What a probe printed."""

    deltas: list[Piece]
    end: list[str]
    num_reconnects: int
    deadline_ms: int | None
    """The server goes away."""

    def tokens(self, sample: int = 0) -> list[int]:
        """In order; each must be where it says that it is."""
        tokens: list[int] = []
        for delta in self.deltas:
            if delta.sample == sample:
                assert delta.first == len(tokens), "a token is lost or doubled"
                tokens += delta.token_ids
        return tokens


def read(output: str) -> Told:
    deltas: list[Piece] = []
    end: list[str] = []
    num_reconnects, deadline_ms = 0, None
    for line in output.splitlines():
        word, *rest = line.split()
        if word == "delta":
            sample, index, ids, reason = rest
            token_ids = [] if ids == "-" else [int(token_id) for token_id in ids.split(",")]
            deltas.append(Piece(int(sample), int(index), token_ids, reason))
        elif word == "reconnects":
            num_reconnects = int(rest[0])
        elif word == "deadline":
            deadline_ms = None if rest[0] == "-" else int(rest[0])
        else:
            end = [word, *rest]
    return Told(deltas, end, num_reconnects, deadline_ms)


def probe(programs: Programs, url: str, max_tokens: int, *options: str) -> Told:
    command = [*programs.probe, url, PROMPT, str(max_tokens), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


LIMITS: Final = Limits(
    max_frame_bytes=2**22, max_streams=8, retention_ms=30_000, max_unacked_tokens=4096, ping_ms=1000, idle_ms=10_000
)
WELCOME: Final = Welcome(version=1, engine="one", server="s", model="m", vocab_size=97, max_length=1000, limits=LIMITS)
STRANGER: Final = Error.of(ErrorCode.E_HELLO)


class Scripted:
    """A server that says what a test wants, on a thread of its own, and keeps what it heard."""

    def __init__(self, answer: Callable[[ClientMessage], list[ServerMessage]]) -> None:
        self.heard: list[ClientMessage] = []
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.url = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._is_open = True
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._thread.join()
        self._socket.close()
        self._context.term()

    def num(self, kind: type[ClientMessage]) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    def _serve(self) -> None:
        while self._is_open:
            if not self._socket.poll(20):
                continue
            who, frame = self._socket.recv_multipart()
            message = decode_client(frame)
            self.heard.append(message)
            for answer in self._answer(message):
                self._socket.send_multipart([who, encode(answer)])


def test_every_golden_frame(programs: Programs) -> None:
    done = subprocess.run(programs.vectors, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    num_frames = len(GOLDEN.read_text(encoding="utf-8").splitlines()) - 1
    passed = re.search(r"# pass (\d+)|(\d+) passed, 0 failed", done.stdout)
    assert passed is not None and int(passed[1] or passed[2]) >= num_frames


def test_mutated_frames_have_the_verdicts_that_python_gives(programs: Programs) -> None:
    rng = random.Random(32)
    golden = [frame for frame in read_golden()[1] if len(frame.data) < 1000]
    cases = [(frame.sender, mutate(frame.data, rng)) for frame in rng.choices(golden, k=10_000)]
    lines = "".join(f"{sender} {data.hex()}\n" for sender, data in cases)
    done = subprocess.run(programs.verdicts, input=lines, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    expected = [verdict_of(sender, data) for sender, data in cases]
    others = [
        (sender, data.hex(), verdict, other)
        for (sender, data), verdict, other in zip(cases, expected, done.stdout.split(), strict=True)
        if verdict != other
    ]
    assert others == []
    assert min(Counter(expected)[verdict] for verdict in ("ok", "E_DECODE", "E_UNKNOWN_KIND")) > 10


def test_a_stream_over_tcp(programs: Programs, server: Server) -> None:
    told = probe(programs, server.url, 300)
    assert len(told.tokens()) == 300
    assert told.deltas[-1].reason == "length"
    assert told.end == ["finish", "length", "3", "300"]
    assert probe(programs, server.url, 300).tokens() == told.tokens()


def test_a_stream_over_ipc(programs: Programs, server: Server, home: Path) -> None:
    home.chmod(0o700)
    other = start_server(home, listen=f"ipc://{home}/s")
    try:
        told = probe(programs, other.url, 50)
    finally:
        stop_server(other.process)
    assert told.tokens() == probe(programs, server.url, 50).tokens()


def test_the_example_prints_text(programs: Programs, home: Path, word_model: str) -> None:
    server = start_server(home, "--set", f"tokenizer={word_model}")
    try:
        done = subprocess.run(
            [*programs.example, server.url, "w1 w2 w3"], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    finally:
        stop_server(server.process)
    assert done.returncode == 0, done.stderr
    text, _, end = done.stdout.rstrip().rpartition("\n")
    assert re.fullmatch(r"(w\d+|word)( (w\d+|word))*", text.strip())
    assert re.fullmatch(r"\[(length|stop), \d+ tokens\]", end)


def test_an_expression_is_enforced(programs: Programs, home: Path, tmp_path: Path) -> None:
    folder = save_byte_tokenizer(tmp_path)
    server = start_server(home, "--set", f"tokenizer={folder}", "--set", f"fake_vocab_size={VOCAB_SIZE}")
    try:
        told = probe(programs, server.url, 60, r"regex=[0-9]{20}\.")
        refused = probe(programs, server.url, 60, "regex=(")
    finally:
        stop_server(server.process)
    text = Tokenizer.from_file(f"{folder}/tokenizer.json").decode(told.tokens())
    assert re.fullmatch(r"[0-9]{20}\.", text) and told.end[:2] == ["finish", "stop"]
    assert refused.end == ["error", str(int(ErrorCode.E_GRAMMAR)), "regex"]


def test_samples(programs: Programs, server: Server) -> None:
    told = probe(programs, server.url, 40, "n=3", "temperature=1.0")
    assert [len(told.tokens(sample)) for sample in range(3)] == [40, 40, 40]
    assert told.end == ["finish", "length", "3", "120"]


def test_cancelling(programs: Programs, server: Server) -> None:
    began = time.monotonic()
    told = probe(programs, server.url, 30_000, "cancel_after=50")
    assert 50 <= len(told.tokens()) < 1000
    assert told.end[:3] == ["finish", "abort", "3"] and 50 <= int(told.end[3]) < 5000
    assert time.monotonic() - began < 10.0


def test_a_cancel_after_the_end_drops_what_was_not_read(programs: Programs, server: Server) -> None:
    told = probe(programs, server.url, 50, "cancel_after=1", "delay_ms=500")
    assert len(told.deltas) == 1
    assert told.end == ["finish", "length", "3", "50"]


def test_a_slow_reader_has_its_window_and_all_tokens(programs: Programs, server: Server) -> None:
    told = probe(programs, server.url, 300, "window=16", "delay_ms=2")
    assert told.tokens() == probe(programs, server.url, 300).tokens()
    assert told.end == ["finish", "length", "3", "300"]


def test_a_refusal_names_the_field(programs: Programs, server: Server) -> None:
    assert probe(programs, server.url, 10, "temperature=-1").end == ["error", "10", "temperature"]


@pytest.mark.parametrize("how", ["cut for a moment", "cut for 5 s", "held for 5 s"])
def test_no_token_is_lost_or_doubled_by_a_cut(programs: Programs, server: Server, how: str) -> None:
    whole = probe(programs, server.url, 2000).tokens()
    with Proxy(server.port) as proxy:
        command = [*programs.probe, f"tcp://127.0.0.1:{proxy.port}", PROMPT, "2000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = [process.stdout.readline() for _ in range(100)]
            (proxy.hold if how.startswith("held") else proxy.cut)()
            time.sleep(5.0 if how.endswith("5 s") else 0.0)
            proxy.mend()
            rest, _ = process.communicate(timeout=TIMEOUT_S)
    told = read("".join(first) + rest)
    assert told.tokens() == whole
    assert told.end == ["finish", "length", "3", "2000"]
    assert told.num_reconnects >= 1


def test_a_server_that_is_started_anew_has_lost_the_stream(programs: Programs, home: Path) -> None:
    first = start_server(home)
    with Proxy(first.port) as proxy:
        command = [*programs.probe, f"tcp://127.0.0.1:{proxy.port}", PROMPT, "30000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(100)]
            proxy.cut()
            first.process.kill()
            stop_server(first.process)
            second = start_server(home, listen=f"tcp://127.0.0.1:{first.port}")
            try:
                proxy.mend()
                rest, _ = process.communicate(timeout=TIMEOUT_S)
            finally:
                stop_server(second.process)
    told = read("".join(lines) + rest)
    assert told.end == ["error", "lost", "-"]
    assert [key for key, _ in groupby(told.tokens())]  # those that came are in order


def test_what_a_server_no_longer_keeps_is_lost(programs: Programs) -> None:
    def answer(message: ClientMessage) -> list[ServerMessage]:
        match message:
            case Hello():
                return [WELCOME]
            case Submit(id=id):
                return [Delta(id=id, seq=2)]  # a gap
            case Resume(id=id):
                return [Error.of(ErrorCode.E_NOT_FOUND, id)]
        return []

    with Scripted(answer) as server:
        assert probe(programs, server.url, 10).end == ["error", "lost", "-"]


@pytest.mark.parametrize("is_resumable", [True, False])
def test_a_stream_that_nothing_was_heard_of_is_asked_for_twice(programs: Programs, is_resumable: bool) -> None:
    def answer(message: ClientMessage) -> list[ServerMessage]:
        match message:
            case Hello():
                return [WELCOME]
            case Submit(id=id):
                return [STRANGER] if server.num(Submit) == 1 else [Finish(id=id, reason="length")]
        return []

    with Scripted(answer) as server:
        told = probe(programs, server.url, 10, f"resumable={is_resumable:d}")
    assert told.end == ["finish", "length", "0", "0"]
    assert server.num(Submit) == 2 and told.num_reconnects == 1


def test_a_window_is_no_larger_than_what_another_server_has_room_for(programs: Programs) -> None:
    small = replace(WELCOME, engine="two", limits=replace(LIMITS, max_unacked_tokens=4))

    def answer(message: ClientMessage) -> list[ServerMessage]:
        match message:
            case Hello():
                return [WELCOME if server.num(Hello) == 1 else small]
            case Submit(id=id):
                if server.num(Submit) == 1:
                    return [STRANGER]
                return [Delta(id=id, seq=seq, index=seq, token_ids=bytes(4)) for seq in range(2)]
            case Grant(id=id):
                return [Finish(id=id, reason="length", seq=2)]
        return []

    with Scripted(answer) as server:
        assert probe(programs, server.url, 10).end[:2] == ["finish", "length"]
    assert [(grant.limit, grant.ack) for grant in server.heard if isinstance(grant, Grant)] == [(6, 2)]


def test_a_full_server_is_not_pressed_and_named_when_time_is_up(programs: Programs) -> None:
    full = Reject(
        code=int(ErrorCode.E_OVERLOADED), name="E_OVERLOADED", text="full", min_version=1, max_version=1, retryable=True
    )
    with Scripted(lambda message: [full]) as server:
        assert probe(programs, server.url, 10, "timeout_ms=1500").end == ["error", "20", "-"]
    assert 1 <= server.num(Hello) <= 3


def test_a_server_that_goes_away_says_by_when(programs: Programs, home: Path) -> None:
    server = start_server(home, "--drain-s", "60")
    try:
        command = [*programs.probe, server.url, PROMPT, "500"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = [process.stdout.readline() for _ in range(50)]
            server.process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=TIMEOUT_S)
        told = read("".join(first) + rest)
        assert len(told.tokens()) == 500 and told.end[:2] == ["finish", "length"]
        assert told.deadline_ms is not None and 0 < told.deadline_ms < 60_000
    finally:
        stop_server(server.process)


def test_a_server_that_stays_says_no_deadline(programs: Programs, server: Server) -> None:
    assert probe(programs, server.url, 5).deadline_ms is None


def test_only_a_client_with_keys_is_heard(programs: Programs, home: Path, tmp_path: Path) -> None:
    _, server_secret = write_keys(tmp_path / "server", "server")
    public, secret = write_keys(tmp_path / "allowed", "client")
    secret.rename(tmp_path / "client.key_secret")
    own, theirs = read_pair(tmp_path / "client.key_secret"), read_pair(server_secret)
    keys = [
        f"server_key={theirs.public.decode()}",
        f"public_key={own.public.decode()}",
        f"secret_key={own.secret.decode()}",
    ]
    server = start_server(home, "--key", str(server_secret), "--clients", str(public.parent))
    try:
        assert len(probe(programs, server.url, 20, *keys).tokens()) == 20
        assert probe(programs, server.url, 20, "timeout_ms=500").end == ["error", "lost", "-"]
    finally:
        stop_server(server.process)


@pytest.mark.parametrize("missing", ["server_key", "public_key", "secret_key"])
def test_some_of_the_keys_are_refused(programs: Programs, server: Server, missing: str) -> None:
    """Above all a client's own without the server's, which would make a connection in plain text."""
    names = [name for name in ("server_key", "public_key", "secret_key") if name != missing]
    told = probe(programs, server.url, 20, *[f"{name}={'k' * 40}" for name in names])
    assert told.deltas == [] and told.end[:2] == ["error", "0"]
    assert re.sub(r"(?=[A-Z])", "_", told.end[2]).lower() == missing


def test_a_wrong_token_is_rejected(programs: Programs, home: Path) -> None:
    (home / "token").write_text("sesame", encoding="utf-8")
    server = start_server(home, "--token-file", str(home / "token"))
    try:
        assert len(probe(programs, server.url, 20, "token=sesame").tokens()) == 20
        assert probe(programs, server.url, 20, "token=wrong").end == ["error", "3", "-"]
    finally:
        stop_server(server.process)


def test_many_at_once(programs: Programs, server: Server) -> None:
    expected = probe(programs, server.url, 100).tokens()
    got: list[list[int]] = []
    threads = [threading.Thread(target=lambda: got.append(probe(programs, server.url, 100).tokens())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 4
