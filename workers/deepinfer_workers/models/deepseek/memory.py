"""The memory that every rank of a deployment needs, from a config and the sizes of tensors. Reads no file.

`ep` ranks hold the routed experts together, each an equal run of them; `dp` ranks or groups of ranks serve requests of
their own, with caches of their own. There are as many ranks as the larger of the two, which the smaller one divides.
All else is on every rank, but the n-gram tables: those stay in their files, mapped, once for all ranks of a host.

Not counted: blocks of cache rows, which have what `kv_cache_bytes` says; routed experts that are kept expanded, which
have a part of what is free; what a step and the packing of a weight take for a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Final, NamedTuple

from deepinfer_workers import slots
from deepinfer_workers.capacity import block_size_of
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.formats import cache_formats
from deepinfer_workers.models.deepseek.layer_caches import draft_slot_bytes, slot_bytes, token_bytes
from deepinfer_workers.models.deepseek.rank_tensors import experts_of_rank
from deepinfer_workers.models.deepseek.tensors import DRAFT_GROUPS, TensorSpec
from deepinfer_workers.runner import WorkerFault

MAX_RANKS: Final = 4096
NUM_ROPE_TABLES: Final = 2
"""With and without compressed rows; of every position as many cosines and sines as dims are turned."""
FLOAT32_BYTES: Final = 4


class RankMemory(NamedTuple):
    """Of one rank, as its tensors are stored."""

    rank: int
    group: int
    """Which of the `dp` groups: ranks of a group serve the same requests."""
    experts: tuple[int, int]
    """The first routed expert of every layer, and the one behind the last."""
    dense_bytes: int
    """All that is neither expert nor table."""
    expert_bytes: int
    draft_bytes: int | None
    """More, where drafts are served; `None`: the ranks cannot share their experts, which are fewer."""
    vision_bytes: int
    """More, where images are served."""


class SharedMemory(NamedTuple):
    """What does not depend on the rank."""

    table_bytes: int
    """Of n-gram tables, in mapped files: of what is read, the host's page cache keeps as much as there is room for."""
    dense_numbers: int
    """As many are expanded to float32 on a CPU, where `dense_bytes` tells what they take in the file. Without the
    embedding, whose rows stay in the mapped file there."""
    rope_bytes: int
    """Of the turns of every position."""
    token_bytes: float
    """Of paged cache rows, as the released model packs them: for every token that is kept."""
    slot_bytes: int
    """Of window rings and pending states: for every request that may run."""
    known_slot_bytes: int
    """More for each of these, of its tokens and its blocks' numbers, at the model's whole length."""
    draft_slot_bytes: int
    """More, where drafts are served."""


def memory_by_rank(
    config: DeepseekConfig, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int], *, num_ep: int, num_dp: int
) -> list[RankMemory]:
    """`sizes` are the bytes of every tensor of `specs`. Raises `WorkerFault` for ranks that do not divide."""
    num_ranks = num_ranks_of(num_ep, num_dp)
    totals = _totals(specs, sizes)
    has_drafts = not config.num_draft_experts % num_ep
    found = []
    for rank in range(num_ranks):
        part = rank % num_ep
        experts, drafted = experts_of_rank(config.num_experts, num_ep, part), None
        if has_drafts:
            draft_experts = experts_of_rank(config.num_draft_experts, num_ep, part)
            drafted = totals["draft"] + sum(totals["draft", expert] for expert in draft_experts)
        found.append(
            RankMemory(
                rank,
                group=rank * num_dp // num_ranks,
                experts=(experts.start, experts.stop),
                dense_bytes=totals["dense"],
                expert_bytes=sum(totals["expert", expert] for expert in experts),
                draft_bytes=drafted,
                vision_bytes=totals["vision"],
            )
        )
    return found


def shared_memory(config: DeepseekConfig, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> SharedMemory:
    formats = cache_formats(config, "packed", quantizes=True)
    return SharedMemory(
        table_bytes=sum(sizes[name] for name, spec in specs.items() if spec.is_table),
        dense_numbers=sum(
            prod(spec.shape)
            for name, spec in specs.items()
            if _kind(spec) == "dense" and spec.group != "embedding" and not name.endswith(".scale")
        ),
        rope_bytes=NUM_ROPE_TABLES * config.max_len * config.rope_dim * FLOAT32_BYTES,
        token_bytes=token_bytes(config, formats),
        slot_bytes=slot_bytes(config, formats),
        known_slot_bytes=slots.slot_bytes(config.max_len, block_size_of(config.block_multiple)),
        draft_slot_bytes=draft_slot_bytes(config, formats),
    )


def num_ranks_of(num_ep: int, num_dp: int) -> int:
    """Raises `WorkerFault`."""
    for name, number in (("ep", num_ep), ("dp", num_dp)):
        if not 1 <= number <= MAX_RANKS:
            raise WorkerFault("setting", f"{name}: 1 to {MAX_RANKS} ranks were expected, {number} came")
    if max(num_ep, num_dp) % min(num_ep, num_dp):
        text = f"a multiple or a divisor of ep {num_ep} was expected, {num_dp} came"
        raise WorkerFault("setting", f"dp: {text}")
    return max(num_ep, num_dp)


def _totals(specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> Counter[str | tuple[str, int]]:
    """Bytes of every kind, those of experts by kind and number."""
    totals: Counter[str | tuple[str, int]] = Counter()
    for name, spec in specs.items():
        kind = _kind(spec)
        totals[kind if spec.expert is None else (kind, spec.expert)] += sizes[name]
    return totals


def _kind(spec: TensorSpec) -> str:
    if spec.is_table:
        return "table"
    if spec.group in DRAFT_GROUPS:
        return "draft"
    if spec.group == "vision":
        return "vision"
    return "dense" if spec.expert is None else "expert"
