"""Of a long prompt the decoder half of V4.1 computes the end alone: which rows, and that their bits depend on nothing
else than that.

Rows are counted twice: by the model, and below it at its matrix products (`ProductRows`), which know of no truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.deepseek_configs import v41_flash, v41_small
from benchmarks.deepseek_flops import prompt_flops
from benchmarks.prefill_truncation import MODES, Prompts, rows_of_length
from deepinfer import ConfigError, Engine
from deepinfer_kernels import select_ops
from deepinfer_protocol import SlotSampling
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.loading import load_deepseek
from deepinfer_workers.models.deepseek.model import Deepseek, RowCounts
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.safetensors_folder import SafetensorsFolder
from doubles.deepseek_products import ProductRows
from doubles.deepseek_sequences import DRAFTING, EXACT, Sequences, random_tokens
from doubles.driver import Driver, Row
from doubles.released_deepseek import v41_flash as released_v41_flash
from doubles.tiny_deepseek import tiny_v4, tiny_v41

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB: Final = 512
WINDOW: Final = 16
KEEP: Final = WINDOW + 5 + 1
"""The least that is allowed: window, a block of drafts, and the position that is sampled."""
NUM_LAYERS: Final = 10
DECODER: Final = 5
"""The first layer of the decoder half."""
COMPACT: Final = EXACT._replace(keep_tokens=KEEP)

EVERY_LAYER: Final = (
    *("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "hc_attn_fn", "hc_ffn_fn"),
    *("ffn.gate", "ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3"),
)
EXPERTS: Final = ("ffn.experts.w1", "ffn.experts.w2", "ffn.experts.w3")
NUM_CHOSEN: Final = 2
"""Routed experts of a token."""
RATIOS: Final = {2: 2, 5: 1}
"""Source layers, and tokens a compressed row."""
INDEXED: Final = (2, 4, 5, 7, 9)
ENGRAMS: Final = (1, 4)


class Counted(NamedTuple):
    """Sequences in `compact`, and the rows that reach their products."""

    sequences: Sequences
    rows: ProductRows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chooses rows as soon as a position sees more than four, so that every prompt here does."""
    folder = tmp_path_factory.mktemp("v41")
    write_model(tiny_v41(vocab_size=VOCAB, index_topk=4), folder)
    return folder


@pytest.fixture(scope="module")
def counted(folder: Path) -> Counted:
    rows = ProductRows()
    with rows.watching():
        sequences = Sequences(folder, COMPACT)
    rows.watch_head(sequences.model)
    return Counted(sequences, rows)


@pytest.fixture(scope="module")
def compact(counted: Counted) -> Sequences:
    return counted.sequences


@pytest.fixture(scope="module")
def off(folder: Path) -> Sequences:
    return Sequences(folder)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random_tokens(length, seed, VOCAB)


def chunks_of(length: int, size: int) -> list[int]:
    return [end - start for start, end in pairwise([*range(0, length, size), length])]


def specified_rows(num_tokens: int, num_kept: int) -> dict[str, int]:
    """Rows of every product but the head, for one prompt of which the decoder half computes `num_kept`.

    Layers below the decoder see every token, and so do the compressed row and index key of its first layer. All else
    of that layer and of those above it sees what is kept.
    """
    rows: dict[str, int] = {}
    for layer in range(NUM_LAYERS):
        seen = num_tokens if layer < DECODER else num_kept
        rows |= {f"layers.{layer}.{name}": seen for name in EVERY_LAYER}
        rows |= {f"layers.{layer}.{name}": NUM_CHOSEN * seen for name in EXPERTS}
        if layer in INDEXED:
            rows |= {f"layers.{layer}.attn.indexer.{name}": seen for name in ("wq_b", "weights_proj")}
        if layer in ENGRAMS:
            rows[f"layers.{layer}.engram.wkv"] = num_tokens
        if layer in RATIOS:
            rows[f"layers.{layer}.attn.compressor.wkv"] = num_tokens
            rows[f"layers.{layer}.attn.indexer.wk"] = num_tokens // RATIOS[layer]
        if RATIOS.get(layer, 1) > 1:
            rows[f"layers.{layer}.attn.compressor.wgate"] = num_tokens
    return rows


