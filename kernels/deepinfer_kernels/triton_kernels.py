"""Device code in Triton. Launched by `nvidia`, which says what the arguments are.

Reductions run in float32. A row's result depends on its own sequence and on the launch's constants only. No integer
argument changes from step to step, and pointers whose alignment does are not compiled for it: whatever serving launches
has been compiled before.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    is_in = at < width
    values = tl.load(x + row + at, mask=is_in, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    gain = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row + at, values * scale * gain, mask=is_in)


@triton.jit
def add_rms_norm_kernel(x, delta, weight, total, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    is_in = at < width
    values = tl.load(x + row + at, mask=is_in, other=0.0).to(tl.float32)
    values += tl.load(delta + row + at, mask=is_in, other=0.0).to(tl.float32)
    # The norm is of what is kept, rounding included.
    kept = values.to(total.dtype.element_ty)
    tl.store(total + row + at, kept, mask=is_in)
    values = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    gain = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row + at, values * scale * gain, mask=is_in)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, gate / (1.0 + tl.exp(-gate)) * up, mask=is_in)


@triton.jit
def rotate_and_cache_kernel(
    heads, cos, sin, queries, keys, values, indices,
    num_heads, num_kv, kv_stride, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A position's heads, `HEADS` at a time: queries are turned, keys turned and cached, values cached."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF_BLOCK)[None, :]
    num_all = num_heads + 2 * num_kv
    is_in = (head < num_all) & (at < HALF)
    source = heads + (row * num_all + head) * 2 * HALF + at
    first = tl.load(source, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_in, other=0.0).to(tl.float32)
    is_turned = head < num_heads + num_kv
    c = tl.where(is_turned, tl.load(cos + row * HALF + at, mask=at < HALF, other=0.0), 1.0)
    s = tl.where(is_turned, tl.load(sin + row * HALF + at, mask=at < HALF, other=0.0), 0.0)
    low = first * c - second * s
    high = second * c + first * s

    is_query = is_in & (head < num_heads)
    target = queries + (row * num_heads + head) * 2 * HALF + at
    tl.store(target, low, mask=is_query)
    tl.store(target + HALF, high, mask=is_query)

    index = tl.load(indices + row)
    is_key = is_in & (head >= num_heads) & is_turned
    # In 64 bits: a cache may have more elements than 32 bits count.
    target = keys + (head - num_heads).to(tl.int64) * kv_stride + index * 2 * HALF + at
    tl.store(target, low, mask=is_key)
    tl.store(target + HALF, high, mask=is_key)
    is_value = is_in & (head >= num_heads + num_kv)
    target = values + (head - num_heads - num_kv).to(tl.int64) * kv_stride + index * 2 * HALF + at
    tl.store(target, low, mask=is_value)
    tl.store(target + HALF, high, mask=is_value)


@triton.jit(do_not_specialize_on_alignment=["peaks", "totals", "firsts", "sizes"])
def attend_kernel(
    queries, keys, values, out, peaks, totals, firsts, sizes, slots, positions, tables,
    scale, kv_stride, table_stride, num_heads,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of up to `WIDTH` consecutive positions of a sequence, one kv head, one of `SPLITS` parts of its keys.

    With one part the output is final; else it is a sum with its peak and total, for `combine_kernel`.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(firsts + tile)
    size = tl.load(sizes + tile) if WIDTH > 1 else 1
    slot = tl.load(slots + first)
    start = tl.load(positions + first)

    lane = tl.arange(0, WIDTH * GROUP_BLOCK)  # position in the tile, then head in the group
    offset = lane // GROUP_BLOCK
    member = lane % GROUP_BLOCK
    is_real = (offset < size) & (member < GROUP)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM_BLOCK)
    rows = (first + offset).to(tl.int64) * num_heads + head
    q = tl.load(queries + rows[:, None] * DIM + dim[None, :], mask=is_real[:, None] & (dim < DIM)[None, :], other=0.0)

    num_keys = start + size
    part = tl.cdiv(tl.cdiv(num_keys, SPLITS), KEYS) * KEYS
    low = split * part
    high = tl.minimum(low + part, num_keys)
    last = start + offset  # the last key that a lane may see
    peak = tl.full([WIDTH * GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([WIDTH * GROUP_BLOCK], tl.float32)
    acc = tl.zeros([WIDTH * GROUP_BLOCK, DIM_BLOCK], tl.float32)
    head_keys = keys + kv_head.to(tl.int64) * kv_stride  # a cache may have more elements than 32 bits count
    head_values = values + kv_head.to(tl.int64) * kv_stride
    for begin in range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < high
        block = tl.load(tables + slot * table_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        at = (block * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * DIM + dim[None, :]
        is_loaded = is_key[:, None] & (dim < DIM)[None, :]
        k = tl.load(head_keys + at, mask=is_loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(is_key[None, :] & (key[None, :] <= last[:, None]), scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, 1))
        # A lane that has seen no key yet has a peak of minus infinity: keep the difference finite.
        safe = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(peak - safe)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(head_values + at, mask=is_loaded, other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = raised

    is_stored = is_real[:, None] & (dim < DIM)[None, :]
    if SPLITS == 1:
        tl.store(out + rows[:, None] * DIM + dim[None, :], acc / total[:, None], mask=is_stored)
    else:
        places = rows * SPLITS + split
        tl.store(out + places[:, None] * DIM + dim[None, :], acc, mask=is_stored)
        tl.store(peaks + places, peak, mask=is_real)
        tl.store(totals + places, total, mask=is_real)


@triton.jit(do_not_specialize_on_alignment=["peaks", "totals", "firsts"])
def combine_kernel(
    parts, peaks, totals, firsts, out, num_heads,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The parts of one position and head, added up in the order of the keys."""
    row = tl.load(firsts + tl.program_id(0)).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, SPLITS_BLOCK)
    is_in = split < SPLITS
    dim = tl.arange(0, DIM_BLOCK)
    peak = tl.load(peaks + row * SPLITS + split, mask=is_in, other=float("-inf"))
    weight = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(weight * tl.load(totals + row * SPLITS + split, mask=is_in, other=0.0), 0)
    places = (row * SPLITS + split)[:, None] * DIM + dim[None, :]
    acc = tl.load(parts + places, mask=is_in[:, None] & (dim < DIM)[None, :], other=0.0)
    tl.store(out + row * DIM + dim, tl.sum(acc * weight[:, None], 0) / total, mask=dim < DIM)


