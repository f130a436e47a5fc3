"""The memory of ranks, added up by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deepinfer_kernels import select_ops
from deepinfer_workers import capacity
from deepinfer_workers.capacity import limits_of
from deepinfer_workers.inspect import inspect
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.formats import cache_formats
from deepinfer_workers.models.deepseek.layer_caches import slot_bytes, token_bytes
from deepinfer_workers.models.deepseek.memory import memory_by_rank, shared_memory
from deepinfer_workers.models.deepseek.rank_tensors import tensors_of_rank
from deepinfer_workers.models.deepseek.tensors import expected_tensors
from deepinfer_workers.models.model import CacheNeeds
from deepinfer_workers.runner import WorkerFault
from doubles.driver import DEFAULTS
from doubles.released_deepseek import v4_flash_0731, v41_flash, v41_flash_flat
from doubles.tiny_deepseek import tiny_v4, tiny_v41, with_vision

EXPERT_BYTES = 18_800_640
"""Of V4.1-Flash: 3 x 5120 x 2304 numbers of 4 bits, and a scale for every 32."""


def parts_of(config_json: dict[str, Any]) -> tuple[DeepseekConfig, Any, dict[str, int]]:
    config = DeepseekConfig.read(config_json, "config.json")
    specs = expected_tensors(config)
    return config, specs, {name: spec.num_bytes for name, spec in specs.items()}


def test_ranks_of_the_release_share_experts_and_each_hold_the_rest() -> None:
    ranks = memory_by_rank(*parts_of(v41_flash()), num_ep=8, num_dp=8)
    assert [rank.experts for rank in ranks] == [(48 * rank, 48 * rank + 48) for rank in range(8)]
    assert {rank.expert_bytes for rank in ranks} == {40 * 48 * EXPERT_BYTES}
    assert [rank.group for rank in ranks] == list(range(8))
    total = 510_286_023_000 - 202_758_032_400  # the tables stay in their files
    first = ranks[0]
    draft_experts = 3 * 128 * EXPERT_BYTES
    assert first.draft_bytes is not None
    dense_drafts = first.draft_bytes - draft_experts // 8
    assert first.dense_bytes + 8 * first.expert_bytes + dense_drafts + draft_experts + first.vision_bytes == total


def test_caches_of_the_release_take_what_its_packing_takes() -> None:
    shared = shared_memory(*parts_of(v41_flash()))
    assert shared.token_bytes == 890 and shared.table_bytes == 768_022_850 * 264
    rollback = 5 + 1  # a block of drafts, and the token behind it
    pending = 3 * (2 + rollback) * 2 * 512 * 4  # tokens of a pair, in three layers
    assert shared.slot_bytes == 40 * (128 + rollback) * 528 + pending
    assert shared.draft_slot_bytes == 3 * (128 + rollback) * 528
    assert shared.known_slot_bytes == 4 * (1048576 + 1) + 4 * 65536 + 8
    assert shared.rope_bytes == 2 * 2 * 32 * 1048576 * 4  # cosines and sines of 32 pairs, with YaRN and without
    assert int(shared_memory(*parts_of(v4_flash_0731())).token_bytes) == 3514


def test_a_config_alone_is_enough_in_a_folder_or_by_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(v4_flash_0731()))
    (tmp_path / "flat.json").write_text(json.dumps(v41_flash_flat()))
    told = inspect(tmp_path, 1, 1)
    assert (told["num_tensors"], told["num_bytes"], told["files"]) == (72_317, 166_878_536_440, "none")
    assert inspect(tmp_path / "flat.json", 1, 1)["num_bytes"] == 510_286_023_000


@pytest.mark.parametrize("config", [tiny_v41, tiny_v4, lambda: with_vision(tiny_v41(is_quantized=False))])
@pytest.mark.parametrize(("num_ep", "num_dp"), [(1, 1), (4, 1), (2, 4), (1, 3)])
def test_every_byte_is_on_some_rank(config: Callable[[], dict[str, Any]], num_ep: int, num_dp: int) -> None:
    parts = parts_of(config())
    ranks = memory_by_rank(*parts, num_ep=num_ep, num_dp=num_dp)
    assert len(ranks) == max(num_ep, num_dp)
    (alone,) = memory_by_rank(*parts, num_ep=1, num_dp=1)
    tables = shared_memory(*parts).table_bytes
    assert alone.draft_bytes is not None
    everything = alone.dense_bytes + alone.expert_bytes + alone.draft_bytes + alone.vision_bytes + tables
    assert everything == sum(parts[2].values())
    assert sum(rank.expert_bytes for rank in ranks) == alone.expert_bytes * len(ranks) // num_ep
    assert {rank.dense_bytes for rank in ranks} == {alone.dense_bytes}
    assert [rank.group for rank in ranks] == sorted(rank.group for rank in ranks)
    assert {rank.group for rank in ranks} == set(range(num_dp))


@pytest.mark.parametrize("num_ep", [3, 384])
def test_ranks_that_divide_the_experts_but_not_those_of_drafts_serve_no_drafts(num_ep: int) -> None:
    parts = parts_of(v41_flash())
    ranks = memory_by_rank(*parts, num_ep=num_ep, num_dp=1)
    assert {rank.draft_bytes for rank in ranks} == {None}
    assert {rank.expert_bytes for rank in ranks} == {40 * 384 // num_ep * EXPERT_BYTES}
    with pytest.raises(WorkerFault, match=f"ep: a divisor of 128 draft experts was expected, {num_ep} came"):
        tensors_of_rank(*parts[:2], num_ep, 0, has_drafts=True)


def test_what_a_cpu_expands_is_all_that_is_dense_but_the_embedding() -> None:
    _, specs, _ = parts = parts_of(tiny_v41(is_quantized=False))
    dense = [
        spec
        for spec in specs.values()
        if spec.expert is None
        and spec.group not in ("embedding", "engram table", "draft stages", "draft experts", "vision")
    ]
    assert shared_memory(*parts).dense_numbers == sum(math.prod(spec.shape) for spec in dense)
    assert shared_memory(*parts_of(tiny_v41())).dense_numbers == shared_memory(*parts).dense_numbers


@pytest.mark.parametrize(
    ("num_ep", "num_dp", "words"),
    [(0, 1, "ep: 1 to 4096 ranks were expected, 0 came"), (3, 1, "ep: a divisor of 8 experts was expected, 3 came"),
     (1, 1 << 30, "dp: 1 to 4096"), (4, 3, "dp: a multiple or a divisor of ep 4 was expected, 3 came")],
)  # fmt: skip
def test_ranks_that_do_not_divide_are_refused(num_ep: int, num_dp: int, words: str) -> None:
    with pytest.raises(WorkerFault, match=words) as caught:
        memory_by_rank(*parts_of(tiny_v41()), num_ep=num_ep, num_dp=num_dp)
    assert caught.value.code == "setting"


@pytest.mark.parametrize("released", [v41_flash, v4_flash_0731])
def test_the_defaults_hold_a_release_on_a_cpu(
    released: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 sequences of a million tokens each: slots take more than all blocks, and do not come out of their memory."""
    deepseek = DeepseekConfig.read(released(), "config.json")
    formats = cache_formats(deepseek, "packed", quantizes=True)

    def cache_needs(block_size: int) -> CacheNeeds:
        per_token = token_bytes(deepseek, formats)
        return CacheNeeds(round(per_token * block_size), slot_bytes(deepseek, formats), per_token)

    model: Any = SimpleNamespace(
        vocab_size=deepseek.vocab_size,
        max_len=deepseek.max_len,
        block_multiple=deepseek.block_multiple,
        cache_needs=cache_needs,
        drafter=None,
    )
    config = msgspec.structs.replace(DEFAULTS, num_slots=256, block_size=0, num_blocks=0, max_batch_positions=2048)
    ops = select_ops("cpu", batch_invariant=True)
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 16 << 30)
    limits = limits_of(config, model, ops)
    assert limits.num_blocks == (1 << 30) // cache_needs(limits.block_size).block_bytes > 8
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 1 << 30)
    with pytest.raises(WorkerFault, match=r"^max_num_seqs 256 with max_model_len 1048576 takes \d+ bytes, \d+ for"):
        limits_of(config, model, ops)
    monkeypatch.setattr(capacity, "free_bytes", lambda device: None)
    assert limits_of(config, model, ops) == limits