def own_counts(model: Deepseek) -> tuple[list[int], list[int], int]:
    """Since the last call."""
    counts = model.counts
    found = counts.through_layer.tolist(), counts.into_rows.tolist(), counts.head
    counts.through_layer[:], counts.into_rows[:], counts.head = 0, 0, 0
    return found


def without_head(rows: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in rows.items() if name != "head"}


# ---- which rows


@pytest.mark.parametrize("chunk", [200, 50, 16, 13, 10])
@pytest.mark.parametrize("length", [10, KEEP - 1, KEEP, KEEP + 1, 60, 101])
def test_exactly_the_rows_that_are_specified_are_computed(counted: Counted, length: int, chunk: int) -> None:
    sequences, rows = counted
    own_counts(sequences.model), rows.take()
    sequences.start(0, prompt_of(length), num_prompt=length)
    logits = torch.cat([sequences.run((0, count))[0] for count in chunks_of(length, chunk)])
    num_kept = min(length, KEEP)
    assert without_head(rows.take()) == specified_rows(length, num_kept)
    through_layer, into_rows, _ = own_counts(sequences.model)
    assert through_layer == [length] * DECODER + [num_kept] * (NUM_LAYERS - DECODER)
    assert into_rows == [length if layer in RATIOS else 0 for layer in range(NUM_LAYERS)]
    # What is not computed reads as zeros: they are the first rows.
    assert logits.any(-1).tolist() == [False] * (length - num_kept) + [True] * num_kept


def test_prompts_and_decoding_in_one_step_are_counted_each(counted: Counted) -> None:
    sequences, rows = counted
    lengths = {0: 70, 1: 15, 2: 40}
    for slot, length in lengths.items():
        sequences.start(slot, prompt_of(length + 3, seed=slot), num_prompt=length)
    sequences.run((0, 70))
    own_counts(sequences.model), rows.take()
    sequences.run((0, 1), (1, 15), (2, 12))  # a decoded token, a short prompt, the first 12 of 40
    through_layer, _, head = own_counts(sequences.model)
    assert through_layer == [28] * DECODER + [16] * (NUM_LAYERS - DECODER)
    found = rows.take()
    assert found.pop("head") == head == 28
    assert found == specified_rows(28, 16) | {"layers.2.attn.indexer.wk": 0 + 7 + 6}
    sequences.run((0, 2), (1, 1), (2, 28))  # the rest of 40, of which 22 are kept
    assert own_counts(sequences.model)[0] == [31] * DECODER + [25] * (NUM_LAYERS - DECODER)
    assert rows.take()["layers.9.ffn.experts.w2"] == NUM_CHOSEN * 25


def runner_model(driver: Driver) -> Deepseek:
    model = driver.runner._model
    assert isinstance(model, Deepseek)
    return model


def drive(folder: Path, **changes: object) -> Driver:
    settings: dict[str, object] = {"prefill_keep_tokens": KEEP, "num_threads": 1, "max_model_len": 256}
    return Driver(folder, **settings | changes)


def test_a_runner_asks_the_head_for_what_is_sampled(folder: Path) -> None:
    driver = drive(folder)
    prompts = [prompt_of(length, seed=length) for length in (90, 12)]
    for slot, prompt in enumerate(prompts):
        driver.admit(slot, prompt, SlotSampling(num_prompt=len(prompt)))
    driver.step(Row(0, 50, flags=0), Row(1, 12))
    through_layer, into_rows, head = own_counts(runner_model(driver))
    assert (through_layer[0], into_rows[DECODER], through_layer[DECODER], head) == (62, 62, 12, 1)
    driver.step(Row(0, 40), Row(1, 1))
    through_layer, into_rows, head = own_counts(runner_model(driver))
    assert (through_layer[0], into_rows[DECODER], through_layer[DECODER], head) == (41, 41, KEEP + 1, 2)


