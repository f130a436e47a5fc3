"""Records how real text loads the experts: for every step and layer, how many of its tokens each expert gets.

    python -m examples.train_nano.expert_loads DATA SERVED OUT.jsonl.xz [--steps N] [--positions N]

Held-out documents are computed in full, and their positions cut into steps, one document after another. The first line
of OUT says what it holds; each other line is a step, [layers, experts].
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deepinfer_protocol import MaskBatch, RowFlag, SlotAdmit, SlotSampling, StepPlan, WorkerConfig, pack_int32
from deepinfer_workers.model_runner import ModelRunner
from deepinfer_workers.models.deepseek.model import Deepseek
from examples.train_nano.held_out import as_prompts, held_out

Ids = list[int]
Choices = npt.NDArray[np.int64]
Route = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
STEPS, POSITIONS = 256, 256
_MOST_POSITIONS = 4096


class Routed(NamedTuple):
    choices: Choices
    """[positions, layers, experts of a token]"""
    num_experts: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "served", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--positions", type=int, default=POSITIONS, help="of a step")
    arguments = parser.parse_args()
    record(arguments.data, arguments.served, arguments.out, arguments.steps, arguments.positions)
    print(f"{arguments.out.stat().st_size / 1e3:.0f} kB in {arguments.out}")


def record(data: Path, served: Path, out: Path, num_steps: int = STEPS, positions: int = POSITIONS) -> None:
    """Fewer steps where there is less text."""
    documents = list(_first(as_prompts(held_out(data, 1 << 30)), num_steps * positions))
    routed = route(served, documents)
    loads = count_loads(routed, positions)[:num_steps]
    what = {
        "model": served.name,
        "text": "held-out documents",
        "steps": len(loads),
        "positions": positions,
        "layers": routed.choices.shape[1],
        "experts": routed.num_experts,
        "experts_per_token": routed.choices.shape[2],
    }
    lines = [json.dumps(line, separators=(",", ":")) for line in (what, *loads.tolist())]
    with lzma.open(out, "wt", encoding="utf-8", preset=9) as file:
        file.write("\n".join(lines) + "\n")


def read_loads(path: Path) -> Choices:
    """What `record` wrote: [steps, layers, experts]."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return np.array([json.loads(line) for line in file.readlines()[1:]])


def count_loads(routed: Routed, positions: int) -> Choices:
    """Of whole steps: [steps, layers, experts]."""
    choices = routed.choices[: len(routed.choices) // positions * positions]
    steps = choices.reshape(-1, positions, *choices.shape[1:]).swapaxes(1, 2)  # [steps, layers, positions, k]
    loads: Choices = (steps[..., None] == np.arange(routed.num_experts)).sum((2, 3))
    return loads


def route(served: Path, documents: Sequence[Ids]) -> Routed:
    """Compute `documents`, each in a step of its own, and note which experts its tokens go to."""
    runner = ModelRunner(_config(served))
    try:
        ready = runner.load(lambda done, total: None)
        model = runner._model
        assert isinstance(model, Deepseek)
        chosen: list[list[npt.NDArray[np.int64]]] = [[] for _ in model._blocks]
        with ExitStack() as stack:
            for block, seen in zip(model._blocks, chosen, strict=True):
                gate = block._sublayers._moe._gate
                stack.enter_context(mock.patch.object(gate, "route", _noting(gate.route, seen)))
            for index, document in enumerate(documents):
                runner.launch(runner.build(_plan(index, document, ready.block_size)), _no_masks).wait()
        choices = np.stack([np.concatenate(seen) for seen in chosen], axis=1)
        return Routed(choices, model.config.num_experts)
    finally:
        runner.close()


def _noting(route: Route, seen: list[npt.NDArray[np.int64]]) -> Route:
    def noting(x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        experts, shares = route(x, tokens)
        seen.append(experts.cpu().numpy())
        return experts, shares

    return noting


def _first(documents: Sequence[Ids], num_tokens: int) -> Iterator[Ids]:
    for document in documents:
        if num_tokens <= 0:
            return
        yield document
        num_tokens -= len(document)


def _config(served: Path) -> WorkerConfig:
    return WorkerConfig(
        endpoint="ipc://nowhere",
        epoch=1,
        rank=0,
        num_ranks=1,
        runner="model",
        model=str(served),
        accelerator="cpu",
        num_slots=1,
        block_size=0,
        kv_cache_bytes=0,
        num_blocks=_MOST_POSITIONS // 16,
        max_model_len=0,
        max_batch_positions=_MOST_POSITIONS,
        batch_invariant=True,
        num_threads=0,
        prefill_truncation="off",
        num_drafts=0,
    )


def _plan(index: int, document: Ids, block_size: int) -> StepPlan:
    """The whole of `document`, in the one slot."""
    blocks = list(range(-(-len(document) // block_size)))
    return StepPlan(
        epoch=1,
        step_id=1 + index,
        rank=0,
        padded_positions=len(document),
        retired=pack_int32([0] if index else []),
        admits=[SlotAdmit(0, 1 + index, 0, 0, pack_int32(document), pack_int32(blocks), SlotSampling())],
        appends=b"",
        rows=pack_int32([0, 1 + index, len(document), int(RowFlag.SAMPLE)]),
    )


def _no_masks() -> MaskBatch:
    raise AssertionError("no row waits for a mask")


if __name__ == "__main__":
    main()
