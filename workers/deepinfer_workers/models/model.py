"""The seam between the runner and a model. Knows no architecture, and nothing of plans, sockets or sampling.

A model owns its weights and its caches. The runner owns the slots (tokens, lengths, block tables), tells the model who
took one, and asks for hidden states of packed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from deepinfer_kernels import PackedRows
from deepinfer_protocol import WorkerConfig
from deepinfer_workers.batch import Admission, DeviceBatch, Ints, Limits
from deepinfer_workers.checkpoint import unsupported


@dataclass(frozen=True)
class Step:
    """What a step computes, on the device. `T` packed positions, padding included, which belongs to the null slot."""

    tokens: Tensor
    """[T]"""
    cache_indices: Tensor
    """[T]: block * block size + offset: where a position's rows lie in the paged caches."""
    rows: PackedRows
    """Whose positions these are. `rows.positions` [T] are their indices in the sequences."""
    known: Tensor
    """[slots, positions] int32: every token known of every slot."""
    prefetched: object = None
    """What the model's `prefetch` gave for this step."""


class ModelOptions(NamedTuple):
    """What a configuration chooses of a model. A model without the part in question does not look at it."""

    max_len: int = 0
    """Positions; 0: the model's own limit."""
    block_size: int = 16
    """0: as the model needs it."""
    keep_tokens: int | None = None
    """Positions at the end of a prompt that a decoder half computes; `None`: all."""
    cache_format: str = "auto"
    quantizes_activations: bool = True
    quantizes_caches: bool = True
    expert_cache_bytes: int | None = None
    """For experts that are expanded when tokens are sent to them; `None`: a share of what is free."""
    num_workers: int = 1
    """They may be on one machine, and share its memory."""
    num_drafts: int = -1
    """The longest draft; -1: the model's block, where it has draft stages; 0: none, and the stages are not loaded."""

    @classmethod
    def of(cls, config: WorkerConfig) -> ModelOptions:
        return cls(
            config.max_model_len,
            config.block_size,
            config.prefill_keep_tokens if config.prefill_truncation == "compact" else None,
            config.cache_format,
            config.quantize_activations,
            config.quantize_cache,
            num_workers=config.num_ranks,
            num_drafts=config.num_drafts,
        )


class CacheNeeds(NamedTuple):
    """What a model keeps. A model of one uniform paged cache has no slot state, and nothing to replay."""

    block_bytes: int
    """Of the paged caches, for one block."""
    slot_bytes: int = 0
    """Of the state that belongs to one slot and is never shared."""
    token_bytes: float = 0.0
    """Of the paged caches, for one token."""
    bounded_replay: int = 0
    """Positions before a prefix hit that are computed again, as the makers of the model do it: an approximation."""
    exact_replay: int = 0
    """Positions before a prefix hit that rebuild the slot state to the bit."""


HiddenFlat = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of slots, positions and tokens, [R] each on the device."""


class Drafter(Protocol):
    """The draft stages of a model (DSpark): what they guess of the tokens behind the newest one.

    They read what the model's own forward passes left in the slots' state, of the positions before the newest token,
    and leave nothing there themselves. Called by the device thread, after `forward`.
    """

    block_size: int
    """The longest draft."""

    def hidden(self, slots: Ints, positions: Tensor, tokens: Tensor) -> Tensor:
        """The blocks of `slots` [R], whose newest tokens `tokens` [R] stand at `positions` [R]: [R, block, C].

        The positions before are computed, those of the blocks are not.
        """

    @property
    def hidden_flat(self) -> HiddenFlat | None:
        """As `hidden`, so that what is launched depends on R alone: a CUDA graph can hold it. `None`: there is none."""

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Of `hidden` [R, C], one place of every block, behind the tokens `previous` [R]: [R, V] float32."""

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Of the same places, [R] float32: how probably the draft there is accepted, if all before it are."""


class Model(Protocol):
    """Weights, caches and forward pass. Everything but `prefetch` and `close` is called by the device thread."""

    vocab_size: int
    max_len: int
    block_multiple: int
    """Blocks have a multiple of as many tokens, and so hold whole rows."""

    drafter: Drafter | None
    """`None`: no draft stages, or they are not asked for (`ModelOptions.num_drafts`)."""

    @property
    def capture_lengths(self) -> Sequence[int]:
        """Its layers can be captured in CUDA graphs, for sequences up to each of these lengths; none: they cannot."""

    def cache_needs(self, block_size: int) -> CacheNeeds:
        """Known once the weights are."""

    def allocate(self, limits: Limits) -> None:
        """Make the caches: `limits.num_blocks` blocks and a null block, `limits.num_slots` slots and a null slot."""

    def typical_steps(self) -> list[Ints]:
        """Sizes of rows whose steps launch everything that is compiled at its first use."""

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Sequences take slots, whose state of before is void."""

    def prefetch(self, batch: DeviceBatch, starts: Ints) -> object:
        """Host thread, while the device computes the step before: start to fetch what `batch` will need.

        `starts` [S] are the first positions of its rows. Called once for every step, in their order.
        """

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, C] behind the last norm; writes what the caches keep of all positions."""

    def is_flat(self, batch: DeviceBatch) -> bool:
        """`forward_flat` computes such a step."""

    @property
    def needs_host(self) -> bool:
        """`stage` brings something, and waits until the device knows the tokens of the step."""

    def stage(self, step: Step) -> None:
        """Before `forward_flat` of the same step: what the host has to bring of it."""

    def forward_flat(self, step: Step, most_positions: int) -> Tensor:
        """As `forward`, for sequences up to `most_positions`: what is launched depends on the number of positions."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Of `hidden` [R, C]: [R, V] float32."""

    def close(self) -> None:
        """Host thread, the last call: end the threads of its own. A step may still hang in the device."""


def check_max_len(name: str, asked: int, own_limit: int) -> None:
    """Raises `WorkerFault` when more positions are asked for than the model `name` has."""
    if asked > own_limit:
        raise unsupported(name, f"max_model_len {asked} is above the model's own {own_limit}")
