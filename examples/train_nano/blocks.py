"""Draft blocks at many places of packed rows. Knows nothing of layers or weights.

A block of `K` places stands behind a place p: its first token, the anchor, is the text's token at p + 1, and place i
of it is asked for the token at p + 2 + i. Its context is what the window of place p sees, p itself included.

Legend: `B` rows, `T` places of a row, `A` blocks of a row, `K` places of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from examples.train_nano.figures import Figures
from examples.train_nano.packed import IGNORED, Packed, Packer, Turns

PLACES_PER_BLOCK = 8
"""A row has a block for so many places."""


class Blocks(NamedTuple):
    before: Tensor
    """[B, A, K]: places whose hidden states say what the target wants of the block's places: p + 1 + i."""
    previous: Tensor
    """[B, A, K]: tokens at those places, the anchor first."""
    wanted: Tensor
    """[B, A, K]: the tokens of the text that are asked for."""
    is_asked: Tensor
    """[B, A, K]: the text goes on so far, and is to be learnt."""
    turns: Turns
    """Of all blocks' places, [B, A * K, ...]."""
    context: Tensor
    """[B, A, T]: the places that each block sees before it."""


def choose_blocks(
    figures: Figures, packed: Packed, packer: Packer, seed: int, places_per_block: int = PLACES_PER_BLOCK
) -> Blocks:
    """At random places of what is to be learnt; the same for the same seed. Rows of little text have idle blocks."""
    assert figures.drafts is not None
    size, (num_rows, length), device = figures.drafts.block_size, packed.tokens.shape, packed.tokens.device
    is_learnt = packed.targets != IGNORED
    can_begin = is_learnt & is_learnt.roll(-1, 1)
    can_begin[:, -1] = False
    draws = torch.rand(packed.tokens.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    chosen = torch.where(can_begin, draws, -1.0).topk(max(length // places_per_block, 1), 1)
    places = chosen.indices  # [B, A]
    steps = torch.arange(size, device=device)
    before = places[..., None] + 1 + steps  # [B, A, K]
    is_inside = before < length
    before = before.clamp(max=length - 1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, before.flatten(1)).view(before.shape)

    wanted = at(packed.targets)
    is_asked = (wanted != IGNORED) & is_inside & (chosen.values >= 0)[..., None]
    positions = packed.positions.gather(1, places)[..., None] + 1 + steps
    row = torch.arange(length, device=device)
    floors = packed.floors.gather(1, places)[..., None]
    distance = places[..., None] - row
    return Blocks(
        before,
        at(packed.tokens),
        wanted.clamp(min=0),
        is_asked.cumprod(-1).bool(),
        packer.plain_turns(positions.view(num_rows, -1)),
        (distance >= 0) & (distance < figures.window) & (row >= floors),
    )
