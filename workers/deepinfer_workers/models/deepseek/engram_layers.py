"""The Engram layers of a model: tables in mapped files or on the device, rows fetched ahead, what they add to streams.

Knows nothing of blocks or caches.

Legend: `T` positions of a step, padded; `N` longest n-gram; `E` width of what a table gives for a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepinfer_workers.batch import DeviceBatch, Ints
from deepinfer_workers.models.deepseek.block import Streams
from deepinfer_workers.models.deepseek.config import EngramConfig
from deepinfer_workers.models.deepseek.engram import Engram
from deepinfer_workers.models.deepseek.engram_hash import NO_TOKEN, compressed_vocabulary, layer_hashes
from deepinfer_workers.models.deepseek.engram_prefetch import EngramPrefetch, EngramPrefetcher, EngramSource
from deepinfer_workers.models.deepseek.engram_resident import ResidentTable, fits
from deepinfer_workers.models.deepseek.engram_table import EngramTable
from deepinfer_workers.models.deepseek.weights import DeepseekWeights
from deepinfer_workers.models.model import Step

_EVERY: Final = slice(None)


class Added(NamedTuple):
    """What one layer's table gives for the positions of a step."""

    engram: Engram
    embeddings: Tensor
    """[T, E]"""
    image_token_id: int | None

    def add_to(self, streams: Streams, kept: Tensor, tokens: Tensor) -> Streams:
        """`streams` of the positions `kept` [t], whose `tokens` are [t]."""
        is_image = None if self.image_token_id is None else tokens == self.image_token_id
        return streams._replace(
            values=self.engram.apply(streams.values, self.embeddings.index_select(0, kept), is_image)
        )


class EngramLayers:
    """All Engram layers of a model."""

    def __init__(self, weights: DeepseekWeights, config: EngramConfig) -> None:
        """Raises `WorkerFault` when the folder's tokenizer is not the one that the tables were made with."""
        self._config = config
        self._device = weights.device
        self._image_token_id = weights.config.image_token_id
        vocabulary = compressed_vocabulary(weights.tensors.path / "tokenizer.json", weights.config.vocab_size)
        hashes = layer_hashes(config, vocabulary, self._image_token_id)
        tables = [_table(weights, f"layers.{layer}.engram.embed") for layer in config.layers]
        self._sources: list[EngramSource] = []
        self._resident: list[ResidentTable] = []
        """All tables, or none."""
        if fits(sum(config.table_rows), config.head_dim, self._device):
            self._resident = [
                ResidentTable(hash_, *table, self._device) for hash_, table in zip(hashes, tables, strict=True)
            ]
        else:
            self._sources = [
                EngramSource(hash_, EngramTable(*table)) for hash_, table in zip(hashes, tables, strict=True)
            ]
        self._prefetcher: EngramPrefetcher | None = None
        self._staged: dict[int, list[Tensor]] = {}  # by the number of positions
        self._engrams = [_engram(weights, f"layers.{layer}.engram") for layer in config.layers]

    @property
    def are_resident(self) -> bool:
        """The tables are on the device: steps ask the host for nothing."""
        return bool(self._resident)

    def allocate(self, num_slots: int) -> None:
        if self._sources:
            self._prefetcher = EngramPrefetcher(self._sources, num_slots)

    def prefetch(self, batch: DeviceBatch, starts: Ints) -> EngramPrefetch | None:
        """Host thread, in the order of the plans."""
        return None if self._prefetcher is None else self._prefetcher.submit(batch, starts)

    def close(self) -> None:
        """End the thread that fetches."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def embeddings(self, step: Step, num_positions: int) -> dict[int, Added]:
        """By layer, of the step's first `num_positions`, which are no padding."""
        if self._resident:
            return self._added([values[:num_positions] for values in self._of_tables(step)])
        return self._added([values[:num_positions].to(self._device) for values in self._fetch(step)])

    def stage(self, step: Step) -> None:
        """Bring what `staged` gives for steps of this size; nothing waits but for the tokens to be known."""
        if self._resident:
            return
        for target, values in zip(self._room(len(step.tokens)), self._fetch(step), strict=True):
            target.copy_(values)

    def staged(self, step: Step) -> dict[int, Added]:
        """As `embeddings` of all positions, padding included, so that a CUDA graph can hold it.

        Of tables on the host what was last staged of this many positions, always in the same place.
        """
        if self._resident:
            return self._added(self._of_tables(step))
        return self._added(self._room(len(step.tokens)))

    def _room(self, num_positions: int) -> list[Tensor]:
        if num_positions not in self._staged:
            config = self._config
            width = (config.max_ngram - 1) * config.num_heads * config.head_dim
            self._staged[num_positions] = [
                torch.zeros(num_positions, width, device=self._device) for _ in self._engrams
            ]
        return self._staged[num_positions]

    def _added(self, embeddings: Sequence[Tensor]) -> dict[int, Added]:
        return {
            layer: Added(engram, values, self._image_token_id)
            for layer, engram, values in zip(self._config.layers, self._engrams, embeddings, strict=True)
        }

    def _fetch(self, step: Step) -> list[Tensor]:
        """Of each layer, on the host: [T, E]."""
        assert isinstance(step.prefetched, EngramPrefetch)
        prefetched = step.prefetched
        prefetched.settle(step.rows.counts, len(step.tokens))
        missing = torch.from_numpy(prefetched.missing).to(step.tokens.device)
        ngrams = step_ngrams(step, self._config.max_ngram, missing).cpu().numpy()
        return [rows.dequantize() for rows in prefetched.take(ngrams)]

    def _of_tables(self, step: Step) -> list[Tensor]:
        """Of each layer, on the device and from there: [T, E]."""
        ngrams = step_ngrams(step, self._config.max_ngram)
        return [table.embeddings(ngrams) for table in self._resident]


def step_ngrams(step: Step, max_ngram: int, places: Tensor | slice = _EVERY) -> Tensor:
    """The tokens at `places` [M] of the step and those before them, newest first: [M, N], on the device."""
    before = torch.arange(max_ngram, device=step.tokens.device)
    positions = step.rows.positions[places][:, None] - before
    tokens = step.known[step.rows.slots[places][:, None], positions.clamp(min=0)].long()
    return torch.where(positions < 0, NO_TOKEN, tokens)


def _table(weights: DeepseekWeights, name: str) -> tuple[Tensor, Tensor | None]:
    codes = weights.stored(f"{name}.weight")
    return codes, weights.stored(f"{name}.scale") if weights.config.is_quantized else None


def _engram(weights: DeepseekWeights, name: str) -> Engram:
    product = weights.plain(f"{name}.q_weight") * weights.plain(f"{name}.k_weight")  # [n, C]
    return Engram(weights.linear(f"{name}.wkv"), product, weights.config.rms_eps)
