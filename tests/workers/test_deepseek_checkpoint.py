"""Checkpoints in the released format: written, compared with their config, read by ranks, and damaged in many ways."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepinfer_kernels import dequantize_fp4, dequantize_fp8_blocks, dequantize_fp8_rows
from deepinfer_workers import safetensors_file
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.generator import write_checkpoint
from deepinfer_workers.models.deepseek.random_tensors import DRAWN, RandomTensors
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors, check_tensors, experts_of_rank
from deepinfer_workers.models.deepseek.tensors import expected_tensors
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.safetensors_file import SafetensorsFile
from deepinfer_workers.safetensors_folder import INDEX, SafetensorsFolder
from deepinfer_workers.safetensors_writer import header_bytes
from doubles.released_deepseek import v41_flash
from doubles.tiny_deepseek import tiny_v4, tiny_v41, with_vision

pytestmark = pytest.mark.usefixtures("one_thread")

Json = dict[str, Any]
SHARD_BYTES = 400_000
"""Several files of several tensors each."""
CONFIGS: dict[str, Callable[[], Json]] = {
    "v4.1": tiny_v41,
    "v4.1 with vision": lambda: with_vision(tiny_v41()),
    "v4.1 plain": lambda: tiny_v41(is_quantized=False),
    "v4": tiny_v4,
    "v4 plain": lambda: tiny_v4(is_quantized=False),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "model"
    write_checkpoint(tiny_v41(), folder, shard_bytes=SHARD_BYTES)
    return folder


def open_checked(folder: Path) -> SafetensorsFolder:
    opened = SafetensorsFolder(folder)
    check_tensors(opened, expected_tensors(DeepseekConfig.read(opened.metadata, "config.json")))
    return opened


# What is written


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_what_the_config_asks_for(tmp_path: Path, name: str) -> None:
    config = write_checkpoint(CONFIGS[name](), tmp_path, shard_bytes=SHARD_BYTES)
    opened = open_checked(tmp_path)
    specs = expected_tensors(config)
    assert len(opened.tensors) == len(specs)
    total = sum(spec.num_bytes for spec in specs.values())
    assert total == sum(info.num_bytes for info in opened.tensors.values()) == opened.announced_bytes
    headers = sum(struct.unpack("<Q", path.read_bytes()[:8])[0] + 8 for path in tmp_path.glob("*.safetensors"))
    assert total + headers == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_as_the_safetensors_library_reads_them(tmp_path: Path, name: str) -> None:
    write_checkpoint(CONFIGS[name](), tmp_path, shard_bytes=SHARD_BYTES)
    opened = SafetensorsFolder(tmp_path)
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as theirs:
            for tensor in theirs.keys():  # noqa: SIM118 (it is no mapping)
                ours, value = opened.stored(tensor), theirs.get_tensor(tensor)
                assert (ours.dtype, ours.shape) == (value.dtype, value.shape)
                assert torch.equal(ours.view(torch.uint8), value.view(torch.uint8)), tensor


def test_values_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    for seed, shard_bytes in ((0, SHARD_BYTES), (0, 1 << 30), (1, SHARD_BYTES)):
        write_checkpoint(tiny_v41(), tmp_path / f"{seed}-{shard_bytes}", seed=seed, shard_bytes=shard_bytes)
    first, again, other = (SafetensorsFolder(path) for path in sorted(tmp_path.iterdir()))
    name = "layers.3.ffn.experts.2.w1.weight"
    assert torch.equal(first.stored(name), again.stored(name))
    assert not torch.equal(first.stored(name), other.stored(name))
    assert not torch.equal(first.stored(name), first.stored(name.replace("2.w1", "1.w1")))


def test_stored_matrices_keep_the_length_of_their_input(written: Path) -> None:
    opened = SafetensorsFolder(written)
    pairs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "layers.0.attn.wq_b": lambda codes, scales: dequantize_fp8_blocks(codes, scales, 32),
        "layers.4.ffn.experts.7.w2": dequantize_fp4,
        "layers.4.engram.embed": lambda codes, scales: dequantize_fp8_rows(codes, scales) / 32**0.5,
    }
    for name, dequantize in pairs.items():
        values = dequantize(opened.stored(f"{name}.weight"), opened.stored(f"{name}.scale"))
        assert values.pow(2).sum(-1).mean().item() == pytest.approx(1.0, abs=0.1), name


def test_a_large_matrix_has_as_many_different_rows() -> None:
    config = DeepseekConfig.read(v41_flash(), "config.json")
    tensors = RandomTensors(config, expected_tensors(config), seed=0)
    for name in ("layers.7.ffn.experts.383.w1", "layers.7.attn.wq_b"):
        (_, codes), (_, scales) = tensors.parts(f"{name}.weight")
        is_fp4 = codes.dtype == torch.int8
        values = dequantize_fp4(codes, scales) if is_fp4 else dequantize_fp8_blocks(codes, scales, 32)
        assert values.numel() > DRAWN and len(values[:, :64].unique(dim=0)) == len(values)
        assert values.pow(2).sum(-1).mean().item() == pytest.approx(1.0, abs=0.1), name


def test_a_token_is_never_sent_to_an_expert_twice(tmp_path: Path) -> None:
    config = write_checkpoint(tiny_v4(), tmp_path)
    table = SafetensorsFolder(tmp_path).stored("layers.1.ffn.gate.tid2eid")
    assert table.shape == (config.vocab_size, 2) and set(table.flatten().tolist()) == set(range(config.num_experts))
    assert (table[:, 0] != table[:, 1]).all()


def test_a_sparse_table_reads_as_zeros_and_takes_no_room(tmp_path: Path) -> None:
    rows = (1 << 33) + 7  # 275 GB
    config = tiny_v41(engram_num_embeddings=[420, rows])
    write_checkpoint(config, tmp_path, engram_tables="sparse")
    opened = open_checked(tmp_path)
    table = opened.stored("layers.4.engram.embed.weight")
    assert table.shape == (rows, 32) and not table[:: rows // 7].view(torch.uint8).any()
    assert opened.stored("layers.1.attn.wkv.weight").view(torch.uint8).any()
    files = [path.stat() for path in tmp_path.glob("*.safetensors")]
    assert sum(file.st_blocks * 512 for file in files) < sum(file.st_size for file in files) - rows * 32


@pytest.mark.parametrize("family", [tiny_v41, tiny_v4])
def test_what_is_not_quantised_may_be_of_either_width(tmp_path: Path, family: Callable[..., Json]) -> None:
    write_checkpoint(family(is_quantized=False), tmp_path / "written")
    opened = SafetensorsFolder(tmp_path / "written")
    shutil.copytree(tmp_path / "written", tmp_path / "wide", ignore=shutil.ignore_patterns("model*"))
    wide = {name: opened.stored(name) for name in opened.tensors}
    wide = {name: value.float() if value.is_floating_point() else value for name, value in wide.items()}
    save_file(wide, tmp_path / "wide/model.safetensors")
    widths = [
        sum(info.num_bytes for info in folder.tensors.values()) for folder in (opened, open_checked(tmp_path / "wide"))
    ]
    assert widths[0] < widths[1]
    name = "layers.1.attn.wkv.weight"
    save_file(wide | {name: wide[name].half()}, tmp_path / "wide/model.safetensors")
    with pytest.raises(WorkerFault, match=rf"tensor {name}: BF16 or F32 of shape \(64, 128\) .* F16 of shape"):
        open_checked(tmp_path / "wide")


# What a rank takes


@pytest.mark.parametrize(("num_ranks", "rank"), [(1, 0), (2, 1), (8, 3)])
def test_a_rank_reads_its_own_experts_and_all_that_is_dense(
    written: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, rank: int
) -> None:
    opened = SafetensorsFolder(written)
    config = DeepseekConfig.read(opened.metadata, "config.json")
    given: list[str] = []
    stored = opened.stored

    def note(name: str) -> Tensor:
        given.append(name)
        return stored(name)

    monkeypatch.setattr(opened, "stored", note)
    reports: list[tuple[int, int]] = []

    def report(done_bytes: int, total_bytes: int) -> None:
        reports.append((done_bytes, total_bytes))

    tensors = RankTensors(opened, config, num_ranks, rank, report=report)
    assert given == [], "comparing reads headers alone"
    for name in tensors.specs:
        tensors.stored(name)
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in given if ".ffn.experts." in name}
    assert experts == set(range(8 * rank // num_ranks, 8 * (rank + 1) // num_ranks)) == set(tensors.experts)
    kinds = Counter(".ffn.experts." in name for name in given)
    assert kinds[True] == 10 * 6 * 8 // num_ranks
    assert kinds[False] == sum(
        spec.expert is None and not name.startswith("mtp.") for name, spec in expected_tensors(config).items()
    )
    mapped = ("engram table", "routed experts")  # they are read when a token asks for them
    read_bytes = [opened.tensors[name].num_bytes for name, spec in tensors.specs.items() if spec.group not in mapped]
    assert reports[-1] == (sum(read_bytes), sum(read_bytes))


def test_a_file_without_a_tensor_of_the_rank_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(path: Path) -> Any:
        mapped.append(path.name)
        return map_file(path)

    mapped: list[str] = []
    map_file = safetensors_file._map
    monkeypatch.setattr(safetensors_file, "_map", note)
    config = write_checkpoint(tiny_v41(), tmp_path, shard_bytes=1)  # a file a tensor
    opened = SafetensorsFolder(tmp_path)
    tensors = RankTensors(opened, config, 4, 1)
    assert mapped == [], "comparing reads headers alone"
    for name in tensors.specs:
        tensors.stored(name)
    assert len(set(mapped)) == len(mapped) == len(tensors.specs) < len(opened.tensors) // 2


@pytest.mark.parametrize(
    ("num_ranks", "rank", "words"), [(3, 0, "a divisor of 8"), (2, 2, "below 2"), (0, 0, "0 came")]
)
def test_ranks_must_divide_the_experts(num_ranks: int, rank: int, words: str) -> None:
    with pytest.raises(WorkerFault, match=words):
        experts_of_rank(8, num_ranks, rank)


# Damage


class Damage:
    """A copy of a checkpoint that a test may spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: Json = json.loads((folder / INDEX).read_text())
        self.shard_of: dict[str, str] = self.index["weight_map"]

    def path(self, tensor: str) -> Path:
        return self.folder / self.shard_of[tensor]

    def header(self, tensor: str) -> Json:
        content = self.path(tensor).read_bytes()
        fields: Json = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
        return fields

    def write_header(self, tensor: str, header: bytes) -> None:
        content = self.path(tensor).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        self.path(tensor).write_bytes(header + content[8 + length :])

    def change_header(self, tensor: str, change: Callable[[Json], object]) -> None:
        fields = self.header(tensor)
        change(fields)
        self.write_header(tensor, header_bytes(fields))

    def change_index(self, change: Callable[[Json], object]) -> None:
        change(self.index)
        (self.folder / INDEX).write_text(json.dumps(self.index))

    def change_config(self, **changes: Any) -> None:
        config = json.loads((self.folder / "config.json").read_text())
        config["text_config"] |= changes
        (self.folder / "config.json").write_text(json.dumps(config))

    def drop(self, tensor: str) -> None:
        """From header and data; the index still names it."""
        fields, content = self.header(tensor), self.path(tensor).read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        kept, data = {}, b""
        for name, entry in fields.items():
            if name != tensor:
                first, last = entry["data_offsets"]
                kept[name] = entry | {"data_offsets": [len(data), len(data) + last - first]}
                data += content[start + first : start + last]
        self.path(tensor).write_bytes(header_bytes(kept) + data)

    def rename(self, tensor: str, other: str) -> None:
        """Everywhere."""
        self.change_header(tensor, lambda fields: fields.update({other: fields.pop(tensor)}))
        self.change_index(lambda index: self.shard_of.update({other: self.shard_of.pop(tensor)}))

    def restore(self, tensor: str, dtype: str, shape: list[int]) -> None:
        """As something else, with data to go with it; all that comes behind moves."""
        fields, content = self.header(tensor), self.path(tensor).read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        sizes = {"F32": 4, "BF16": 2, "I64": 8}
        data = b""
        for name, entry in fields.items():
            first, last = entry["data_offsets"]
            part = content[start + first : start + last]
            if name == tensor:
                num_bytes = sizes.get(dtype, 1)
                for size in shape:
                    num_bytes *= size
                part = bytes(num_bytes)
                entry |= {"dtype": dtype, "shape": shape}
            entry["data_offsets"] = [len(data), len(data) + len(part)]
            data += part
        self.path(tensor).write_bytes(header_bytes(fields) + data)