@pytest.mark.parametrize("num_best", [-1, 0])
def test_prompt_logprobs_need_every_position(folder: Path, num_best: int) -> None:
    driver = drive(folder)
    for slot, wanted in enumerate((num_best, -1)):
        driver.admit(slot, prompt_of(60), SlotSampling(num_prompt=60, num_prompt_logprobs=wanted))
    driver.step(Row(0, 60), Row(1, 60))
    through_layer, _, head = own_counts(runner_model(driver))
    num_first = KEEP if num_best < 0 else 60
    assert through_layer == [120] * DECODER + [num_first + KEEP] * (NUM_LAYERS - DECODER)
    assert head == 2 + (0 if num_best < 0 else 59)


def test_off_truncates_nothing(folder: Path) -> None:
    driver = drive(folder, prefill_truncation="off")
    driver.generate(0, prompt_of(60), 1, num_prompt=60)
    assert own_counts(runner_model(driver))[0] == [60] * NUM_LAYERS


def test_v4_is_never_truncated(tmp_path: Path) -> None:
    write_model(tiny_v4(vocab_size=VOCAB), tmp_path)
    tokens = prompt_of(150)
    logits = []
    for options in (EXACT, COMPACT):
        sequences = Sequences(tmp_path, options._replace(block_size=128))
        sequences.start(0, tokens, num_prompt=len(tokens))
        logits.append(sequences.run((0, 150))[0])
        assert own_counts(sequences.model)[0] == [150] * 5
    assert torch.equal(*logits)


# ---- what their bits are


def run_in_chunks(sequences: Sequences, slot: int, sizes: Sequence[int]) -> Tensor:
    return torch.cat([sequences.run((slot, size))[0] for size in sizes])


@pytest.mark.parametrize("length", [5, KEEP - 1, KEEP])
def test_a_prompt_that_is_kept_whole_is_as_without_truncation(compact: Sequences, off: Sequences, length: int) -> None:
    """And so is what is decoded behind it."""
    tokens = prompt_of(length + 12)
    for sequences in (compact, off):
        sequences.start(0, tokens, num_prompt=length)
    sizes = [length, *[1] * 12]
    assert torch.equal(run_in_chunks(compact, 0, sizes), run_in_chunks(off, 0, sizes))


@pytest.mark.parametrize("keep", [KEEP, 75, 76, 90])
def test_positions_whose_windows_reach_no_further_are_exact(folder: Path, off: Sequences, keep: int) -> None:
    """Five layers look back on 15 positions each: the kept ones from the 76th on see nothing that is missing."""
    reach = (NUM_LAYERS - DECODER) * (WINDOW - 1)
    length = 140
    tokens = prompt_of(length, seed=3)
    sequences = Sequences(folder, EXACT._replace(keep_tokens=keep))
    sequences.start(0, tokens, num_prompt=length)
    is_equal = (sequences.run((0, length))[0] == off.full(0, tokens)).all(-1)
    num_exact = max(keep - reach, 0)
    assert is_equal[length - num_exact :].all()
    assert not is_equal[: length - num_exact].any()


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunks_in_any_company_have_the_same_bits(compact: Sequences, data: st.DataObject) -> None:
    num_new = 2
    lengths = data.draw(st.lists(st.integers(1, 110), min_size=1, max_size=3), label="prompts")
    every = [prompt_of(length + num_new, seed=20 + slot) for slot, length in enumerate(lengths)]
    expected = []
    for tokens, length in zip(every, lengths, strict=True):
        compact.start(5, tokens, num_prompt=length)
        expected.append(run_in_chunks(compact, 5, [length, *[1] * num_new]))
    own_counts(compact.model)
    found: list[list[Tensor]] = [[] for _ in every]
    for slot, tokens in enumerate(every):
        compact.start(slot, tokens, num_prompt=lengths[slot])
    while open_slots := [slot for slot, tokens in enumerate(every) if compact.lengths[slot] < len(tokens)]:
        chosen = data.draw(st.sets(st.sampled_from(open_slots), min_size=1), label="slots")
        pieces = [(slot, _piece(data, lengths[slot] - compact.lengths[slot])) for slot in sorted(chosen)]
        for (slot, _), logits in zip(pieces, compact.run(*pieces), strict=True):
            found[slot].append(logits)
    for pieces_of_slot, whole in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(pieces_of_slot), whole)
    num_kept = sum(min(length, KEEP) + num_new for length in lengths)
    through_layer, _, _ = own_counts(compact.model)
    assert through_layer == [sum(map(len, every))] * DECODER + [num_kept] * (NUM_LAYERS - DECODER)


