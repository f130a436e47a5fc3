"""Whatever way a sequence is computed in, its logits are those of one forward over all of it.

To the bit on the row-invariant path with everything rounded as released; within rounding elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_kernels import select_ops
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors
from deepinfer_workers.models.deepseek.weights import DeepseekWeights
from deepinfer_workers.safetensors_folder import SafetensorsFolder
from doubles.deepseek_sequences import EXACT, PLAIN, Sequences, random_tokens
from doubles.driver import Driver
from doubles.tiny_deepseek import tiny_v4, tiny_v41

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 512
FAMILIES = {"v4.1": (tiny_v41, EXACT, 256), "v4": (tiny_v4, EXACT._replace(block_size=128), 384)}
SLOW = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders: Folders = {}
    for family, (config, _, _) in FAMILIES.items():
        folders[family] = tmp_path_factory.mktemp(family)
        write_model(config(vocab_size=VOCAB), folders[family])
    return folders


@pytest.fixture(scope="module", params=FAMILIES)
def sequences(request: pytest.FixtureRequest, folders: Folders) -> Iterator[Sequences]:
    _, options, max_len = FAMILIES[request.param]
    sequences = Sequences(folders[request.param], options, max_len=max_len)
    yield sequences
    sequences.close()


@pytest.fixture(scope="module")
def v41(folders: Folders) -> Iterator[Sequences]:
    sequences = Sequences(folders["v4.1"], max_len=256)
    yield sequences
    sequences.close()


def tokens_of(length: int, seed: int) -> list[int]:
    return random_tokens(length, seed, VOCAB)


def test_decoding_from_a_cache(sequences: Sequences) -> None:
    tokens = tokens_of(sequences.limits.max_len * 3 // 5, seed=1)
    full = sequences.full(0, tokens)
    sequences.start(1, tokens)
    num_prompt = len(tokens) - 40
    prompt = sequences.run((1, num_prompt))[0]
    decoded = [sequences.run((1, 1))[0] for _ in range(40)]
    assert torch.equal(torch.cat([prompt, *decoded]), full)


@SLOW
@given(data=st.data())
def test_any_pieces_in_any_company(sequences: Sequences, data: st.DataObject) -> None:
    most = sequences.limits.max_len * 4 // 5
    lengths = data.draw(st.lists(st.integers(1, most), min_size=1, max_size=3), label="lengths")
    every = [tokens_of(length, seed=10 + slot) for slot, length in enumerate(lengths)]
    expected = [sequences.full(5, tokens) for tokens in every]
    found: list[list[Tensor]] = [[] for _ in every]
    for slot, tokens in enumerate(every):
        sequences.start(slot, tokens)
    while open_slots := [slot for slot, length in enumerate(lengths) if sequences.lengths[slot] < length]:
        chosen = data.draw(st.sets(st.sampled_from(open_slots), min_size=1), label="slots")
        pieces = [(slot, _piece(data, lengths[slot] - sequences.lengths[slot])) for slot in sorted(chosen)]
        for (slot, _), logits in zip(pieces, sequences.run(*pieces), strict=True):
            found[slot].append(logits)
    for parts, full in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(parts), full)


def _piece(data: st.DataObject, left: int) -> int:
    return min(left, data.draw(st.one_of(st.integers(1, 3), st.integers(4, 150)), label="count"))


def test_tokens_taken_back_at_every_position(sequences: Sequences) -> None:
    """Slot n - 1 takes back n tokens."""
    start, length = sequences.limits.max_len // 3 + 3, sequences.limits.max_len // 3 + 40
    every = [tokens_of(length, seed=20 + slot) for slot in range(5)]
    expected = [sequences.full(5, tokens) for tokens in every]
    for slot, tokens in enumerate(every):
        sequences.start(slot, tokens)
    sequences.run(*((slot, start) for slot in range(5)))
    wrong = tokens_of(5, seed=99)
    for position in range(start, length):
        ahead = [min(slot + 1, length - position) for slot in range(5)]
        for slot in range(5):
            sequences.say(slot, position, wrong[: ahead[slot]])
        sequences.run(*enumerate(ahead))
        for slot, tokens in enumerate(every):
            sequences.take_back(slot, ahead[slot])
            sequences.say(slot, position, tokens[position:])
        for slot, logits in enumerate(sequences.run(*((slot, 1) for slot in range(5)))):
            assert torch.equal(logits[0], expected[slot][position]), (slot, position)


def test_an_exact_hit_is_a_cold_run(sequences: Sequences) -> None:
    block_size, replay = sequences.block_size, sequences.model.cache_needs(sequences.block_size).exact_replay
    assert replay == sequences.model.config.num_layers * 15
    num_hit = (sequences.limits.max_len * 3 // 4) // block_size * block_size
    shared = tokens_of(num_hit + 8, seed=30)
    first, second = shared + tokens_of(40, seed=31), shared + tokens_of(50, seed=32)
    full = [sequences.full(5, tokens) for tokens in (first, second)]
    sequences.start(0, first)
    sequences.run((0, num_hit + 28))
    sequences.full(1, tokens_of(sequences.limits.max_len // 2 + 3, seed=35))  # whatever the slot held before
    sequences.start(1, second, length=num_hit - replay, floor=num_hit, blocks=sequences.blocks(0, num_hit))
    replayed = sequences.run((1, replay - 20))[0]
    assert not torch.equal(replayed, full[1][num_hit - replay : num_hit - 20])  # windows begin there
    sequences.run((1, 20))
    # The owner of the blocks goes on beside the one that adopted them.
    outs = [sequences.run((0, 1), (1, 2)) for _ in range(20)]
    assert torch.equal(torch.cat([out[0] for out in outs]), full[0][num_hit + 28 : num_hit + 48])
    assert torch.equal(torch.cat([out[1] for out in outs]), full[1][num_hit : num_hit + 40])


def test_a_bounded_hit_leaves_shared_rows_alone_and_is_near(v41: Sequences) -> None:
    window = v41.model.cache_needs(16).bounded_replay
    shared, num_hit = tokens_of(200, seed=33), 192
    second = shared + tokens_of(50, seed=34)
    first_full, full = v41.full(5, shared), v41.full(5, second)
    v41.start(0, shared)
    v41.run((0, 195))
    v41.start(1, second, length=num_hit - window, floor=num_hit, blocks=v41.blocks(0, num_hit))
    v41.run((1, window))
    out = v41.run((1, 58))[0]
    assert torch.equal(v41.run((0, 5))[0], first_full[195:])
    # The model's own approximation: what lies before the window is known by compressed rows alone.
    assert (out - full[num_hit:]).abs().mean() < full.std() / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_without_rounding_on_any_path(folders: Folders, family: str) -> None:
    _, options, max_len = FAMILIES[family]
    plain = PLAIN._replace(block_size=options.block_size)
    sequences = Sequences(folders[family], plain, max_len=max_len, batch_invariant=False)
    tokens = tokens_of(max_len * 3 // 5, seed=40)
    full = sequences.full(0, tokens)
    sequences.start(1, tokens)
    sequences.start(2, tokens_of(90, seed=41))
    chunks = [sequences.run((1, 61), (2, 20))[0]]
    chunks += [sequences.run((1, 1), (2, 7))[0] for _ in range(10)]
    chunks.append(sequences.run((1, len(tokens) - 71))[0])
    torch.testing.assert_close(torch.cat(chunks), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_the_same_numbers(folders: Folders, family: str, cache_format: str) -> None:
    _, options, max_len = FAMILIES[family]
    tokens = tokens_of(200, seed=50)
    full = Sequences(folders[family], options, max_len=max_len).full(0, tokens)
    open_rows = Sequences(folders[family], options._replace(cache_format=cache_format), max_len=max_len)
    open_rows.start(0, tokens)
    assert torch.equal(torch.cat([open_rows.run((0, count))[0] for count in (50, 1, 149)]), full)


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_matters(folders: Folders, family: str) -> None:
    """Each of the two switches changes something, or the tests above compare nothing."""
    _, exact, _ = FAMILIES[family]
    tokens = tokens_of(60, seed=51)
    full = Sequences(folders[family], exact).full(0, tokens)
    for options in (exact._replace(quantizes_activations=False), exact._replace(quantizes_caches=False)):
        changed = Sequences(folders[family], options).full(0, tokens)
        assert not torch.equal(changed, full)
        assert (changed - full).abs().mean() < full.std() / 2


@pytest.mark.parametrize(
    ("accelerator", "dtype"), [("cpu", "fast"), pytest.param("nvidia", "bfloat16", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    "name", ["layers.2.ffn.gate.weight", "layers.2.hc_attn_fn", "layers.2.attn.compressor.wkv.weight"]
)
def test_plain_products_are_float32_in_any_arithmetic(
    folders: Folders, name: str, accelerator: str, dtype: str
) -> None:
    """What an expert or a row is chosen by is not rounded to what a matrix product is."""
    folder = SafetensorsFolder(folders["v4"])
    config = DeepseekConfig.read(folder.metadata, "config.json")
    ops = select_ops(accelerator, batch_invariant=True, dtype=dtype)
    weights = DeepseekWeights(RankTensors(folder, config), config, ops, quantizes_activations=True)
    weight = weights.plain(name)
    x = torch.randn(20, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(ops.device)
    expected = x.double() @ weight.double().T
    assert (weights.plain_linear(name)(x) - expected).abs().max() < 1e-5 * expected.std()


def test_a_small_model_takes_one_thread(folders: Folders) -> None:
    torch.set_num_threads(2)
    for chosen, expected in ((0, 1), (2, 2)):
        driver = Driver(folders["v4.1"], num_threads=chosen, prefill_keep_tokens=30)
        assert f" {expected} threads" in driver.ready.device
        driver.close()
    torch.set_num_threads(1)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_is_near(folders: Folders, family: str, dtype: str) -> None:
    """Plain torch there: the same numbers within what the arithmetic gives."""
    _, options, max_len = FAMILIES[family]
    plain = PLAIN._replace(block_size=options.block_size)
    tokens = tokens_of(max_len * 3 // 5, seed=60)
    expected = Sequences(folders[family], plain, max_len=max_len).full(0, tokens)
    sequences = Sequences(folders[family], plain, max_len=max_len, accelerator="nvidia", dtype=dtype)
    sequences.start(1, tokens)
    found = torch.cat([sequences.run((1, count))[0] for count in (50, 1, len(tokens) - 51)])
    error = (found - expected).abs().mean() / expected.std()
    # Rows and experts are chosen by what layers before have rounded: V4.1, with more choices, ends further off.
    assert error < {"float32": 1e-5, "bfloat16": {"v4.1": 0.17, "v4": 0.05}[family]}[dtype]


@pytest.mark.gpu
def test_a_gpu_streams_with_everything_rounded(folders: Folders) -> None:
    tokens = tokens_of(120, seed=61)
    full = Sequences(folders["v4.1"]).full(0, tokens)
    found = Sequences(folders["v4.1"], accelerator="nvidia").full(0, tokens)
    agreement = (found.argmax(-1) == full.argmax(-1)).double().mean()
    assert agreement > 0.8  # codes flip where a sum is rounded otherwise
