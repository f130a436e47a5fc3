"""Our DeepSeek against the models that others wrote, with the same weights at random. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from doubles.hf_v4 import HfV4
from doubles.nemo_v41 import NemoV41, random_ids


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small products do not share work: where cores are busy, threads of one wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("topk", "blocks"), [(8, 4), (128, 64)], ids=["some rows", "all rows"])
def test_the_oracle_of_v41_is_causal_and_its_layers_make_up_the_model(topk: int, blocks: int) -> None:
    oracle, ids = NemoV41(1, index_topk=topk, candidate_topk_blocks=blocks), random_ids(96, 1)
    whole, layered = oracle.logits(ids), oracle.trace(ids)
    assert torch.equal(layered.logits, whole)
    torch.testing.assert_close(oracle.logits(ids[:64]), whole[:64], rtol=0, atol=2e-5)
    assert layered.margin > 1e-6
    # What is to be compared is at work: fewer rows than there are, candidates, formats.
    last = layered.layers[-1].made
    assert (last.topk_indices[0, -1] >= 0).sum() == min(96, topk)
    assert last.candidates[0, -1].sum() == min(96, 4 * blocks)
    assert (oracle.logits(ids, quantized=True) - whole).abs().max() > 0.1


def test_the_oracle_of_v41_writes_the_released_names() -> None:
    tensors = NemoV41(0).tensors()
    assert len(tensors) == 490
    assert tensors["layers.4.engram.embed.weight"].shape == (508, 32)
    assert tensors["layers.9.attn.wo_a.weight"].shape == (2 * 32, 4 * 64 // 2)
    assert "layers.5.attn.compressor.wgate.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_the_oracle_of_v4_is_causal() -> None:
    oracle, ids = HfV4(1), random_ids(300, 1)
    whole = oracle.trace(ids)
    torch.testing.assert_close(oracle.trace(ids[:201]).logits, whole.logits[:201], rtol=0, atol=2e-5)
    assert whole.margin > 1e-6
    assert len(oracle.tensors()) == 304
