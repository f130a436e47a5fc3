"""The training model of DSpark stages: blocks behind many places of packed rows to drafts' logits and losses.

The formulas are those of the inference model. The stages read what a frozen target leaves: its taps, its embedding and
its head. Generates nothing.

The losses are those of DSpark (DeepSpec): at place k, weighted by exp(-k / 4), 0.1 of the cross-entropy, 0.9 of the
total variation to the target's distribution, and the confidence's own. They are taken twice: behind the text's tokens
at temperature 1, as sampled drafts meet them; and behind tokens that the target itself thinks the likeliest, sharpened,
as greedy drafts do. The confidence learns how often the likeliest tokens are the same behind such tokens, and the
acceptance at temperature 1 behind others.

Legend: `B` rows, `T` places of a row, `A` blocks of a row, `K` places of a block, `M` = A * K, `C` channels,
`V` tokens, `E` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from examples.train_nano.blocks import Blocks
from examples.train_nano.figures import Figures
from examples.train_nano.layers import Mixes, Switches, collapse, expand, mixes, norm, product
from examples.train_nano.model import think
from examples.train_nano.packed import Packed, Turns, turn
from examples.train_nano.parameters import Weights, of_stage
from examples.train_nano.rounding import fp8_rows

DECAY = 4.0
"""Places until a draft counts a third of the first."""
SHARP = 0.3
"""The temperature that stands for greedy drafts: 0 has no gradient."""
SAMPLED_SHARE = 0.5
"""Of what is lost at temperature 1, against what is lost by greedy drafts."""
_OFF_PATH_SHARE = 0.25
_CROSS_ENTROPY, _VARIATION = 0.1, 0.9


class Target(NamedTuple):
    """What the frozen model gives."""

    taps: Tensor
    """[B, T, layers * C]"""
    hidden: Tensor
    """[B, T, C], normed."""
    embedding: Tensor
    """[V, C]"""
    head: Tensor
    """[V, C]"""


class Guesses(NamedTuple):
    """Of blocks whose tokens are the text's."""

    logits: Tensor
    """[B, A, K, V] float32: with the Markov head's."""
    confidences: Tensor
    """[B, A, K]: logits."""


class DraftLosses(NamedTuple):
    total: Tensor
    sums: Tensor
    """[6, K]: places that were asked for, what drafts and target have in common there, the confidence; and, behind the
    target's likeliest tokens alone, the places, drafts that are the likeliest too, the confidence."""
    loads: Tensor
    """[stages, E]"""


