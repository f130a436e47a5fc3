"""Every operation against its definition, and its row invariance: the bits of a row in any company."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import deepinfer_kernels
from deepinfer_kernels import Ops, UnknownAccelerator, half, select_ops
from deepinfer_kernels.half import BF16, FP16
from deepinfer_kernels.linear import (
    TILE_ROWS,
    Backend,
    Tiling,
    linear,
    num_parts,
    pack_linear,
    pack_with,
    proven_tiling,
    tile_heights,
)
from deepinfer_kernels.reference import hadamard, rotary, sigmoid
from doubles.paged import Paged, rand

# Absolute, for inputs of standard normal size.
TOLERANCE = {"linear": 1e-4, "attention": 1e-5, "elementwise": 1e-5}
# A weight keeps 11 bits in float16, and 8 in bfloat16, where activations and results are rounded too.
HALF_TOLERANCE = {FP16: 2e-3, BF16: 5e-2}


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("cpu", batch_invariant=True)


def test_an_unknown_accelerator_is_refused_by_name() -> None:
    with pytest.raises(UnknownAccelerator, match="abacus"):
        select_ops("abacus", batch_invariant=True)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnknownAccelerator, match="'cpu' has no dtype 'bfloat16': it has float32, fast"):
        select_ops("cpu", batch_invariant=True, dtype="bfloat16")


def test_a_hadamard_matrix_is_orthonormal_and_its_own_inverse() -> None:
    matrix = hadamard(torch.eye(64))
    assert torch.equal(matrix.abs(), torch.full((64, 64), 0.125)) and torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, torch.eye(64))
    x = rand(9, 2, 128)
    assert torch.equal(hadamard(x)[4:5], hadamard(x[4:5]))


def test_sigmoid() -> None:
    x = torch.cat((rand(77) * 20, torch.tensor([-torch.inf, torch.inf])))
    torch.testing.assert_close(sigmoid(x).double(), x.double().sigmoid(), rtol=1e-6, atol=0)
    assert torch.equal(sigmoid(x)[70:71], sigmoid(x[70:71]))


@pytest.mark.parametrize("dtype", ["float32", "fast"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_exact_product_is_float32_in_any_arithmetic(dtype: str, batch_invariant: bool) -> None:
    ops = select_ops("cpu", batch_invariant=batch_invariant, dtype=dtype)
    x, weight = rand(5, 96), rand(40, 96)
    out = ops.linear(x, ops.pack_exact(weight))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=0, atol=TOLERANCE["linear"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(UnknownAccelerator, match="CUDA"):
        select_ops("nvidia", batch_invariant=True)


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "deepinfer_kernels.nvidia", raising=False)
    monkeypatch.delattr(deepinfer_kernels, "nvidia", raising=False)
    with pytest.raises(UnknownAccelerator, match="'nvidia' needs triton"):
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


@pytest.mark.parametrize("backend", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("num_in", "num_out"), [(576, 960), (1536, 576), (48, 40), (7, 13), (1, 1), (2048, 2048)])
def test_half_linear(backend: Backend, num_in: int, num_out: int) -> None:
    if half.missing_for_half() or (backend is BF16 and not half.has_bf16_products()):
        pytest.skip("this CPU or torch has no such product")
    weight, x = rand(num_out, num_in) * num_in**-0.5, rand(600, num_in, seed=1)
    packed = pack_with(backend, weight, batch_invariant=True)
    whole = linear(x, packed)
    assert whole.dtype == torch.float32
    assert (whole - x.double() @ weight.double().T).abs().max() < HALF_TOLERANCE[backend]
    for count in (*range(1, 70), 127, 200, 256, 301):
        start = 7 * count % (600 - count)
        part = linear(x[start : start + count].clone(), packed)
        assert torch.equal(part, whole[start : start + count]), f"{num_in=} {num_out=} {start=} {count=}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_whose_rows_depend_on_their_place_is_not_used(dtype: torch.dtype) -> None:
    """Some libraries cut a tile into unequal parts, of which each adds up in an order of its own."""

    def multiply(x: Tensor, packed: Tensor) -> Tensor:
        return (x @ packed.T + 1e-3 * torch.arange(len(x))[:, None]).to(dtype)

    weight, x = rand(40, 48), rand(21, 48, seed=1)
    packed = pack_with(Backend(Tensor.contiguous, multiply, dtype=dtype), weight, batch_invariant=True)
    exact = linear(x, pack_linear(weight, batch_invariant=True)).to(dtype)
    assert torch.equal(linear(x, packed), exact)
    free = pack_with(Backend(Tensor.contiguous, multiply, dtype=dtype), weight, batch_invariant=False)
    assert not torch.equal(linear(x, free), exact)


def test_a_large_weight_is_multiplied_in_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_kernels.linear.MOST_WEIGHTS", 1000)
    assert [num_parts(num_out, 48) for num_out in (20, 21, 84, 160, 1)] == [1, 1, 4, 8, 1]
    weight, x = rand(84, 48).bfloat16(), rand(301, 48, seed=1)
    packed = pack_linear(weight, batch_invariant=True)
    parts = [pack_linear(part, batch_invariant=True) for part in weight.split(21)]
    assert torch.equal(linear(x, packed), torch.cat([linear(x, part) for part in parts], 1))
    assert (linear(x, packed) - x.double() @ weight.double().T).abs().max() < TOLERANCE["linear"]
    for count in (1, 16, 17, 100):
        assert torch.equal(linear(x[200 - count : 200], packed), linear(x, packed)[200 - count : 200]), count


def test_weights_that_fp16_cannot_hold_stay_in_float32() -> None:
    weight, x = torch.tensor([[1e6, 1.0]]), torch.tensor([[1.0, 2.0]])
    assert linear(x, half.pack_fp16(weight, batch_invariant=True)).item() == 1e6 + 2.0


def test_fast_says_what_it_is_and_falls_back_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_ops("cpu", batch_invariant=True).arithmetic == "float32"
    monkeypatch.setattr(half, "has_bf16_products", lambda: False)
    monkeypatch.setattr(half, "missing_for_half", lambda: "")
    assert select_ops("cpu", batch_invariant=True, dtype="fast").arithmetic.startswith("fast (fp16 weights")
    monkeypatch.setattr(half, "missing_for_half", lambda: "this CPU has no AVX2")
    exact = select_ops("cpu", batch_invariant=True, dtype="fast")
    assert exact.arithmetic == "float32, since this CPU has no AVX2" and exact.row_multiple == TILE_ROWS
    weight, x = rand(8, 8), rand(3, 8, seed=1)
    assert torch.equal(exact.linear(x, exact.pack_linear(weight)), linear(x, pack_linear(weight, batch_invariant=True)))


def test_tiles_cover_the_rows() -> None:
    in_tiles = Tiling((256, 64, 16))
    assert tile_heights(16, in_tiles) == tile_heights(3, in_tiles) == [16]
    assert tile_heights(256 * 2 + 64 + 41, in_tiles) == [256, 256, 64, 16, 16, 16]
    assert tile_heights(600, Tiling((256,), floor=2)) == [256, 256, 88]
    assert tile_heights(513, Tiling((256,), floor=2)) == [256, 256, 2]
    proven = proven_tiling(64, 64, torch.get_num_threads())
    assert proven is not None and proven.heights[-1] == TILE_ROWS and not proven.floor


def test_a_product_that_differs_below_some_height_is_padded_to_it() -> None:
    """As matrix-vector loops do, by less than a rounding to bfloat16 shows on plain data."""

    def multiply(x: Tensor, packed: Tensor) -> Tensor:
        halves = [part @ half.T for part, half in zip(x.chunk(2, 1), packed.chunk(2, 1), strict=True)]
        whole = torch.stack([x[row] @ packed.T for row in range(len(x))])
        return (halves[0] + halves[1] if len(x) < 3 else whole).bfloat16()

    backend = Backend(Tensor.contiguous, multiply, takes_any_height=True, dtype=torch.bfloat16)
    tiling = proven_tiling(96, 64, torch.get_num_threads(), backend)
    assert (tiling is not None and 2 <= tiling.floor <= 3) or tiling == Tiling((256, 64, TILE_ROWS))


@pytest.mark.parametrize("width", [1, 7, 48, 576])
def test_row_operations(ops: Ops, width: int) -> None:
    x, weight = rand(77, 2 * width) * 4, rand(2 * width, seed=1)
    cos, sin = rand(77, 1, width, seed=2), rand(77, 1, width, seed=3)
    heads = rand(77, 3, 2 * width, seed=4)

    def run(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = x[rows].clone()
        turned = rotary(heads[rows].clone(), cos[rows].clone(), sin[rows].clone())
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


@pytest.mark.parametrize(
    ("num_kv", "group", "dim", "block_size"),
    [(3, 3, 64, 16), (2, 4, 8, 16), (1, 1, 16, 1), (1, 17, 32, 48), (2, 8, 128, 64), (1, 16, 64, 256)],
)
def test_paged_attention(ops: Ops, num_kv: int, group: int, dim: int, block_size: int) -> None:
    lengths = [200, 1, 64, 65, 130]
    paged = Paged(ops, lengths, num_kv, group, dim, block_size)
    whole = paged.attend([0, 1, 2, 3, 4], [0] * 5, lengths)
    for row in range(5):
        assert (whole[row] - paged.expected(row)).abs().max() < TOLERANCE["attention"]
    for chunk in (1, 7, 64):
        starts = list(range(0, 200, chunk))
        for start in starts:
            count = min(chunk, 200 - start)
            (part,) = paged.attend([0], [start], [count])
            assert torch.equal(part, whole[0][start : start + count]), f"{chunk=} {start=}"
    mixed = paged.attend([4, 1, 3, 0], [129, 0, 33, 63], [1, 1, 32, 3])
    for part, (row, start, count) in zip(mixed, [(4, 129, 1), (1, 0, 1), (3, 33, 32), (0, 63, 3)], strict=True):
        assert torch.equal(part, whole[row][start : start + count]), f"{row=}"


@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_decode_alone_and_in_a_batch(ops: Ops, num_rows: int) -> None:
    lengths = [1 + 37 * row % 300 for row in range(40)]
    paged = Paged(ops, lengths, 3, 3, 64)
    last = [length - 1 for length in lengths]
    whole = paged.attend(list(range(40)), last, [1] * 40)
    for first in range(0, 40, num_rows):
        rows = list(range(first, min(first + num_rows, 40)))
        parts = paged.attend(rows, [last[row] for row in rows], [1] * len(rows))
        assert all(torch.equal(part, whole[row]) for part, row in zip(parts, rows, strict=True)), f"{rows=}"


def test_rotate_and_cache_splits_turns_and_stores(ops: Ops) -> None:
    heads, (cos, sin) = rand(5, 4 + 2 * 2, 8), rand(2, 5, 4, seed=1)
    keys, values = torch.zeros(2, 2, 20, 8)
    at = torch.tensor([3, 19, 0, 7, 8])
    queries = ops.rotate_and_cache(heads, cos, sin, keys, values, at)
    turned = rotary(heads[:, :6], cos[:, None], sin[:, None])
    assert torch.equal(queries, turned[:, :4])
    assert torch.equal(keys[:, at], turned[:, 4:].transpose(0, 1))
    assert torch.equal(values[:, at], heads[:, 6:].transpose(0, 1))
    assert not keys[:, [1, 2, 4]].any()


def test_add_rms_norm_is_both(ops: Ops) -> None:
    x, delta, weight = rand(9, 48), rand(9, 48, seed=1), rand(48, seed=2)
    total, normed = ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))
