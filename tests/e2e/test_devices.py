"""The same engine on every device: random weights through the whole of it, one schedule like the other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer import Completion, Engine, SamplingParams
from deepinfer.errors import InvalidRequest
from doubles.smollm2 import model_path
from doubles.tiny_llama import TinyLlama

TINY = TinyLlama(num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab=499, max_len=256)
DEVICES = ["cpu", pytest.param("nvidia", marks=pytest.mark.gpu)]
PROMPTS = [[(7 * index + position * position) % TINY.vocab for position in range(1 + 11 * index)] for index in range(8)]
FEW_BLOCKS: dict[str, Any] = {"num_blocks": 26, "prefill_chunk": 5}
"""Some give way to others."""
SCHEDULES: list[dict[str, Any]] = [
    {"overlap": False},
    FEW_BLOCKS,
    {"max_num_seqs": 3},
    {"cuda_graphs": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("random")
    (path / "config.json").write_text(json.dumps(TINY.config))
    return str(path)


def params(index: int) -> SamplingParams:
    if index % 2:
        return SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seq_seed=index, detokenize=False)
    return SamplingParams(max_tokens=20, temperature=0, logprobs=2, detokenize=False)


async def completions(folder: str, **settings: Any) -> list[Completion]:
    async with Engine(folder, load_format="dummy", **{"dtype": "float32"} | settings) as engine:
        works = [engine.generate(prompt, params(index)) for index, prompt in enumerate(PROMPTS)]
        found = await asyncio.gather(*works)
        engine.check_integrity()
        return found


async def tokens(folder: str, **settings: Any) -> list[list[int]]:
    return [completion.token_ids for completion in await completions(folder, **settings)]


@pytest.mark.parametrize("accelerator", DEVICES)
async def test_every_schedule_gives_the_same_tokens(folder: str, accelerator: str) -> None:
    expected = await tokens(folder, accelerator="cpu")
    assert all(len(row) == 20 for row in expected)
    assert await tokens(folder, accelerator=accelerator) == expected
    for schedule in SCHEDULES if accelerator == "nvidia" else SCHEDULES[:2]:
        found = await completions(folder, accelerator=accelerator, **schedule)
        assert [completion.token_ids for completion in found] == expected, schedule
        if schedule is FEW_BLOCKS:
            assert any(completion.num_preemptions for completion in found)


async def test_without_a_state_of_slots_a_hit_is_exact_whatever_the_settings_say(folder: str) -> None:
    """By default hits are bounded and long prompts truncated, which is nothing to a model with one paged cache."""
    prompt = PROMPTS[-1]
    cold = SamplingParams(max_tokens=20, temperature=0, logprobs=2, detokenize=False, skip_reading_prefix_cache=True)
    async with Engine(folder, load_format="dummy") as engine:
        first = await engine.generate(prompt, cold)
        again = await engine.generate(prompt, params(0))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
        assert again.samples == first.samples
        assert not any(rank.shape.is_replay_bounded for rank in engine._core.scheduler.ranks)


@pytest.mark.gpu
async def test_bfloat16_is_the_same_with_and_without_graphs(folder: str) -> None:
    settings = {"accelerator": "nvidia", "dtype": "bfloat16", "overlap": False}
    assert await tokens(folder, **settings) == await tokens(folder, **settings, cuda_graphs=False)


async def test_random_weights_without_a_tokenizer_take_token_ids_only(folder: str) -> None:
    async with Engine(folder, load_format="dummy") as engine:
        with pytest.raises(InvalidRequest, match="prompt"):
            await engine.generate("some text")


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.parametrize("cuda_graphs", [True, False])
async def test_smollm2_answers_as_on_the_cpu(cuda_graphs: bool) -> None:
    questions = ["What is the capital of France?", "What is 17 + 25?"]
    async with Engine(str(model_path()), accelerator="nvidia", dtype="float32", cuda_graphs=cuda_graphs) as engine:
        works = [
            engine.generate(messages=[{"role": "user", "content": text}], params=SamplingParams(temperature=0))
            for text in questions
        ]
        answers = [completion.text for completion in await asyncio.gather(*works)]
    assert answers == ["The capital of France is Paris.", "17 + 25 = 32."]


def test_the_shapes_of_random_weights_are_the_models(folder: str, tmp_path: Path) -> None:
    from deepinfer_workers.models.registry import open_checkpoint

    written = open_checkpoint(TINY.write(tmp_path))
    random = open_checkpoint(Path(folder), "dummy")
    shapes = {name: info.shape for name, info in written.tensors.items()}
    assert {name: info.shape for name, info in random.tensors.items()} == shapes
    assert random.read("lm_head.weight").std() > 0.01
    assert (random.read("lm_head.weight") != random.read("model.embed_tokens.weight")).any()
