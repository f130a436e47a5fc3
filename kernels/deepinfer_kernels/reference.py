"""Small operations in plain torch: the specification, and the path on the CPU. Knows nothing of models or caches.

Legend: `T` packed positions, `N` heads of any kind, `K` kv heads, `D` head dim, `R` turned dims, `C` channels, `V`
vocabulary, `n` residual streams.

Every operation here is row-invariant on the CPU: elementwise operations whose vector and scalar forms round alike
(hence no `silu`, no `rsqrt`, no fused multiply-add), and reductions over a whole last dimension of fixed size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [V, C] for `tokens` [T]: [T, C]."""
    return table.index_select(0, tokens)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [T, C] over the root of its mean square, times `weight` [C]: [T, C]."""
    mean_square = (x * x).mean(-1, keepdim=True)  # [T, 1]
    return (x / (mean_square + eps).sqrt()) * weight


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x` + `delta` [T, C], and its `rms_norm`: [T, C] each."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def rotate_and_cache(heads: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Split `heads` [T, H + 2K, D] into queries, keys and values, turn the first two, put the last two into the cache.

    `keys`, `values` [K, positions, D] are written at `indices` [T]. The turned queries: [T, H, D].
    """
    num_kv = keys.shape[0]
    num_turned = heads.shape[1] - num_kv
    turned = rotary(heads[:, :num_turned], cos[:, None], sin[:, None])  # [T, H + K, D]
    kv_write(keys, turned[:, num_turned - num_kv :], indices)
    kv_write(values, heads[:, num_turned:], indices)
    return turned[:, : num_turned - num_kv]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, N, D] turned by `cos`, `sin` [T, 1, D/2]; the halves of D are the two coordinates: [T, N, D]."""
    first, second = x.chunk(2, dim=-1)  # [T, N, D/2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for `gate_up` [T, 2C] = gate beside up: [T, C]."""
    gate, up = gate_up.chunk(2, dim=-1)  # [T, C] each
    # exp and division round alike in every lane and tail; torch's own silu does not.
    decay = gate.neg().exp_().add_(1.0)  # [T, C]
    return torch.div(gate, decay, out=decay).mul_(up)


def kv_write(cache: Tensor, values: Tensor, indices: Tensor) -> None:
    """Put `values` [T, K, D] into `cache` [K, positions, D] at `indices` [T], in place."""
    cache.index_copy_(1, indices, values.transpose(0, 1))


def sigmoid(x: Tensor) -> Tensor:
    """Of any shape, by exp and division, which round alike in every lane and tail."""
    return 1.0 / (1.0 + x.neg().exp())


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """`x` [T, N, D] with its last R dims turned by `cos`, `sin` [T, R / 2], or turned back: [T, N, D].

    Neighbours are the two coordinates.
    """
    rope_dim = 2 * cos.shape[1]
    head, tail = x.split((x.shape[-1] - rope_dim, rope_dim), -1)
    first, second = tail.unflatten(-1, (-1, 2)).unbind(-1)  # [T, N, R / 2] each
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, R / 2]
    if back:
        sin = -sin
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
    return torch.cat((head, turned.flatten(-2)), -1)


def mix_numbers(raw: Tensor, flat: Tensor, scale: Tensor, base: Tensor, rms_eps: float) -> Tensor:
    """Numbers of each position from its streams `flat` [T, n * C] and a product of them, `raw` [T, numbers].

    The norm of the streams goes in behind the product; `scale` is a number or one for each: [T, numbers].
    """
    return raw / ((flat * flat).mean(-1, keepdim=True) + rms_eps).sqrt() * scale + base


def stream_mixes(
    raw: Tensor, streams: Tensor, scale: Tensor, base: Tensor, num_iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """How a sublayer reads and writes the `streams` [T, n, C] of each position, by `raw` [T, 2n + n * n] (hyper-
    connections): shares in its input and of its output, [T, n] each, and what stream j (first) passes on to stream k
    (second), [T, n, n], whose rows and columns add up to about 1 behind `num_iters` of Sinkhorn's iterations.
    """
    n = streams.shape[1]
    numbers = mix_numbers(raw, streams.flatten(1), scale, base, rms_eps)
    pre, post, logits = numbers.split((n, n, n * n), -1)
    return sigmoid(pre) + eps, 2.0 * sigmoid(post), _balance(logits.unflatten(-1, (n, n)), num_iters, eps)


def _balance(logits: Tensor, num_iters: int, eps: float) -> Tensor:
    """Of `logits` [T, n, n]."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    comb = (weights / weights.sum(-1, keepdim=True)).add_(eps)
    comb.div_(comb.sum(-2, keepdim=True).add_(eps))
    for _ in range(num_iters - 1):
        comb.div_(comb.sum(-1, keepdim=True).add_(eps))
        comb.div_(comb.sum(-2, keepdim=True).add_(eps))
    return comb


def expand_streams(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams [T, n, C] behind a sublayer whose output is [T, C], by `stream_mixes`: [T, n, C]."""
    total = post[..., None] * output[:, None]
    for source in range(streams.shape[1]):
        total = total + comb[:, source, :, None] * streams[:, source, None]
    return total


def hadamard(x: Tensor) -> Tensor:
    """`x` [..., D] times the orthonormal Hadamard matrix in Sylvester's order: [..., D]. D is a power of two.

    It spreads what a few dims hold over all of them, and leaves products of two such rows as they are.
    """
    size = x.shape[-1]
    width = 1
    while width < size:
        first, second = x.unflatten(-1, (-1, 2, width)).unbind(-2)  # [..., D / 2 width, width] each
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    turned: Tensor = x * size**-0.5
    return turned
