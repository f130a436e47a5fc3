"""The real small model: golden answers, and the same bits in any company and any chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deepinfer_protocol import RowFlag, SlotSampling, unpack_int32
from doubles.driver import Driver, Row
from doubles.smollm2 import build_tokenizer, chat_prompt, model_path

pytestmark = pytest.mark.model

END = 2
CPU_CACHE = (
    "A CPU cache is a type of data storage device that caches frequently used data, such as CPU instructions, "
    "to reduce the load on the CPU's main memory."
)
GOLDEN = [
    ("What is the capital of France?", 37, "The capital of France is Paris."),
    ("Explain in two sentences what a CPU cache is.", 40, CPU_CACHE),
    ("What is 17 + 25?", None, "17 + 25 = 32."),
]
NUM_GOLDEN_FAST = 2
"""The last answer has the same sum, but bf16 products do not stop it there."""
WATCHED = SlotSampling(num_logprobs=3)


@pytest.fixture(scope="module")
def path() -> Path:
    return model_path()


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return build_tokenizer(path)


@pytest.fixture(scope="module", params=["float32", "fast"])
def driver(path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    yield Driver(path, dtype=request.param)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(chat_prompt(question)).ids for question, _, _ in GOLDEN]


def test_golden_answers_come_out_of_one_batch(driver: Driver, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    for (_, num_tokens, _), prompt in zip(GOLDEN, prompts, strict=True):
        assert num_tokens in (None, len(prompt))
    golden = GOLDEN[:NUM_GOLDEN_FAST] if driver.config.dtype == "fast" else GOLDEN
    prompts = prompts[: len(golden)]
    for slot, prompt in enumerate(prompts):
        driver.admit(slot, prompt)
    output = driver.step(*(Row(slot, len(prompt)) for slot, prompt in enumerate(prompts)))
    answers = [[token] for token in unpack_int32(output.tokens)]
    while open_ := [slot for slot, answer in enumerate(answers) if answer[-1] != END and len(answer) < 60]:
        for slot, token in zip(open_, unpack_int32(driver.step(*(Row(slot, 1) for slot in open_)).tokens), strict=True):
            answers[slot].append(token)
    for slot in range(len(prompts)):
        driver.retire(slot)
    assert [answer[-1] for answer in answers] == [END] * len(golden)
    assert [tokenizer.decode(answer[:-1]) for answer in answers] == [answer for _, _, answer in golden]


def continue_watched(driver: Driver, prompt: list[int], chunk: int) -> list[bytes]:
    """Logprobs of the token after the prompt and of two more, to the bit."""
    driver.admit(0, prompt, WATCHED)
    for start in range(0, len(prompt), chunk):
        count = min(chunk, len(prompt) - start)
        output = driver.step(Row(0, count, int(RowFlag.SAMPLE) if start + count == len(prompt) else 0))
    traces = [output.logprob_ids + output.logprobs]
    for _ in range(2):
        output = driver.step(Row(0, 1))
        traces.append(output.logprob_ids + output.logprobs)
    driver.retire(0)
    return traces


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_change_a_bit(driver: Driver, prompts: list[list[int]], chunk: int) -> None:
    prompt = (prompts[0] + prompts[1] + prompts[2])[:100]
    assert continue_watched(driver, prompt, chunk) == continue_watched(driver, prompt, len(prompt))


def test_a_batch_of_sixteen_does_not_change_a_bit(driver: Driver, prompts: list[list[int]]) -> None:
    flat = prompts[0] + prompts[1] + prompts[2]
    texts = [flat[slot : slot + 20 + 5 * slot] for slot in range(16)]
    expected = [continue_watched(driver, text, 4096) for text in texts]
    for slot, text in enumerate(texts):
        driver.admit(slot, text, WATCHED)
    outputs = [driver.step(*(Row(slot, len(text)) for slot, text in enumerate(texts)))]
    outputs += [driver.step(*(Row(slot, 1) for slot in range(16))) for _ in range(2)]
    for slot in range(16):
        driver.retire(slot)
    for slot in range(16):
        part = slice(16 * slot, 16 * (slot + 1))
        assert [output.logprob_ids[part] + output.logprobs[part] for output in outputs] == expected[slot], f"{slot=}"
