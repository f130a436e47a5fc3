"""V4.1-Flash at its full width as one expert-parallel rank, and the same path with a tiny model in `make test`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.full_width import CONFIG, memory_now, run
from deepinfer_kernels import select_ops
from deepinfer_kernels.ops import ExpertLinear
from deepinfer_workers.models.deepseek import moe as moe_module
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.models.deepseek.moe import ExpertCache, MoE, Routing
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors, experts_of_rank
from deepinfer_workers.models.deepseek.weights import DeepseekWeights
from deepinfer_workers.safetensors_folder import SafetensorsFolder
from deepinfer_workers.safetensors_writer import SafetensorsWriter, Slot
from doubles.experts import by_tiles
from doubles.released_deepseek import v41_flash
from doubles.tiny_deepseek import tiny_v41

pytestmark = pytest.mark.usefixtures("one_thread")

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/full_width.py"
MOST_GIB = 12.0
DISK_BYTES = 12 << 30
NUM_RANKS = 2
LAYER = 5
ABOUT_LAYERS = {
    "num_hidden_layers", "compress_ratios", "kv_source_layer_ids", "index_source_layer_ids",
    "candidate_source_layer_id", "engram_layer_ids", "engram_num_embeddings",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_model(tiny_v41(vocab_size=512), folder)
    return folder


def moe(
    folder: Path,
    num_ranks: int = 1,
    rank: int = 0,
    most_bytes: int | None = None,
    expert_linear: ExpertLinear | None = None,
) -> tuple[MoE, ExpertCache]:
    opened = SafetensorsFolder(folder)
    config = DeepseekConfig.read(opened.metadata, "config.json")
    tensors = RankTensors(opened, config, num_ranks, rank)
    ops = replace(select_ops("cpu", batch_invariant=True, dtype="float32"), expert_linear=expert_linear)
    weights = DeepseekWeights(tensors, config, ops, True)
    experts = ExpertCache(weights, most_bytes)
    return MoE(weights, f"layers.{LAYER}.ffn", experts, Routing.of_layer(weights, LAYER)), experts


def test_every_figure_is_that_of_the_release_and_every_kind_of_layer_is_there() -> None:
    released = v41_flash()["text_config"]
    same = released.keys() - ABOUT_LAYERS - {"num_nextn_predict_layers", "use_cache", "initializer_range"}
    same = {key for key in same if not key.startswith("dspark_")}
    assert {key: CONFIG["text_config"][key] for key in same} == {key: released[key] for key in same}
    assert CONFIG["text_config"]["engram_num_embeddings"] == released["engram_num_embeddings"][:1]
    config = DeepseekConfig.read(CONFIG, "config.json")
    kinds = [
        (ratio, layer in config.kv_sources, layer in config.index_sources) for layer, ratio in enumerate(config.ratios)
    ]
    full, reindex, reuse = (True, True), (False, True), (False, False)
    assert kinds == [(0, False, False), (2, *full), (1, *full), (1, *reindex), (1, *reuse)]


@torch.inference_mode()
def test_routed_parts_of_the_ranks_and_one_shared_part_are_the_whole(whole: Path) -> None:
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(40)
    one, _ = moe(whole)
    ranks = [moe(whole, NUM_RANKS, rank) for rank in range(NUM_RANKS)]
    routed = [part.routed(x, tokens) for part, _ in ranks]
    assert all(part.abs().max() > 0.01 for part in routed)
    assert (routed[0] + routed[1] - one.routed(x, tokens)).abs().max() < 1e-6
    assert (routed[0] + routed[1] + ranks[0][0].shared(x) - one(x, tokens)).abs().max() < 1e-6
    assert torch.equal(ranks[0][0].shared(x), one.shared(x))
    for rank, (_, experts) in enumerate(ranks):
        own = {f"layers.{LAYER}.ffn.experts.{expert}" for expert in experts_of_rank(8, NUM_RANKS, rank)}
        assert experts.num_expanded.keys() == own


def test_a_rank_runs_where_only_its_experts_are_written(whole: Path, tmp_path: Path) -> None:
    write_model(tiny_v41(vocab_size=512), tmp_path, engram_tables="sparse", experts=experts_of_rank(8, NUM_RANKS, 0))
    opened, reference = SafetensorsFolder(tmp_path), SafetensorsFolder(whole)
    for expert in range(8):
        for part in ("w1.weight", "w2.scale"):
            name = f"layers.3.ffn.experts.{expert}.{part}"
            codes = opened.stored(name).view(torch.uint8)
            assert torch.equal(codes, reference.stored(name).view(torch.uint8)) if expert < 4 else not codes.any(), name
    figures = run(tmp_path, 40, 3, NUM_RANKS)
    assert len(figures["tokens"]) == 4 and figures["layers"] == 10
    assert figures["experts_used"] == figures["experts_expanded"] == 10 * 4
    assert figures["engram_rows"] > 100
    assert 0 < figures["peak_anonymous_gib"] <= figures["peak_gib"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is mapped")
def test_released_pages_are_no_longer_in_memory_and_read_the_same(tmp_path: Path) -> None:
    size = 32 << 20
    (tmp_path / "config.json").write_text("{}")
    writer = SafetensorsWriter(tmp_path, [Slot("a", "U8", (size,)), Slot("b", "U8", (7,))], shard_bytes=1 << 30)
    values = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    writer.write("a", values)
    writer.write("b", values[:7])
    opened = SafetensorsFolder(tmp_path)
    stored = opened.stored("a")
    before = memory_now()["RssFile"]
    assert torch.equal(stored, values)
    assert memory_now()["RssFile"] - before > size // 2
    opened.release("a")
    assert memory_now()["RssFile"] - before < size // 4
    assert torch.equal(stored, values) and torch.equal(opened.stored("b"), values[:7])


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_one_rank_at_full_width_stays_below_12_gib() -> None:
    if shutil.disk_usage(tempfile.gettempdir()).free < DISK_BYTES:
        pytest.skip(f"{DISK_BYTES >> 30} GiB of disk are needed for the checkpoint")
    command = [sys.executable, str(BENCHMARK), "--json", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    print(done.stdout)
    assert figures["peak_gib"] <= MOST_GIB, figures
    assert figures["checkpoint_gb"] > 140 and figures["engram_rows"] > 24_000
    assert 200 < figures["experts_used"] <= 5 * 48


@torch.inference_mode()
@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_experts_at_once_are_experts_one_by_one(whole: Path, num_ranks: int, rank: int) -> None:
    """As a GPU has them, where they fit; where not, they come one by one there, too."""
    tokens = torch.arange(40)
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    expected = moe(whole, num_ranks, rank)[0].routed(x, tokens)
    at_once, experts = moe(whole, num_ranks, rank, expert_linear=by_tiles)
    assert (at_once.routed(x, tokens) - expected).abs().max() < 1e-6
    assert (at_once.routed(x[:1], tokens[:1]) - expected[:1]).abs().max() < 1e-6
    assert not experts.num_expanded
    cramped, experts = moe(whole, num_ranks, rank, most_bytes=1 << 20, expert_linear=by_tiles)
    assert torch.equal(cramped.routed(x, tokens), expected) and experts.num_expanded


@torch.inference_mode()
@pytest.mark.parametrize(("num_kept", "num_read"), [(20, 30), (19, 50)])
def test_experts_are_kept_where_those_of_a_token_fit(whole: Path, num_kept: int, num_read: int) -> None:
    """Ten layers of two experts a token: those of one token are asked for twice, and then ten others."""
    _, experts = moe(whole, most_bytes=num_kept * 3 * 128 * 64 * 4)
    names = [f"layers.{layer}.ffn.experts.{expert}" for layer in range(10) for expert in range(3)]
    token = [name for name in names if not name.endswith(".2")]
    for name in token + token:
        experts.get(name)
    for name in set(names) - set(token):
        experts.get(name)
    assert experts.num_expanded.total() == num_read
    assert len(experts._experts) == (20 if num_kept == 20 else 0)


def test_half_of_what_is_free_is_for_experts(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_expert = 3 * 128 * 64 * 4
    monkeypatch.setattr(moe_module, "free_bytes", lambda device: 2 * 80 * one_expert)
    _, experts = moe(whole)
    assert experts._find_most() == 80
    assert ExpertCache(experts._weights, num_workers=4)._find_most() == 20
    assert ExpertCache(experts._weights, num_workers=5)._find_most() == 0
    monkeypatch.setattr(moe_module, "free_bytes", lambda device: None)
    assert moe(whole)[1]._find_most() == (1 << 30) // one_expert
