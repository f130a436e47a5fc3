"""What every layer of a model keeps between steps, and how many bytes it takes. Knows nothing of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from deepinfer_workers.batch import Limits
from deepinfer_workers.models.deepseek.caches import PagedRows, Rings, RowFormat
from deepinfer_workers.models.deepseek.compressor import GroupShape
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.formats import CacheFormats, pending_format

MIN_ROLLBACK: Final = 5
"""Tokens that can be taken back, at least: as many as a draft block has."""


@dataclass(frozen=True)
class SourceRows:
    """The compressed rows of a source layer, and what is kept until a group is complete."""

    ratio: int
    main: PagedRows
    index: PagedRows | None
    """`None`: every visible row is attended to (V4, ratio 128)."""
    pending: Rings | None
    """States of single tokens; `None` at ratio 1, where every token completes its group."""
    pending_index: Rings | None
    """V4: those of the index keys' own compressor."""


@dataclass(frozen=True)
class LayerCaches:
    """What one layer keeps between steps."""

    window: Rings
    source: SourceRows | None


class DeepseekCaches:
    """`num_blocks` blocks and a null block, `num_slots` slots and a null slot."""

    def __init__(self, config: DeepseekConfig, formats: CacheFormats, limits: Limits, device: torch.device) -> None:
        self._config, self._formats, self._limits, self._device = config, formats, limits, device
        self.layers = [
            LayerCaches(
                self._window(),
                self._source(layer) if layer in config.kv_sources else None,
            )
            for layer in range(config.num_layers)
        ]

    def draft_rings(self) -> list[Rings]:
        """One for each draft stage."""
        return [self._window() for _ in range(self._config.num_stages)]

    def _window(self) -> Rings:
        capacity = window_capacity(self._config)
        return Rings(self._formats.window, self._limits.num_slots + 1, capacity, self._device)

    def _source(self, layer: int) -> SourceRows:
        config, formats = self._config, self._formats
        ratio = config.ratios[layer]
        main, index = pending_shapes(config, layer)
        return SourceRows(
            ratio,
            main=self._paged(formats.main, ratio),
            index=self._paged(formats.index, ratio) if layer in config.index_sources else None,
            pending=self._pending(main),
            pending_index=self._pending(index),
        )

    def _paged(self, row_format: RowFormat, ratio: int) -> PagedRows:
        limits = self._limits
        return PagedRows(row_format, limits.num_blocks, limits.block_size // ratio, self._device)

    def _pending(self, shape: GroupShape | None) -> Rings | None:
        if shape is None:
            return None
        capacity = pending_capacity(self._config, shape)
        return Rings(pending_format(shape.state_dim), self._limits.num_slots + 1, capacity, self._device)


def pending_shapes(config: DeepseekConfig, layer: int) -> tuple[GroupShape | None, GroupShape | None]:
    """What a source layer keeps of tokens whose group is not complete: for its rows, and for V4's index keys."""
    ratio = config.ratios[layer]
    has_own_keys = config.family == "v4" and layer in config.index_sources
    return (
        GroupShape.of(config, ratio, config.head_dim) if ratio > 1 else None,
        GroupShape.of(config, ratio, config.index_dim) if has_own_keys else None,
    )


def rollback(config: DeepseekConfig) -> int:
    """Tokens that can be taken back, and one that follows them."""
    drafts = 0 if config.dspark is None else config.dspark.block_size
    return max(drafts, MIN_ROLLBACK) + 1


def window_capacity(config: DeepseekConfig) -> int:
    """Positions of a window ring: what was written last can be taken back without having lost what it replaced."""
    return config.window + rollback(config)


def pending_capacity(config: DeepseekConfig, shape: GroupShape) -> int:
    return shape.lookback + rollback(config)


def token_bytes(config: DeepseekConfig, formats: CacheFormats) -> float:
    """Of the paged rows, for one token."""
    return sum(
        (formats.main.row_bytes + (formats.index.row_bytes if layer in config.index_sources else 0))
        / config.ratios[layer]
        for layer in config.kv_sources
    )


def slot_bytes(config: DeepseekConfig, formats: CacheFormats) -> int:
    """Of windows and pending states, for one slot."""
    total = config.num_layers * window_capacity(config) * formats.window.row_bytes
    for layer in config.kv_sources:
        shapes = filter(None, pending_shapes(config, layer))
        total += sum(pending_capacity(config, shape) * pending_format(shape.state_dim).row_bytes for shape in shapes)
    return total


def draft_slot_bytes(config: DeepseekConfig, formats: CacheFormats) -> int:
    """Of the draft stages' context, for one slot."""
    return config.num_stages * window_capacity(config) * formats.window.row_bytes
