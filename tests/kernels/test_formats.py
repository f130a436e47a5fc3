"""The number formats against their definition, over all codes and on random rows, and against a public oracle."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_kernels import (
    FormatError,
    dequantize_fp4,
    dequantize_fp8_blocks,
    dequantize_fp8_rows,
    fake_index_row,
    fake_main_row,
    fake_quantize_activation,
    fake_v4_row,
    fake_window_row,
    index_row_bytes,
    main_row_bytes,
    pack_index_row,
    pack_main_row,
    pack_v4_row,
    pack_window_row,
    quantize_activation,
    quantize_fp4,
    quantize_fp8_blocks,
    quantize_fp8_rows,
    unpack_index_row,
    unpack_main_row,
    unpack_v4_row,
    unpack_window_row,
    v4_row_bytes,
    window_row_bytes,
)
from deepinfer_kernels.codes import E8M0, FP4_MAX, FP8, FP8_MAX, grouped, power_of_two_scale
from doubles import small_floats
from doubles.small_floats import Array, amax, fp4_bytes, fp8_codes, power_of_two_codes, scaled

ROPE = 16  # turned dims of a V4 row in these tests


class Row(NamedTuple):
    """One row format as the tests call it."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    fake: Callable[[Tensor], Tensor]
    group: int


ROWS: Final = {
    "main": Row(pack_main_row, unpack_main_row, fake_main_row, 16),
    "index": Row(pack_index_row, unpack_index_row, fake_index_row, 32),
    "window": Row(pack_window_row, unpack_window_row, fake_window_row, 32),
    "v4": Row(
        lambda x: pack_v4_row(x, ROPE),
        lambda rows: unpack_v4_row(rows, ROPE),
        lambda x: fake_v4_row(x, ROPE),
        64,
    ),
}
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def all_bytes(*shape: int) -> Tensor:
    """Every byte in turn."""
    return torch.arange(math.prod(shape)).to(torch.uint8).view(shape)


def bits(x: Tensor) -> Tensor:
    """What tells -0 from 0, and takes every NaN for the same."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def same(ours: Tensor, expected: Array) -> None:
    """Bitwise equal, once `expected` is rounded to float32."""
    with np.errstate(over="ignore"):  # 448 * 2^127 is an infinity in float32
        rounded = torch.from_numpy(np.asarray(expected, dtype=np.float32))
    assert torch.equal(bits(ours), bits(rounded))


def rough(*shape: int, seed: int = 0, spread: float = 20.0) -> Tensor:
    """Random values whose groups differ in size by powers of two, with ties, zeros and whole groups of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.3, (x * 4).round() / 4, x)
    x = x * torch.exp2((torch.randn(*shape[:-1], 1, generator=generator) * spread).round().clamp(-120, 120))
    x[..., :64] *= (torch.rand(*shape[:-1], 1, generator=generator) > 0.1).float()
    return x


# Reading: every code under every scale.


def test_every_fp8_code_under_every_scale_reads_as_defined() -> None:
    codes, scales = all_bytes(256, 256), all_bytes(256, 1).expand(256, 8).contiguous()
    expected = small_floats.E4M3[None] * small_floats.E8M0[:, None]
    same(dequantize_fp8_rows(codes.view(FP8), scales.view(E8M0)), expected)
    same(dequantize_fp8_blocks(codes.view(FP8), scales.view(E8M0)[::32], 32)[::32], expected[::32])


def test_every_pair_of_fp4_codes_under_every_scale_reads_as_defined() -> None:
    codes, scales = all_bytes(256, 256), all_bytes(256, 1).expand(256, 16).contiguous()
    pairs = np.stack([small_floats.E2M1[np.arange(256) & 15], small_floats.E2M1[np.arange(256) >> 4]], axis=-1)
    expected = pairs.reshape(1, 512) * small_floats.E8M0[:, None]
    same(dequantize_fp4(codes.view(torch.int8), scales.view(E8M0)), expected)