NORM = "layers.3.attn_norm.weight"
WQ_A = "layers.3.attn.wq_a.weight"
SCALE = "layers.3.attn.wq_a.scale"
EXPERT = "layers.3.ffn.experts.5.w2.weight"


def last_of(damage: Damage, tensor: str) -> str:
    """What the file of `tensor` ends with."""
    return list(damage.header(tensor))[-1]


def truncate(damage: Damage) -> list[str]:
    last, size = last_of(damage, NORM), damage.path(NORM).stat().st_size
    with damage.path(NORM).open("r+b") as file:
        file.truncate(size - 1)
    return [f"tensor {last}: data up to byte {size} was expected, the file ends at {size - 1}"]


def truncate_in_the_middle(damage: Damage) -> list[str]:
    start = 8 + struct.unpack("<Q", damage.path(NORM).read_bytes()[:8])[0]
    first, end = damage.header(NORM)[NORM]["data_offsets"]
    with damage.path(NORM).open("r+b") as file:
        file.truncate(start + first + 5)
    return [f"tensor {NORM}: data up to byte {start + end} was expected, the file ends at {start + first + 5}"]


def lengthen(damage: Damage) -> list[str]:
    size = damage.path(NORM).stat().st_size
    with damage.path(NORM).open("ab") as file:
        file.write(b"\0\0\0")
    return [f"{size} bytes were expected by its header, {size + 3} came", first_of(damage, NORM)]


