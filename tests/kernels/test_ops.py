"""Every operation against its definition, and its row invariance: the bits of a row in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_kernels import Ops, UnknownAccelerator, select_ops
from deepinfer_kernels.linear import TILE_ROWS, proven_heights, tile_heights

# Absolute, for inputs of standard normal size.
TOLERANCE = {"linear": 1e-4, "attention": 1e-5, "elementwise": 1e-5}


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("cpu", batch_invariant=True)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_an_unknown_accelerator_is_refused_by_name() -> None:
    with pytest.raises(UnknownAccelerator, match="abacus"):
        select_ops("abacus", batch_invariant=True)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnknownAccelerator, match="'cpu' has no dtype 'bfloat16': it has float32"):
        select_ops("cpu", batch_invariant=True, dtype="bfloat16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(UnknownAccelerator, match="CUDA"):
        select_ops("nvidia", batch_invariant=True)


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 960), (1536, 576), (48, 40), (7, 13), (1, 1)])
def test_linear(ops: Ops, num_in: int, num_out: int) -> None:
    weight, x = rand(num_out, num_in) * num_in**-0.5, rand(600, num_in, seed=1)
    packed = ops.pack_linear(weight)
    whole = ops.linear(x, packed)
    expected = x.double() @ weight.double().T
    assert (whole - expected).abs().max() < TOLERANCE["linear"]
    for start, count in [(0, 1), (5, 1), (599, 1), (3, 2), (0, 15), (9, 16), (1, 17), (40, 63), (8, 64), (11, 301)]:
        part = ops.linear(x[start : start + count].clone(), packed)
        assert torch.equal(part, whole[start : start + count]), f"{num_in=} {num_out=} {start=} {count=}"


def test_tiles_cover_the_rows() -> None:
    assert tile_heights(16, (256, 64, 16)) == [16]
    assert tile_heights(256 * 2 + 64 + 48, (256, 64, 16)) == [256, 256, 64, 16, 16, 16]
    assert proven_heights(64, 64, torch.get_num_threads())[-1] == TILE_ROWS


@pytest.mark.parametrize("width", [1, 7, 48, 576])
def test_row_operations(ops: Ops, width: int) -> None:
    x, weight = rand(77, 2 * width) * 4, rand(2 * width, seed=1)
    cos, sin = rand(77, 1, width, seed=2), rand(77, 1, width, seed=3)
    heads = rand(77, 3, 2 * width, seed=4)

    def run(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = x[rows].clone()
        turned = ops.rotary(heads[rows].clone(), cos[rows].clone(), sin[rows].clone())
        return ops.rms_norm(part, weight, 1e-5), ops.silu_mul(part), turned

    norm, activated, turned = run(slice(None))
    wide = x.double()
    gate, up = wide.chunk(2, -1)
    first, second = heads.double().chunk(2, -1)
    expected = (
        wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(),
        gate * torch.sigmoid(gate) * up,
        torch.cat((first * cos - second * sin, second * cos + first * sin), -1),
    )
    for found, wanted in zip((norm, activated, turned), expected, strict=True):
        assert (found - wanted).abs().max() < TOLERANCE["elementwise"] * 10
    for start, count in [(0, 1), (76, 1), (3, 5), (17, 33)]:
        rows = slice(start, start + count)
        for found, whole in zip(run(rows), (norm, activated, turned), strict=True):
            assert torch.equal(found, whole[rows]), f"{width=} {start=} {count=}"


def test_silu_mul_of_large_values(ops: Ops) -> None:
    gate = torch.tensor([[-200.0, 200.0, -90.0, 0.0]])
    assert ops.silu_mul(torch.cat((gate, torch.ones(1, 4)), -1)).tolist() == [[-0.0, 200.0, pytest.approx(0), 0.0]]


class Paged:
    """Sequences in a shuffled paged cache."""

    def __init__(self, lengths: list[int], num_kv: int, group: int, dim: int, block_size: int = 16) -> None:
        self.lengths, self.group, self.block_size = lengths, group, block_size
        self.q = [rand(n, num_kv * group, dim, seed=10 + i) for i, n in enumerate(lengths)]
        self.k = [rand(n, num_kv, dim, seed=500 + i) for i, n in enumerate(lengths)]
        self.v = [rand(n, num_kv, dim, seed=900 + i) for i, n in enumerate(lengths)]
        per_row = -(-max(lengths) // block_size)
        order = np.random.default_rng(0).permutation(per_row * len(lengths))
        self.tables = torch.from_numpy(order.reshape(len(lengths), per_row).astype(np.int32))
        num_positions = per_row * len(lengths) * block_size
        # What nobody wrote is poison: reading it would show.
        self.keys = torch.full((num_kv, num_positions, dim), torch.nan)
        self.values = self.keys.clone()

    def fill(self, ops: Ops) -> Paged:
        for row, length in enumerate(self.lengths):
            at = torch.arange(length)
            indices = self.tables[row, at // self.block_size].long() * self.block_size + at % self.block_size
            ops.kv_write(self.keys, self.k[row], indices)
            ops.kv_write(self.values, self.v[row], indices)
        return self

    def attend(self, ops: Ops, rows: list[int], starts: list[int], counts: list[int]) -> list[Tensor]:
        num_positions = -(-sum(counts) // 16) * 16
        parts = [self.q[r][s : s + c] for r, s, c in zip(rows, starts, counts, strict=True)]
        padding = torch.zeros(num_positions - sum(counts), *parts[0].shape[1:])
        plan = ops.plan_attention(
            starts,
            counts,
            self.tables[rows],
            block_size=self.block_size,
            group_size=self.group,
            num_positions=num_positions,
        )
        out = ops.paged_attention(torch.cat((*parts, padding)), self.keys, self.values, plan)
        return list(out[: sum(counts)].split(counts))  # type: ignore[no-untyped-call]

    def expected(self, row: int) -> Tensor:
        """[n, H * D], by the definition in float64."""
        q, k, v = (x[row].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(self.group, 0), v.repeat_interleave(self.group, 0)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
        return out.transpose(0, 1).reshape(q.shape[1], -1)


@pytest.mark.parametrize(
    ("num_kv", "group", "dim", "block_size"),
    [(3, 3, 64, 16), (2, 4, 8, 16), (1, 1, 16, 1), (1, 17, 32, 48), (2, 8, 128, 64), (1, 16, 64, 256)],
)
def test_paged_attention(ops: Ops, num_kv: int, group: int, dim: int, block_size: int) -> None:
    lengths = [200, 1, 64, 65, 130]
    paged = Paged(lengths, num_kv, group, dim, block_size).fill(ops)
    whole = paged.attend(ops, [0, 1, 2, 3, 4], [0] * 5, lengths)
    for row in range(5):
        assert (whole[row] - paged.expected(row)).abs().max() < TOLERANCE["attention"]
    for chunk in (1, 7, 64):
        starts = list(range(0, 200, chunk))
        for start in starts:
            count = min(chunk, 200 - start)
            (part,) = paged.attend(ops, [0], [start], [count])
            assert torch.equal(part, whole[0][start : start + count]), f"{chunk=} {start=}"
    mixed = paged.attend(ops, [4, 1, 3, 0], [129, 0, 33, 63], [1, 1, 32, 3])
    for part, (row, start, count) in zip(mixed, [(4, 129, 1), (1, 0, 1), (3, 33, 32), (0, 63, 3)], strict=True):
        assert torch.equal(part, whole[row][start : start + count]), f"{row=}"


@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_decode_alone_and_in_a_batch(ops: Ops, num_rows: int) -> None:
    lengths = [1 + 37 * row % 300 for row in range(40)]
    paged = Paged(lengths, 3, 3, 64).fill(ops)
    last = [length - 1 for length in lengths]
    whole = paged.attend(ops, list(range(40)), last, [1] * 40)
    for first in range(0, 40, num_rows):
        rows = list(range(first, min(first + num_rows, 40)))
        parts = paged.attend(ops, rows, [last[row] for row in rows], [1] * len(rows))
        assert all(torch.equal(part, whole[row]) for part, row in zip(parts, rows, strict=True)), f"{rows=}"
