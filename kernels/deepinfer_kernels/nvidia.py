"""Operations on an NVIDIA GPU: matrix products by cuBLAS, the rest by Triton kernels. Knows nothing of models.

Same meaning as `reference` and `attention`, in bfloat16 or float32. No function here waits for the device, so all can
be captured in a CUDA graph. `triton` comes with torch's CUDA builds.

Legend: as in `reference`; `n` tiles of an attention launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, frexp, log2
from typing import Final, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from deepinfer_kernels import triton_kernels as device
from deepinfer_kernels.attention import Ints, PackedRows
from deepinfer_kernels.codes import FP8_MAX
from deepinfer_kernels.draws import DraftedRows, Kept
from deepinfer_kernels.expert_tiles import TILE_PAIRS, ExpertTiles
from deepinfer_kernels.linear import LinearWeight
from deepinfer_kernels.row_formats import MIN_FP8_AMAX

SHORT_ROW: Final = 8
"""Rows of at most this many positions (decode, drafts) attend position by position; longer ones in tiles."""
FLAT_STEP: Final = 64
"""In a step of at most this many positions every row does."""
MIN_LANES: Final = 16  # the fewest rows of a tensor core product
TILE_LANES: Final = 64
KEYS: Final = 64
STAGES: Final = {torch.bfloat16: 3, torch.float32: 1}
"""Tiles of keys on their way at once: of float32 more than one does not fit into every GPU's shared memory."""
MAX_SPLITS: Final = 16
WANTED_PROGRAMS: Final = 264  # two for each of 132 multiprocessors
HEADS_AT_ONCE: Final = 8
MAX_BLOCK: Final = 1024
GROUPS_AT_ONCE: Final = 16
EXPERT_COLUMNS: Final = 64
EXPERT_INNER: Final = 64
_MANTISSA: Final = 1 << 23  # of a float32's bits
_LIMIT_MANTISSA, _LIMIT_EXPONENT = frexp(FP8_MAX)
_LIMIT_BITS: Final = 2 * _MANTISSA - 1 - int(2 * _LIMIT_MANTISSA * _MANTISSA)
_LIMIT_SHIFT: Final = (_LIMIT_EXPONENT - 1) * _MANTISSA


class Launch(NamedTuple):
    """Tiles of one width."""

    firsts: Tensor
    """[n]: the first position of each tile, as an index into the step."""
    sizes: Tensor | None
    """[n]: its positions; `None`: one each."""
    width: int
    splits: int


@dataclass(frozen=True)
class CudaAttentionPlan:
    """How the attention of one step is launched, the same for all layers."""

    rows: PackedRows
    launches: list[Launch]
    block_size: int
    group_size: int


def is_flat(counts: Ints) -> bool:
    """Rows of these sizes attend position by position: what is launched depends on the padded step size alone."""
    return int(counts.sum()) <= FLAT_STEP or int(counts.max()) <= SHORT_ROW