def first_of(damage: Damage, tensor: str) -> str:
    """Of the tensors in the same file, the one that the index names first."""
    shard = damage.shard_of[tensor]
    return "tensor " + next(name for name, other in damage.shard_of.items() if other == shard)


def rename(damage: Damage) -> list[str]:
    damage.rename(WQ_A, "layers.3.attn.q_a_proj.weight")
    return [f"tensor {WQ_A}: F8_E4M3 of shape (64, 128) was expected and is missing",
            "layers.3.attn.q_a_proj.weight, which is none of this model, came"]  # fmt: skip


def add(damage: Damage) -> list[str]:
    header, new = damage.header(NORM), "layers.3.attn.wq_a.weight_scale_inv"
    end = header[last_of(damage, NORM)]["data_offsets"][1]
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
    damage.change_header(NORM, lambda fields: fields.update({new: entry}))
    with damage.path(NORM).open("ab") as file:
        file.write(bytes(8))
    damage.change_index(lambda index: damage.shard_of.update({new: damage.shard_of[NORM]}))
    return [f"tensor {new}: none was expected by config.json, F32 of shape (2,) came"]


def add_beside_the_index(damage: Damage) -> list[str]:
    add(damage)
    new = "layers.3.attn.wq_a.weight_scale_inv"
    damage.change_index(lambda index: damage.shard_of.pop(new))
    return [f"tensor {new}: an entry in {INDEX} was expected, none came"]


