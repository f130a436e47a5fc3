"""SmolLM2-135M on the CPU through `Engine.stream`: tokens a second and time to first token, by arithmetic and streams.

    python benchmarks/cpu_smollm2.py --json
    python benchmarks/cpu_smollm2.py --json --peer openvino --peer-python /path/to/venv/bin/python

Every stream has a prompt of 40 tokens of its own and 64 new tokens, greedy, `ignore_eos`, prefix cache off. A figure is
the median of the runs, one run before them not counted. `tokens_per_s` is new tokens over the wall time from the first
`stream()` to the last token, so prompts are in it; `decode_tokens_per_s` is from when all streams have their first
token. `ceiling` is what the path's matrix products alone would reach, head included: at so many rows a step for
decoding, and for prompts and decoding together (`run_ceiling`). `memory_floor` is what reading the weights alone would
allow. All of it is measured in this run, on the same threads.

The peer is openvino-genai in an environment of its own, since its packages are not ours:
`python -m venv /tmp/peer && /tmp/peer/bin/pip install openvino-genai`. It gets all prompts in one call, and reports the
time to first token itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from deepinfer import Engine, SamplingParams
from deepinfer.catalog import default_cache_dir, resolve
from deepinfer.env import worker_environment
from deepinfer.tokenizer import Tokenizer

REPO: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO)]  # where nothing is installed, the measures beside this file are found too

from benchmarks.cpu_limits import Products, Shape, Shapes, read_bandwidth  # noqa: E402
from benchmarks.quality_gate import measure_quality  # noqa: E402

MODEL: Final = "smollm2-135m"
TEXT: Final = REPO / "tests/data/english.txt"
SHAPES: Final = Shapes(
    num_layers=30,
    layer=(Shape(960, 576), Shape(576, 576), Shape(3072, 576), Shape(576, 1536)),
    head=Shape(49_152, 576),
)
DTYPES: Final = ("float32", "fast")
STREAMS: Final = (1, 16, 64)
PROMPT_TOKENS: Final = 40
NEW_TOKENS: Final = 64
STEP_POSITIONS: Final = 512
"""Positions of a step, at most: the engine's default."""


class Run(NamedTuple):
    """One run of some streams."""

    tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float
    idle_share: float


def prompts() -> list[list[int]]:
    """One for each stream: English, and no two of them begin alike."""
    ids = Tokenizer.from_model(model_path()).encode(TEXT.read_text(), add_special_tokens=False)
    return [[*ids[9 * index : 9 * index + PROMPT_TOKENS]] for index in range(max(STREAMS))]


def model_path() -> Path:
    return resolve(MODEL, cache_dir=default_cache_dir(), report=lambda _: None).path


async def run_streams(engine: Engine, texts: Sequence[Sequence[int]]) -> Run:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    idle_us = engine.stats().core.idle_us
    started = time.perf_counter()

    async def read(prompt: Sequence[int]) -> tuple[float, int]:
        """When the first token came, and how many came with it."""
        first: tuple[float, int] | None = None
        num_tokens = 0
        async for chunk in engine.stream(list(prompt), params):
            num_tokens += len(chunk.token_ids)
            first = first or (time.perf_counter(), num_tokens)
        assert num_tokens == NEW_TOKENS and first is not None
        return first

    firsts = await asyncio.gather(*[read(prompt) for prompt in texts])
    ended = time.perf_counter()
    all_run = max(when for when, _ in firsts)
    num_tokens = NEW_TOKENS * len(texts)
    return Run(
        tokens_per_s=num_tokens / (ended - started),
        # Tokens that came before all ran are few: those that early streams got while others' prompts were computed.
        decode_tokens_per_s=(num_tokens - sum(count for _, count in firsts)) / (ended - all_run),
        ttft_ms=1e3 * statistics.median(when - started for when, _ in firsts),
        idle_share=1e-6 * (engine.stats().core.idle_us - idle_us) / (ended - started),
    )


async def measure_engine(dtype: str, num_threads: int, num_runs: int) -> list[dict[str, Any]]:
    lines = []
    settings: dict[str, Any] = {"dtype": dtype, "prefix_cache": False, "max_num_seqs": max(STREAMS)}
    async with Engine(MODEL, num_threads=num_threads, **settings) as engine:
        texts = prompts()
        for num_streams in STREAMS:
            runs = [await run_streams(engine, texts[:num_streams]) for _ in range(num_runs + 1)][1:]
            medians = Run(*(statistics.median(column) for column in zip(*runs, strict=True)))
            lines.append({"engine": "deepinfer", "dtype": dtype, "streams": num_streams, **medians._asdict()})
    return lines


