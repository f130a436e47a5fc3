"""Weight files: what is read, and that nothing in a file is trusted."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from deepinfer_kernels import select_ops
from deepinfer_workers import safetensors_file, safetensors_folder
from deepinfer_workers.checkpoint import MAX_TEXT, Checkpoint
from deepinfer_workers.gguf_file import GGUFFile
from deepinfer_workers.models.model import ModelOptions
from deepinfer_workers.models.registry import load_model, open_checkpoint
from deepinfer_workers.runner import WorkerFault
from deepinfer_workers.safetensors_folder import SafetensorsFolder
from doubles.driver import Driver
from doubles.tiny_llama import TinyLlama

TINY = TinyLlama()
GGUF_NAMES = {
    "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    if name in ("lm_head.weight", "model.norm.weight"):
        return {"lm_head.weight": "output.weight", "model.norm.weight": "output_norm.weight"}[name]
    noun = GGUF_NAMES[name.split(".")[-2]]
    return f"blk.{name.split('.')[2]}.{noun}.weight" if ".layers." in name else f"{noun}.weight"


def permute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter does it."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None] = lambda fields, tensors: None
) -> Path:
    fields: dict[str, Any] = {
        "block_count": TINY.num_layers, "embedding_length": TINY.hidden, "feed_forward_length": TINY.ffn,
        "attention.head_count": TINY.num_heads, "attention.head_count_kv": TINY.num_kv_heads,
        "attention.key_length": TINY.head_dim, "context_length": TINY.max_len,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    tensors: dict[str, Any] = {gguf_name(name): value for name, value in TINY.tensors().items()}
    for name in tensors:
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            tensors[name] = permute(tensors[name], TINY.num_heads if "attn_q" in name else TINY.num_kv_heads)
    change(fields, tensors)
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture", "llama"))
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    for key, value in fields.items():
        add: Any = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"llama.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    load_model(checkpoint, select_ops("cpu", batch_invariant=True), ModelOptions(), lambda done, total: None)
    return checkpoint


def check_fault(path: Path, code: str, words: str) -> None:
    with pytest.raises(WorkerFault, match=words) as caught:
        load(path)
    assert caught.value.code == code


def test_gguf_and_safetensors_of_one_model_give_one_answer(tmp_path: Path) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    answers = [
        Driver(path).generate(0, tokens, 12)
        for path in (write_gguf(tmp_path / "m.gguf"), TINY.write(tmp_path / "folder"))
    ]
    assert answers[0] == answers[1]


def test_gguf_fields_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            found = ours.metadata[name]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == field.contents(), name
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert torch.equal(ours.read(tensor.name), torch.from_numpy(np.array(tensor.data)))


def test_gguf_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    path = write_gguf(tmp_path / "m.gguf", lambda fields, tensors: tensors.update({"rope_freqs.weight": factors}))
    inv_freq = 10_000.0 ** -(np.arange(0, 8, 2) / 8) / factors
    tokens = list(range(50, 110))
    assert Driver(path).generate(0, tokens, 1) == [int(TINY.logits(tokens, inv_freq)[-1].argmax())]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda f, t: f.update({"general.architecture": "bert"}), "unsupported_model", "gguf:bert"),
        (lambda f, t: f.update({"rope.scaling.type": "yarn"}), "unsupported_model", "yarn"),
        (lambda f, t: f.update({"expert_count": 8}), "unsupported_model", "expert_count"),
        (lambda f, t: f.update({"rope.dimension_count": 4}), "unsupported_model", "dimension_count"),
        (lambda f, t: f.pop("block_count"), "model_file", "block_count"),
        (lambda f, t: f.update({"block_count": "two"}), "model_file", "block_count"),
        (lambda f, t: f.update({"attention.head_count_kv": 4}), "model_file", "6 heads"),
        (lambda f, t: f.update({"block_count": 3}), "model_file", "blk.2"),
        (lambda f, t: t.pop("blk.1.ffn_up.weight"), "model_file", "blk.1.ffn_up.weight was expected"),
        (lambda f, t: t.update({"output_norm.weight": np.ones(7, np.float32)}), "model_file", r"\(48,\) was expected"),
        (lambda f, t: t.update({"blk.0.attn_q.bias": np.ones(48, np.float32)}), "unsupported_model", "attn_q.bias"),
    ],
)
def test_a_gguf_file_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: Any, code: str, words: str) -> None:
    check_fault(write_gguf(tmp_path / "m.gguf", change), code, words)


@pytest.mark.parametrize(
    ("offset", "data", "words"),
    [
        (0, b"GGML", "starts with"),
        (4, struct.pack("<I", 0x03000000), "version"),
        (8, struct.pack("<Q", 2**62), "tensors announced"),
        (16, struct.pack("<Q", 2**60), "fields announced"),
        (24, struct.pack("<Q", 2**50), "a string"),
    ],
)
def test_a_crafted_gguf_header_is_refused_before_it_costs_anything(
    tmp_path: Path, offset: int, data: bytes, words: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)
    check_fault(path, "model_file", words)


@pytest.mark.parametrize("size", [0, 3, 20, 200, 1500, 40_000, -1])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:size])
    check_fault(path, "model_file", "m.gguf: ")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_gguf_header_is_a_fault_or_still_a_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    good = folder / "good.gguf"
    if not folder.exists():
        folder.mkdir()
        write_gguf(good)
    content = bytearray(good.read_bytes()[:6000])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    bad = folder / "bad.gguf"
    bad.write_bytes(content)
    with pytest.raises(WorkerFault):
        GGUFFile(bad)


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(TINY.config | changes))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unsupported_model", "hf:GPT2LMHeadModel"),
        ({"architectures": None}, "unsupported_model", "architecture"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "unsupported_model", "auto_map"),
        ({"attention_bias": True}, "unsupported_model", "attention_bias"),
        ({"hidden_act": "gelu"}, "unsupported_model", "gelu"),
        ({"quantization_config": {"bits": 4}}, "unsupported_model", "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "unsupported_model", "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "model_file", "low_freq_factor"),
        ({"hidden_size": 1 << 60}, "model_file", "hidden_size"),
        ({"hidden_size": None}, "model_file", "hidden_size"),
        ({"vocab_size": 200}, "model_file", r"\(200, 48\) was expected"),
        ({"num_hidden_layers": 5}, "model_file", "layers.2"),
        ({"head_dim": 7}, "model_file", "even"),
        ({"rms_norm_eps": -1.0}, "model_file", "rms_norm_eps"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], code: str, words: str
) -> None:
    change_config(TINY.write(tmp_path / "model"), **changes)
    check_fault(tmp_path / "model", code, words)


@pytest.mark.parametrize("config", [b"", b"[1]", b"{" * 5000, b"[" * 100_000, b"\xff\xfe", b" " * (2 << 20)])
def test_a_config_that_is_none_is_refused(tmp_path: Path, config: bytes) -> None:
    (TINY.write(tmp_path / "model") / "config.json").write_bytes(config)
    check_fault(tmp_path / "model", "model_file", "config.json")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"1234", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 90 << 20) + b"{}",
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1099511627776]}}'.ljust(64),
        struct.pack("<Q", 64) + b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,16]}}'.ljust(64) + b"\0" * 16,
    ],
)  # fmt: skip
def test_a_damaged_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (TINY.write(tmp_path / "model") / "model.safetensors").write_bytes(content)
    check_fault(tmp_path / "model", "model_file", "model.safetensors")


def header_of(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("shape", [[1] * 9, [1 << 60] * 100_000])
def test_a_shape_of_many_dimensions_is_not_multiplied(tmp_path: Path, shape: list[int]) -> None:
    content = header_of({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}) + bytes(4)
    (TINY.write(tmp_path / "model") / "model.safetensors").write_bytes(content)
    check_fault(tmp_path / "model", "model_file", "tensor a: a shape of at most 8 sizes .* were expected, ")


def test_a_file_or_an_index_of_too_many_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TINY.write(tmp_path / "model")
    num_tensors = len(TINY.tensors())
    load(folder)
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", num_tensors - 1)
    words = f"at most {num_tensors - 1} tensors were expected"
    check_fault(folder, "model_file", f"model.safetensors: {words} in its header, {num_tensors} came")
    monkeypatch.undo()
    monkeypatch.setattr(safetensors_folder, "MAX_TENSORS", num_tensors - 1)
    weight_map = dict.fromkeys(TINY.tensors(), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_fault(folder, "model_file", rf"index\.json: {words}, {num_tensors} came")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["config.json", "shard.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_opened(tmp_path: Path, name: str) -> None:
    folder = TINY.write(tmp_path / "model")
    weight_map = dict.fromkeys(TINY.tensors(), "shard.safetensors")
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(WorkerFault, match=f"^{name}: a regular file was expected, and it is none") as caught:
        SafetensorsFolder(folder)
    assert caught.value.code == "model_file"


@pytest.mark.parametrize("name", ["\x1b[2J\ud800", "n" * 5_000_000])
def test_what_a_file_calls_its_tensors_is_told_short_and_printable(tmp_path: Path, name: str) -> None:
    folder = TINY.write(tmp_path / "model")
    content = header_of({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}) + bytes(8)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WorkerFault, match=r"tensor .*offsets \[0, 8\] came$") as caught:
        SafetensorsFolder(folder)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 2 * MAX_TEXT
    assert "\\x1b[2J\\ud800" in text or "nnn ... nnn" in text


def write_sharded(folder: Path) -> dict[str, str]:
    TINY.write(folder)
    (folder / "model.safetensors").unlink()
    tensors = TINY.tensors()
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for shard in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: value for name, value in tensors.items() if weight_map[name] == shard}, folder / shard)
    return weight_map


def test_a_sharded_folder_is_read_by_its_index(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = load(tmp_path / "model")
    for name, value in TINY.tensors().items():
        assert torch.equal(checkpoint.read(name), torch.from_numpy(value))


@pytest.mark.parametrize("shard", ["../model-0.safetensors", "/etc/passwd", "model-0.bin", "model-9.safetensors",
                                   "\0.safetensors"])  # fmt: skip
def test_an_index_cannot_name_what_is_not_in_its_folder(tmp_path: Path, shard: str) -> None:
    weight_map = write_sharded(tmp_path / "model") | {"model.norm.weight": shard}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_fault(tmp_path / "model", "model_file", "safetensors")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = TINY.write(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    check_fault(folder, "model_file", "model.safetensors")


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    folder = TINY.write(tmp_path / "model")
    tensors = {name: value.astype(np.float16) for name, value in TINY.tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = SafetensorsFolder(folder)
    assert torch.equal(checkpoint.read("model.norm.weight"), torch.from_numpy(tensors["model.norm.weight"]).float())


def test_versions_differ_when_the_weights_do(tmp_path: Path) -> None:
    first, again = (SafetensorsFolder(TINY.write(tmp_path / str(i) / "model")).version for i in range(2))
    other = SafetensorsFolder(TinyLlama(ffn=96).write(tmp_path / "2" / "model")).version
    assert first == again != other
