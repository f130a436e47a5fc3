"""What serving costs and how long readers wait: in the process, over the client wire, and over HTTP.

    python benchmarks/serving.py --json [--model fake] [--prompts FILE] [--rates 5,10,20]
    python benchmarks/serving.py --stalled --json

Each way first gets as many requests as it takes at once (`rate` 0), which says its capacity, then requests at rising
shares of that, as a Poisson process. `fake` is a worker that costs nothing: its steps take `--step-ms`, its texts are
those of V4.1-Nano's tokenizer. Wire and HTTP are doors of `deepinfer serve`, a process of its own. CPU time is of the
engine and its server (`server`) and of the readers (`client`), without the worker; in the process both are one. Tokens
that come at once count as evenly spaced since those before them. A file of prompts has a JSON object a line, with
`turns`. Linux only.

With `--stalled` 64 streams run over the wire. The process that reads one of them is stopped and let go on by turns:
told is the time between tokens of the others while it reads and while it does not, the ratio, in the median, and what
windows differ by among themselves (`spread`: two in a row in which it reads, the larger by the smaller, in the median).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from deepinfer import Client, DeepInferError, Engine, SamplingParams, connect
from deepinfer.bench import Percentiles
from deepinfer.cli.common import engine_settings
from deepinfer.home import new_loop
from deepinfer.many import run_all

WAYS: Final = ("process", "wire", "http")
TOKENIZER: Final = "v41-nano"
VOCAB_SIZE: Final = 8192
SETTLE_S: Final = 0.5
"""After a process was stopped or let go on, before its window begins."""
PROMPTS: Final = (
    "Tell me a short story about a lost dog.",
    "What should I cook for six friends who do not eat meat?",
    "Explain to a child why the sky is blue and the evening red.",
    "Write a letter to a neighbour whose music is too loud at night. Stay friendly.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Say why people get it wrong.",
    "Name three things that a traveller in the mountains must not forget.",
)
READER: Final = """
import asyncio, sys
from deepinfer import SamplingParams, connect

async def read(url, max_tokens):
    async with connect(url) as client:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        async for chunk in client.stream([1, 2, 3], params):
            if not chunk.first_index:
                print("reading", flush=True)

asyncio.run(read(sys.argv[1], int(sys.argv[2])))
"""
"""A client in a process of its own: the server's address and how much it reads."""


class Asked(NamedTuple):
    """One request of a load."""

    prompt: str
    max_tokens: int
    at_s: float
    """Since the load began."""


class Refused(Exception):
    """A request came to no end; its text is the code."""


class Way(Protocol):
    """A way to an engine."""

    name: str

    def answer(self, asked: Asked) -> AsyncIterator[int]:
        """How many tokens came, whenever some do. Raises `Refused`."""

    def cpu_s(self) -> tuple[float, float]:
        """Of engine and server, and of the readers, since their processes began; the first is 0 where it is one."""


# ---- the ways


class Streams:
    """An engine in this process, or a client of the wire: they have the same streams."""

    def __init__(self, name: str, door: Engine | Client, server: Server | None = None) -> None:
        self.name = name
        self._door = door
        self._server = server

    async def answer(self, asked: Asked) -> AsyncIterator[int]:
        messages = [{"role": "user", "content": asked.prompt}]
        params = SamplingParams(max_tokens=asked.max_tokens, temperature=0.0, ignore_eos=True)
        try:
            async with self._door.stream(messages=messages, params=params) as stream:
                async for chunk in stream:
                    yield len(chunk.token_ids)
        except DeepInferError as error:
            raise Refused(error.code) from None

    def cpu_s(self) -> tuple[float, float]:
        return 0.0 if self._server is None else self._server.cpu_s(), time.process_time()


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(Struct):
    delta: Delta


class Usage(Struct):
    completion_tokens: int


class Failure(Struct):
    code: str


