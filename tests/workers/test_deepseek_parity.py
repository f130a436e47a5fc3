"""Our DeepSeek against the models that others wrote, with the same weights at random. Knows nothing of engines.

Choices of experts and rows are sharp: where two scores are closer than a rounding, either is right, and what follows
differs. A seed with such a tie is left out, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from deepinfer_workers.models.deepseek.block import Streams
from deepinfer_workers.models.deepseek.generator import write_checkpoint
from doubles.deepseek_probe import Passed, Probe
from doubles.hf_v4 import HfV4
from doubles.nemo_v41 import IMAGE_TOKEN, Layer, NemoV41, Trace, random_ids, write_words

pytestmark = pytest.mark.usefixtures("one_thread")

ATOL: Final = 1e-4
TIE: Final = 2e-6
"""Closer scores than this may come out in another order: some ten roundings of a float32 of size 1."""
SOME_ROWS: Final[dict[str, Any]] = {"index_topk": 8, "candidate_topk_blocks": 4}
ALL_ROWS: Final[dict[str, Any]] = {"index_topk": 512, "candidate_topk_blocks": 128}
LENGTHS_V41: Final = (96, 1, 2, 17, 40, 150, 3, 331)
LENGTHS_V4: Final = (300, 1, 3, 129, 4, 128, 7, 256, 40, 450)
QUANTIZATION: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
NUM_SEEDS: Final = 24
FIRST_SEED_V4: Final = 100


def seeds(most_in_short_runs: int) -> list[Any]:
    return [
        pytest.param(seed, marks=() if seed < most_in_short_runs else pytest.mark.full) for seed in range(NUM_SEEDS)
    ]


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Callable[..., Probe]]:
    """Our model with the weights of an oracle, by way of a checkpoint folder."""
    probes: list[Probe] = []

    def load(oracle: NemoV41 | HfV4, *, quantizes: bool = False) -> Probe:
        probes.append(Probe(oracle.write(tmp_path / str(len(probes))), quantizes=quantizes))
        return probes[-1]

    yield load
    for each in probes:
        each.close()


# The oracles against themselves


@pytest.mark.parametrize("text", [SOME_ROWS, ALL_ROWS], ids=["some rows", "all rows"])
def test_the_oracle_of_v41_is_causal_and_its_layers_make_up_the_model(text: dict[str, Any]) -> None:
    oracle, ids = NemoV41(1, **text), random_ids(96, 1)
    whole, layered = oracle.logits(ids), oracle.trace(ids)
    assert torch.equal(layered.logits, whole)
    torch.testing.assert_close(oracle.logits(ids[:64]), whole[:64], rtol=0, atol=2e-5)
    # What is to be compared is at work: fewer rows than there are, candidates, formats.
    last = layered.layers[-1].made
    assert (last.topk_indices[0, -1] >= 0).sum() == min(96, text["index_topk"])
    assert last.candidates[0, -1].sum() == min(96, 4 * text["candidate_topk_blocks"])
    assert (oracle.logits(ids, quantized=True) - whole).abs().max() > 0.1


def test_the_oracle_of_v4_is_causal() -> None:
    oracle, ids = HfV4(1), random_ids(300, 1)
    whole = oracle.trace(ids)
    torch.testing.assert_close(oracle.trace(ids[:201]).logits, whole.logits[:201], rtol=0, atol=2e-5)
    assert len(oracle.tensors()) == 304


@pytest.mark.full
@pytest.mark.parametrize(("oracle", "ignored"), [(NemoV41, {"gate.bias_vl"}), (HfV4, set())])  # a bias for images
def test_every_tensor_of_an_oracle_matters(oracle: type[NemoV41] | type[HfV4], ignored: set[str]) -> None:
    """One that did not could be read from anywhere."""
    model, ids = oracle(2), random_ids(140, 2)
    before, seen, idle = model.trace(ids).logits, set[str](), set[str]()
    for name, tensor in model.model.state_dict().items():
        kind = re.sub(r"\.\d+\.", ".", name)
        if kind in seen:
            continue
        seen.add(kind)
        kept = tensor.clone()
        tensor.copy_(tensor.flip(0) if tensor.dtype == torch.int64 else tensor + torch.randn(tensor.shape))
        if (model.trace(ids).logits - before).abs().max() < 100 * ATOL:
            idle.add(".".join(kind.split(".")[-2:]))
        tensor.copy_(kept)
    assert idle == ignored


def test_the_oracle_of_v41_writes_the_released_names() -> None:
    tensors = NemoV41(0).tensors()
    assert len(tensors) == 490
    assert tensors["layers.4.engram.embed.weight"].shape == (508, 32)
    assert tensors["layers.9.attn.wo_a.weight"].shape == (2 * 32, 4 * 64 // 2)
    assert "layers.5.attn.compressor.wgate.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


# Ours against them


@pytest.mark.parametrize("seed", seeds(8))
def test_v41_computes_what_the_oracle_does(seed: int, probe: Callable[..., Probe]) -> None:
    oracle = NemoV41(seed, **(SOME_ROWS, SOME_ROWS, ALL_ROWS)[seed % 3])
    ids = random_ids(LENGTHS_V41[seed % len(LENGTHS_V41)], seed)
    expected = oracle.trace(ids)
    leave_out_ties(expected.margin)
    logits, passed = probe(oracle).run(ids)
    for layer, (ours, theirs) in enumerate(zip(passed, outputs(expected), strict=True)):
        assert_close(ours.after.values, theirs.values, f"streams behind layer {layer}")
        assert_close(ours.after.shares, theirs.shares, f"mix behind layer {layer}")
        assert torch.equal(chosen(ours), chosen_by(expected.layers[layer])), f"rows chosen for layer {layer}"
    assert_close(logits, expected.logits, "logits")


def test_v41_treats_image_tokens_as_the_oracle_does(probe: Callable[..., Probe]) -> None:
    """Another bias of the gates, no Engram, and no n-gram across them."""
    oracle, ids = NemoV41(50, sees_images=True, **SOME_ROWS), random_ids(70, 50)
    ids[5:17], ids[40] = [IMAGE_TOKEN] * 12, IMAGE_TOKEN
    expected = oracle.trace(ids)
    leave_out_ties(expected.margin)
    logits, _ = probe(oracle).run(ids)
    assert_close(logits, expected.logits, "logits")
    for layer in oracle.model.model.layers.values():
        layer.ffn.gate.bias_vl.zero_()
    assert (oracle.trace(ids).logits - logits).abs().max() > 100 * ATOL


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_v41_reads_the_released_format_as_the_oracle_does(seed: int, tmp_path: Path) -> None:
    """FP8 in squares and in rows, two FP4 in a byte, BF16: weights of the generator, expanded by both."""
    oracle, ids = NemoV41(**SOME_ROWS), random_ids(80, seed)
    write_checkpoint(oracle.config | {"quantization_config": QUANTIZATION}, tmp_path, seed=seed)
    write_words(tmp_path)
    oracle.read(tmp_path)
    expected = oracle.trace(ids)
    leave_out_ties(expected.margin)
    probe = Probe(tmp_path)
    logits, _ = probe.run(ids)
    probe.close()
    assert_close(logits, expected.logits, "logits")
    assert expected.logits.std() > 100 * ATOL


@pytest.mark.parametrize("seed", seeds(6))
def test_v4_computes_what_the_oracle_does(seed: int, probe: Callable[..., Probe]) -> None:
    oracle = HfV4(FIRST_SEED_V4 + seed, index_topk=512 if seed % 3 == 2 else 8)
    ids = random_ids(LENGTHS_V4[seed % len(LENGTHS_V4)], seed)
    expected = oracle.trace(ids)
    leave_out_ties(expected.margin)
    logits, passed = probe(oracle).run(ids)
    for layer, (ours, theirs) in enumerate(zip(passed, expected.streams[1:], strict=True)):
        assert_close(ours.after.values, theirs, f"streams behind layer {layer}")
    assert_close(logits, expected.logits, "logits")


@pytest.mark.parametrize("seed", seeds(4))
def test_layers_of_v41_round_what_they_cache_as_the_oracle_does(
    seed: int, probe: Callable[..., Probe], record_property: Callable[[str, object], None]
) -> None:
    """Every layer is given what the oracle gave it: a code that differs stays with its layer."""
    oracle = NemoV41(seed, **SOME_ROWS)
    ids = random_ids(LENGTHS_V41[seed % len(LENGTHS_V41)], seed)
    expected = oracle.trace(ids, quantized=True)
    _, passed = probe(oracle, quantizes=True).run(ids, outputs(expected))
    num_codes, num_differing, num_far = 0, 0, 0
    for ours, layer, theirs in zip(passed, expected.layers, outputs(expected), strict=True):
        codes = {kind_of(cached): cached.rows[0] for cached in layer.cached if cached.rows.numel()}
        ours_of = {kind: rows for kind, rows in ours.rounded.items() if rows.numel()}
        assert codes.keys() - ours_of.keys() <= {"query"}  # ours asks for no scores where all rows are taken
        for kind, rows in ours_of.items():
            num_codes += rows.numel()
            num_differing += int((rows != codes[kind]).sum())
        num_far += int(((ours.after.values - theirs.values).abs().amax((1, 2)) > ATOL).sum())
        assert_close(ours.after.values.median(), theirs.values.median(), "the median")
    num_outputs = len(passed) * len(ids)
    record_property("share of codes that differ", num_differing / num_codes)
    record_property("share of positions further off than the tolerance", num_far / num_outputs)
    print(f"seed {seed}: {num_differing} of {num_codes} codes differ, {num_far} of {num_outputs} outputs are far off")
    assert num_differing <= 2e-4 * num_codes
    assert num_far <= 0.02 * num_outputs


def leave_out_ties(margin: float) -> None:
    if margin < TIE:
        pytest.skip(f"a tie: two scores of the oracle, the last chosen and the first not, differ by {margin:.1e}")


def outputs(trace: Trace) -> list[Streams]:
    """Behind every layer."""
    behind = [Streams(layer.streams, layer.pre) for layer in trace.layers[1:]]
    return [*behind, Streams(trace.streams, trace.pre)]


def chosen(passed: Passed) -> Tensor:
    """[T, rows] bool"""
    return as_mask(torch.empty(len(passed.before.values), 0) if passed.choice is None else passed.choice)


def chosen_by(layer: Layer) -> Tensor:
    rows = layer.made.topk_indices
    return as_mask(torch.empty(len(layer.streams), 0) if rows is None else rows[0])


def as_mask(rows: Tensor) -> Tensor:
    """Of row numbers [T, K], -1 for none: [T, 512] bool."""
    mask = torch.zeros(len(rows), 513, dtype=torch.bool)
    return mask.scatter(1, rows.long() % 513, True)[:, :-1]  # -1 is the last


def kind_of(cached: Any) -> str:
    if cached.rows.ndim == 4:
        return "query"
    return {"fp8": "window", "nvfp4": "main", "mxfp4": "index"}[cached.format]


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL, msg=lambda text: f"{what}: {text}")