def typical_steps(num_kv: int) -> list[Ints]:
    """A prompt alone, and beside as many single positions as make each number of splits; single positions alone."""
    long = FLAT_STEP + 1
    steps = [np.array([long], np.int64)]
    splits = 1
    while splits <= MAX_SPLITS:
        num_singles = -(-WANTED_PROGRAMS // (num_kv * splits))
        steps += [np.array([long] + [1] * num_singles, np.int64), np.ones(num_singles, np.int64)]
        splits *= 2
    return steps


def plan_attention(rows: PackedRows, *, block_size: int, group_size: int, num_kv: int) -> CudaAttentionPlan:
    """Short rows position by position, long ones in tiles."""
    num_positions = rows.positions.shape[0]
    if is_flat(rows.counts):
        every = torch.arange(num_positions, device=rows.positions.device)
        launches = [Launch(every, None, 1, _num_splits(num_positions * num_kv))]
    else:
        launches = _mixed_launches(rows, max(1, TILE_LANES // triton.next_power_of_2(group_size)), num_kv)
    return CudaAttentionPlan(rows, launches, block_size, group_size)


def paged_attention(queries: Tensor, keys: Tensor, values: Tensor, plan: CudaAttentionPlan) -> Tensor:
    """`queries` [T, H, D] on the caches `keys`, `values` [K, positions, D] of a layer: [T, H * D]."""
    num_positions, num_heads, dim = queries.shape
    out = queries.new_empty(num_positions, num_heads * dim)
    for launch in plan.launches:
        _attend(queries, keys, values, out, plan, launch)
    return out


def pack_linear(weight: Tensor, dtype: torch.dtype) -> LinearWeight:
    """`weight` [F, C] as cuBLAS takes it."""
    return LinearWeight(weight.to(dtype), torch.nn.functional.linear)


def project(x: Tensor, weight: LinearWeight) -> Tensor:
    """Logits: `x` [T, C] times the transposed weight [V, C], kept in float32: [T, V]."""
    if x.dtype == torch.float32:
        return torch.nn.functional.linear(x, weight.packed)
    return torch.mm(x, weight.packed.t(), out_dtype=torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference; reduced in float32."""
    num_rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    device.rms_norm_kernel[(num_rows,)](x, weight, out, width, eps, BLOCK=block, num_warps=_num_warps(block))
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the reference; the sum is rounded before it is normed."""
    num_rows, width = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    device.add_rms_norm_kernel[(num_rows,)](
        x, delta, weight, total, out, width, eps, BLOCK=block, num_warps=_num_warps(block)
    )
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As the reference; computed in float32."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    device.silu_mul_kernel[(num_rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


def rotate_and_cache(heads: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """As the reference; turned in float32."""
    num_rows, num_all, dim = heads.shape
    num_kv, half = keys.shape[0], dim // 2
    num_heads = num_all - 2 * num_kv
    queries = heads.new_empty(num_rows, num_heads, dim)
    device.rotate_and_cache_kernel[(num_rows, triton.cdiv(num_all, HEADS_AT_ONCE))](
        heads, cos, sin, queries, keys, values, indices, num_heads, num_kv, keys.stride(0),
        HALF=half, HALF_BLOCK=triton.next_power_of_2(half), HEADS=HEADS_AT_ONCE,
    )  # fmt: skip
    return queries


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference's `rms_norm`, for any shape."""
    if not x.numel():
        return x
    rows = x.contiguous().view(-1, x.shape[-1])
    return rms_norm(rows, weight, eps).view(x.shape)


def round_activation(x: Tensor, group: int) -> Tensor:
    """As `fake_quantize_activation`, bit for bit."""
    if not x.numel():
        return x
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    row_groups = triton.cdiv(width, group)
    num_groups = x.numel() // width * row_groups
    device.round_activation_kernel[(triton.cdiv(num_groups, GROUPS_AT_ONCE),)](
        x, out, num_groups, width, row_groups, MIN_FP8_AMAX,
        GROUP=group, GROUP_BLOCK=triton.next_power_of_2(group), GROUPS=GROUPS_AT_ONCE, LIMIT_BITS=_LIMIT_BITS,
        SHIFT=_LIMIT_SHIFT,
    )  # fmt: skip
    return out


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """As the reference."""
    if not x.numel():
        return x
    x = x.contiguous()
    num_rows, num_heads, dim = x.shape
    out = torch.empty_like(x)
    device.turn_pairs_kernel[(num_rows, triton.cdiv(num_heads, HEADS_AT_ONCE))](
        x, cos, sin, out, num_heads, -1.0 if back else 1.0,
        DIM=dim, ROPE=2 * cos.shape[1], HALF_BLOCK=triton.next_power_of_2(dim // 2), HEADS=HEADS_AT_ONCE,
    )  # fmt: skip
    return out


def stream_mixes(
    raw: Tensor, streams: Tensor, scale: Tensor, base: Tensor, num_iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    num_rows, n, channels = streams.shape
    collapse, post, comb = raw.new_empty(num_rows, n), raw.new_empty(num_rows, n), raw.new_empty(num_rows, n, n)
    if num_rows:
        block = min(MAX_BLOCK, triton.next_power_of_2(n * channels))
        device.stream_mixes_kernel[(num_rows,)](
            raw.contiguous(), streams.contiguous(), scale, base, collapse, post, comb, eps, rms_eps,
            WIDTH=n * channels, NUM_ITERS=num_iters, N=n, N_BLOCK=triton.next_power_of_2(n), BLOCK=block,
            num_warps=_num_warps(block),
        )  # fmt: skip
    return collapse, post, comb


def expand_streams(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As the reference."""
    num_rows, n, channels = streams.shape
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if num_rows:
        block = min(MAX_BLOCK, triton.next_power_of_2(channels))
        device.expand_streams_kernel[(num_rows, triton.cdiv(channels, block))](
            output.contiguous(), streams.contiguous(), post, comb, out, channels,
            N=n, N_BLOCK=triton.next_power_of_2(n), BLOCK=block,
        )  # fmt: skip
    return out


def expert_linear(x: Tensor, weight: Tensor, tiles: ExpertTiles) -> Tensor:
    """The rows of `x` by the transposed weights of their experts, `weight` [E, F, C]: [P, F] float32.

    `x` [P, C] has a row for each pair, or [T, C] one for all pairs of a position. Pairs in no tile get zeros.
    """
    out = torch.zeros(tiles.num_pairs, weight.shape[1], device=x.device)
    if tiles.num_pairs:
        num_experts, width_out, width_in = weight.shape
        device.expert_linear_kernel[(len(tiles.experts), triton.cdiv(width_out, EXPERT_COLUMNS))](
            x.contiguous(), weight, out, tiles.pairs, tiles.experts, num_experts, width_out,
            WIDTH_IN=width_in, PER_INPUT=tiles.num_pairs // len(x), ROWS=TILE_PAIRS, COLUMNS=EXPERT_COLUMNS,
            INNER=EXPERT_INNER, PRECISION="ieee",
        )  # fmt: skip
    return out


def draw(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, moments: Tensor, kept: Kept | None = None
) -> tuple[Tensor, Tensor | None]:
    """As `Draw` says. Nothing of [R, V] is made."""
    num_rows, width = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    log_sums = None if kept is None else torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    if num_rows:
        scores, block = logits if kept is None else kept.scores, min(MAX_BLOCK, triton.next_power_of_2(width))
        device.draw_kernel[(num_rows,)](
            logits.contiguous(), temperatures, seeds, moments, tokens, scores,
            seeds if kept is None else kept.rows, temperatures if log_sums is None else log_sums,
            scores.stride(0),
            KEEP=kept is not None, WIDTH=width, BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return tokens, log_sums


def verify(logits: Tensor, rows: DraftedRows) -> tuple[Tensor, Tensor]:
    """As `Verify` says. Nothing of [P, V] is made."""
    num_rows, width = len(rows.firsts), logits.shape[1]
    num_accepted, followers = torch.empty(2, num_rows, dtype=torch.int64, device=logits.device).unbind(0)
    if num_rows:
        drafts, block = rows.drafts, min(MAX_BLOCK, triton.next_power_of_2(width))
        device.verify_kernel[(num_rows,)](
            logits.contiguous(), rows.firsts, rows.counts, rows.temperatures, rows.accept_seeds, rows.follow_seeds,
            rows.anchors, drafts.tokens, drafts.scores, drafts.log_sums, rows.slots, num_accepted, followers,
            drafts.tokens.shape[1],
            MOMENTS=rows.num_moments, WIDTH=width, BLOCK=block, num_warps=_num_warps(block),
        )  # fmt: skip
    return num_accepted, followers


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, plan: CudaAttentionPlan, launch: Launch
) -> None:
    num_positions, num_heads, dim = queries.shape
    num_kv, num_tiles, splits = keys.shape[0], launch.firsts.shape[0], launch.splits
    group_block = triton.next_power_of_2(plan.group_size)
    group_block = max(group_block, MIN_LANES // launch.width)
    parts, peaks, totals = out, out, out
    if splits > 1:
        parts = queries.new_empty(num_positions * num_heads * splits, dim, dtype=torch.float32)
        peaks, totals = parts.new_empty(2, num_positions * num_heads * splits).unbind(0)
    rows = plan.rows
    device.attend_kernel[(num_tiles, num_kv, splits)](
        queries, keys, values, parts, peaks, totals,
        launch.firsts, launch.firsts if launch.sizes is None else launch.sizes, rows.slots, rows.positions, rows.tables,
        dim**-0.5 * log2(e), keys.stride(0), rows.tables.stride(0), num_heads,
        BLOCK_SIZE=plan.block_size, GROUP=plan.group_size, GROUP_BLOCK=group_block, WIDTH=launch.width,
        DIM=dim, DIM_BLOCK=max(MIN_LANES, triton.next_power_of_2(dim)), KEYS=KEYS, SPLITS=splits,
        PRECISION="ieee", num_warps=4, num_stages=STAGES[queries.dtype],
    )  # fmt: skip
    if splits > 1:
        device.combine_kernel[(num_tiles, num_heads)](
            parts, peaks, totals, launch.firsts, out, num_heads,
            DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), SPLITS=splits, SPLITS_BLOCK=triton.next_power_of_2(splits),
            num_warps=1,
        )  # fmt: skip


def _mixed_launches(rows: PackedRows, width: int, num_kv: int) -> list[Launch]:
    counts = rows.counts
    firsts = np.cumsum(counts) - counts
    is_long = counts > SHORT_ROW
    tiles_per_row = -(-counts[is_long] // width)
    index_in_row = np.arange(tiles_per_row.sum()) - np.repeat(np.cumsum(tiles_per_row) - tiles_per_row, tiles_per_row)
    tile_firsts = np.repeat(firsts[is_long], tiles_per_row) + index_in_row * width
    tile_sizes = np.minimum(np.repeat(counts[is_long], tiles_per_row) - index_in_row * width, width)
    short = counts[~is_long]
    singles = np.repeat(firsts[~is_long] - (np.cumsum(short) - short), short) + np.arange(short.sum())
    target = rows.positions.device
    num_tiles, num_singles = len(tile_firsts), len(singles)
    packed = torch.from_numpy(np.concatenate((tile_firsts, tile_sizes, singles)))
    if target.type == "cuda":
        packed = packed.pin_memory().to(target, non_blocking=True)
    launches = [Launch(packed[:num_tiles], packed[num_tiles : 2 * num_tiles], width, 1)]
    if num_singles:
        launches.append(Launch(packed[2 * num_tiles :], None, 1, _num_splits(num_singles * num_kv)))
    return launches


def _num_splits(num_programs: int) -> int:
    """Into how many parts the keys are cut, so that few rows fill the device as well. A power of two."""
    wanted: int = triton.next_power_of_2(-(-WANTED_PROGRAMS // num_programs))
    return min(wanted, MAX_SPLITS)


def _num_warps(block: int) -> int:
    return min(max(block // 256, 1), 8)