def wrong_scale_shape(damage: Damage) -> list[str]:
    damage.restore(SCALE, "F8_E8M0", [1, 4])
    return [f"tensor {SCALE}: F8_E8M0 of shape (2, 4) was expected, F8_E8M0 of shape (1, 4) came"]


def wrong_shape(damage: Damage) -> list[str]:
    damage.restore(WQ_A, "F8_E4M3", [128, 64])
    return [f"tensor {WQ_A}: F8_E4M3 of shape (64, 128) was expected, F8_E4M3 of shape (128, 64) came"]


def wrong_dtype(damage: Damage) -> list[str]:
    damage.restore(NORM, "F32", [128])
    return [f"tensor {NORM}: BF16 of shape (128,) was expected, F32 of shape (128,) came"]


def unpacked_expert(damage: Damage) -> list[str]:
    damage.restore(EXPERT, "I8", [128, 64])
    return [f"tensor {EXPERT}: I8 of shape (128, 32) was expected, I8 of shape (128, 64) came"]


def unknown_dtype(damage: Damage) -> list[str]:
    damage.change_header(NORM, lambda fields: fields[NORM].update(dtype="F6_E3M2"))
    return [f"tensor {NORM} has dtype 'F6_E3M2'; F32, F16, BF16"]


def missing_scale(damage: Damage) -> list[str]:
    damage.drop(SCALE)
    damage.change_index(lambda index: damage.shard_of.pop(SCALE))
    return [f"tensor {SCALE}: F8_E8M0 of shape (2, 4) was expected and is missing"]


def missing_index(damage: Damage) -> list[str]:
    (damage.folder / INDEX).unlink()
    num_files = len(set(damage.shard_of.values()))
    return [f"model: model.safetensors or {INDEX} was expected, {num_files} other .safetensors files came"]


def missing_shard(damage: Damage) -> list[str]:
    damage.path(NORM).unlink()
    return [f"{damage.shard_of[NORM]}: no readable safetensors file: No such file", first_of(damage, NORM)]


