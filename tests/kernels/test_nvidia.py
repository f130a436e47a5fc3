"""The GPU's operations against the reference. `TRITON_INTERPRET=1` runs them without a GPU, where triton is there."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_kernels import (
    DraftedRows,
    Drafts,
    Kept,
    Ops,
    PackedRows,
    expert_tiles,
    fake_quantize_activation,
    reference,
    select_ops,
)
from doubles import draws
from doubles.experts import by_expert
from doubles.paged import Paged, rand

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
# Of results of size one: a few units in the last place that is kept.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=DTYPES, ids=str)
def ops(request: pytest.FixtureRequest) -> Ops:
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[request.param]
    if not is_interpreted():
        return select_ops("nvidia", batch_invariant=False, dtype=name)
    from deepinfer_kernels import nvidia

    return replace(
        select_ops("cpu", batch_invariant=False),
        dtype=request.param,
        rms_norm=nvidia.rms_norm,
        add_rms_norm=nvidia.add_rms_norm,
        rotate_and_cache=nvidia.rotate_and_cache,
        silu_mul=nvidia.silu_mul,
        plan_attention=nvidia.plan_attention,
        paged_attention=nvidia.paged_attention,
        exact_norm=nvidia.exact_norm,
        round_activation=nvidia.round_activation,
        turn_pairs=nvidia.turn_pairs,
        stream_mixes=nvidia.stream_mixes,
        expand_streams=nvidia.expand_streams,
        expert_linear=nvidia.expert_linear,
        draw=nvidia.draw,
        verify=nvidia.verify,
    )


def near(ops: Ops, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found.cpu().double(), expected.double(), rtol=TOLERANCE[ops.dtype], atol=TOLERANCE[ops.dtype]
    )


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 48), (77, 576), (5, 4096), (2, 1000)])
def test_row_operations(ops: Ops, num_rows: int, width: int) -> None:
    x, delta, gate_up = (rand(num_rows, size, seed=i).to(ops.dtype) for i, size in enumerate((width, width, 2 * width)))
    weight = rand(width, seed=5)
    on = [tensor.to(ops.device) for tensor in (x, delta, gate_up, weight)]
    near(ops, ops.rms_norm(on[0], on[3], 1e-5), reference.rms_norm(x.float(), weight, 1e-5))
    total, normed = ops.add_rms_norm(on[0], on[1], on[3], 1e-5)
    near(ops, total, x + delta)
    near(ops, normed, reference.rms_norm((x + delta).float(), weight, 1e-5))
    near(ops, ops.silu_mul(on[2]), reference.silu_mul(gate_up.float()))


@pytest.mark.parametrize(("num_heads", "num_kv", "dim"), [(9, 3, 64), (32, 8, 128), (1, 1, 2), (6, 2, 80)])
def test_rotate_and_cache(ops: Ops, num_heads: int, num_kv: int, dim: int) -> None:
    heads = rand(21, num_heads + 2 * num_kv, dim).to(ops.dtype)
    cos, sin = rand(2, 21, dim // 2, seed=1).unbind(0)
    at = torch.from_numpy(np.random.default_rng(0).permutation(48)[:21])
    found = torch.zeros(2, num_kv, 48, dim, dtype=ops.dtype, device=ops.device)
    turns = cos.to(ops.device), sin.to(ops.device)
    queries = ops.rotate_and_cache(heads.to(ops.device), *turns, found[0], found[1], at.to(ops.device))
    expected = torch.zeros(2, num_kv, 48, dim)
    near(ops, queries, reference.rotate_and_cache(heads.float(), cos, sin, expected[0], expected[1], at))
    near(ops, found, expected)


@pytest.mark.parametrize(
    ("num_kv", "group", "dim", "block_size"),
    [(3, 3, 64, 16), (2, 4, 16, 16), (1, 1, 32, 1), (1, 17, 32, 48), (2, 8, 128, 64), (1, 4, 80, 256)],
)
def test_paged_attention(ops: Ops, num_kv: int, group: int, dim: int, block_size: int) -> None:
    """Prompts in tiles, single positions in one part and in many, both in one step, several rows of a slot."""
    if is_interpreted() and ops.dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products of bfloat16")
    paged = Paged(ops, [200, 1, 64, 65, 130], num_kv, group, dim, block_size)
    steps: list[tuple[list[int], list[int], list[int]]] = [
        ([0, 1, 2, 3, 4], [0] * 5, [200, 1, 64, 65, 130]),
        ([4, 1, 3, 0], [129, 0, 33, 63], [1, 1, 32, 3]),
        ([0], [199], [1]),
        ([0, 3, 2], [100, 64, 0], [70, 1, 5]),
        ([0, 4], [120, 100], [8, 6]),
    ]
    for rows, starts, counts in steps:
        for part, row, start, count in zip(paged.attend(rows, starts, counts), rows, starts, counts, strict=True):
            near(ops, part, paged.expected(row)[start : start + count])


def write_and_attend(ops: Ops, num_positions: int) -> Tensor:
    """Four positions of three kv heads, through a cache with room for `num_positions`."""
    heads, (cos, sin) = rand(4, 9, 64).to(ops.device, ops.dtype), rand(2, 4, 32, seed=1).to(ops.device)
    keys, values = torch.zeros(2, 3, num_positions, 64, dtype=ops.dtype, device=ops.device)
    at = torch.arange(32, 36, device=ops.device)
    queries = ops.rotate_and_cache(heads, cos, sin, keys, values, at)
    slots, table = torch.zeros_like(at), torch.tensor([[2]], dtype=torch.int32, device=ops.device)
    rows = PackedRows(np.array([4]), slots, at - 32, table)
    plan = ops.plan_attention(rows, block_size=16, group_size=1, num_kv=3)
    return ops.paged_attention(queries, keys, values, plan)


def test_a_cache_of_more_elements_than_32_bits_count_is_addressed(ops: Ops) -> None:
    if is_interpreted() or torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GiB of GPU memory")
    try:
        assert torch.equal(write_and_attend(ops, (1 << 24) + 16), write_and_attend(ops, 64))
    finally:
        torch.cuda.empty_cache()


def test_a_step_is_flat_when_its_launches_depend_on_its_size_alone() -> None:
    from deepinfer_kernels import nvidia

    assert nvidia.is_flat(np.ones(300, np.int64))
    assert nvidia.is_flat(np.array([40, 1, 8]))
    assert not nvidia.is_flat(np.array([9] + [1] * 64))


# ---- DeepSeek's, in float32 in any arithmetic


def nearly(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=1e-5, atol=1e-5)


def apart(x: Tensor) -> Tensor:
    """The same values, whose rows do not lie one behind the other."""
    return torch.stack((x, x + 1), -2)[..., 0, :]


@pytest.mark.parametrize("shape", [(1, 1), (3, 48), (7, 3, 80), (2, 1000), (0, 8)])
def test_exact_norm(ops: Ops, shape: tuple[int, ...]) -> None:
    x, weight = rand(*shape), rand(shape[-1], seed=1)
    expected = reference.rms_norm(x, weight, 1e-6)
    nearly(ops.exact_norm(x.to(ops.device), weight.to(ops.device), 1e-6), expected)
    nearly(ops.exact_norm(apart(x.to(ops.device)), weight.to(ops.device), 1e-6), expected)


@pytest.mark.parametrize(("width", "group"), [(192, 32), (33, 32), (256, 128), (5, 32), (640, 64)])
def test_rounded_activations_have_the_reference_bits(ops: Ops, width: int, group: int) -> None:
    x = rand(40, width) * torch.exp2(rand(40, width, seed=1) * 12)
    x[1], x[2, 0], x[3, -1], x[4, 0] = 0.0, torch.inf, torch.nan, 1e-30
    x[5] = torch.linspace(-448, 448, width)
    x[6] = 17.0 * torch.exp2(torch.arange(width) % 11 - 9.0)  # ties
    found = ops.round_activation(apart(x.to(ops.device)), group).cpu()
    expected = fake_quantize_activation(x, group)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("num_heads", "dim", "rope_dim"), [(1, 64, 32), (8, 64, 32), (9, 48, 48), (3, 10, 2)])
@pytest.mark.parametrize("back", [False, True])
def test_turned_pairs(ops: Ops, num_heads: int, dim: int, rope_dim: int, back: bool) -> None:
    x = rand(11, num_heads, dim)
    cos, sin = rand(2, 11, rope_dim // 2, seed=1).unbind(0)
    found = ops.turn_pairs(apart(x.to(ops.device)), cos.to(ops.device), sin.to(ops.device), back=back)
    nearly(found, reference.turn_pairs(x, cos, sin, back=back))


@pytest.mark.parametrize(("n", "channels", "num_iters"), [(4, 192, 20), (4, 1500, 3), (3, 32, 1), (1, 16, 2)])
def test_stream_mixes_and_what_they_expand(ops: Ops, n: int, channels: int, num_iters: int) -> None:
    streams, raw = rand(9, n, channels), 3 * rand(9, 2 * n + n * n, seed=1)
    scale, base, output = rand(2 * n + n * n, seed=2), rand(2 * n + n * n, seed=3), rand(9, channels, seed=4)
    settings = num_iters, 1e-6, 1e-5
    expected = reference.stream_mixes(raw, streams, scale, base, *settings)
    raw_on, streams_on, scale_on, base_on = (tensor.to(ops.device) for tensor in (raw, streams, scale, base))
    found = ops.stream_mixes(raw_on, streams_on, scale_on, base_on, *settings)
    for one, wanted in zip(found, expected, strict=True):
        nearly(one, wanted)
    wide = ops.expand_streams(apart(output.to(ops.device)), streams_on, found[1], found[2])
    nearly(wide, reference.expand_streams(output, streams, expected[1], expected[2]))


@pytest.mark.parametrize(("num_positions", "k", "num_experts"), [(1, 3, 16), (5, 2, 3), (90, 3, 16), (70, 1, 2)])
def test_expert_linear(ops: Ops, num_positions: int, k: int, num_experts: int) -> None:
    """Of a position, and of a pair; experts of other ranks bring zeros."""
    experts = torch.from_numpy(np.random.default_rng(0).integers(-1, num_experts + 1, (num_positions, k)))
    weight = rand(num_experts, 100, 72, seed=1).to(ops.dtype)
    tiles = expert_tiles(experts.to(ops.device), num_experts)
    for x in (rand(num_positions, 72), rand(num_positions * k, 72, seed=2)):
        x = x.to(ops.dtype)
        assert ops.expert_linear is not None
        found = ops.expert_linear(apart(x.to(ops.device)), weight.to(ops.device), tiles)
        near(ops, found, by_expert(x.float(), weight.float(), experts.flatten()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an interpreter has opinions on infinities
@pytest.mark.parametrize("width", [3, 512, 5000])
def test_tokens_drawn_at_once(ops: Ops, width: int) -> None:
    """Greedy, warm and nearly cold rows; with equal logits, banned tokens and what is no number."""
    num_rows = 8
    logits = rand(num_rows, width, seed=3) * 4
    logits[1] = 0.0
    logits[2, ::2] = -torch.inf
    logits[3, width // 2] = torch.inf
    logits[4, :] = -torch.inf
    temperatures = torch.tensor([0.0, 0.0, 1.0, 0.7, 0.7, 1e-300, 1.3, 0.2], dtype=torch.float64)
    generator = np.random.default_rng(width)
    seeds, moments = torch.from_numpy(generator.integers(0, 1 << 63, num_rows)), torch.arange(num_rows) * 1000
    assert ops.draw is not None
    columns = (logits, temperatures, seeds, moments)
    on_logits, on_temperatures, on_seeds, on_moments = (column.to(ops.device) for column in columns)
    found, log_sums = ops.draw(on_logits, on_temperatures, on_seeds, on_moments)
    assert log_sums is None
    wanted, _ = draws.draw(logits, temperatures, seeds, moments)
    numbers = [0, 1, 2, 5, 6, 7]
    assert found.cpu()[numbers].tolist() == wanted[numbers].tolist()
    assert found[3] == width // 2 and 0 <= int(found[4]) < width

    store = torch.zeros(11, 2, width)
    rows = torch.tensor([10, 2, 3, 4, 5, 6, 7, 8])
    expected = torch.zeros(11, width)
    on_device = store.to(ops.device)
    kept = Kept(on_device[:, 1], rows.to(ops.device))
    found, sums = ops.draw(on_logits, on_temperatures, on_seeds, on_moments, kept)
    wanted, wanted_sums = draws.draw(logits, temperatures, seeds, moments, Kept(expected, rows))
    assert sums is not None and wanted_sums is not None
    assert found.cpu()[numbers].tolist() == wanted[numbers].tolist()
    torch.testing.assert_close(sums.cpu()[numbers], wanted_sums[numbers])
    torch.testing.assert_close(on_device[rows[numbers], 1].cpu(), expected[rows[numbers]])
    assert not on_device[:, 0].any() and not on_device[[0, 1, 2, 9, 10]].any(), "greedy rows keep nothing"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an interpreter has opinions on infinities
@pytest.mark.parametrize("width", [3, 512, 5000])
def test_drafts_judged_at_once(ops: Ops, width: int) -> None:
    """Near and far from the target; rows with few drafts and none, in an order of their own."""
    num_rows, longest = 24, 5
    generator = torch.Generator().manual_seed(width)
    counts = torch.arange(num_rows) % (longest + 1)
    firsts = (counts + 1).cumsum(0) - counts - 1
    logits = torch.randn(int((counts + 1).sum()), width, generator=generator) * 2
    temperatures = torch.linspace(0.3, 1.5, num_rows, dtype=torch.float64)
    slots = torch.randperm(num_rows + 1, generator=generator)[:num_rows]
    store = Drafts(
        torch.zeros(num_rows + 1, longest, dtype=torch.int64),
        torch.zeros(num_rows + 1, longest, width),
        torch.zeros(num_rows + 1, longest, dtype=torch.float64),
    )
    for row, slot in enumerate(slots.tolist()):
        for place in range(int(counts[row])):
            far = torch.randn(width, generator=generator) * (0.0, 0.5, 3.0)[row % 3]
            scores = ((logits[firsts[row] + place].double() / temperatures[row]) + far).float()
            store.scores[slot, place] = scores
            store.log_sums[slot, place] = scores.double().logsumexp(-1)
            store.tokens[slot, place] = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
    seeds = torch.randint(0, 1 << 62, (2, num_rows), generator=generator)
    accept_seeds, follow_seeds = seeds
    anchors = torch.arange(num_rows) * 7
    rows = DraftedRows(store, slots, counts, firsts, temperatures, accept_seeds, follow_seeds, anchors, 9)
    wanted = draws.verify(logits, rows)
    on_device = DraftedRows(
        Drafts(*(tensor.to(ops.device) for tensor in store)),
        slots.to(ops.device),
        counts.to(ops.device),
        firsts.to(ops.device),
        temperatures.to(ops.device),
        accept_seeds.to(ops.device),
        follow_seeds.to(ops.device),
        anchors.to(ops.device),
        num_moments=9,
    )
    assert ops.verify is not None
    found = ops.verify(logits.to(ops.device), on_device)
    assert found[0].tolist() == wanted[0].tolist()
    assert found[1].tolist() == wanted[1].tolist()
    accepted = wanted[0].tolist()
    assert any(0 < taken < count for taken, count in zip(accepted, counts.tolist(), strict=True))
