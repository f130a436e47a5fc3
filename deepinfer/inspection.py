"""What a checkpoint of the DeepSeek family holds and what serving it needs, told by a worker process from its headers.

Knows nothing of tensors: the engine has no torch, and learns of weights only what a process beside it says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from deepinfer.env import worker_environment
from deepinfer.errors import EngineError, WorkerStartError
from deepinfer.group import error_of
from deepinfer.supervisor import module_folders
from deepinfer_protocol import Fault

TIMEOUT_S: Final = 120.0
"""Headers of a hundred thousand tensors take seconds, on a slow disk."""


class TensorGroup(msgspec.Struct, frozen=True):
    """Tensors of one part of the model."""

    name: str
    num_tensors: int
    num_bytes: int


class SharedMemory(msgspec.Struct, frozen=True):
    """What does not depend on the rank."""

    table_bytes: int
    """Of n-gram tables: they stay in mapped files, once for all ranks of a host."""
    dense_numbers: int
    """Weights that are neither experts nor tables nor the embedding; a CPU expands them to float32."""
    rope_bytes: int
    """Of the turns of every position."""
    token_bytes: float
    """Of paged cache rows in the released packing, for every token that is kept."""
    slot_bytes: int
    """Of windows and pending states, for every request that may run."""
    known_slot_bytes: int
    """More for each of these, of its tokens and its blocks' numbers, at the model's whole length."""
    draft_slot_bytes: int
    """More, where drafts are served."""


class RankMemory(msgspec.Struct, frozen=True):
    """What one rank loads, as it is stored."""

    rank: int
    group: int
    """Ranks of a group serve the same requests."""
    experts: tuple[int, int]
    """The first routed expert of every layer, and the one behind the last."""
    dense_bytes: int
    expert_bytes: int
    draft_bytes: int | None
    """More, where drafts are served; `None`: the ranks cannot share their experts, which are fewer."""
    vision_bytes: int
    """More, where images are served."""

    @property
    def num_bytes(self) -> int:
        """Without drafts and images."""
        return self.dense_bytes + self.expert_bytes


class Problem(msgspec.Struct, frozen=True):
    """As a worker's fault has it."""

    code: str
    text: str


class Inspection(msgspec.Struct, frozen=True):
    """All that there is to say of one checkpoint."""

    name: str
    family: str
    is_quantized: bool
    files: str
    """`none`: there is a config alone; `match`; `differ`: `problem` says where. Sizes are the files' if they match."""
    problem: Problem | None
    num_tensors: int
    num_bytes: int
    groups: list[TensorGroup]
    shared: SharedMemory
    ranks: list[RankMemory]

    def check(self) -> None:
        """Raises what the engine would, if the files do not fit the config."""
        if self.problem is not None:
            raise _error(self.problem)


class _Refused(msgspec.Struct, frozen=True):
    error: Problem


def inspect_model(path: Path, *, num_ep: int = 1, num_dp: int = 1) -> Inspection:
    """A folder with config.json, with weights or without, or such a file; for `num_ep` ranks that share the experts
    and `num_dp` groups that serve requests of their own. No weight is read.

    Raises `ModelFileError`, `UnsupportedModel`, `ConfigError`, or `EngineError` where no worker can run.
    """
    command = [sys.executable, "-P", "-m", "deepinfer_workers.inspect", "--ep", str(num_ep), "--dp", str(num_dp)]
    try:
        done = subprocess.run(
            [*command, "--", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=worker_environment(module_folders()),
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkerStartError(f"the checkpoint cannot be inspected: {error}") from None
    try:
        if done.returncode:
            raise _error(msgspec.json.decode(done.stdout, type=_Refused).error)
        return msgspec.json.decode(done.stdout, type=Inspection)
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise EngineError(f"inspecting {path} ended with exit code {done.returncode}: {last}") from None


def _error(problem: Problem) -> Exception:
    return error_of(Fault(epoch=0, rank=0, code=problem.code, text=problem.text))