def index_names_what_is_not_there(damage: Damage) -> list[str]:
    damage.drop(NORM)
    return [f"tensor {NORM} was expected in {damage.shard_of[NORM]} and is not there"]


def index_names_another_file(damage: Damage) -> list[str]:
    other = next(shard for shard in damage.shard_of.values() if shard != damage.shard_of[NORM])
    damage.change_index(lambda index: damage.shard_of.update({NORM: other}))
    return [f"tensor {NORM} was expected in {other} and is not there"]


def index_names_a_file_elsewhere(damage: Damage) -> list[str]:
    damage.change_index(lambda index: damage.shard_of.update({NORM: "../other.safetensors"}))
    return [f"tensor {NORM}: a safetensors file in its folder was expected, '../other.safetensors' came"]


def index_is_wrong_about_the_size(damage: Damage) -> list[str]:
    total = damage.index["metadata"]["total_size"]
    damage.change_index(lambda index: index["metadata"].update(total_size=total + 1))
    return [f"total_size: {total} bytes of tensors were expected, {total + 1} came"]


def in_two_files(damage: Damage) -> list[str]:
    shards = sorted(set(damage.shard_of.values()))
    other = shards[0] if shards[0] != damage.shard_of[NORM] else shards[1]
    content = (damage.folder / other).read_bytes()
    length = 8 + struct.unpack("<Q", content[:8])[0]
    fields = json.loads(content[8:length])
    end = len(content) - length
    fields[NORM] = {"dtype": "BF16", "shape": [128], "data_offsets": [end, end + 256]}
    (damage.folder / other).write_bytes(header_bytes(fields) + content[length:] + bytes(256))
    return [f"tensor {NORM} was expected once, and is in"]


def twice_in_a_header(damage: Damage) -> list[str]:
    fields = damage.header(NORM)
    text = json.dumps(fields)[:-1] + f',"{NORM}":' + json.dumps(fields[NORM]) + "}"
    damage.write_header(NORM, struct.pack("<Q", len(text)) + text.encode())
    return [f"tensor {NORM}: one entry in the header was expected, two came"]


def overlap(damage: Damage) -> list[str]:
    fields = damage.header(NORM)
    first, end = fields[NORM]["data_offsets"]
    damage.change_header(NORM, lambda fields: fields[NORM].update(data_offsets=[first - 2, end - 2]))
    return ["tensor ", "its data was expected at byte"]


def gap(damage: Damage) -> list[str]:
    fields = damage.header(NORM)
    last = last_of(damage, NORM)
    first, end = fields[last]["data_offsets"]
    damage.change_header(NORM, lambda fields: fields[last].update(data_offsets=[first + 64, end + 64]))
    with damage.path(NORM).open("ab") as file:
        file.write(bytes(64))
    start = damage.path(NORM).stat().st_size - (end - first)
    return [f"tensor {last}: its data was expected at byte {start - 64} of the file, {start} came"]


def offsets_contradict_the_shape(damage: Damage) -> list[str]:
    damage.change_header(NORM, lambda fields: fields[NORM].update(shape=[129]))
    return [f"tensor {NORM}: BF16 of shape (129,) takes 258 bytes, offsets ["]


def negative_shape(damage: Damage) -> list[str]:
    damage.change_header(NORM, lambda fields: fields[NORM].update(shape=[-1]))
    return [f"tensor {NORM}: a shape of at most 8 sizes and two offsets were expected, [-1] and ["]


def entry_without_offsets(damage: Damage) -> list[str]:
    damage.change_header(NORM, lambda fields: fields[NORM].pop("data_offsets"))
    return [f"tensor {NORM}: data_offsets, dtype, shape were expected, {{'dtype': 'BF16', 'shape': [128]}} came"]


def header_of_garbage(damage: Damage) -> list[str]:
    damage.write_header(NORM, struct.pack("<Q", 64) + b"\xff" * 64)
    return [damage.shard_of[NORM], "a header in JSON was expected", first_of(damage, NORM)]


def oversize_header(damage: Damage) -> list[str]:
    content = damage.path(NORM).read_bytes()
    damage.path(NORM).write_bytes(struct.pack("<Q", 1 << 60) + content[8:])
    return [f"a header of at most {len(content) - 8} bytes was expected, {1 << 60} were announced",
            first_of(damage, NORM)]  # fmt: skip