def test_every_byte_of_a_main_row_reads_as_defined() -> None:
    """Scales of main rows are E4M3, negative ones and NaN among what can be read."""
    rows = torch.cat((all_bytes(256, 256), all_bytes(256, 1).expand(256, 32)), dim=-1)
    pairs = np.stack([small_floats.E2M1[np.arange(256) & 15], small_floats.E2M1[np.arange(256) >> 4]], axis=-1)
    same(unpack_main_row(rows), pairs.reshape(1, 512) * small_floats.E4M3[:, None])


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "block"), [(1, 1, 32), (70, 45, 32), (64, 96, 32), (129, 260, 128)]
)
def test_a_square_shares_its_scale_at_ragged_edges_too(num_rows: int, num_columns: int, block: int) -> None:
    codes = all_bytes(num_rows, num_columns)
    scales = all_bytes(-(-num_rows // block), -(-num_columns // block)) + 120
    values = dequantize_fp8_blocks(codes.view(FP8), scales.view(E8M0), block)
    for n in range(num_rows):
        scale_row = small_floats.E8M0[scales[n // block].numpy()]
        same(values[n], small_floats.E4M3[codes[n].numpy()] * np.repeat(scale_row, block)[:num_columns])


# Writing: every code, every edge between two codes, every scale.


def edges(magnitudes: Array) -> Tensor:
    """Of every code its value, and every midpoint to the next with its float32 neighbours, of both signs."""
    middles = ((magnitudes[1:] + magnitudes[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(way)) for way in (0, np.inf)]
    positive = np.concatenate([magnitudes.astype(np.float32), middles, *around])
    return torch.from_numpy(np.concatenate([positive, -positive]))


def test_fp8_rounds_every_edge_to_nearest_and_ties_to_even() -> None:
    x = edges(small_floats.E4M3_MAGNITUDES)
    rows = torch.full((len(x), 32), 448.0)  # which makes the scale 1
    rows[:, 0] = x
    codes, scales = quantize_activation(rows)
    assert scales.view(torch.uint8).unique().tolist() == [127]
    assert torch.equal(codes[:, 0].view(torch.uint8), torch.from_numpy(fp8_codes(x.numpy())))


@pytest.mark.parametrize("row", [ROWS["main"], ROWS["index"]], ids=["main", "index"])
@pytest.mark.parametrize("place", [0, 1])
def test_fp4_rounds_every_edge_to_nearest_and_ties_to_even(row: Row, place: int) -> None:
    x = edges(small_floats.E2M1_MAGNITUDES)
    rows = torch.full((len(x), row.group), 6.0)  # which makes the scale 1
    rows[:, place] = x
    same(
        row.fake(rows),
        small_floats.E2M1[
            small_floats.nearest(rows.numpy(), small_floats.E2M1_MAGNITUDES) + 8 * np.signbit(rows.numpy())
        ],
    )
    assert torch.equal(row.pack(rows)[:, : row.group // 2], torch.from_numpy(fp4_bytes(rows.numpy())))


@pytest.mark.parametrize("limit", [FP8_MAX, FP4_MAX])
def test_a_scale_is_the_least_power_of_two_on_both_sides_of_every_edge(limit: float) -> None:
    edge = (small_floats.E8M0[:255] * limit).astype(np.float64)
    edge = edge[edge < np.finfo(np.float32).max].astype(np.float32)
    least = np.float32(2.0**-149)
    near = [edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf)), edge * np.float32(0.75)]
    values = np.concatenate([*near, [least, np.finfo(np.float32).max]])
    expected = torch.from_numpy(power_of_two_codes(values, limit))
    assert torch.equal(power_of_two_scale(torch.from_numpy(values), limit).view(torch.uint8), expected)


def test_zeros_get_a_plain_scale() -> None:
    zeros = torch.zeros(32, 32)
    assert quantize_fp8_blocks(zeros, 32)[1].float().item() == 2.0**-9
    assert quantize_fp8_rows(zeros)[1].float().unique().item() == 2.0**-9
    assert quantize_fp4(zeros)[1].float().unique().item() == 2.0**-3
    assert quantize_activation(zeros)[1].float().unique().item() == 2.0**-22  # 1e-4 / 448, rounded up
    assert pack_index_row(zeros)[:, 16:].unique().item() == 1  # 2^-126
    assert pack_main_row(zeros)[:, 16:].unique().item() == 1  # 2^-9
    for fake in (fake_quantize_activation, fake_index_row, fake_main_row, fake_window_row, fake_v4_row_16):
        assert torch.equal(bits(fake(zeros)), bits(zeros))


def fake_v4_row_16(x: Tensor) -> Tensor:
    return fake_v4_row(x, ROPE)


# Random rows against the definition.

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
close = st.floats(min_value=-8, max_value=8, width=32)
rows_of_64 = st.lists(finite, min_size=64, max_size=64) | st.lists(close, min_size=64, max_size=64)
seeds = st.integers(0, 2**31)
quick = settings(max_examples=60, deadline=None)


def expected_fp8(x: Array, group: int, min_amax: float) -> tuple[Array, Array]:
    """Codes and scale codes."""
    scales = power_of_two_codes(np.maximum(amax(x, group), np.float32(min_amax)), FP8_MAX)
    return fp8_codes(scaled(x, small_floats.E8M0[scales], group)), scales


def expected_index_row(x: Array) -> Array:
    scales = power_of_two_codes(np.maximum(amax(x, 32), 6 * 2.0**-126), FP4_MAX)
    return np.concatenate([fp4_bytes(scaled(x, small_floats.E8M0[scales], 32)), scales], axis=-1)


def expected_main_row(x: Array) -> Array:
    scales = fp8_codes(np.clip(amax(x, 16) / 6, 2.0**-9, 448))
    return np.concatenate([fp4_bytes(scaled(x, small_floats.E4M3[scales], 16)), scales], axis=-1)


def expected_v4_row(x: Array) -> Array:
    dim = x.shape[-1] - ROPE
    filled = np.concatenate([x[..., :dim], np.zeros((*x.shape[:-1], -dim % 64), dtype=x.dtype)], axis=-1)
    codes, scales = expected_fp8(filled, 64, 1e-4)
    turned = torch.from_numpy(x[..., dim:]).bfloat16().contiguous().view(torch.uint8).numpy()
    filler = np.zeros((*x.shape[:-1], -scales.shape[-1] % 8), dtype=np.uint8)
    return np.concatenate([codes[..., :dim], turned, scales, filler], axis=-1)


def check_against_definition(x: Tensor) -> None:
    """Every writer's bytes for `x` [T, D], D a multiple of 64."""
    codes, scales = expected_fp8(x.numpy(), 32, 1e-4)
    ours, our_scales = quantize_activation(x)
    assert np.array_equal(ours.view(torch.uint8).numpy(), codes)
    assert np.array_equal(our_scales.view(torch.uint8).numpy(), scales)
    assert np.array_equal(pack_window_row(x).numpy(), np.concatenate([codes, scales], axis=-1))
    assert np.array_equal(pack_index_row(x).numpy(), expected_index_row(x.numpy()))
    assert np.array_equal(pack_main_row(x).numpy(), expected_main_row(x.numpy()))
    assert np.array_equal(pack_v4_row(x, ROPE).numpy(), expected_v4_row(x.numpy()))


@quick
@given(rows_of_64)
def test_any_row_is_packed_as_defined(row: list[float]) -> None:
    check_against_definition(torch.tensor([row], dtype=torch.float32))


@quick
@given(seeds)
def test_rows_of_every_size_are_packed_as_defined(seed: int) -> None:
    check_against_definition(rough(16, 128, seed=seed))


@quick
@given(seeds)
def test_quotients_next_to_a_tie_are_not_taken_for_it(seed: int) -> None:
    """A main row's scale is no power of two, so its quotients round: never onto a tie that they are not."""
    generator = np.random.default_rng(seed)
    scales = small_floats.E4M3_MAGNITUDES[generator.integers(1, 127, size=(64, 1))]
    middles = (small_floats.E2M1_MAGNITUDES[1:] + small_floats.E2M1_MAGNITUDES[:-1]) / 2
    ties = (scales * middles[generator.integers(0, 7, size=(64, 16))]).astype(np.float32)
    x = np.nextafter(ties, generator.choice(np.array([0, np.inf], np.float32), size=ties.shape), dtype=np.float32)
    x[:, 0] = 6 * scales[:, 0]
    rows = np.concatenate([x, ties], axis=-1)
    rows[:, 16] = x[:, 0]
    assert np.array_equal(pack_main_row(torch.from_numpy(rows)).numpy(), expected_main_row(rows))


@quick
@given(seeds, st.integers(1, 70), st.integers(1, 70))
def test_weights_are_written_as_defined(seed: int, num_rows: int, num_columns: int) -> None:
    weight = rough(num_rows, num_columns, seed=seed, spread=3.0)
    codes, scales = quantize_fp8_blocks(weight, 32)
    for n in range(0, num_rows, 32):
        for k in range(0, num_columns, 32):
            square = weight[n : n + 32, k : k + 32].numpy()
            expected = power_of_two_codes(np.abs(square).max(), FP8_MAX) if square.any() else 118
            assert scales[n // 32, k // 32].view(torch.uint8).item() == expected
            written = codes[n : n + 32, k : k + 32].view(torch.uint8).numpy()
            assert np.array_equal(written, fp8_codes(square / small_floats.E8M0[expected]))


@quick
@given(seeds)
def test_fp4_weights_and_fp8_rows_are_written_as_defined(seed: int) -> None:
    weight = rough(8, 96, seed=seed) + 2.0**-140  # no zeros: their scale is a case of its own
    codes, scales = quantize_fp4(weight)
    expected = power_of_two_codes(amax(weight.numpy(), 32), FP4_MAX)
    assert np.array_equal(scales.view(torch.uint8).numpy(), expected)
    quotients = scaled(weight.numpy(), small_floats.E8M0[expected], 32)
    assert np.array_equal(codes.view(torch.uint8).numpy(), fp4_bytes(quotients))
    row_codes, row_scales = quantize_fp8_rows(weight)
    expected_codes, expected_scales = expected_fp8(weight.numpy(), 32, 0.0)
    assert np.array_equal(row_codes.view(torch.uint8).numpy(), expected_codes)
    assert np.array_equal(row_scales.view(torch.uint8).numpy(), expected_scales)


def test_what_was_read_is_written_again_with_the_same_values() -> None:
    """The checkpoint generator's weights lose nothing on a second way through the format."""
    weight = rough(70, 96, spread=4.0)
    fp8 = dequantize_fp8_blocks(*quantize_fp8_blocks(weight, 32), 32)
    fp4 = dequantize_fp4(*quantize_fp4(weight))
    rows = dequantize_fp8_rows(*quantize_fp8_rows(weight))
    assert torch.equal(bits(dequantize_fp8_blocks(*quantize_fp8_blocks(fp8, 32), 32)), bits(fp8))
    assert torch.equal(bits(dequantize_fp4(*quantize_fp4(fp4))), bits(fp4))
    assert torch.equal(bits(dequantize_fp8_rows(*quantize_fp8_rows(rows))), bits(rows))


# Packing.


def test_rows_have_the_released_sizes() -> None:
    assert (main_row_bytes(512), index_row_bytes(128), window_row_bytes(512), v4_row_bytes(512, 64)) == (
        288,
        68,
        528,
        584,
    )
    x = rough(3, 512)
    assert pack_main_row(x).shape == (3, 288)
    assert pack_index_row(x[:, :128]).shape == (3, 68)
    assert pack_window_row(x).shape == (3, 528)
    assert pack_v4_row(x, 64).shape == (3, 584)


@each_row
@pytest.mark.parametrize("shape", [(0, 64), (5, 64), (2, 3, 128), (64,)])
def test_a_packed_row_holds_what_the_fake_one_shows(row: Row, shape: tuple[int, ...]) -> None:
    x = rough(*shape) if len(shape) > 1 else rough(1, *shape)[0]
    packed = row.pack(x)
    assert packed.dtype == torch.uint8
    assert torch.equal(bits(row.unpack(packed)), bits(row.fake(x)))
    assert row.fake(x).shape == x.shape


@pytest.mark.parametrize(("dim", "rope_dim"), [(64, 16), (512, 64), (64, 64), (528, 16), (1090, 64)])
def test_a_v4_row_knows_its_size_from_its_bytes(dim: int, rope_dim: int) -> None:
    x = rough(4, dim)
    packed = pack_v4_row(x, rope_dim)
    assert packed.shape[-1] == v4_row_bytes(dim, rope_dim)
    values = unpack_v4_row(packed, rope_dim)
    assert values.shape == x.shape
    assert torch.equal(values[:, dim - rope_dim :], x[:, dim - rope_dim :].bfloat16().float())


@each_row
def test_a_row_has_the_same_bits_in_any_company(row: Row) -> None:
    x = rough(37, 192)
    packed, fake = row.pack(x), row.fake(x)
    for start, end in ((0, 1), (3, 20), (36, 37)):
        assert torch.equal(row.pack(x[start:end]), packed[start:end])
        assert torch.equal(bits(row.fake(x[start:end])), bits(fake[start:end]))
        assert torch.equal(bits(row.unpack(packed[start:end])), bits(fake[start:end]))
    strided = torch.stack((x, x), dim=-1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(row.pack(strided), packed)
    assert torch.equal(bits(row.unpack(torch.stack((packed, packed), dim=-1)[..., 0])), bits(fake))


@quick
@given(st.integers(1, 70), seeds)
def test_an_activation_has_the_same_bits_in_any_company(num_rows: int, seed: int) -> None:
    x = rough(num_rows, 96, seed=seed)
    fake = fake_quantize_activation(x)
    for t in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(bits(fake_quantize_activation(x[t : t + 1])), bits(fake[t : t + 1]))
        assert torch.equal(bits(fake_quantize_activation(x[t, 32:64])), bits(fake[t, 32:64]))


@quick
@given(st.integers(1, 9), st.integers(1, 300), st.sampled_from([32, 128]), seeds)
def test_a_fake_activation_is_what_its_codes_read_as(num_rows: int, width: int, group: int, seed: int) -> None:
    """The last group may be short, as if zeros were behind it."""
    x = rough(num_rows, width, seed=seed)
    filled = torch.nn.functional.pad(x, (0, -width % group))
    codes, scales = quantize_activation(filled, group)
    expected = grouped(codes.float(), group) * scales.float()[..., None]
    assert torch.equal(bits(fake_quantize_activation(x, group)), bits(expected.flatten(-2)[:, :width]))


def test_a_fake_activation_takes_every_edge_as_the_codes_do() -> None:
    """Of every power of two from the floor on: the limit's multiple and its neighbours, and what is not finite."""
    edges = FP8_MAX * torch.exp2(torch.arange(-40.0, 120.0))
    around = torch.cat((edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(torch.inf))))
    every = torch.cat((around, torch.tensor([0.0, 1e-4, 1e-30, torch.inf, torch.nan])))
    x = torch.zeros(len(every), 32)
    x[:, 3], x[:, 7] = every, -every / 3
    codes, scales = quantize_activation(x)
    expected = grouped(codes.float(), 32) * scales.float()[..., None]
    assert torch.equal(bits(fake_quantize_activation(x)), bits(expected.flatten(-2)))


# What is not finite, and what is too large.


@each_row
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_own_group_alone(row: Row, bad: float) -> None:
    x = rough(2, 192, spread=1.0)
    clean = row.fake(x)
    x[1, 64] = bad
    fake = row.fake(x)
    assert torch.equal(bits(row.unpack(row.pack(x))), bits(fake))
    spoiled = torch.zeros_like(x, dtype=torch.bool)
    spoiled[1, 64 : 64 + row.group] = True
    if row.group == 16 and not math.isnan(bad):  # a main row's scale is clamped
        assert fake[1, 64] == math.copysign(6 * 448, bad)
        assert fake[1, 65 : 64 + row.group].isfinite().all()
    else:
        assert fake[spoiled].isnan().all()
    assert torch.equal(bits(fake[~spoiled]), bits(clean[~spoiled]))


def test_weights_that_are_not_finite_stay_visible() -> None:
    weight = torch.ones(64, 64)
    weight[0, 0], weight[40, 40] = math.nan, math.inf
    fp8, fp4 = dequantize_fp8_blocks(*quantize_fp8_blocks(weight, 32), 32), dequantize_fp4(*quantize_fp4(weight))
    assert fp8[:32, :32].isnan().all()
    assert fp8[32:, 32:].isnan().all()
    assert torch.equal(fp8[:32, 32:], weight[:32, 32:])
    assert fp4.isnan().any(1).nonzero().flatten().tolist() == [0, 40]


def test_a_main_row_takes_what_it_cannot_hold_to_its_largest() -> None:
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([1e30, -1e30, 2689.0, 100.0])
    assert fake_main_row(x)[0, :5].tolist() == [2688.0, -2688.0, 2688.0, 0.0, 0.0]


def test_the_largest_of_a_group_never_exceeds_the_format() -> None:
    """Why E8M0 groups need no clamp: casts of more than 448 differ between versions of torch."""
    largest = torch.tensor([448 * 2.0**119, 448 * (1 + 2.0**-23), 1e-4, 2.0**-149])
    x = largest[:, None].expand(4, 32).contiguous()
    scales = power_of_two_scale(largest, FP8_MAX).float()
    assert (largest / scales <= 448).all()
    assert fake_quantize_activation(x).isfinite().all()
    assert (fake_quantize_activation(x)[:3] > 0).all()


# Refusals.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_activation(torch.zeros(2, 33)), r"values: expected a multiple of 32 .* got \[2, 33\]"),
        (lambda: pack_main_row(torch.zeros(2, 24)), r"values: expected a multiple of 16"),
        (lambda: pack_index_row(torch.zeros(2, 48)), r"values: expected a multiple of 32"),
        (lambda: pack_window_row(torch.zeros(2, 64).bfloat16()), r"values: expected torch.float32, got torch.bfloat16"),
        (lambda: pack_v4_row(torch.zeros(2, 8), 16), r"values: expected at least 16"),
        (lambda: unpack_main_row(torch.zeros(2, 10, dtype=torch.uint8)), r"rows: expected torch.uint8 \[..., n \* 9\]"),
        (lambda: unpack_index_row(torch.zeros(2, 17)), r"rows: expected torch.uint8 .* got torch.float32 \[2, 17\]"),
        (lambda: unpack_window_row(torch.zeros(2, 32, dtype=torch.uint8)), r"rows: expected .* n \* 33\]"),
        (lambda: unpack_v4_row(torch.zeros(2, 36, dtype=torch.uint8), 16), r"rows: expected .* with 16 BF16"),
        (lambda: quantize_fp4(torch.zeros(2, 40)), r"values: expected a multiple of 32"),
        (lambda: quantize_fp8_blocks(torch.zeros(4), 32), r"weight: expected two dimensions, got \[4\]"),
        (
            lambda: dequantize_fp8_blocks(all_bytes(64, 64).view(FP8), all_bytes(2, 3).view(E8M0), 32),
            r"scales: expected torch.float8_e8m0fnu \[2, 2\], got torch.float8_e8m0fnu \[2, 3\]",
        ),
        (
            lambda: dequantize_fp8_blocks(all_bytes(64, 64), all_bytes(2, 2).view(E8M0), 32),
            r"codes: expected torch.float8_e4m3fn",
        ),
        (lambda: dequantize_fp4(all_bytes(4, 16), all_bytes(4, 1).view(E8M0)), r"codes: expected torch.int8"),
        (
            lambda: dequantize_fp4(all_bytes(4, 16).view(torch.int8), all_bytes(4, 1).view(FP8)),
            r"scales: expected torch.float8_e8m0fnu \[4, 1\], got torch.float8_e4m3fn \[4, 1\]",
        ),
        (lambda: dequantize_fp8_rows(all_bytes(4, 64).view(FP8), all_bytes(4, 1).view(E8M0)), r"scales: .*\[4, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call()


# Devices.


@pytest.mark.gpu
@each_row
def test_a_row_has_the_same_bits_on_a_gpu(row: Row) -> None:
    x = torch.cat([rough(300, 512, seed=seed, spread=spread) for seed, spread in enumerate((0.0, 3.0, 25.0))])
    packed = row.pack(x.cuda())
    assert torch.equal(packed.cpu(), row.pack(x))
    assert torch.equal(bits(row.unpack(packed).cpu()), bits(row.fake(x)))
    assert torch.equal(bits(row.fake(x.cuda()).cpu()), bits(row.fake(x)))


@pytest.mark.gpu
def test_weights_have_the_same_bits_on_a_gpu() -> None:
    codes, scales = all_bytes(256, 256), all_bytes(256, 16)
    reads: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda c, s: dequantize_fp8_rows(c.view(FP8), s[:, :8].view(E8M0)),
        lambda c, s: dequantize_fp8_blocks(c.view(FP8), s[:8, :8].view(E8M0), 32),
        lambda c, s: dequantize_fp4(c.view(torch.int8), s.view(E8M0)),
    )
    for read in reads:
        assert torch.equal(bits(read(codes.cuda(), scales.cuda()).cpu()), bits(read(codes, scales)))
    weight = rough(70, 96)
    writes: tuple[Callable[[Tensor], tuple[Tensor, Tensor]], ...] = (
        lambda w: quantize_fp8_blocks(w, 32),
        quantize_fp4,
        quantize_fp8_rows,
        quantize_activation,
    )
    for write in writes:
        for ours, expected in zip(write(weight.cuda()), write(weight), strict=True):
            assert torch.equal(ours.cpu().view(torch.uint8), expected.view(torch.uint8))


# A public implementation.


def import_oracle(module: str) -> Any:
    """A module of NeMo's DeepSeek-V4.1."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        warnings.simplefilter("ignore")  # what its import says is its own affair
        return pytest.importorskip(f"nemo_automodel.components.models.deepseek_v41.{module}")


@pytest.fixture(scope="module")
def oracle() -> Any:
    return import_oracle("quantization")


ORACLE_FORMATS: Final = {"main": "nvfp4", "index": "mxfp4", "window": "fp8"}


@pytest.mark.parametrize("name", ORACLE_FORMATS)
@pytest.mark.parametrize("spread", [0.0, 3.0, 25.0])
def test_rows_equal_the_oracles(oracle: Any, name: str, spread: float) -> None:
    row = ROWS[name]
    x = rough(512, 512, seed=7, spread=spread)
    if name == "main":
        x = x.clamp(-6 * 448, 6 * 448)  # beyond, the oracle leaves it to torch's cast
    expected = oracle.quantize_cache(x, format=ORACLE_FORMATS[name], block_size=row.group)
    assert torch.equal(bits(row.fake(x)), bits(expected))


@pytest.mark.parametrize("name", ORACLE_FORMATS)
def test_rows_at_every_edge_equal_the_oracles(oracle: Any, name: str) -> None:
    """Ties under every scale, and the largest of a group at every edge of its scale."""
    row = ROWS[name]
    magnitudes = small_floats.E4M3_MAGNITUDES if name == "window" else small_floats.E2M1_MAGNITUDES
    values = edges(magnitudes)
    exponents = torch.arange(-30, 30) if name != "main" else torch.arange(-12, 8)
    x = (values[None] * torch.exp2(exponents.float())[:, None]).flatten()
    rows = torch.zeros(len(x), row.group)
    rows[:, 0] = x
    rows[:, 1] = x.roll(1)
    rows[:, 2] = x / 3
    expected = oracle.quantize_cache(rows, format=ORACLE_FORMATS[name], block_size=row.group)
    assert torch.equal(bits(row.fake(rows)), bits(expected))


def test_activations_equal_the_oracles_fp8(oracle: Any) -> None:
    x = rough(256, 320, seed=11)
    assert torch.equal(bits(fake_quantize_activation(x)), bits(oracle.quantize_cache(x, format="fp8", block_size=32)))


def test_weights_equal_the_oracles() -> None:
    read = import_oracle("state_dict_adapter").dequantize_checkpoint_weight
    codes, scales = all_bytes(256, 256), all_bytes(256, 16) % 255
    fp8, fp8_scales = codes.view(FP8), scales[:8, :8].view(E8M0)
    same(dequantize_fp8_blocks(fp8, fp8_scales, 32), read(fp8, fp8_scales, dtype=torch.float32).numpy())
    row_scales = scales[:, :8].view(E8M0)
    same(dequantize_fp8_rows(fp8, row_scales), read(fp8, row_scales, dtype=torch.float32, rowwise=True).numpy())
    expected = read(codes.view(torch.int8), scales.view(E8M0), dtype=torch.float32)
    assert torch.equal(dequantize_fp4(codes.view(torch.int8), scales.view(E8M0)), expected)  # whose code 8 is no -0
