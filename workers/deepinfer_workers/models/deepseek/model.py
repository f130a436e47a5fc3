"""DeepSeek-V4.1 and V4: weights, caches and the forward pass of packed positions. A `Model`.

Knows nothing of plans or sampling. V4.1 is a causal encoder and a decoder that own one half of the layers each. All
rows that prefixes share come from the encoder, so that of a long prompt the decoder needs to compute the end alone
(truncation).

Legend: `T` positions, `n` streams, `C` channels, `S` pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import Ops
from deepinfer_workers.batch import Admission, DeviceBatch, Ints, Limits
from deepinfer_workers.models.deepseek.attention import StepState
from deepinfer_workers.models.deepseek.block import Block, Streams, enter
from deepinfer_workers.models.deepseek.config import DeepseekConfig
from deepinfer_workers.models.deepseek.dspark import DsparkDrafter
from deepinfer_workers.models.deepseek.engram_layers import Added, EngramLayers
from deepinfer_workers.models.deepseek.flat_positions import DeviceFloors, FlatPositions, Positions
from deepinfer_workers.models.deepseek.formats import cache_formats
from deepinfer_workers.models.deepseek.hyper import HeadCollapse, collapse
from deepinfer_workers.models.deepseek.layer_caches import (
    DeepseekCaches,
    draft_slot_bytes,
    rollback,
    slot_bytes,
    token_bytes,
)
from deepinfer_workers.models.deepseek.moe import ExpertCache
from deepinfer_workers.models.deepseek.pieces import Pieces
from deepinfer_workers.models.deepseek.positions import StepPositions
from deepinfer_workers.models.deepseek.rank_tensors import RankTensors
from deepinfer_workers.models.deepseek.rope import RopeTable
from deepinfer_workers.models.deepseek.weights import DeepseekWeights
from deepinfer_workers.models.model import CacheNeeds, Drafter, ModelOptions, Step

LEAST_CAPTURED: Final = 256
"""Tokens of the shortest bound of sequences that graphs are made for; a score for each may be computed."""


@dataclass
class RowCounts:
    """Positions computed so far: what truncation saves is counted, not assumed."""

    through_layer: Ints
    """[layers]: attention and experts."""
    into_rows: Ints
    """[layers]: compressed rows of a source layer."""
    head: int = 0


class SlotFloors:
    """Where the state of each slot begins. The null slot behind the last is never asked for."""

    def __init__(self, num_slots: int) -> None:
        self.window = np.zeros(num_slots, np.int64)
        """Below, the encoder's windows know nothing."""
        self.rows = np.zeros(num_slots, np.int64)
        """Compressed rows below are there already, and others may read them: they are not written."""
        self.decoder = np.zeros(num_slots, np.int64)
        """Below, the decoder half computes nothing."""


class Taps:
    """What the drafter's target layers hold of a step's positions: means over the streams.

    V4.1: what goes into the layers, behind an Engram. V4: what comes out of them.
    """

    def __init__(self, config: DeepseekConfig, *, is_open: bool) -> None:
        """Nothing is taken where not `is_open`."""
        self._layers = config.dspark.target_layers if config.dspark is not None and is_open else ()
        self._reads_inputs = config.family == "v4.1"
        self._taken: list[Tensor] = []

    def take(self, layer: int, before: Streams, after: Streams) -> None:
        if layer in self._layers:
            self._taken.append((before if self._reads_inputs else after).values.mean(1))

    def narrow(self, kept: Tensor) -> None:
        """Only the positions `kept` are computed from here on."""
        self._taken = [taken.index_select(0, kept) for taken in self._taken]

    def values(self) -> Tensor:
        """[T, L * C], in the order of the layers."""
        return torch.cat(self._taken, 1)


