"""The compiled operations of the CPU's fast path against the reference, and the bits of a row in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_kernels import PackedRows, native, reference, select_ops
from deepinfer_kernels.native import KEY_LANES, NativeOps, NotNative
from doubles.paged import rand

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Relative and absolute, of what is computed from inputs of `dtype` and rounded to it once."""
ATTENTION_TOLERANCE = 1e-2
"""A cached number may fall on the other side of a tie than its definition does."""


@pytest.fixture(params=DTYPES, ids=str)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    try:
        return NativeOps(request.param)
    except NotNative as reason:
        pytest.skip(str(reason))


def near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [1, 15, 16, 48, 100, 576])
def test_row_operations(ops: NativeOps, width: int) -> None:
    dtype = ops.dtype
    x, weight = 3 * rand(37, width), rand(width, seed=1)
    delta, gate_up = rand(37, width, seed=2).to(dtype), (8 * rand(37, 2 * width, seed=3)).to(dtype)

    def run(rows: slice) -> tuple[Tensor, ...]:
        parts = [tensor[rows].clone() for tensor in (x, delta, gate_up)]
        total, normed = ops.add_rms_norm(parts[0], parts[1], weight, 1e-5)
        return ops.rms_norm(parts[0], weight, 1e-5), total, normed, ops.silu_mul(parts[2])

    whole = run(slice(None))
    sums = x.double() + delta.double()
    expected = (
        reference.rms_norm(x.double(), weight.double(), 1e-5),
        sums,
        reference.rms_norm(sums, weight.double(), 1e-5),
        reference.silu_mul(gate_up.double()),
    )
    for found, wanted in zip(whole, expected, strict=True):
        near(found, wanted, TOLERANCE[dtype])
    for start, count in [(0, 1), (36, 1), (3, 2), (5, 17)]:
        rows = slice(start, start + count)
        assert all(torch.equal(part, found[rows]) for part, found in zip(run(rows), whole, strict=True)), f"{start=}"


def test_silu_mul_of_large_values(ops: NativeOps) -> None:
    gate = torch.tensor([[-200.0, 200.0, -90.0, 0.0]])
    found = ops.silu_mul(torch.cat((gate, torch.ones(1, 4)), -1).to(ops.dtype))
    near(found, torch.tensor([[0.0, 200.0, 0.0, 0.0]]), 1e-30)


class Sequences:
    """Keys and values of sequences in a shuffled cache, put there by the operation itself."""

    def __init__(self, ops: NativeOps, lengths: list[int], num_kv: int, group: int, dim: int, block_size: int) -> None:
        self.ops, self.lengths, self.group, self.block_size = ops, lengths, group, block_size
        per_row = -(-max(lengths) // block_size)
        order = np.random.default_rng(0).permutation(per_row * len(lengths)).astype(np.int32)
        self.tables = torch.from_numpy(order.reshape(len(lengths), per_row))
        num_positions = -(-per_row * len(lengths) * block_size // KEY_LANES) * KEY_LANES
        # What nobody wrote is poison: reading it would show.
        self.keys, self.values = torch.full((2, num_kv, num_positions, dim), torch.nan, dtype=native.CACHE_DTYPE)
        self.heads = [
            rand(n, group * num_kv + 2 * num_kv, dim, seed=10 + i).to(ops.dtype) for i, n in enumerate(lengths)
        ]
        self.turns = [rand(2, n, dim // 2, seed=50 + i) for i, n in enumerate(lengths)]
        self.queries = [self._write(row) for row in range(len(lengths))]

    def _write(self, row: int) -> Tensor:
        at = torch.arange(self.lengths[row])
        indices = self.tables[row, at // self.block_size].long() * self.block_size + at % self.block_size
        cos, sin = self.turns[row]
        return self.ops.rotate_and_cache(self.heads[row], cos, sin, self.keys, self.values, indices)

    def attend(self, rows: list[int], starts: list[int], counts: list[int]) -> list[Tensor]:
        """[count, H * D] of each row: positions from its start on."""
        slots = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
        positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        packed = PackedRows(np.array(counts, np.int64), slots, positions, self.tables)
        num_kv = self.keys.shape[0]
        plan = self.ops.plan_attention(packed, block_size=self.block_size, group_size=self.group, num_kv=num_kv)
        queries = torch.cat([self.queries[r][s : s + c] for r, s, c in zip(rows, starts, counts, strict=True)])
        return list(self.ops.paged_attention(queries, self.keys, self.values, plan).split(counts))

    def expected(self, row: int) -> tuple[Tensor, Tensor]:
        """Queries [n, H, D] and attention [n, H * D], by the definition in float64 on the rounded cache."""
        num_kv, length = self.keys.shape[0], self.lengths[row]
        cos, sin = self.turns[row].double()
        keys, values = torch.zeros(2, num_kv, length, self.keys.shape[2], dtype=torch.float64)
        heads = self.heads[row].double()
        queries = reference.rotate_and_cache(heads, cos, sin, keys, values, torch.arange(length))
        q = queries.transpose(0, 1)
        keys, values = (x.to(native.CACHE_DTYPE).double().repeat_interleave(self.group, 0) for x in (keys, values))
        scores = q @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ values
        return queries, out.transpose(0, 1).reshape(length, -1)


@pytest.mark.parametrize(
    ("num_kv", "group", "dim", "block_size"),
    [(3, 3, 64, 16), (2, 4, 8, 16), (1, 1, 16, 1), (1, 17, 32, 48), (2, 8, 128, 64), (1, 5, 80, 7), (2, 2, 6, 256)],
)
def test_attention(ops: NativeOps, num_kv: int, group: int, dim: int, block_size: int) -> None:
    sequences = Sequences(ops, [200, 1, 64, 65, 130], num_kv, group, dim, block_size)
    whole = sequences.attend([0, 1, 2, 3, 4], [0] * 5, sequences.lengths)
    for row, found in enumerate(whole):
        queries, attended = sequences.expected(row)
        near(sequences.queries[row], queries, TOLERANCE[torch.float32])
        near(found, attended, ATTENTION_TOLERANCE)
    for chunk in (1, 7, 64):
        for start in range(0, 200, chunk):
            [part] = sequences.attend([0], [start], [min(chunk, 200 - start)])
            assert torch.equal(part, whole[0][start : start + chunk]), f"{chunk=} {start=}"
    mixed = [4, 1, 3, 0], [129, 0, 33, 63], [1, 1, 32, 3]
    for part, row, start, count in zip(sequences.attend(*mixed), *mixed, strict=True):
        assert torch.equal(part, whole[row][start : start + count]), f"{row=}"


def test_without_a_compiler_the_fast_path_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = select_ops("cpu", batch_invariant=True, dtype="fast")
    if not fast.arithmetic.startswith("fast"):
        pytest.skip(fast.arithmetic)

    def refuse() -> object:
        raise NotNative("there is no C compiler")

    monkeypatch.setattr(native, "compiled", refuse)
    other = select_ops("cpu", batch_invariant=True, dtype="fast")
    assert "not native: there is no C compiler" in other.arithmetic
    assert other.cache_dtype == torch.float32 and other.rms_norm is reference.rms_norm
    x, weight = rand(5, 64), rand(32, 64, seed=1)
    assert other.linear(x, other.pack_linear(weight)).dtype == torch.float32


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("false",))
    with pytest.raises(NotNative, match="false does not compile it"):
        native.compiled.__wrapped__()
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(NotNative, match="no C compiler"):
        native.compiled.__wrapped__()