def empty_file(damage: Damage) -> list[str]:
    damage.path(NORM).write_bytes(b"")
    return ["a header of at least 8 bytes was expected, 0 came", first_of(damage, NORM)]


def config_of_more_experts(damage: Damage) -> list[str]:
    damage.change_config(n_routed_experts=9)
    return ["tensor layers.0.ffn.gate.weight: BF16 of shape (9, 128) was expected, BF16 of shape (8, 128) came"]


def config_of_another_width(damage: Damage) -> list[str]:
    damage.change_config(moe_intermediate_size=96)
    name = "layers.0.ffn.shared_experts.w1.weight"
    return [f"tensor {name}: F8_E4M3 of shape (96, 128) was expected, F8_E4M3 of shape (64, 128) came"]


def config_of_fewer_layers(damage: Damage) -> list[str]:
    damage.change_config(
        num_hidden_layers=9, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0], index_source_layer_ids=[2, 4, 5, 7],
        dspark_target_layer_ids=[6, 7, 8],
    )  # fmt: skip
    return ["tensor layers.9.", "none was expected by config.json", "came"]


def config_of_another_source(damage: Damage) -> list[str]:
    damage.change_config(index_source_layer_ids=[2, 3, 5, 7, 9])
    return ["tensor layers.3.attn.indexer.wq_b.weight: F8_E4M3 of shape (512, 64) was expected and is missing",
            "; layers.4.attn.indexer.", ", which is none of this model, came"]  # fmt: skip


def config_without_quantisation(damage: Damage) -> list[str]:
    config = json.loads((damage.folder / "config.json").read_text())
    del config["quantization_config"]
    (damage.folder / "config.json").write_text(json.dumps(config))
    return ["tensor layers.0.attn.wq_a.weight: BF16 or F32 of shape (64, 128) was expected, F8_E4M3 of shape (64, 128)"]


@pytest.mark.parametrize(
    "spoil",
    [
        rename, truncate, truncate_in_the_middle, lengthen, add, add_beside_the_index, wrong_scale_shape, wrong_shape,
        wrong_dtype, unpacked_expert, unknown_dtype, missing_scale, missing_index, missing_shard,
        index_names_what_is_not_there, index_names_another_file, index_names_a_file_elsewhere,
        index_is_wrong_about_the_size, in_two_files,
        twice_in_a_header, overlap, gap, offsets_contradict_the_shape, negative_shape, entry_without_offsets,
        header_of_garbage, oversize_header, empty_file, config_of_more_experts, config_of_another_width,
        config_of_fewer_layers, config_of_another_source, config_without_quantisation,
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_by_tensor_with_what_was_expected_and_what_came(
    written: Path, tmp_path: Path, spoil: Callable[[Damage], list[str]]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(written, folder)
    open_checked(folder)
    words = spoil(Damage(folder))
    with pytest.raises(WorkerFault) as caught:
        open_checked(folder)
    text = str(caught.value)
    assert caught.value.code in ("model_file", "unsupported_model")
    assert all(word in text for word in words), (text, words)


# The file's own rules


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_header_with_any_byte_changed_is_refused_or_still_says_what_lies_where(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    fields = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    content = bytearray(header_bytes(fields) + bytes(32))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 33))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except WorkerFault as fault:
        assert fault.code in ("model_file", "unsupported_model") and "any.safetensors" in str(fault)
    else:
        assert sum(entry.info.num_bytes for entry in file.tensors.values()) == 32
        for name in file.tensors:
            assert file.view(name).shape == file.tensors[name].info.shape


def test_a_tensor_on_an_odd_byte_is_read(tmp_path: Path) -> None:
    fields = {
        "a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        "none": {"dtype": "F32", "shape": [0, 4], "data_offsets": [11, 11]},
    }
    (tmp_path / "config.json").write_text("{}")
    data = bytes([1, 2, 255]) + struct.pack("<2f", 1.5, -2.0)
    (tmp_path / "model.safetensors").write_bytes(header_bytes(fields) + data)
    opened = SafetensorsFolder(tmp_path)
    assert opened.stored("b").tolist() == [1.5, -2.0] == opened.read("b").tolist()
    assert opened.stored("a").tolist() == [1, 2, -1] and opened.stored("none").shape == (0, 4)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as theirs:
        assert torch.equal(theirs.get_tensor("b"), opened.stored("b"))
    with pytest.raises(WorkerFault, match="tensor a has dtype I8"):
        opened.read("a")
