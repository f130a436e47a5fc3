"""Runs our DeepSeek on one sequence, and keeps what passes its layers. Knows nothing of oracles, plans or the runner.

Legend: `T` positions, `n` streams, `C` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import PackedRows, select_ops
from deepinfer_protocol import SlotSampling
from deepinfer_workers.batch import Admission, DeviceBatch, Limits
from deepinfer_workers.models.deepseek import model as model_module
from deepinfer_workers.models.deepseek.block import AttentionInput, Block, Streams
from deepinfer_workers.models.deepseek.caches import RowFormat, float_format
from deepinfer_workers.models.deepseek.formats import CacheFormats, cache_formats
from deepinfer_workers.models.deepseek.model import Deepseek
from deepinfer_workers.models.model import ModelOptions, Step
from deepinfer_workers.models.registry import load_model
from deepinfer_workers.safetensors_folder import SafetensorsFolder

BLOCK_SIZE: Final = 128
_NONE: Final = np.empty(0, np.int64)


@dataclass
class Passed:
    """One layer's share of a forward."""

    before: Streams
    """[T, n, C] and [T, n]: after the Engram, where the layer has one."""
    after: Streams
    choice: Tensor | None
    """[T, K] row numbers, -1 behind the last."""
    rounded: dict[str, Tensor]
    """`window` [T, D], `main` [G, D], `index` [G, d], `query` [T, h, d]: as attention and indexer read them."""


class Probe:
    """A model of one slot in exact arithmetic; `quantizes`: what it caches goes through the released formats."""

    def __init__(self, folder: Path, *, quantizes: bool = False) -> None:
        options = ModelOptions(
            block_size=BLOCK_SIZE,
            keep_tokens=None,
            num_drafts=0,
            quantizes_activations=False,
            quantizes_caches=quantizes,
            cache_format="float32",
        )
        self._rounded: dict[str, Tensor] = {}

        def watched_formats(*args: Any, **kwargs: Any) -> CacheFormats:
            made = cache_formats(*args, **kwargs)
            return CacheFormats(
                self._watch("window", made.window), self._watch("main", made.main), self._watch("index", made.index)
            )

        with mock.patch.object(model_module, "cache_formats", watched_formats):
            ops = select_ops("cpu", batch_invariant=True, dtype="float32")
            model = load_model(SafetensorsFolder(folder), ops, options, lambda done, total: None)
        assert isinstance(model, Deepseek)
        self.model = model
        self._num_blocks = -(-self.model.max_len // BLOCK_SIZE)
        self._limits = Limits(1, self._num_blocks, BLOCK_SIZE, self.model.max_len, self.model.vocab_size, 1 << 20)
        self.model.allocate(self._limits)
        self._passed: list[Passed] = []
        self._forced: Sequence[Streams] = ()
        self._watch_blocks()

    def close(self) -> None:
        self.model.close()

    def run(self, ids: Sequence[int], forced: Sequence[Streams] = ()) -> tuple[Tensor, list[Passed]]:
        """Logits [T, vocab] of one full forward, and what passed each layer.

        Where given, `forced` is what each layer hands on in place of what it made.
        """
        self._passed, self._forced = [], forced
        self.model.admit(self._batch(ids).admissions)
        hidden = self.model.forward(self._step(ids))[: len(ids)]
        return self.model.logits(hidden), self._passed

    def _watch(self, kind: str, row_format: RowFormat) -> RowFormat:
        return float_format(row_format.width, torch.float32, self._watched(kind, row_format.round))

    def _watched(self, kind: str, round: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def watched(rows: Tensor) -> Tensor:
            rounded = round(rows)
            self._rounded.setdefault("query" if rows.ndim == 3 else kind, rounded)  # the ring takes the last ones again
            return rounded

        return watched

    def _watch_blocks(self) -> None:
        blocks: list[Any] = self.model._blocks
        for layer, block in enumerate(blocks):
            blocks[layer] = _WatchedBlock(block, self)

    def _batch(self, ids: Sequence[int]) -> DeviceBatch:
        tokens, blocks = np.array(ids, np.int64), np.arange(self._num_blocks)
        admission = Admission(0, 1, 0, 0, tokens, blocks, SlotSampling(), _NONE)
        slots = np.zeros(1, np.int64)
        count = len(ids)
        return DeviceBatch(
            step_id=1,
            retired=_NONE,
            admissions=[admission],
            append_slots=_NONE,
            append_blocks=_NONE,
            slots=slots,
            generations=slots + 1,
            counts=np.array([count]),
            sampled=slots,
            is_waiting=np.zeros(1, np.bool_),
            row_of=np.zeros(count, np.int64),
            offset_of=np.arange(count),
            num_positions=self._limits.padded(count),
        )

    def _step(self, ids: Sequence[int]) -> Step:
        count, num_positions = len(ids), self._limits.padded(len(ids))
        num_padding = num_positions - count
        tokens = torch.tensor([*ids, *[0] * num_padding])
        slots = torch.tensor([0] * count + [1] * num_padding)
        positions = torch.tensor([*range(count), *[0] * num_padding])
        tables = torch.stack((torch.arange(self._num_blocks), torch.full((self._num_blocks,), self._num_blocks)))
        known = torch.zeros(2, self.model.max_len + 1, dtype=torch.int32)
        known[0, :count] = tokens[:count]
        rows = PackedRows(np.array([count]), slots, positions, tables.to(torch.int32))
        prefetched = self.model.prefetch(self._batch(ids), np.zeros(1, np.int64))
        return Step(tokens, positions, rows, known, prefetched)


class _WatchedBlock:
    def __init__(self, block: Block, probe: Probe) -> None:
        self._block, self._probe = block, probe

    def make_rows(self, *args: Any) -> AttentionInput:
        return self._block.make_rows(*args)

    def __call__(self, streams: Streams, *args: Any) -> Streams:
        probe = self._probe
        after = self._block(streams, *args)
        choice = args[2].choice
        probe._passed.append(Passed(streams, after, None if choice is None else choice.rows, dict(probe._rounded)))
        probe._rounded.clear()
        return probe._forced[len(probe._passed) - 1] if probe._forced else after