@triton.jit(do_not_specialize=["num_groups"])
def round_activation_kernel(
    x, out, num_groups, width, row_groups, min_amax,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, GROUPS: tl.constexpr, LIMIT_BITS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Groups of neighbours in rows of `width`, the last of a row may be short: as E4M3 keeps them, by its own scale.

    The scale is a power of two, so that both products by it are exact. Not every GPU has E4M3.
    """
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = group % row_groups * GROUP + tl.arange(0, GROUP_BLOCK)[None, :]
    is_in = (group < num_groups) & (tl.arange(0, GROUP_BLOCK) < GROUP)[None, :] & (column < width)
    at = group // row_groups * width + column
    values = tl.load(x + at, mask=is_in, other=0.0)
    amax = tl.maximum(tl.max(tl.abs(values), 1), min_amax)
    is_finite = tl.min(tl.where(tl.abs(values) < float("inf"), 1, 0), 1) == 1
    # In a float32's bits: up to the next power of two unless the mantissa is within the limit's, then over the limit's.
    bits = ((amax.to(tl.int32, bitcast=True) + LIMIT_BITS) & -8388608) - SHIFT
    scale = tl.where(is_finite, bits.to(tl.float32, bitcast=True), float("nan"))[:, None]
    inverse = tl.where(is_finite, (0x7F000000 - bits).to(tl.float32, bitcast=True), float("nan"))[:, None]
    quotients = values * inverse  # at most 448
    # E4M3 steps by eighths of a power of two, by 2^-9 below 2^-6. Next to 1.5 * 2^23 of these float32 steps by as much.
    exponent = (tl.abs(quotients).to(tl.int32, bitcast=True) >> 23) & 255
    anchor = ((tl.maximum(exponent, 121) + 20) << 23) | 0x400000
    anchor = anchor.to(tl.float32, bitcast=True)
    tl.store(out + at, ((quotients + anchor) - anchor) * scale, mask=is_in)


@triton.jit
def turn_pairs_kernel(
    x, cos, sin, out, num_heads, sign, DIM: tl.constexpr, ROPE: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Neighbours in the last `ROPE` dims of a position's heads, `HEADS` at a time, are turned; `sign` -1: back."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    is_in = (head < num_heads) & (pair < DIM // 2)
    at = (row * num_heads + head) * DIM + 2 * pair
    first = tl.load(x + at, mask=is_in, other=0.0)
    second = tl.load(x + at + 1, mask=is_in, other=0.0)
    turned = pair - (DIM - ROPE) // 2
    is_turned = (turned >= 0) & (pair < DIM // 2)
    c = tl.load(cos + row * (ROPE // 2) + turned, mask=is_turned, other=1.0)
    s = tl.load(sin + row * (ROPE // 2) + turned, mask=is_turned, other=0.0) * sign
    tl.store(out + at, first * c - second * s, mask=is_in)
    tl.store(out + at + 1, first * s + second * c, mask=is_in)


@triton.jit
def stream_mixes_kernel(
    raw, streams, scale, base, collapse, post, comb, eps, rms_eps,
    WIDTH: tl.constexpr, NUM_ITERS: tl.constexpr, N: tl.constexpr, N_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mixes of one position: its numbers, and Sinkhorn's iterations on them."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(streams + row * WIDTH + at, mask=at < WIDTH, other=0.0)
        squares += values * values
    norm = 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + rms_eps)
    stream = tl.arange(0, N_BLOCK)
    is_in = stream < N
    first = row * (2 * N + N * N)
    pre = tl.load(raw + first + stream, mask=is_in, other=0.0) * norm
    pre = pre * tl.load(scale + stream, mask=is_in, other=0.0) + tl.load(base + stream, mask=is_in, other=0.0)
    tl.store(collapse + row * N + stream, 1.0 / (1.0 + tl.exp(-pre)) + eps, mask=is_in)
    out = tl.load(raw + first + N + stream, mask=is_in, other=0.0) * norm
    out = out * tl.load(scale + N + stream, mask=is_in, other=0.0) + tl.load(base + N + stream, mask=is_in, other=0.0)
    tl.store(post + row * N + stream, 2.0 / (1.0 + tl.exp(-out)), mask=is_in)

    place = stream[:, None] * N + stream[None, :]
    is_pair = is_in[:, None] & is_in[None, :]
    logits = tl.load(raw + first + 2 * N + place, mask=is_pair, other=0.0) * norm
    logits = logits * tl.load(scale + 2 * N + place, mask=is_pair, other=0.0)
    logits += tl.load(base + 2 * N + place, mask=is_pair, other=0.0)
    logits = tl.where(is_pair, logits, float("-inf"))
    peak = tl.where(is_in, tl.max(logits, 1), 0.0)[:, None]
    weights = tl.where(is_pair, tl.exp(logits - peak), 0.0)
    total = tl.where(is_in, tl.sum(weights, 1), 1.0)[:, None]
    mixed = tl.where(is_pair, weights / total + eps, 0.0)
    mixed = mixed / (tl.sum(mixed, 0)[None, :] + eps)
    for _ in range(NUM_ITERS - 1):
        mixed = mixed / (tl.sum(mixed, 1)[:, None] + eps)
        mixed = mixed / (tl.sum(mixed, 0)[None, :] + eps)
    tl.store(comb + row * N * N + place, mixed, mask=is_pair)


@triton.jit
def expand_streams_kernel(
    output, streams, post, comb, out, width, N: tl.constexpr, N_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """All streams of one position, `BLOCK` channels."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.arange(0, N_BLOCK)
    is_in = (source < N)[:, None] & (at < width)[None, :]
    values = tl.load(streams + (row * N + source[:, None]) * width + at[None, :], mask=is_in, other=0.0)
    own = tl.load(output + row * width + at, mask=at < width, other=0.0)
    for target in tl.static_range(N):
        shares = tl.load(comb + row * N * N + source * N + target, mask=source < N, other=0.0)
        total = tl.load(post + row * N + target) * own + tl.sum(shares[:, None] * values, 0)
        tl.store(out + (row * N + target) * width + at, total, mask=at < width)


@triton.jit
def expert_linear_kernel(
    x, weight, out, pairs, experts, num_experts, width_out,
    WIDTH_IN: tl.constexpr, PER_INPUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of pairs by one expert's weight, `COLUMNS` of its outputs."""
    expert = tl.load(experts + tl.program_id(0))
    if expert < num_experts:
        pair = tl.load(pairs + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
        is_pair = pair >= 0
        source = tl.where(is_pair, pair // PER_INPUT, 0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < width_out
        own = weight + expert * width_out * WIDTH_IN
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, WIDTH_IN, INNER):
            at = begin + tl.arange(0, INNER)
            is_at = at < WIDTH_IN
            rows = tl.load(
                x + source[:, None] * WIDTH_IN + at[None, :], mask=is_pair[:, None] & is_at[None, :], other=0.0
            )
            columns = tl.load(
                own + column[None, :] * WIDTH_IN + at[:, None], mask=is_column[None, :] & is_at[:, None], other=0.0
            )
            total += tl.dot(rows, columns, input_precision=PRECISION)
        target = out + pair[:, None] * width_out + column[None, :]
        tl.store(target, total, mask=is_pair[:, None] & is_column[None, :])


@triton.jit
def _mixed(x):
    """The finaliser of SplitMix64, of int64 that wraps."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _noise_key(seed, position):
    gamma = -7046029254386353131
    return _mixed(_mixed(seed + gamma) + (position + 1) * gamma)


@triton.jit
def _uniform(key, tokens):
    """Strictly between 0 and 1, float64; as `noise` of the workers has it."""
    bits = _mixed(key + (tokens.to(tl.int64) + 1) * -7046029254386353131)
    uniform = (((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    # The largest value rounds to 1. A number in Python would be taken for a float32.
    return tl.minimum(uniform, tl.full((), 0.9999999999999999, tl.float64))


@triton.jit
def _gumbel(key, tokens):
    return -tl.log(-tl.log(_uniform(key, tokens)))


@triton.jit
def _better(values, tokens, best, chosen):
    """The best of all so far, the lowest token among equals: its value and the token."""
    peak = tl.max(values, 0)
    token = tl.min(tl.where(values == peak, tokens, 0x7FFFFFFF), 0)
    is_better = peak > best
    return tl.where(is_better, peak, best), tl.where(is_better, token, chosen)


@triton.jit
def _peak(logits, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of a row and its token."""
    best, chosen = float("-inf"), 0
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
        best, chosen = _better(values, at, best, chosen)
    return best, chosen


@triton.jit
def _score(logits, at, peak, temperature, WIDTH: tl.constexpr):
    """The peak's is 0, float64."""
    values = tl.load(logits + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
    return tl.where(values == peak, 0.0, (values.to(tl.float64) - peak) / temperature)


@triton.jit
def _log_sum(logits, peak, temperature, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Of the exponentials of a row's scores, float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, WIDTH, BLOCK):
        total += tl.exp(_score(logits, start + tl.arange(0, BLOCK), peak, temperature, WIDTH))
    return tl.log(tl.sum(total, 0))


@triton.jit(do_not_specialize_on_alignment=["seeds", "moments", "kept", "kept_rows"])
def draw_kernel(
    logits, temperatures, seeds, moments, tokens, kept, kept_rows, log_sums, kept_stride,
    KEEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the largest logit, or of logit / temperature + Gumbel noise.

    With `KEEP` the scores are rounded to float32 and kept, so that they are exactly what was drawn from.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * WIDTH
    peak, chosen = _peak(logits, WIDTH, BLOCK)
    temperature = tl.load(temperatures + row)
    log_sum = tl.zeros((), tl.float64)
    if temperature > 0:
        key = _noise_key(tl.load(seeds + row), tl.load(moments + row))
        if KEEP:
            kept += tl.load(kept_rows + row) * kept_stride
        best = tl.full((), float("-inf"), tl.float64)
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            score = _score(logits, at, peak, temperature, WIDTH)
            if KEEP:
                rounded = score.to(tl.float32)
                tl.store(kept + at, rounded, mask=at < WIDTH)
                score = rounded.to(tl.float64)
                total += tl.exp(score)
            best, chosen = _better(score + _gumbel(key, at), at, best, chosen)
        if KEEP:
            log_sum = tl.log(tl.sum(total, 0))
    tl.store(tokens + row, chosen.to(tl.int64))
    if KEEP:
        tl.store(log_sums + row, log_sum)


@triton.jit(do_not_specialize_on_alignment=["firsts", "counts", "slots", "num_accepted", "followers"])
def verify_kernel(
    logits, firsts, counts, temperatures, accept_seeds, follow_seeds, anchors, drafts, kept, kept_sums, slots,
    num_accepted, followers, num_places, MOMENTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: how many of its drafts rejection sampling accepts, and the token behind them."""
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(firsts + row) * WIDTH
    count, temperature = tl.load(counts + row), tl.load(temperatures + row)
    anchor, block = tl.load(anchors + row), tl.load(slots + row) * num_places
    accept_seed = tl.load(accept_seeds + row)
    place = tl.zeros((), tl.int64)
    peak, _ = _peak(logits, WIDTH, BLOCK)
    log_sum = _log_sum(logits, peak, temperature, WIDTH, BLOCK)
    is_accepted = place < count
    while is_accepted:
        draft = tl.load(drafts + block + place)
        value = tl.load(logits + draft).to(tl.float32)
        p = tl.exp(tl.where(value == peak, 0.0, (value.to(tl.float64) - peak) / temperature) - log_sum)
        q = tl.exp(tl.load(kept + (block + place) * WIDTH + draft).to(tl.float64) - tl.load(kept_sums + block + place))
        uniform = _uniform(_noise_key(accept_seed, anchor * MOMENTS + place), place * 0)
        is_accepted = uniform * q < p
        if is_accepted:
            place += 1
            logits += WIDTH
            peak, _ = _peak(logits, WIDTH, BLOCK)
            log_sum = _log_sum(logits, peak, temperature, WIDTH, BLOCK)
            is_accepted = place < count

    key = _noise_key(tl.load(follow_seeds + row), anchor)
    is_rejected = place < count
    behind = block + tl.where(is_rejected, place, 0)
    drawn_from, drawn_sum = kept + behind * WIDTH, tl.load(kept_sums + behind)
    best = tl.full((), float("-inf"), tl.float64)
    best_rest = tl.full((), float("-inf"), tl.float64)
    chosen, of_rest = 0, 0
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        gumbel = _gumbel(key, at)
        log_p = _score(logits, at, peak, temperature, WIDTH) - log_sum
        best, chosen = _better(log_p + gumbel, at, best, chosen)
        if is_rejected:
            log_q = tl.load(drawn_from + at, mask=at < WIDTH, other=float("-inf")).to(tl.float64) - drawn_sum
            rest = tl.log(tl.maximum(tl.exp(log_p) - tl.exp(log_q), 0.0))
            best_rest, of_rest = _better(rest + gumbel, at, best_rest, of_rest)
    # Rounding may leave nothing of a rest that was hardly there.
    chosen = tl.where(best_rest > float("-inf"), of_rest, chosen)
    tl.store(num_accepted + row, place)
    tl.store(followers + row, chosen.to(tl.int64))