def _piece(data: st.DataObject, left: int) -> int:
    """Of a prompt as much as comes, of what follows it a token."""
    return min(left, data.draw(st.integers(5, 60), label="count")) if left > 0 else 1


@pytest.mark.parametrize("chunk", [120, 17])
def test_decoding_and_starting_again_have_the_same_bits(compact: Sequences, chunk: int) -> None:
    """After a preemption the prompt and what was generated are computed again: in chunks that end anywhere."""
    tokens = prompt_of(90, seed=4)
    num_prompt, start = 60, 60 - KEEP
    compact.start(0, tokens, num_prompt=num_prompt)
    first = run_in_chunks(compact, 0, [num_prompt, *[1] * 20])
    compact.start(1, tokens, num_prompt=num_prompt)
    again = run_in_chunks(compact, 1, chunks_of(80, chunk))
    assert torch.equal(again, first)
    assert not again[:start].any()
    beside = [compact.run((0, 1), (1, 1)) for _ in range(10)]
    assert all(torch.equal(*pair) for pair in beside)


def test_a_preempted_sequence_keeps_of_its_prompt_what_it_kept_before(folder: Path) -> None:
    prompt = prompt_of(60, seed=6)
    driver = drive(folder)
    whole = driver.generate(0, prompt, 12, num_prompt=60)
    own_counts(runner_model(driver))
    rest = driver.generate(1, prompt + whole[:7], 5, chunk=25, num_prompt=60)
    assert rest == whole[7:]
    through_layer, _, _ = own_counts(runner_model(driver))
    assert through_layer == [60 + 11] * DECODER + [KEEP + 11] * (NUM_LAYERS - DECODER)