def limits(dtype: str) -> Iterator[dict[str, float]]:
    """For each number of streams: what the products and the reading of the weights allow."""
    products, bandwidth = Products(SHAPES, dtype), read_bandwidth()
    for num_streams in STREAMS:
        num_positions = PROMPT_TOKENS * num_streams
        size = min(num_positions, STEP_POSITIONS)
        prompts_s = num_positions / size * products.step_s(size, min(size // PROMPT_TOKENS, num_streams))
        step_s = products.step_s(num_streams, num_streams)
        yield {
            "ceiling_tokens_per_s": num_streams / step_s,
            "run_ceiling_tokens_per_s": NEW_TOKENS * num_streams / (prompts_s + (NEW_TOKENS - 1) * step_s),
            "memory_floor_tokens_per_s": num_streams * bandwidth / products.weight_bytes,
        }


def limits_of_worker(dtype: str, num_threads: int) -> list[dict[str, float]]:
    """`limits`, in a process that is set up as a worker is."""
    command = [sys.executable, __file__, "--limits", dtype, "--threads", str(num_threads)]
    environment = worker_environment([str(REPO)])
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    bounds: list[dict[str, float]] = json.loads(done.stdout)
    return bounds


def with_shares(line: dict[str, Any], bounds: dict[str, float]) -> dict[str, Any]:
    shares = {
        "share_of_ceiling": line["decode_tokens_per_s"] / bounds["ceiling_tokens_per_s"],
        "share_of_run_ceiling": line["tokens_per_s"] / bounds["run_ceiling_tokens_per_s"],
    }
    return line | bounds | shares


def measure_peer(python: str, num_runs: int) -> Iterator[dict[str, Any]]:
    counts = ",".join(map(str, STREAMS))
    command = [python, str(REPO / "benchmarks/openvino_peer.py"), str(model_path()), counts, str(NEW_TOKENS)]
    done = subprocess.run(
        [*command, str(num_runs)], input=json.dumps(prompts()), stdout=subprocess.PIPE, text=True, check=True
    )
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def gate() -> dict[str, Any]:
    tokens = Tokenizer.from_model(model_path()).encode(TEXT.read_text(), add_special_tokens=False)
    quality = measure_quality(model_path(), tokens, "fast")
    return {"gate": "fast against float32", **asdict(quality), "passes": quality.passes}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    yield {
        "benchmark": "cpu_smollm2",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "runs": arguments.runs,
    }
    for dtype in arguments.dtypes:
        lines = asyncio.run(measure_engine(dtype, torch.get_num_threads(), arguments.runs))
        bounds = limits_of_worker(dtype, torch.get_num_threads())
        yield from (with_shares(line, bound) for line, bound in zip(lines, bounds, strict=True))
    if arguments.peer:
        yield from measure_peer(arguments.peer_python, arguments.runs)
    if "fast" in arguments.dtypes:
        yield gate()


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 5 if abs(value) < 1 else 1) if isinstance(value, float) else value
        for key, value in line.items()
    }


def show(lines: list[dict[str, Any]]) -> None:
    """The figures as a table, everything else as it is."""
    from rich.console import Console
    from rich.table import Table

    columns = [
        *("engine", "dtype", "streams", "ttft_ms", "tokens_per_s", "decode_tokens_per_s", "ceiling_tokens_per_s"),
        *("share_of_ceiling", "share_of_run_ceiling", "memory_floor_tokens_per_s", "idle_share"),
    ]
    table = Table(*columns)
    for line in lines:
        if "streams" in line:
            table.add_row(*(str(line.get(column, "")) for column in columns))
    console = Console()
    console.print(*(line for line in lines if "streams" not in line), table, sep="\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a JSON object a line, as they are measured")
    parser.add_argument("--peer", choices=("openvino",), help="measure it too, in this run")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has the peer's packages")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of the device; 0: torch's choice")
    parser.add_argument("--limits", choices=DTYPES, help="the bounds alone, for one arithmetic")
    arguments = parser.parse_args(argv)
    if arguments.limits:
        torch.set_num_threads(arguments.threads or torch.get_num_threads())
        print(json.dumps(list(limits(arguments.limits))))
        return
    lines = []
    for line in map(rounded, measure(arguments)):
        lines.append(line)
        if arguments.json:
            print(json.dumps(line), flush=True)
    if not arguments.json:
        show(lines)


if __name__ == "__main__":
    main()
