"""Where V4 rounds, routes and starts again otherwise than V4.1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_kernels import fake_index_row, select_ops
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.formats import cache_formats
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.moe import Gate, Routing
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors
from deepinfer_workers.models.deepseek.weights import DeepseekWeights
from deepinfer_workers.safetensors_folder import SafetensorsFolder
from doubles.deepseek_products import ProductRows
from doubles.deepseek_sequences import EXACT, Sequences, random_tokens
from doubles.tiny_deepseek import tiny_v4, tiny_v41

pytestmark = pytest.mark.usefixtures("one_thread")

Made = Callable[..., dict[str, Any]]
DIM: Final = 128
VOCAB: Final = 512


def weights_of(config: dict[str, Any], folder: Path) -> DeepseekWeights:
    write_model(config, folder)
    opened = SafetensorsFolder(folder)
    read = DeepseekConfig.read(opened.metadata, "config.json")
    ops = select_ops("cpu", batch_invariant=True, dtype="float32")
    return DeepseekWeights(RankTensors(opened, read), read, ops, quantizes_activations=True)


def config_of(made: dict[str, Any]) -> DeepseekConfig:
    return DeepseekConfig.read(made, "config.json")


def hadamard_matrix(size: int) -> Tensor:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    return torch.from_numpy(matrix)


@pytest.mark.parametrize("cache_format", ["packed", "float32"])
def test_index_rows_are_turned_before_they_are_rounded(cache_format: str) -> None:
    rows = torch.randint(-40, 40, (3, 7, DIM), generator=torch.Generator().manual_seed(0)).float()  # sums are exact
    turned = fake_index_row((rows @ hadamard_matrix(DIM)) * DIM**-0.5)
    formats = cache_formats(config_of(tiny_v4(index_head_dim=DIM)), cache_format, quantizes=True)
    assert torch.equal(formats.round_index_query(rows), turned)
    assert torch.equal(formats.index.unpack(formats.index.pack(rows)), turned)
    v41 = cache_formats(config_of(tiny_v41(index_head_dim=DIM)), cache_format, quantizes=True)
    assert torch.equal(v41.round_index_query(rows), fake_index_row(rows))
    assert torch.equal(cache_formats(config_of(tiny_v4()), "auto", quantizes=False).round_index_query(rows), rows)


def test_a_few_large_dims_do_not_spoil_the_choice_of_rows() -> None:
    """FP4 has three bits beside the sign: dims that set a group's scale leave nothing of the others."""
    generator = torch.Generator().manual_seed(1)
    index = cache_formats(config_of(tiny_v4(index_head_dim=DIM)), "auto", quantizes=True).index
    large = torch.cat((torch.full((8,), 8.0), torch.ones(DIM - 8)))
    queries, keys = (torch.randn(count, DIM, generator=generator) * large for count in (64, 4096))
    weights = torch.randn(64, generator=generator)

    def best(queries: Tensor, keys: Tensor) -> set[int]:
        return set(((queries @ keys.T).relu() * weights[:, None]).sum(0).topk(256).indices.tolist())

    kept = best(index.round(queries), index.unpack(index.pack(keys))) & best(queries, keys)
    assert len(kept) / 256 > 0.9


@pytest.mark.parametrize(("made", "group"), [(tiny_v4, 128), (tiny_v41, 32)])
def test_inputs_of_products_are_rounded_in_groups_as_wide_as_a_square_of_weights(
    made: Made, group: int, tmp_path: Path
) -> None:
    weights = weights_of(made(vocab_size=VOCAB), tmp_path)
    sizes = torch.exp2(torch.arange(288) / 16)  # a smaller group has another scale
    x = torch.randn(5, 288, generator=torch.Generator().manual_seed(2)) * sizes
    expected = []
    for part in x.split(group, 1):  # the last one may be short
        scale = torch.exp2((part.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil())
        expected.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    assert torch.equal(weights.product(torch.eye(288), quantizes=True)(x), torch.cat(expected, 1))
    assert torch.equal(weights.product(torch.eye(288), quantizes=False)(x), x)


@pytest.mark.parametrize("made", [tiny_v4, tiny_v41])
def test_the_weight_of_a_single_expert(made: Made, tmp_path: Path) -> None:
    """V4 divides by the sum of the chosen also where that is one."""
    weights = weights_of(made(vocab_size=VOCAB, num_experts_per_tok=1), tmp_path)
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    _, shares = Gate(weights, "layers.3.ffn.gate", Routing.of_layer(weights, 3)).route(x, torch.arange(6))
    assert torch.equal(shares, torch.full((6, 1), 1.5)) == (made is tiny_v4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    write_model(tiny_v4(vocab_size=VOCAB), folder)
    return folder


def test_a_hit_without_replay_does_not_read_what_the_slot_held_before(folder: Path) -> None:
    """The first compressed row behind it looks back on tokens that the slot never saw: they are missing."""
    sequences = Sequences(folder, EXACT._replace(block_size=128), max_len=384)
    tokens = random_tokens(200, 1, VOCAB)
    sequences.start(0, tokens)
    sequences.run((0, 128))
    outs = []
    for slot in (1, 2):
        sequences.full(slot, random_tokens(130, slot, VOCAB))
        sequences.start(slot, tokens, length=128, floor=128, blocks=sequences.blocks(0, 128))
        outs.append(sequences.run((slot, 72))[0])
    sequences.close()
    assert torch.equal(*outs)


def test_a_source_layer_reads_its_streams_once(folder: Path) -> None:
    rows = ProductRows()
    with rows.watching():
        sequences = Sequences(folder, EXACT._replace(block_size=128))
    sequences.full(0, random_tokens(50, 4, VOCAB))
    assert rows.take()["layers.2.hc_attn_fn"] == 50