def rows_of(sequences: Sequences, slot: int, num_tokens: int) -> dict[str, Tensor]:
    """The bytes of all compressed rows and index keys of a slot's first tokens, in their order."""
    found: dict[str, Tensor] = {}
    for layer, ratio in RATIOS.items():
        source = sequences.model._caches.layers[layer].source
        assert source is not None and source.index is not None
        for name, paged in (("main", source.main), ("index", source.index)):
            blocks = sequences.tables[slot, : -(-num_tokens // sequences.block_size)].long()
            places = blocks[:, None] * paged.rows_per_block + torch.arange(paged.rows_per_block)
            found[f"{name} of layer {layer}"] = paged._store[places.flatten()[: num_tokens // ratio]]
    return found


def test_what_prefixes_share_is_as_without_truncation(compact: Sequences, off: Sequences) -> None:
    """It comes from the encoder alone, whatever the decoder half computes."""
    length = 101
    for sequences in (compact, off):
        sequences.start(0, prompt_of(length, seed=5), num_prompt=length)
    run_in_chunks(compact, 0, [31, 40, 30])
    run_in_chunks(off, 0, [length])
    found, expected = rows_of(compact, 0, length), rows_of(off, 0, length)
    assert found.keys() == expected.keys() and len(found) == 4
    for name, rows in found.items():
        assert rows.any(-1).all() and torch.equal(rows, expected[name]), name


# ---- what it saves


def test_products_of_a_prompt_are_what_the_rows_make_of_the_shapes(folder: Path) -> None:
    """The benchmark counts what torch multiplies, and its formula says the same to the last FLOP."""
    config = DeepseekConfig.read(SafetensorsFolder(folder).metadata, "config.json")
    counted = {}
    for mode in MODES:
        prompts = Prompts(folder, mode, max_len=256, chunk=256, keep_tokens=KEEP)
        counted[mode] = {length: prompts.count(prompt_of(length)) for length in (60, 150)}
        for length, found in counted[mode].items():
            formula = prompt_flops(config, found.rows, length)
            assert found.products == formula.products
            assert found.pairs > formula.attention + formula.scores  # keys come in whole tiles
    off, compact = (counted[mode][150] for mode in MODES)
    assert compact.products / off.products == pytest.approx((1 + KEEP / 150) / 2, abs=0.04)
    longer = rows_of_length(700, *((length, found.rows) for length, found in counted["compact"].items()))
    assert longer.through_layer.tolist() == [700] * DECODER + [KEEP] * (NUM_LAYERS - DECODER)
    assert longer.head == 1


def test_rows_that_follow_no_rule_are_not_carried_on() -> None:
    few, many = (RowCounts(np.array([count]), np.array([0]), 1) for count in (10, 15))
    with pytest.raises(ValueError, match="follow no rule"):
        rows_of_length(100, (10, few), (20, many))


@pytest.mark.parametrize(("num_tokens", "share"), [(1_000, 0.579), (16_000, 0.515), (128_000, 0.511)])
def test_of_flash_about_half_is_left(num_tokens: int, share: float) -> None:
    """15.8 GFLOP a token in the encoder, 30.9 in all layers; 140 positions and the head once go through all."""
    config = DeepseekConfig.read(v41_flash(), "config.json")
    into_rows = np.where(np.isin(np.arange(40), config.kv_sources), num_tokens, 0)

    def products(num_kept: int, head: int) -> float:
        through_layer = np.where(np.arange(40) < config.decoder_start, num_tokens, num_kept)
        return prompt_flops(config, RowCounts(through_layer, into_rows, head), num_tokens).products / num_tokens / 1e9

    assert products(0, 0) == pytest.approx(2 * (7.893 + 0.0027), abs=0.002)
    assert products(num_tokens, 0) == pytest.approx(2 * (7.893 + 7.576), abs=0.003)
    assert products(140, 1) / products(num_tokens, 1) == pytest.approx(share, abs=0.001)


def test_the_benchmark_names_the_released_shapes() -> None:
    published, ours = released_v41_flash()["text_config"], v41_flash()["text_config"]
    assert ours == {name: published[name] for name in ours}
    small = DeepseekConfig.read(v41_small(), "config.json")
    flash = DeepseekConfig.read(v41_flash(), "config.json")
    for field in ("ratios", "kv_sources", "index_sources", "window", "experts_per_token", "decoder_start"):
        assert getattr(small, field) == getattr(flash, field)


# ---- what is refused


def test_a_keep_that_cannot_rebuild_what_decoding_reads_is_refused_with_the_sum(folder: Path) -> None:
    ops = select_ops("cpu", batch_invariant=True, dtype="float32")
    options = DRAFTING._replace(keep_tokens=KEEP - 1)
    with pytest.raises(WorkerFault, match=r"21 is below window \+ drafts \+ 1 = 16 \+ 5 \+ 1 = 22"):
        load_deepseek(SafetensorsFolder(folder), ops, options, lambda done, total: None)


async def test_an_engine_names_the_setting_that_its_model_refuses(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"21 is below window \+ drafts \+ 1 = 16 \+ 5 \+ 1 = 22") as refused:
        await Engine.start(str(folder), prefill_keep_tokens=KEEP - 1, num_threads=1)
    assert refused.value.field == "prefill_keep_tokens"