class DraftModel:
    """Figures and functions; the weights come with each call."""

    def __init__(self, figures: Figures, dtype: torch.dtype, *, compiles: bool = False) -> None:
        self._figures, self._dtype = figures.of_stages, dtype
        assert figures.drafts is not None
        self._drafts = figures.drafts

        def ready(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False, fullgraph=True) if compiles else function

        self._main, self._mixes, self._attend, self._think = ready(_main), ready(mixes), ready(_attend), ready(think)
        self._losses = ready(_losses)

    def hidden(
        self, weights: Weights, target: Target, packed: Packed, blocks: Blocks, switches: Switches
    ) -> tuple[Tensor, Tensor]:
        """[B, A, K, C]: the streams behind the last stage, collapsed; and the experts' loads, [stages, E]."""
        figures, dtype = self._figures, self._dtype
        tokens = torch.full_like(blocks.previous, self._drafts.noise)
        tokens[..., 0] = blocks.previous[..., 0]
        streams = target.embedding[tokens.flatten(1)][:, :, None].repeat(1, 1, figures.hc_mult, 1)  # [B, M, n, C]
        shares = torch.zeros(streams.shape[:3], device=streams.device)
        shares[..., 0] = 1.0
        is_real = blocks.is_asked[..., :1].expand(tokens.shape).flatten(1)
        first = of_stage(weights, 0)
        main = self._main(figures, first["main_proj.weight"], first["main_norm.weight"], target.taps, switches, dtype)
        loads = []
        for stage in range(figures.num_layers):
            own = of_stage(weights, stage)
            mixed = self._mix(own, "hc_attn", streams)
            streams = self._attend(
                figures, _of(own, "attn"), streams, shares, mixed, main, packed.plain, blocks, switches, dtype
            )
            shares = mixed.read
            mixed = self._mix(own, "hc_ffn", streams)
            streams, load = self._think(figures, _of(own, "ffn"), streams, shares, mixed, is_real, switches, dtype)
            shares = mixed.read
            loads.append(load)
        return collapse(shares, streams).view(*tokens.shape, -1), torch.stack(loads)

    def _mix(self, weights: Weights, name: str, streams: Tensor) -> Mixes:
        fn, base, scale = (weights[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        mixed: Mixes = self._mixes(self._figures, fn, base, scale, streams)
        return mixed

    def guesses(self, weights: Weights, target: Target, hidden: Tensor, previous: Tensor) -> Guesses:
        """Of `hidden` [B, A, K, C] behind the tokens `previous` [B, A, K]."""
        return Guesses(*_guess(self._figures, self._ends(weights), target.head, hidden, previous, self._dtype))

    def losses(
        self, weights: Weights, target: Target, packed: Packed, blocks: Blocks, switches: Switches
    ) -> DraftLosses:
        hidden, loads = self.hidden(weights, target, packed, blocks, switches)
        index = blocks.before.flatten(1)[..., None].expand(-1, -1, target.hidden.shape[-1])
        wanted = target.hidden.gather(1, index).view(hidden.shape)
        loss, sums = self._losses(self._figures, self._ends(weights), target.head, hidden, wanted, blocks, self._dtype)
        return DraftLosses(loss, sums, loads)

    def _ends(self, weights: Weights) -> Weights:
        """What turns hidden states into drafts."""
        names = ("norm.weight", "markov_head.embed.weight", "markov_head.head.weight", "confidence_head.proj.weight")
        last = of_stage(weights, self._drafts.num_stages - 1)
        return {name: last[name] for name in names}


def _of(weights: Weights, part: str) -> Weights:
    return {name: weight for name, weight in weights.items() if name.startswith(part)}


def _main(
    figures: Figures, projection: Tensor, scale: Tensor, taps: Tensor, switches: Switches, dtype: torch.dtype
) -> Tensor:
    """What all stages make their context of: [B, T, C]."""
    return norm(product(fp8_rows(taps, switches.rounds), projection, dtype), scale, figures.rms_eps)


def _attend(
    figures: Figures,
    weights: Weights,
    streams: Tensor,
    shares: Tensor,
    mixed: Mixes,
    main: Tensor,
    turns: Turns,
    blocks: Blocks,
    switches: Switches,
    dtype: torch.dtype,
) -> Tensor:
    """Each place of a block sees the block, and the context that `main` [B, T, C] has for it."""
    rounds, eps = switches.rounds, figures.rms_eps
    x = norm(collapse(shares, streams), weights["attn_norm.weight"], eps)

    def keys_of(inputs: Tensor, turns: Turns) -> Tensor:
        rows = norm(product(inputs, weights["attn.wkv.weight"], dtype), weights["attn.kv_norm.weight"], eps)
        return fp8_rows(turn(rows[:, :, None], turns)[:, :, 0], rounds).to(dtype)

    inputs = fp8_rows(x, rounds)
    latent = norm(product(inputs, weights["attn.wq_a.weight"], dtype), weights["attn.q_norm.weight"], eps)
    queries = product(fp8_rows(latent, rounds), weights["attn.wq_b.weight"], dtype)
    queries = turn(queries.unflatten(-1, (figures.num_heads, figures.head_dim)), blocks.turns)  # [B, M, H, D]
    seen, own = keys_of(fp8_rows(main, rounds), turns), keys_of(inputs, blocks.turns)
    out = turn(_look(queries, seen, own, weights["attn.attn_sink"], blocks.context), blocks.turns, back=True)
    groups = out.flatten(2).unflatten(-1, (figures.o_groups, -1))
    first = weights["attn.wo_a.weight"].to(dtype).unflatten(0, (figures.o_groups, figures.o_lora_rank))
    middle = torch.einsum("btgi,goi->btgo", groups, first).flatten(2)
    return expand(product(fp8_rows(middle, rounds), weights["attn.wo_b.weight"], dtype), streams, mixed)


def _look(queries: Tensor, seen: Tensor, own: Tensor, sinks: Tensor, context: Tensor) -> Tensor:
    """`queries` [B, M, H, D], keys `seen` [B, T, D] and `own` [B, M, D], `context` [B, A, T]: [B, M, H, D]."""
    num_rows, num_blocks, _ = context.shape
    num_heads, dim = queries.shape[2:]
    size, scale = queries.shape[1] // num_blocks, dim**-0.5
    far = torch.bmm(queries.flatten(1, 2), seen.transpose(1, 2)).view(num_rows, num_blocks, size, num_heads, -1)
    far = (far.float() * scale).masked_fill(~context[:, :, None, None], -torch.inf)
    by_block = own.view(num_rows * num_blocks, size, dim)
    near = torch.bmm(queries.reshape(num_rows * num_blocks, -1, dim), by_block.transpose(1, 2))
    near = near.view(num_rows, num_blocks, size, num_heads, size).float() * scale
    sinks = sinks[:, None]
    peaks = torch.maximum(torch.maximum(near.amax(-1, keepdim=True), far.amax(-1, keepdim=True)), sinks).detach()
    near, far = (near - peaks).exp(), (far - peaks).exp()
    total = near.sum(-1, keepdim=True) + far.sum(-1, keepdim=True) + (sinks - peaks).exp()
    out = torch.bmm(far.to(seen.dtype).view(num_rows, -1, far.shape[-1]), seen).view(*far.shape[:-1], dim)
    out = out + torch.bmm(near.to(own.dtype).view(len(by_block), -1, size), by_block).view(out.shape)
    looked: Tensor = (out / total).to(seen.dtype).view(queries.shape)
    return looked


def _guess(
    figures: Figures, ends: Weights, head: Tensor, hidden: Tensor, previous: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    normed = norm(hidden, ends["norm.weight"], figures.rms_eps)
    known = ends["markov_head.embed.weight"][previous]
    logits = product(normed, head, dtype).float() + product(known, ends["markov_head.head.weight"], dtype).float()
    both = torch.cat((hidden, known), -1).float()
    return logits, linear(both, ends["confidence_head.proj.weight"])[..., 0]


def _losses(
    figures: Figures,
    ends: Weights,
    head: Tensor,
    hidden: Tensor,
    wanted: Tensor,
    blocks: Blocks,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`hidden` is the drafts', `wanted` the target's, [B, A, K, C] each."""
    logits, confidences = _guess(figures, ends, head, hidden, blocks.previous, dtype)
    target = product(wanted, head, dtype).float()
    likeliest = target.argmax(-1)
    is_likeliest = (likeliest == blocks.wanted).int()
    is_on_path = torch.cat((torch.ones_like(is_likeliest[..., :1]), is_likeliest[..., :-1]), -1).cumprod(-1)
    on_path = (is_on_path * blocks.is_asked).float()
    asked = blocks.is_asked.float()

    sampled_loss, sampled_overlap = _distance(logits, target)
    greedy_loss, _ = _distance(logits / SHARP, target / SHARP)
    is_same = (logits.argmax(-1) == likeliest).float()
    label = torch.where(on_path > 0, is_same, sampled_overlap.detach())
    doubt = binary_cross_entropy_with_logits(confidences, label, reduction="none")

    off_path = asked - on_path
    terms = _mean(greedy_loss, on_path) + SAMPLED_SHARE * _mean(sampled_loss, asked)
    terms = terms + _mean(doubt, on_path) + _OFF_PATH_SHARE * _mean(doubt, off_path)  # [K]
    weights = (-torch.arange(terms.shape[0], device=terms.device) / DECAY).exp()
    guessed = confidences.sigmoid()
    sums = torch.stack(
        [
            (values * counts).sum((0, 1))
            for values, counts in (
                (asked, asked),
                (sampled_overlap, asked),
                (guessed, asked),
                (on_path, on_path),
                (is_same, on_path),
                (guessed, on_path),
            )
        ]
    )
    return (terms * weights).sum() / weights.sum(), sums.detach()


def _distance(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss against the target's distribution, and what the two have in common: [B, A, K] each."""
    log_guess, wanted = logits.log_softmax(-1), target.softmax(-1)
    cross_entropy = -(wanted * log_guess).sum(-1)
    variation = 0.5 * (wanted - log_guess.exp()).abs().sum(-1)
    return _CROSS_ENTROPY * cross_entropy + _VARIATION * variation, 1.0 - variation


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """[K]: over those that count."""
    return (values * counts).sum((0, 1)) / counts.sum((0, 1)).clamp(min=1.0)