class Deepseek:
    """A `Model`: paged compressed rows, windows and pending groups by slot."""

    drafter: Drafter | None = None

    def __init__(
        self,
        tensors: RankTensors,
        config: DeepseekConfig,
        ops: Ops,
        options: ModelOptions,
    ) -> None:
        """`tensors` have the draft stages if `options` ask for them. Of the routed experts those of
        `tensors` are computed; the part of others in a sum is left out.
        """
        self.config = config
        self.vocab_size = config.vocab_size
        self.block_multiple = config.block_multiple
        self.max_len = options.max_len or config.max_len
        self._ops = ops
        self._keep_tokens = options.keep_tokens if config.family == "v4.1" else None
        self._formats = cache_formats(config, options.cache_format, quantizes=options.quantizes_caches)
        weights = DeepseekWeights(tensors, config, ops, options.quantizes_activations)
        self._embedding = weights.stored("embed.weight").to(ops.device)  # [V, C], where it is mapped on the CPU
        tables = self._rope_tables(options.num_drafts)
        self.experts = ExpertCache(weights, options.expert_cache_bytes, options.num_workers)
        self._blocks = [
            Block(weights, layer, tables[ratio > 0], self._formats, self.experts)
            for layer, ratio in enumerate(config.ratios)
        ]
        self._engram = None if config.engram is None else EngramLayers(weights, config.engram)
        self._collapse = HeadCollapse(weights, "hc_head") if config.family == "v4" else None
        self._norm = weights.norm("norm")
        self._head = weights.head("head.weight")
        self._drafter: DsparkDrafter | None = None
        if config.dspark is not None and options.num_drafts:
            self.drafter = self._drafter = DsparkDrafter(
                weights, config.dspark, tables[False], self._formats, self.experts, self._embed, self._head
            )
        self.counts = RowCounts(np.zeros(config.num_layers, np.int64), np.zeros(config.num_layers, np.int64))

    def cache_needs(self, block_size: int) -> CacheNeeds:
        config = self.config
        per_token = token_bytes(config, self._formats)
        drafting = 0 if self._drafter is None else draft_slot_bytes(config, self._formats)
        return CacheNeeds(
            block_bytes=round(per_token * block_size),
            slot_bytes=slot_bytes(config, self._formats) + drafting,
            token_bytes=per_token,
            bounded_replay=config.window,
            exact_replay=config.num_layers * (config.window - 1),
        )

    def allocate(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._caches = DeepseekCaches(self.config, self._formats, limits, self._ops.device)
        self._floors = SlotFloors(limits.num_slots)
        self._device_floors = DeviceFloors.of_nobody(limits.num_slots, self._ops.device)
        if self._drafter is not None:
            self._drafter.allocate(self._caches.draft_rings(), self._device_floors.decoder)
        if self._engram is not None:
            self._engram.allocate(limits.num_slots)

    def typical_steps(self) -> list[Ints]:
        return []

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            slot = admission.slot
            self._floors.window[slot] = admission.length
            self._floors.rows[slot] = admission.floor
            self._floors.decoder[slot] = max(admission.length, self._decoder_start(admission))
        if admissions:
            self._device_floors.take(self._floors.window, self._floors.rows, self._floors.decoder)

    def _decoder_start(self, admission: Admission) -> int:
        """Of the prompt, whatever was generated behind it before a preemption: that was computed in full, and is so
        again."""
        sampling = admission.sampling
        if self._keep_tokens is None or sampling.num_prompt_logprobs >= 0:
            return 0
        return max((sampling.num_prompt or len(admission.tokens)) - self._keep_tokens, 0)

    def prefetch(self, batch: DeviceBatch, starts: Ints) -> object:
        return None if self._engram is None else self._engram.prefetch(batch, starts)

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, C] behind the last norm: zeros for padding, and where truncation computes nothing."""
        positions = self._positions(step)
        if not len(positions):
            return torch.zeros(len(step.tokens), self.config.hidden_size, device=step.tokens.device)
        engram = None if self._engram is None else self._engram.embeddings(step, len(positions))
        streams, kept = self._run(positions, engram, self._floors.decoder)
        return self._leave(streams, kept, len(step.tokens))

    @property
    def capture_lengths(self) -> Sequence[int]:
        """Where experts are multiplied at once: else a step looks who goes where."""
        if not self.experts.are_at_once:
            return ()
        lengths = [LEAST_CAPTURED]
        while lengths[-1] < self.max_len:
            lengths.append(4 * lengths[-1])
        return (*lengths[:-1], self.max_len)

    def is_flat(self, batch: DeviceBatch) -> bool:
        """Rows that decode, so short that rings have room for them behind a window: shapes follow from their number."""
        return len(batch.sampled) == len(batch.slots) and int(batch.counts.max(initial=0)) <= rollback(self.config)

    @property
    def needs_host(self) -> bool:
        return self._engram is not None and not self._engram.are_resident

    def stage(self, step: Step) -> None:
        """Before `forward_flat` of the same step, what the host has to bring."""
        if self._engram is not None:
            self._engram.stage(step)

    def forward_flat(self, step: Step, most_positions: int) -> Tensor:
        """As `forward`, of a step that `is_flat`, on the device alone: a CUDA graph can hold it."""
        positions = FlatPositions(step.tokens, step.rows, self._block_size, self._device_floors, most_positions)
        engram = None if self._engram is None else self._engram.staged(step)
        streams, kept = self._run(positions, engram, None)
        return self._leave(streams, kept, len(step.tokens))

    def _run(
        self, positions: Positions, engram: dict[int, Added] | None, decoder_floors: Ints | None
    ) -> tuple[Streams, Tensor]:
        """Streams behind the last layer, and of which positions. `decoder_floors` [slots]: `None`: all have a decoder
        half."""
        device = positions.tokens.device
        streams = self._enter(positions)
        state, taps = StepState(), Taps(self.config, is_open=self._drafter is not None)
        kept = torch.arange(len(positions), device=device)
        for layer, (block, caches) in enumerate(zip(self._blocks, self._caches.layers, strict=True)):
            if engram is not None and layer in engram:
                streams = engram[layer].add_to(streams, kept, positions.tokens)
            known = None
            if caches.source is not None:
                known = block.make_rows(streams, positions, caches, state)
                self.counts.into_rows[layer] += len(positions)
            if layer == self.config.decoder_start and isinstance(positions, StepPositions):
                assert decoder_floors is not None
                positions, kept = positions.tail(decoder_floors[positions.pieces.slots])
                if len(kept) < len(streams.values):
                    streams, known = streams.at(kept), None
                    taps.narrow(kept)
            if not len(positions):
                break
            before, streams = streams, block(streams, positions, caches, state, known)
            taps.take(layer, before, streams)
            self.counts.through_layer[layer] += len(positions)
        if self._drafter is not None and len(positions):
            self._drafter.keep(taps.values(), positions)
        return streams, kept

    def logits(self, hidden: Tensor) -> Tensor:
        self.counts.head += len(hidden)
        if not len(hidden):  # prompts that are not complete yet
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return self._ops.project(hidden.to(self._ops.dtype), self._head)

    def close(self) -> None:
        if self._engram is not None:
            self._engram.close()

    def _positions(self, step: Step) -> StepPositions:
        """Those of the step without its padding."""
        counts = step.rows.counts
        firsts = np.cumsum(counts) - counts
        slots, starts = (array[firsts].cpu().numpy() for array in (step.rows.slots, step.rows.positions))
        pieces = Pieces(slots, starts, counts, step.tokens.device)
        floors = self._floors
        return StepPositions(
            pieces,
            step.tokens[: pieces.num_positions],
            step.rows.tables,
            self._block_size,
            floors.window[slots],
            floors.rows[slots],
        )

    def _enter(self, positions: Positions) -> Streams:
        return enter(self._embed(positions.tokens), self.config.hc_mult)

    def _embed(self, tokens: Tensor) -> Tensor:
        """[T] to [T, C] float32."""
        return self._ops.embedding(tokens, self._embedding).to(torch.float32)

    def _leave(self, streams: Streams, kept: Tensor, num_positions: int) -> Tensor:
        hidden = torch.zeros(num_positions, self.config.hidden_size, device=kept.device)
        if len(kept):
            last = (
                collapse(streams.shares, streams.values) if self._collapse is None else self._collapse(streams.values)
            )
            hidden.index_copy_(0, kept, self._norm(last))
        return hidden

    def _rope_tables(self, num_drafts: int) -> dict[bool, RopeTable]:
        """Without and with compressed rows. A block of drafts may stand behind the last position."""
        config, device = self.config, self._ops.device
        num_behind = config.dspark.block_size if config.dspark is not None and num_drafts else 0
        return {
            False: RopeTable(config.rope_theta, config.rope_dim, self.max_len + num_behind, None, device),
            True: RopeTable(config.compress_theta, config.rope_dim, self.max_len, config.yarn, device),
        }
