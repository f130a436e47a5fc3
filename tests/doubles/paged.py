"""Sequences in a shuffled paged cache, and their attention by the definition in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import Ops, PackedRows


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Paged:
    """Keys and values of sequences of `lengths`, put where block tables say. Slot `i` holds sequence `i`."""

    def __init__(self, ops: Ops, lengths: list[int], num_kv: int, group: int, dim: int, block_size: int = 16) -> None:
        self.ops, self.lengths, self.group, self.block_size = ops, lengths, group, block_size
        self.q, self.k, self.v = (
            [rand(n, num_heads, dim, seed=seed + i).to(ops.dtype) for i, n in enumerate(lengths)]
            for num_heads, seed in ((num_kv * group, 10), (num_kv, 500), (num_kv, 900))
        )
        per_row = -(-max(lengths) // block_size)
        # One more slot, and one more block, are for padding.
        order = np.append(
            np.random.default_rng(0).permutation(per_row * len(lengths)), [per_row * len(lengths)] * per_row
        )
        tables = torch.from_numpy(order.reshape(len(lengths) + 1, per_row).astype(np.int32))
        # What nobody wrote is poison, but for the padding's block: reading it would show.
        num_positions = (per_row * len(lengths) + 1) * block_size
        keys = torch.full((num_kv, num_positions, dim), torch.nan, dtype=ops.dtype)
        keys[:, -block_size:] = 0.0
        values = keys.clone()
        for row, length in enumerate(lengths):
            at = torch.arange(length)
            indices = tables[row, at // block_size].long() * block_size + at % block_size
            keys[:, indices] = self.k[row].transpose(0, 1)
            values[:, indices] = self.v[row].transpose(0, 1)
        self.tables, self.keys, self.values = (x.to(ops.device) for x in (tables, keys, values))

    def attend(self, rows: list[int], starts: list[int], counts: list[int]) -> list[Tensor]:
        """[count, H * D] of each row: positions from its start on."""
        num_real = sum(counts)
        num_positions = -(-num_real // 16) * 16
        parts = [self.q[r][s : s + c] for r, s, c in zip(rows, starts, counts, strict=True)]
        queries = torch.cat((*parts, torch.zeros(num_positions - num_real, *parts[0].shape[1:], dtype=self.ops.dtype)))
        slots = torch.full((num_positions,), len(self.lengths))
        slots[:num_real] = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
        positions = torch.zeros(num_positions, dtype=torch.int64)
        positions[:num_real] = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        device = self.ops.device
        plan = self.ops.plan_attention(
            PackedRows(np.array(counts, np.int64), slots.to(device), positions.to(device), self.tables),
            block_size=self.block_size,
            group_size=self.group,
            num_kv=self.keys.shape[0],
        )
        out = self.ops.paged_attention(queries.to(device), self.keys, self.values, plan).cpu()
        return list(out[:num_real].split(counts))

    def expected(self, row: int) -> Tensor:
        """[n, H * D], by the definition in float64."""
        q, k, v = (x[row].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(self.group, 0), v.repeat_interleave(self.group, 0)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
        return out.transpose(0, 1).reshape(q.shape[1], -1)
