"""DSpark: draft stages that guess a block of tokens at once, from what target layers held. A `Drafter`.

What is written of a position while it is computed is the context of the blocks behind it: nothing here knows which
tokens get accepted. Knows nothing of sampling.

Source of the formulas: the released inference code. The confidence reads what the last stage hands on before its norm.

Legend: `T` positions of a step, `L` target layers, `R` blocks, `B` places of a block, `C` channels, `V` vocabulary, `n`
streams.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels import LinearWeight
from deepinfer_workers.batch import Ints
from deepinfer_workers.models.deepseek.block import Streams, Sublayers, enter
from deepinfer_workers.models.deepseek.caches import Rings
from deepinfer_workers.models.deepseek.config import DsparkConfig
from deepinfer_workers.models.deepseek.draft_attention import DraftAttention, DraftBlocks
from deepinfer_workers.models.deepseek.flat_positions import Positions
from deepinfer_workers.models.deepseek.formats import CacheFormats
from deepinfer_workers.models.deepseek.hyper import HeadCollapse, collapse
from deepinfer_workers.models.deepseek.moe import ExpertCache, Routing
from deepinfer_workers.models.deepseek.rope import RopeTable
from deepinfer_workers.models.deepseek.weights import DeepseekWeights
from deepinfer_workers.models.model import HiddenFlat


class DraftStage:
    """A layer of the drafter."""

    def __init__(
        self, weights: DeepseekWeights, stage: int, dspark: DsparkConfig, formats: CacheFormats, experts: ExpertCache
    ) -> None:
        name = f"mtp.{stage}"
        self.attention = DraftAttention(weights, f"{name}.attn", formats)
        routing = Routing(dspark.experts_per_token, weights.tensors.draft_experts)
        self._sublayers = Sublayers(weights, name, experts, routing)

    def __call__(self, streams: Streams, tokens: Tensor, blocks: DraftBlocks, ring: Rings) -> Streams:
        return self._sublayers(streams, tokens, lambda x: self.attention(x, blocks, ring))


class MarkovHead:
    """What the token before says of the next one, whatever came earlier: a table of low rank."""

    def __init__(self, weights: DeepseekWeights, name: str) -> None:
        embed, head = ("markov_w1", "markov_w2") if weights.config.family == "v4" else ("embed", "head")
        self._ops = weights.ops
        self._table = weights.stored(f"{name}.{embed}.weight").to(weights.device)  # [V, rank]
        self._head = weights.head(f"{name}.{head}.weight")

    def embed(self, tokens: Tensor) -> Tensor:
        """Of `tokens` [R]: [R, rank] float32."""
        return self._ops.embedding(tokens, self._table).to(torch.float32)

    def logits(self, embedded: Tensor) -> Tensor:
        """Of `embedded` [R, rank]: [R, V] float32."""
        return self._ops.project(embedded.to(self._ops.dtype), self._head)


class DsparkDrafter:
    """A `Drafter`. Its stages' rings hold the context of as many positions as the model's windows do."""

    def __init__(
        self,
        weights: DeepseekWeights,
        dspark: DsparkConfig,
        table: RopeTable,
        formats: CacheFormats,
        experts: ExpertCache,
        embed: Callable[[Tensor], Tensor],
        head: LinearWeight,
    ) -> None:
        """`embed` (tokens [T] to [T, C] float32) and `head` are the model's own. `table` reaches a block further than
        sequences do."""
        config = weights.config
        last = f"mtp.{dspark.num_stages - 1}"
        self.block_size = dspark.block_size
        self._config, self._dspark, self._ops = config, dspark, weights.ops
        self._table, self._embed, self._head = table, embed, head
        self._experts = experts
        self._main_proj, self._main_norm = weights.linear("mtp.0.main_proj"), weights.norm("mtp.0.main_norm")
        self._stages = [DraftStage(weights, stage, dspark, formats, experts) for stage in range(dspark.num_stages)]
        self._collapse = HeadCollapse(weights, f"{last}.hc_head") if config.family == "v4" else None
        self._norm = weights.norm(f"{last}.norm")
        self._markov = MarkovHead(weights, f"{last}.markov_head")
        self._confidence = weights.plain_linear(f"{last}.confidence_head.proj.weight")

    @property
    def hidden_flat(self) -> HiddenFlat | None:
        """Where experts are multiplied at once: else it is looked who goes where."""
        return self._hidden if self._experts.are_at_once else None

    def allocate(self, rings: list[Rings], floors: Tensor) -> None:
        """A ring for each stage. Below `floors` [slots + 1], as they are when a block is made, nothing is in them."""
        self._rings, self._floors = rings, floors

    def keep(self, taps: Tensor, positions: Positions) -> None:
        """Make the context of `positions`, of which the target layers held `taps` [T, L * C].

        Positions that are not meant are overwritten when others are computed in their place.
        """
        write = positions.window(self._config.window, self._rings[0].capacity).around.write
        context = self._main_norm(self._main_proj(taps.index_select(0, write.kept)))
        turns = self._table.at(positions.positions.index_select(0, write.kept))
        for stage, ring in zip(self._stages, self._rings, strict=True):
            ring.write(write.slots, write.places, stage.attention.context_keys(context, turns))

    def hidden(self, slots: Ints, positions: Tensor, tokens: Tensor) -> Tensor:
        """Of the newest tokens [R] at `positions` [R], and noise behind them: [R, B, C], before the last norm."""
        if not len(slots):
            return torch.zeros(0, self.block_size, self._config.hidden_size, device=self._ops.device)
        return self._hidden(torch.from_numpy(np.ascontiguousarray(slots)).to(self._ops.device), positions, tokens)

    def _hidden(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """Of one block at least; nothing depends on what the host knows."""
        num_blocks, num_places = len(slots), self.block_size
        ids = torch.full((num_blocks, num_places), self._dspark.noise_token_id, device=self._ops.device)
        ids[:, 0] = tokens
        block_ids = ids.flatten()
        blocks = self._blocks(slots, positions.long())
        streams = enter(self._embed(block_ids), self._config.hc_mult)
        for stage, ring in zip(self._stages, self._rings, strict=True):
            streams = stage(streams, block_ids, blocks, ring)
        last = collapse(streams.shares, streams.values) if self._collapse is None else self._collapse(streams.values)
        return last.view(num_blocks, num_places, -1)

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Of `hidden` [R, C], one place of every block, behind the tokens `previous` [R]: [R, V] float32."""
        if not len(hidden):
            return hidden.new_empty(0, self._config.vocab_size)
        base = self._ops.project(self._norm(hidden).to(self._ops.dtype), self._head)
        return base + self._markov.logits(self._markov.embed(previous))

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Of the same places, [R] float32: how probably the draft there is accepted, if all before it are."""
        if not len(hidden):
            return hidden.new_empty(0)
        return self._ops.sigmoid(self._confidence(torch.cat((hidden, self._markov.embed(previous)), -1))[:, 0])

    def _blocks(self, slots: Tensor, anchors: Tensor) -> DraftBlocks:
        device, window = anchors.device, self._config.window
        places = anchors[:, None] + torch.arange(self.block_size, device=device)  # [R, B]
        context = anchors[:, None] - window + torch.arange(window, device=device)  # [R, W]
        floors = self._floors[slots].clamp(min=0)
        return DraftBlocks(
            turns=self._table.at(places.flatten()),
            slots=slots,
            context=context,
            is_hidden=context < floors[:, None],
        )
