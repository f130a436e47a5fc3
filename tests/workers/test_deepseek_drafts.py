"""Draft stages: NeMo's training backbone as the oracle, and the same bits whatever way the context came to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from deepinfer_kernels import select_ops
from deepinfer_workers.models.deepseek import model as model_module
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.loading import load_deepseek
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors
from deepinfer_workers.models.model import ModelOptions
from deepinfer_workers.models.registry import load_model, open_checkpoint
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.safetensors_folder import SafetensorsFolder
from doubles.deepseek_sequences import DRAFTING, PLAIN, Drafted, Sequences, random_tokens
from doubles.tiny_deepseek import tiny_v4, tiny_v41
from doubles.tiny_llama import TinyLlama

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB: Final = 512
WINDOW: Final = 16
BLOCK: Final = 5
KEEP: Final = WINDOW + BLOCK + 1
FAMILIES: Final = {"v4.1": (tiny_v41, DRAFTING, 256), "v4": (tiny_v4, DRAFTING._replace(block_size=128), 384)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, (config, _, _) in FAMILIES.items():
        write_model(config(vocab_size=VOCAB), folders[family])
    return folders


@pytest.fixture(scope="module", params=FAMILIES)
def sequences(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Sequences]:
    _, options, max_len = FAMILIES[request.param]
    sequences = Sequences(folders[request.param], options, max_len=max_len)
    yield sequences
    sequences.close()


def tokens_of(length: int, seed: int) -> list[int]:
    return random_tokens(length, seed, VOCAB)


def drafted_at_once(sequences: Sequences, tokens: list[int], anchor: int) -> Drafted:
    """Behind one forward of all `tokens`, alone in slot 5."""
    sequences.full(5, tokens)
    return sequences.draft((5, anchor))[0]


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, 70])
def test_chunks_and_decoding_leave_the_same_context(sequences: Sequences, length: int) -> None:
    tokens = tokens_of(length, seed=length)
    expected = drafted_at_once(sequences, tokens, anchor=9)
    sequences.start(0, tokens)
    for count in [length // 2, length - length // 2 - length // 4, *[1] * (length // 4)]:
        if count:
            sequences.run((0, count))
    assert sequences.draft((0, 9))[0].equals(expected)
    assert not sequences.draft((0, 10))[0].equals(expected)


def test_a_block_depends_on_no_other(sequences: Sequences) -> None:
    every = [tokens_of(length, seed=40 + length) for length in (3, 16, 33, 90, 21)]
    expected = [drafted_at_once(sequences, tokens, anchor=20 + slot) for slot, tokens in enumerate(every)]
    for slot, tokens in enumerate(every):
        sequences.start(slot, tokens)
    sequences.run(*((slot, len(tokens)) for slot, tokens in enumerate(every)))
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 1]):
        for slot, found in zip(order, sequences.draft(*((slot, 20 + slot) for slot in order)), strict=True):
            assert found.equals(expected[slot])


def test_tokens_taken_back(sequences: Sequences) -> None:
    """Slot n - 1 takes back n positions, which others then take the place of."""
    every = [tokens_of(40, seed=60 + slot) for slot in range(5)]
    before = [drafted_at_once(sequences, tokens[:34], anchor=8) for tokens in every]
    after = [drafted_at_once(sequences, tokens, anchor=8) for tokens in every]
    for slot, tokens in enumerate(every):
        sequences.start(slot, tokens)
    sequences.run(*((slot, 34) for slot in range(5)))
    for slot in range(5):
        sequences.say(slot, 34, tokens_of(5, seed=99))
    sequences.run(*((slot, slot + 1) for slot in range(5)))
    for slot, tokens in enumerate(every):
        sequences.take_back(slot, slot + 1)
        sequences.say(slot, 34, tokens[34:])
    found = sequences.draft(*((slot, 8) for slot in range(5)))
    assert all(mine.equals(its) for mine, its in zip(found, before, strict=True))
    for _ in range(6):
        sequences.run(*((slot, 1) for slot in range(5)))
    found = sequences.draft(*((slot, 8) for slot in range(5)))
    assert all(mine.equals(its) for mine, its in zip(found, after, strict=True))


def test_drafting_writes_nothing(sequences: Sequences) -> None:
    tokens = tokens_of(50, seed=70)
    full = sequences.full(5, tokens)
    sequences.start(0, tokens)
    sequences.run((0, 40))
    first = sequences.draft((0, 8))[0]
    assert sequences.draft((0, 8))[0].equals(first)
    assert torch.equal(sequences.run((0, 10))[0], full[40:])


def test_the_last_position_has_a_block_behind_it(sequences: Sequences) -> None:
    tokens = tokens_of(sequences.limits.max_len, seed=71)
    assert drafted_at_once(sequences, tokens, anchor=8).logits.isfinite().all()


def test_an_exact_hit_drafts_as_a_cold_run(sequences: Sequences) -> None:
    block_size, replay = sequences.block_size, sequences.model.cache_needs(sequences.block_size).exact_replay
    num_hit = (sequences.limits.max_len * 3 // 4) // block_size * block_size
    # V4.1's taps are layers' inputs, which look back on a window less than the replay rebuilds. V4's are outputs.
    num_behind = 1 if sequences.model.config.family == "v4.1" else WINDOW
    tokens = tokens_of(num_hit + num_behind, seed=72)
    expected = drafted_at_once(sequences, tokens, anchor=8)
    sequences.start(0, tokens)
    sequences.run((0, num_hit))
    blocks = sequences.blocks(0, num_hit)
    sequences.start(1, tokens, length=num_hit - replay, floor=num_hit, blocks=blocks)
    sequences.run((1, len(tokens) - num_hit + replay))
    assert sequences.draft((1, 8))[0].equals(expected)


def test_a_bounded_hit_hides_what_the_slot_held_before(folders: dict[str, Path]) -> None:
    tokens = tokens_of(140, seed=73)
    found = []
    for held in (74, 75):
        sequences = Sequences(folders["v4.1"], DRAFTING)
        sequences.full(1, tokens_of(100, seed=held))
        sequences.start(0, tokens)
        sequences.run((0, 128))
        sequences.start(1, tokens, length=120, floor=128, blocks=sequences.blocks(0, 128))
        sequences.run((1, 10))  # less than a window: all below 120 is unknown
        found.append(sequences.draft((1, 8))[0])
        sequences.close()
    assert found[0].equals(found[1])


def test_truncation_keeps_the_context_that_a_prompt_ends_with(folders: dict[str, Path]) -> None:
    compact = Sequences(folders["v4.1"], DRAFTING._replace(keep_tokens=KEEP))
    tokens = tokens_of(100, seed=76)
    found = []
    for slot, sizes in enumerate(([100], [33, 50, 17], [95, 5])):
        compact.start(slot, tokens, num_prompt=100)
        for size in sizes:
            compact.run((slot, size))
        found.append(compact.draft((slot, 8))[0])
    assert found[0].equals(found[1]) and found[0].equals(found[2])
    compact.close()


def test_taps_in_another_order_draft_something_else(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(30, seed=77)
    sequences = Sequences(folders["v4.1"], DRAFTING)
    expected = drafted_at_once(sequences, tokens, anchor=8)
    monkeypatch.setattr(model_module.Taps, "values", lambda taps: torch.cat(taps._taken[::-1], 1))
    assert not drafted_at_once(sequences, tokens, anchor=8).equals(expected)
    sequences.close()


@pytest.mark.parametrize("config", [tiny_v41, tiny_v4])
def test_rings_are_counted_and_stages_loaded_only_for_drafts(config: Any, folders: dict[str, Path]) -> None:
    family = "v4" if config is tiny_v4 else "v4.1"
    _, options, _ = FAMILIES[family]
    sizes, loaded = [], []
    for num_drafts in (0, 1, -1):
        model = load(folders[family], options._replace(num_drafts=num_drafts))
        sizes.append(model.cache_needs(128).slot_bytes)
        loaded.append(model.drafter is not None)
        row_bytes = model._formats.window.row_bytes
        model.close()
    assert loaded == [False, True, True]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[0] == 3 * (WINDOW + BLOCK + 1) * row_bytes


def load(folder: Path, options: ModelOptions) -> Any:
    ops = select_ops("cpu", batch_invariant=True)
    return load_deepseek(SafetensorsFolder(folder), ops, options, lambda done, total: None)


def test_longer_drafts_than_the_block_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(WorkerFault, match=r"num_drafts: the checkpoint's block is 5, 7 came"):
        load(folders["v4.1"], DRAFTING._replace(num_drafts=7))


def test_drafts_without_stages_are_refused(tmp_path: Path) -> None:
    ratios = [0, 0, 2, 2, 2, 1, 1, 1, 1, 1]
    write_model(tiny_v41(vocab_size=VOCAB, num_nextn_predict_layers=0, compress_ratios=ratios), tmp_path)
    words = r"num_drafts: the checkpoint has no DSpark stages \(num_nextn_predict_layers is 0\)"
    with pytest.raises(WorkerFault, match=words):
        load(tmp_path, DRAFTING._replace(num_drafts=1))
    model = load(tmp_path, DRAFTING)
    assert model.drafter is None
    model.close()


def test_truncation_must_leave_room_for_drafts_that_are_made(folders: dict[str, Path]) -> None:
    with pytest.raises(WorkerFault, match="window \\+ drafts \\+ 1 = 16 \\+ 5 \\+ 1 = 22"):
        load(folders["v4.1"], DRAFTING._replace(keep_tokens=KEEP - 1))
    load(folders["v4.1"], DRAFTING._replace(keep_tokens=WINDOW + 1, num_drafts=0)).close()


def test_llama_has_no_stages(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(TinyLlama().write(tmp_path))
    ops = select_ops("cpu", batch_invariant=True)
    with pytest.raises(WorkerFault, match="num_drafts: this architecture has no draft stages, 2 came"):
        load_model(checkpoint, ops, ModelOptions(num_drafts=2), lambda done, total: None)
    assert load_model(checkpoint, ops, ModelOptions(), lambda done, total: None).drafter is None


def test_ranks_share_the_draft_experts(folders: dict[str, Path]) -> None:
    num_ranks = 2
    folder = SafetensorsFolder(folders["v4.1"])
    config = DeepseekConfig.read(folder.metadata, "config.json")
    ranks = [RankTensors(folder, config, num_ranks, rank, has_drafts=True) for rank in range(num_ranks)]
    assert [list(rank.draft_experts) for rank in ranks] == [[0, 1], [2, 3]]
    assert not RankTensors(folder, config, num_ranks, 0).draft_experts


# ---- the oracle


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 7, WINDOW, 45])
def test_drafts_are_the_oracles(tmp_path: Path, seed: int, length: int) -> None:
    nemo = pytest.importorskip("doubles.nemo_v41")
    oracle = nemo.NemoDrafts(seed)
    oracle.write(tmp_path)
    ids = nemo.random_ids(length + 1, seed)
    sequences = Sequences(tmp_path, PLAIN._replace(num_drafts=-1))
    sequences.start(0, ids[:length])
    sequences.run((0, length))
    found = sequences.draft((0, ids[length]))[0]
    sequences.close()
    drafted = found.tokens.tolist()
    expected = oracle.draft(ids[:length], ids[length], drafted)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.confidences, expected.confidences, rtol=1e-4, atol=1e-4)
    reversed_taps = oracle.draft(ids[:length], ids[length], drafted, order=[2, 1, 0])
    assert (found.hidden - reversed_taps.hidden).abs().max() > 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_drafts_for_many_what_a_cpu_does(folders: dict[str, Path], family: str) -> None:
    """Rows of several sequences in one step, and their blocks in one call."""
    _, options, max_len = FAMILIES[family]
    plain = options._replace(quantizes_activations=False, quantizes_caches=False)
    found = []
    for accelerator in ("cpu", "nvidia"):
        sequences = Sequences(folders[family], plain, max_len=max_len, accelerator=accelerator)
        for slot, length in enumerate((3, 40, 90, 17)):
            sequences.start(slot, tokens_of(100, seed=80 + slot))
            sequences.run((slot, length))
        steps = [sequences.run((0, 1), (1, 4), (2, 2), (3, 6)) for _ in range(3)]
        found.append(
            ([logits for step in steps for logits in step], sequences.draft(*((slot, 8) for slot in range(4))))
        )
        sequences.close()
    (expected, drafts), (on_gpu, drafts_on_gpu) = found
    for mine, its in zip(on_gpu, expected, strict=True):
        assert (mine - its).abs().max() < 1e-3 * its.std()
    for block, wanted in zip(drafts_on_gpu, drafts, strict=True):
        assert (block.hidden - wanted.hidden).abs().max() < 1e-3 * wanted.hidden.std()
        assert torch.equal(block.tokens, wanted.tokens)
        torch.testing.assert_close(block.confidences, wanted.confidences, atol=1e-3, rtol=0)