class Event(Struct):
    """As much of a chat completion's chunk as counts tokens."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Failure | None = None

    @property
    def has_text(self) -> bool:
        return any(choice.delta.content or choice.delta.reasoning_content for choice in self.choices)


class Http:
    """Chat completions as server-sent events, a connection each."""

    name = "http"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._decode = msgspec.json.Decoder(Event).decode

    async def answer(self, asked: Asked) -> AsyncIterator[int]:
        """An event with text counts as a token; those whose text came with a later one are counted at the end."""
        num_tokens = 0
        async for event in self._events(asked):
            if event.error is not None:
                raise Refused(event.error.code)
            count = int(event.has_text)
            if event.usage is not None:
                count = event.usage.completion_tokens - num_tokens
            num_tokens += count
            yield count

    async def _events(self, asked: Asked) -> AsyncIterator[Event]:
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            writer.write(self._request(asked))
            head = await reader.readuntil(b"\r\n\r\n")
            if head.split(None, 2)[1] != b"200":
                yield self._decode(await reader.read())
                return
            while size := int(await reader.readuntil(b"\r\n"), 16):
                part = await reader.readexactly(size + 2)
                for line in part.split(b"\n"):
                    if line.startswith(b"data: {"):
                        yield self._decode(line[6:])
        except (OSError, EOFError) as error:
            raise Refused(type(error).__name__) from None
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _request(self, asked: Asked) -> bytes:
        body = {
            "model": self._server.name,
            "messages": [{"role": "user", "content": asked.prompt}],
            "max_tokens": asked.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        raw = msgspec.json.encode(body)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._server.host}\r\nconnection: close\r\n"
        return head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw

    def cpu_s(self) -> tuple[float, float]:
        return self._server.cpu_s(), time.process_time()


class Server:
    """`deepinfer serve` with both doors, while it runs."""

    name = "served"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._pid = process.pid
        wire, http = (process.stdout.readline().split() for _ in range(2))
        if not http:
            raise SystemExit("the server has not started")
        self.wire_url = wire[-1]
        self.host, _, port = http[-1].removeprefix("http://").partition(":")
        self.port = int(port)

    def cpu_s(self) -> float:
        """User and system time, all threads; its worker is a process of its own."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(model: str, settings: dict[str, Any]) -> Iterator[Server]:
    command = [sys.executable, "-m", "deepinfer", "serve", model, "--http", "127.0.0.1:0", "--no-log", "--drain-s", "0"]
    command += ["--served-name", Server.name]
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with running(command, stderr=subprocess.DEVNULL) as process:
        yield Server(process)


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def opened(name: str, model: str, settings: dict[str, Any]) -> AsyncIterator[Way]:
    async with AsyncExitStack() as stack:
        if name == "process":
            yield Streams(name, await stack.enter_async_context(Engine(model, **settings)))
            return
        server = stack.enter_context(serving(model, settings))
        if name == "wire":
            yield Streams(name, await stack.enter_async_context(connect(server.wire_url)), server)
        else:
            yield Http(server)


# ---- a load and what comes of it


def read_prompts(file: Path | None) -> Sequence[str]:
    """First turns of conversations, a JSON object a line."""
    if file is None:
        return PROMPTS
    return [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]


