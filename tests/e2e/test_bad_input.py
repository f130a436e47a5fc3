"""A request or a model that cannot be served: a typed error at the first read, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from deepinfer import (
    ContextLengthExceeded,
    Engine,
    InvalidRequest,
    ModelFileError,
    SamplingParams,
    TokenStream,
    UnknownModel,
    UnsupportedModel,
)
from deepinfer_protocol import SlotSampling
from doubles.oracle import completion
from doubles.smollm2 import model_path

REFUSED: list[tuple[dict[str, Any], type[InvalidRequest], str]] = [
    ({"prompt": []}, InvalidRequest, "prompt"),
    ({"prompt": [1] * 40_000}, ContextLengthExceeded, "prompt"),
    ({"prompt": [32_000]}, InvalidRequest, "prompt"),
    ({"prompt": [-1]}, InvalidRequest, "prompt"),
    ({"prompt": "text without a tokenizer"}, InvalidRequest, "prompt"),
    ({}, InvalidRequest, "prompt"),
    ({"prompt": [1], "messages": [{"role": "user", "content": "x"}]}, InvalidRequest, "prompt"),
    ({"prompt": [1], "params": SamplingParams(max_tokens=0)}, InvalidRequest, "max_tokens"),
    ({"prompt": [1], "params": SamplingParams(temperature=-1)}, InvalidRequest, "temperature"),
    ({"prompt": [1], "params": SamplingParams(temperature=float("nan"))}, InvalidRequest, "temperature"),
    ({"prompt": [1], "params": SamplingParams(n=10**9)}, InvalidRequest, "n"),
    ({"prompt": [1], "params": SamplingParams(logprobs=10**9)}, InvalidRequest, "logprobs"),
    ({"prompt": [1], "params": SamplingParams(stop_token_ids=[1] * 10**6)}, InvalidRequest, "stop_token_ids"),
    ({"prompt": [1], "params": SamplingParams(max_tokens=40_000)}, ContextLengthExceeded, "max_tokens"),
    ({"prompt": [1], "request_id": "a b"}, InvalidRequest, "request_id"),
    ({"prompt": [1], "priority": 1.5}, InvalidRequest, "priority"),
    ({"prompt": [1], "timeout_s": -1.0}, InvalidRequest, "timeout_s"),
    ({"prompt": [1], "queue_timeout_s": float("nan")}, InvalidRequest, "queue_timeout_s"),
]


def test_refusals_are_typed_and_leave_the_others_alone() -> None:
    async def main() -> None:
        async with Engine("fake", fake_step_s=0.001) as engine:
            prompts = [[5, 6, index] for index in range(8)]
            others = [engine.stream(prompt, SamplingParams(temperature=0, max_tokens=200)) for prompt in prompts]
            reads = [asyncio.create_task(collect(stream)) for stream in others]
            for arguments, error, field in REFUSED * 3:
                stream = engine.stream(**arguments)  # never raises here
                with pytest.raises(error) as caught:
                    await anext(stream)
                assert caught.value.field == field
            for prompt, read in zip(prompts, reads, strict=True):
                wanted, _ = completion(prompt, SlotSampling(), 203, frozenset(), 32_000)
                assert await read == wanted
            assert engine.stats().scheduler.num_blocks_used == 0

    asyncio.run(main())


def test_refusals_come_within_a_millisecond() -> None:
    """From the call to the error of the first read; the best of several tries, since this machine may be busy."""

    async def refusal_s(engine: Engine, arguments: dict[str, Any]) -> float:
        started_s = time.perf_counter()
        with pytest.raises(InvalidRequest):
            await anext(engine.stream(**arguments))
        return time.perf_counter() - started_s

    async def main() -> None:
        async with Engine("fake") as engine:
            for arguments, _, field in REFUSED:
                best_s = min([await refusal_s(engine, arguments) for _ in range(5)])
                assert best_s < 0.001, f"{field}: {arguments!r:.80} took {1e3 * best_s:.2f} ms"

    asyncio.run(main())


async def collect(stream: TokenStream) -> list[int]:
    return [token for chunk in [chunk async for chunk in stream] for token in chunk.token_ids]


def start(model: str | Path) -> None:
    async def main() -> None:
        engine = await Engine.start(model, start_timeout_s=60.0)
        await engine.aclose()

    asyncio.run(main())


def test_an_unknown_model_is_told_with_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match="smollm2-135m"):
        start("no-such-model")


@pytest.mark.model
def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    whole = model_path().read_bytes()
    file = tmp_path / "short.gguf"
    for size in (0, 3, 1000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"short\.gguf"):
            start(file)


@pytest.mark.model
def test_a_corrupted_weight_file_is_named(tmp_path: Path) -> None:
    whole = bytearray(model_path().read_bytes())
    file = tmp_path / "odd.gguf"
    whole[8:16] = (2**60).to_bytes(8, "little")  # so many tensors
    file.write_bytes(whole)
    with pytest.raises(ModelFileError, match=r"odd\.gguf"):
        start(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a config that asks for a plain Llama, and nothing else."""
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        start(folder)


def add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))


def test_a_folder_that_asks_for_code_is_refused_and_its_code_not_run(folder: Path) -> None:
    add_tokenizer(folder)
    trap = folder / "ran"
    (folder / "modeling.py").write_text(f"open({str(trap)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}))
    with pytest.raises(UnsupportedModel, match="auto_map"):
        start(folder)
    assert not trap.exists()


def test_a_missing_tensor_is_named(folder: Path) -> None:
    import numpy

    add_tokenizer(folder)
    save_file({"model.norm.weight": numpy.ones(8, numpy.float32)}, folder / "model.safetensors")
    with pytest.raises((ModelFileError, UnsupportedModel)):
        start(folder)
