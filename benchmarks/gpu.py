"""Streams on one GPU, through `Engine.stream`: tokens a second, step time, and how long the device had nothing to do.

    python benchmarks/gpu.py --json

Every point is so many streams of one prompt length, decoding greedily; the figures are of the span in which all of them
decode: from the first token of the last one to the end of the first one. `llama-8b` is the shape of Llama 3.1 8B with
random weights. First SmolLM2 in float32 is compared with what the CPU says, and graphs with no graphs, unless
`--no-golden` is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deepinfer import Engine, SamplingParams

LLAMA_8B: Final = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
_CPU_CACHE: Final = (
    "A CPU cache is a type of data storage device that caches frequently used data, such as CPU instructions, to "
    "reduce the load on the CPU's main memory."
)
GOLDEN: Final = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Explain in two sentences what a CPU cache is.", _CPU_CACHE),
    ("What is 17 + 25?", "17 + 25 = 32."),
)
"""Greedy answers of SmolLM2-135M in float32 on a CPU."""


class Span:
    """What the engine did between two moments."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._start_s = time.perf_counter()
        core = engine.stats().core
        self._start = (core.num_steps, core.num_tokens, core.device_us, core.idle_us, core.host_us)

    def figures(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self._start_s
        core = self._engine.stats().core
        now = (core.num_steps, core.num_tokens, core.device_us, core.idle_us, core.host_us)
        steps, tokens, device_us, idle_us, host_us = (b - a for a, b in zip(self._start, now, strict=True))
        steps = max(steps, 1)
        return {
            "tokens_per_s": round(tokens / wall_s),
            "step_ms": round(1e3 * wall_s / steps, 3),
            "device_ms": round(1e-3 * device_us / steps, 3),
            "device_idle_share": round(idle_us / max(device_us + idle_us, 1), 4),
            "worker_host_ms": round(1e-3 * host_us / steps, 3),
            "steps": steps,
        }


async def measure(
    engine: Engine, num_streams: int, num_prompt: int, num_tokens: int, vocab_size: int
) -> dict[str, Any]:
    """One point."""
    random_ = random.Random(num_streams)
    prompts = [[random_.randrange(100, vocab_size) for _ in range(num_prompt)] for _ in range(num_streams)]
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
    num_running, span, started_s = 0, None, time.perf_counter()
    figures: dict[str, Any] = {}
    first_s: list[float] = []

    async def read(prompt: list[int]) -> None:
        nonlocal num_running, span
        is_first = True
        async for chunk in engine.stream(prompt, params):
            if is_first:
                is_first = False
                first_s.append(time.perf_counter() - started_s)
                num_running += 1
                if num_running == num_streams:
                    span = Span(engine)
            if chunk.finish_reason is not None and span is not None and not figures:
                figures.update(span.figures())

    await asyncio.gather(*[read(prompt) for prompt in prompts])
    wall_s = time.perf_counter() - started_s
    first_s.sort()
    return figures | {
        "ttft_ms_p50": round(1e3 * first_s[len(first_s) // 2], 1),
        "whole_tokens_per_s": round(num_streams * num_tokens / wall_s),
    }


async def run_model(name: str, model: str, arguments: argparse.Namespace, **settings: Any) -> None:
    """All points of one model, overlap on and off."""
    for overlap in (True, False):
        began_s = time.perf_counter()
        async with Engine(
            model,
            accelerator="nvidia",
            overlap=overlap,
            max_num_seqs=max(arguments.streams),
            max_batch_tokens=4096,
            prefill_chunk=2048,
            prefix_cache=False,
            max_model_len=2048,
            **settings,
        ) as engine:
            load_s = round(time.perf_counter() - began_s, 1)
            await measure(engine, 8, arguments.prompt, 8, 10_000)  # warm
            for num_streams in arguments.streams:
                figures = await measure(engine, num_streams, arguments.prompt, arguments.tokens, 10_000)
                point = {"benchmark": "gpu", "model": name, "streams": num_streams, "overlap": overlap}
                report(arguments, point | figures | {"dtype": "bfloat16", "load_s": load_s})


async def golden(model: str, arguments: argparse.Namespace) -> None:
    """SmolLM2's known answers in float32, and graphs against no graphs."""

    async def answers(dtype: str, cuda_graphs: bool) -> list[list[str]]:
        params = SamplingParams(max_tokens=64, temperature=0)
        async with Engine(
            model, accelerator="nvidia", dtype=dtype, cuda_graphs=cuda_graphs, max_num_seqs=64, max_model_len=2048
        ) as engine:
            chats = [[{"role": "user", "content": question}] for question, _ in GOLDEN]
            together = await asyncio.gather(*[engine.generate(messages=chat, params=params) for chat in chats])
            alone = [await engine.generate(messages=chat, params=params) for chat in chats]
            return [[completion.text for completion in batch] for batch in (together, alone)]

    expected = [answer for _, answer in GOLDEN]
    exact = {graphs: await answers("float32", graphs) for graphs in (True, False)}
    fast = {graphs: await answers("bfloat16", graphs) for graphs in (True, False)}
    report(
        arguments,
        {
            "benchmark": "gpu-golden",
            "float32_equals_cpu": exact == {graphs: [expected, expected] for graphs in (True, False)},
            "float32_graphs_equal": exact[True] == exact[False],
            "bfloat16_graphs_equal": fast[True] == fast[False],
            "answers": exact[True][0],
            "answers_bfloat16": fast[True][0],
        },
    )


def report(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(figures), flush=True)
    else:
        print("  ".join(f"{key}={value}" for key, value in figures.items()), flush=True)


async def run(arguments: argparse.Namespace) -> None:
    if arguments.golden:
        await golden(arguments.smollm2, arguments)
    if "smollm2" in arguments.models:
        await run_model("smollm2-135m", arguments.smollm2, arguments)
    if "llama-8b" in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
            await run_model("llama-8b", folder, arguments, load_format="dummy")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--models", nargs="*", default=["smollm2", "llama-8b"], choices=["smollm2", "llama-8b"])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 64, 256, 1024])
    parser.add_argument("--prompt", type=int, default=40, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a stream")
    parser.add_argument("--smollm2", default="smollm2-135m", help="a name or a path")
    parser.add_argument("--no-golden", dest="golden", action="store_false")
    arguments = parser.parse_args(argv)
    try:
        import uvloop
    except ModuleNotFoundError:
        asyncio.run(run(arguments))
    else:
        uvloop.run(run(arguments))


if __name__ == "__main__":
    main()