def draw(prompts: Sequence[str], count: int, mean_tokens: int, rate: float, seed: int) -> list[Asked]:
    """`rate` in requests/s; 0: all at once. Answers have 1/2 to 3/2 of `mean_tokens`."""
    drawn, at_s = random.Random(f"{seed} {rate}"), 0.0
    found = []
    for _ in range(count):
        at_s += drawn.expovariate(rate) if rate else 0.0
        max_tokens = drawn.randint(max(mean_tokens // 2, 1), max(3 * mean_tokens // 2, 1))
        found.append(Asked(drawn.choice(prompts), max_tokens, at_s))
    return found


class Readers:
    """What the readers of one load saw."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self.ttft_s, self.gaps_s = array("d"), array("d")
        self.num_tokens = self.num_done = 0
        self.refusals: Counter[str] = Counter()

    async def read(self, asked: Asked, begun_s: float) -> None:
        """`begun_s`: since when the reader waits."""
        last_s = 0.0
        try:
            async for count in self._way.answer(asked):
                if not count:
                    continue
                now_s = time.perf_counter()
                if last_s:
                    self.gaps_s.extend([(now_s - last_s) / count] * count)
                else:
                    self.ttft_s.append(now_s - begun_s)
                last_s = now_s
                self.num_tokens += count
            self.num_done += 1
        except Refused as error:
            self.refusals[str(error)] += 1


async def replay(way: Way, load: Sequence[Asked], num_at_once: int) -> dict[str, Any]:
    """At most `num_at_once` (0: any number) are under way together."""
    turn = asyncio.Semaphore(num_at_once or len(load))
    readers = Readers(way)
    server_s, client_s = way.cpu_s()
    start_s = time.perf_counter()

    async def ask(asked: Asked) -> None:
        due_s = start_s + asked.at_s
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        async with turn:
            await readers.read(asked, time.perf_counter() if num_at_once else due_s)

    await run_all([ask(asked) for asked in load])
    duration_s = time.perf_counter() - start_s
    server_s, client_s = (after - before for after, before in zip(way.cpu_s(), (server_s, client_s), strict=True))
    per_token = 1e6 / max(readers.num_tokens, 1)
    return {
        "requests": len(load),
        "tokens": readers.num_tokens,
        "duration_s": round(duration_s, 3),
        "requests_per_s": round(readers.num_done / duration_s, 3),
        "tokens_per_s": round(readers.num_tokens / duration_s, 1),
        "ttft_ms": Percentiles.of(readers.ttft_s, 1e3),
        "inter_token_ms": Percentiles.of(readers.gaps_s, 1e3),
        "refusals": readers.refusals,
        "server_us_per_token": round(per_token * server_s, 1) if server_s else None,
        "client_us_per_token": round(per_token * client_s, 1) if server_s else None,
        "host_us_per_token": round(per_token * (server_s + client_s), 1),
    }


async def measure(name: str, options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Of one way: a line at once, then one a rate."""
    prompts = read_prompts(options.prompts)

    def load(rate: float) -> list[Asked]:
        count = max(round(rate * options.seconds), 4) if rate else 4 * options.streams
        return draw(prompts, count, options.tokens, rate, options.seed)

    async with opened(name, options.model, settings_of(options)) as way:
        await replay(way, load(0.0)[:4], 2)  # what only first requests cost is not measured
        full = await replay(way, load(0.0), options.streams)
        yield {"way": name, "rate": 0.0, **full}
        for rate in options.rates or [round(share * full["requests_per_s"], 3) for share in options.shares]:
            yield {"way": name, "rate": rate, **await replay(way, load(rate), 0)}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_num_seqs": options.streams}
    if options.model == "fake":
        settings |= {"tokenizer": TOKENIZER, "fake_vocab_size": VOCAB_SIZE, "fake_check_stamps": False}
        settings["fake_step_s"] = options.step_ms / 1e3
    return settings | engine_settings(options.set)


# ---- a client that stops reading


class Gaps:
    """Times between tokens, kept while a window is open."""

    def __init__(self) -> None:
        self.window: array[float] | None = None

    async def read(self, client: Client, index: int, params: SamplingParams) -> None:
        last_s = time.perf_counter()
        async for chunk in client.stream([1, 2, 3, index], params):
            now_s, count = time.perf_counter(), len(chunk.token_ids)
            if self.window is not None:
                self.window.extend([(now_s - last_s) / count] * count if count else ())
            last_s = now_s

    async def during(self, seconds: float) -> float:
        """The 99th percentile, in ms, of a window that opens when things have settled."""
        await asyncio.sleep(SETTLE_S)
        self.window = window = array("d")
        await asyncio.sleep(seconds)
        self.window = None
        return Percentiles.of(window, 1e3).p99


async def measure_stalled(options: argparse.Namespace) -> dict[str, Any]:
    """Windows with and without, by turns."""
    num_tokens = 30_000
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    pairs: list[tuple[float, float]] = []
    async with AsyncExitStack() as stack:
        server = stack.enter_context(serving(options.model, settings_of(options)))
        client = await stack.enter_async_context(connect(server.wire_url))
        command = [sys.executable, "-c", READER, server.wire_url, str(num_tokens)]
        other = stack.enter_context(running(command))
        gaps = Gaps()
        reading = [asyncio.create_task(gaps.read(client, index, params)) for index in range(options.streams - 1)]
        assert other.stdout is not None
        if not await asyncio.to_thread(other.stdout.readline):
            raise SystemExit("the other client could not read")
        for _ in range(options.pairs):
            reading_ms = await gaps.during(options.window_s)
            other.send_signal(signal.SIGSTOP)
            stalled_ms = await gaps.during(options.window_s)
            other.send_signal(signal.SIGCONT)
            pairs.append((reading_ms, stalled_ms))
        if any(task.done() for task in reading):
            raise SystemExit("a stream ended too early: fewer pairs, shorter windows or longer steps are needed")
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    with_it = [pair[0] for pair in pairs]
    return {
        "pairs": options.pairs,
        "window_s": options.window_s,
        "p99_reading_ms": with_it,
        "p99_stalled_ms": [pair[1] for pair in pairs],
        "ratio": round(median(stalled / reading for reading, stalled in pairs), 4),
        "spread": round(median([max(two) / min(two) for two in pairwise(with_it)] or [1.0]), 4),
    }


# ---- the command


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--ways", default=",".join(WAYS), help="of process, wire and http")
    parser.add_argument("--streams", type=int, default=64, help="sequences at once")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, in the mean")
    parser.add_argument("--prompts", type=Path, help="a file with a JSON object a line: `turns`")
    parser.add_argument("--rates", type=numbers, help="requests a second, with commas; not given: see --shares")
    parser.add_argument("--shares", type=numbers, default=[0.25, 0.5, 0.75, 1.0, 1.25], help="of a way's capacity")
    parser.add_argument("--seconds", type=float, default=10.0, help="during which requests arrive, of each rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of `fake`")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    parser.add_argument("--stalled", action="store_true", help="what a client that stops reading costs the others")
    parser.add_argument("--pairs", type=int, default=24, help="of windows, with --stalled")
    parser.add_argument("--window-s", type=float, default=2.0, help="with --stalled")
    return parser.parse_args(argv)


async def run(options: argparse.Namespace) -> None:
    about = {
        "benchmark": "serving_stalled" if options.stalled else "serving",
        "model": options.model,
        "streams": options.streams,
        "step_ms": options.step_ms if options.model == "fake" else None,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    if options.stalled:
        tell(about | await measure_stalled(options), options.json)
        return
    about |= {"mean_tokens": options.tokens, "seed": options.seed}
    for name in options.ways.split(","):
        async for found in measure(name, options):
            tell(about | found, options.json)


def tell(found: dict[str, Any], is_json: bool) -> None:
    plain = msgspec.to_builtins(found)
    if is_json:
        print(json.dumps(plain), flush=True)
    else:
        print("\n".join(f"{key:20} {value}" for key, value in plain.items()), end="\n\n", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run(options))


if __name__ == "__main__":
    main()
