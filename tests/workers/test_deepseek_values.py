"""Numbers of a checkpoint that cannot be: refused by tensor where they are read, and never an answer."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from deepinfer_workers.model_runner import ModelRunner
from deepinfer_workers.models.deepseek.generator import write_model
from deepinfer_workers.runner import WorkerFault
from doubles.deepseek_sequences import random_tokens
from doubles.driver import DEFAULTS, Driver, Row
from doubles.tiny_deepseek import tiny_v4, tiny_v41

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 512


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family, made in (("v4.1", tiny_v41), ("v4", tiny_v4)):
        folders[family] = tmp_path_factory.mktemp(family)
        write_model(made(vocab_size=VOCAB), folders[family])
    return folders


@pytest.fixture
def broken(written: dict[str, Path], tmp_path: Path) -> Iterator[Callable[[str, str, bytes], Driver]]:
    """A runner of a model one of whose tensors begins with other bytes."""
    drivers: list[Driver] = []

    def load(family: str, tensor: str, data: bytes) -> Driver:
        folder = tmp_path / "model"
        shutil.copytree(written[family], folder)
        poke(folder, tensor, data)
        drivers.append(Driver(folder, block_size=128, num_slots=4, num_blocks=8, num_threads=1, dtype="float32"))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.close()


def poke(folder: Path, tensor: str, data: bytes) -> None:
    for shard in folder.glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        start = 8 + struct.unpack("<Q", content[:8])[0]
        if entry := json.loads(content[8:start]).get(tensor):
            first = start + entry["data_offsets"][0]
            content[first : first + len(data)] = data
            shard.write_bytes(content)
            return
    raise AssertionError(f"{tensor} is nowhere")


@pytest.mark.parametrize("tensor", ["layers.3.attn.wq_a.scale", "layers.3.attn.wo_a.scale"])
def test_a_scale_that_is_no_number_is_refused_at_load(broken: Callable[..., Driver], tensor: str) -> None:
    with pytest.raises(WorkerFault, match=f"tensor {tensor}: powers of two were expected, 255 came") as refused:
        broken("v4.1", tensor, b"\xff")
    assert refused.value.code == "model_file"


def test_the_scale_of_an_expert_is_refused_when_a_token_is_sent_there(broken: Callable[..., Driver]) -> None:
    tensor = "layers.3.ffn.experts.5.w2.scale"
    driver = broken("v4.1", tensor, b"\xff")
    driver.admit(0, random_tokens(100, 1, VOCAB))
    with pytest.raises(WorkerFault, match=f"tensor {tensor}: powers of two were expected, 255 came"):
        driver.step(Row(0, 100))


@pytest.mark.parametrize("wrong", [8, 999, -1])
def test_an_expert_that_there_is_not_is_refused_at_load(broken: Callable[..., Driver], wrong: int) -> None:
    words = f"tensor layers.1.ffn.gate.tid2eid: ids below 8 were expected, {wrong} came"
    with pytest.raises(WorkerFault, match=words) as refused:
        broken("v4", "layers.1.ffn.gate.tid2eid", struct.pack("<q", wrong))
    assert refused.value.code == "model_file"


def test_a_runner_that_is_closed_has_no_thread_left(written: dict[str, Path]) -> None:
    before = set(threading.enumerate())
    driver = Driver(written["v4.1"], num_slots=4, num_blocks=8, num_threads=1, dtype="float32")
    driver.admit(0, random_tokens(20, 1, VOCAB))
    driver.step(Row(0, 20))  # its rows are fetched by a thread
    (thread,) = set(threading.enumerate()) - before
    driver.close()
    assert not thread.is_alive()
    driver.close()


def test_a_runner_that_did_not_load_can_be_closed(written: dict[str, Path]) -> None:
    runner = ModelRunner(msgspec.structs.replace(DEFAULTS, model=str(written["v4.1"]), num_blocks=0, kv_cache_bytes=8))
    with pytest.raises(WorkerFault):
        runner.load(lambda done, total: None)
    runner.close()


def test_a_weight_that_is_no_number_ends_the_step(broken: Callable[..., Driver]) -> None:
    driver = broken("v4.1", "norm.weight", b"\xc0\x7f")
    driver.admit(2, random_tokens(20, 1, VOCAB))
    driver.step(Row(2, 10, 0))  # nothing is sampled yet
    with pytest.raises(WorkerFault, match=r"step 1: the logits of slot 2 are NaN") as ended:
        driver.step(Row(2, 10))
    assert ended.value.code == "internal"
