"""The messages between an engine and its own workers.

Everything of a step is columnar: int32 little-endian columns as msgpack `bin` fields, so that 256 rows cost a copy
and not 256 objects. Knows nothing of sockets, of tensors, or of what a request is.

A message travels to a *group* of 1 to N workers. Each rank gets its own `StepPlan` (its own slots, blocks and rows);
`step_id` and `padded_positions` are the same on all ranks, and a plan without rows is legal: a rank with nothing to
do still takes part in the step.
"""

from __future__ import annotations

import sys
from array import array
from enum import IntFlag
from typing import Annotated, Final

from msgspec import Meta, Struct

from deepinfer_protocol.limits import (
    INT32_MAX,
    INT64_MAX,
    MAX_BAD_WORD_IDS,
    MAX_BIAS_IDS,
    MAX_BLOCKS,
    MAX_COSTS,
    MAX_DRAFTS,
    MAX_LENGTH,
    MAX_LOGPROBS,
    MAX_MASK_BYTES,
    MAX_RANKS,
    MAX_ROWS,
    MAX_SLOTS,
    MAX_STOP_IDS,
    MAX_TEXT_CHARACTERS,
)

WIRE_REVISION: Final = 5
"""Raised by every change of a message. Both ends come from one installation: any difference is refused."""

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Int64 = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
NumRanks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
Drafts = Annotated[int, Meta(ge=0, le=MAX_DRAFTS)]
Length = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
ShortText = Annotated[str, Meta(max_length=256)]


class RowFlag(IntFlag):
    """Fourth column of a plan's rows."""

    SAMPLE = 1
    """The row's last position yields a token."""
    WAITS_FOR_MASK = 2
    """Its sampling is a second launch, after the step's `MaskBatch` has arrived."""


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of every message: a msgpack array, its kind first, then the fields by position."""


class LogitShaping(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What is done to the logits of one slot before its temperature. Most slots have none of it."""

    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    """Of tokens in the prompt or the output: positive logits are divided by it, others multiplied."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken off the logits of tokens in the output."""
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Taken off the logits of tokens in the output, once for each time."""
    bias_ids: Annotated[bytes, Meta(max_length=4 * MAX_BIAS_IDS)] = b""
    """int32 LE, rising."""
    bias_values: Annotated[bytes, Meta(max_length=4 * MAX_BIAS_IDS)] = b""
    """float32 LE, one an id: added to its logit. Minus infinity bans it."""
    allowed_bits: Annotated[bytes, Meta(max_length=MAX_MASK_BYTES)] = b""
    """One bit a token, as in a `MaskBatch`: no other token is sampled. Empty: all may be."""
    bad_words: Annotated[bytes, Meta(max_length=4 * MAX_BAD_WORD_IDS)] = b""
    """int32 LE: for each word its length and its token ids. The last one is not sampled where the output ends with
    the others."""


class SlotSampling(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """How the device samples one slot. The counter-based noise of position `p` is f(seed, p)."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Count = 0
    """0 keeps all."""
    seed: Int64 = 0
    """63 bits."""
    min_length: Length = 0
    """While the length after sampling would be at most this, the tokens of `stop_ids` are not sampled."""
    stop_ids: Annotated[bytes, Meta(max_length=4 * MAX_STOP_IDS)] = b""
    """int32 LE."""
    num_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """-1: none; k: the sampled token's log probability and those of the k best."""
    num_prompt: Length = 0
    """How many of the admission's tokens are the prompt; those behind them were generated before a preemption."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Tokens less probable than this times the most probable one are not sampled."""
    num_prompt_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1
    """-1: none; k: as `num_logprobs`, of every prompt token whose position before it is computed."""
    shaping: LogitShaping | None = None
    rejects: bool = False
    """Drafts are accepted by rejection sampling, which promises the distribution alone and accepts more. Otherwise
    while they equal the target's own tokens, which are those of a run without drafts."""


class SlotAdmit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A sequence takes a slot. Its state there starts from nothing but this."""

    slot: Slot
    generation: Count
    """Rises with every admission to the slot; results of an older one are ignored."""
    length: Length
    """The first row starts here: no position below it is computed in this slot."""
    floor: Length
    """Tokens whose paged rows are already in `block_ids` (a prefix hit), at least `length`. Positions from `length` to
    here are replayed: computed to rebuild the slot's own state, while their paged rows, others' too, stay as they are.
    """
    tokens: bytes
    """int32 LE: every token known so far (the prompt, and what was generated before a preemption)."""
    block_ids: bytes
    """int32 LE: the blocks of the sequence, in order; they hold the first `floor` tokens at least."""
    sampling: SlotSampling


class Hello(Message, frozen=True, tag=1):
    """First word of a worker: who it is and what it speaks."""

    version: ShortText
    epoch: Int64
    rank: Rank
    pid: Count


class StepCosts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What steps take on a rank's device, measured when it started. Sizes rise; times are in microseconds."""

    positions: Annotated[bytes, Meta(max_length=4 * MAX_COSTS)]
    """int32 LE: positions of a step, its padding included."""
    forward_us: Annotated[bytes, Meta(max_length=4 * MAX_COSTS)]
    """float32 LE: forward and sampling of as many."""
    draft_rows: Annotated[bytes, Meta(max_length=4 * MAX_COSTS)] = b""
    """int32 LE: rows that draft."""
    draft_us: Annotated[bytes, Meta(max_length=4 * MAX_COSTS)] = b""
    """float32 LE: the draft blocks of as many."""


class Ready(Message, frozen=True, tag=2):
    """The model is loaded; what it can hold. The engine's only source for these figures."""

    epoch: Int64
    rank: Rank
    vocab_size: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    num_slots: Annotated[int, Meta(ge=1, lt=MAX_SLOTS)]
    num_blocks: Annotated[int, Meta(ge=1, lt=MAX_BLOCKS)]
    block_size: Annotated[int, Meta(ge=1, le=4096)]
    """Tokens a block."""
    block_bytes: Int64
    slot_bytes: Int64
    global_bytes_per_token: Annotated[float, Meta(ge=0.0, le=float(INT32_MAX))]
    """What the paged rows of one token take, in bytes; a layer that keeps a row for every other token counts half."""
    bounded_replay_tokens: Length
    """Positions before the end of a prefix hit that are replayed to rebuild the slot state as the model's makers
    do; 0 for uniform paged caches."""
    exact_replay_tokens: Length
    """As many as make the slot state the one that a run without the hit has."""
    weights_version: ShortText
    device: ShortText
    """For people: what the model runs on."""
    num_drafts: Drafts = 0
    """The longest draft that a plan may ask for; 0: the model has no draft stages, or they are switched off."""
    costs: StepCosts | None = None
    """`None`: not measured."""


class Progress(Message, frozen=True, tag=8):
    """Loading goes on: `done` of `total` bytes of weights."""

    epoch: Int64
    rank: Rank
    done: Int64
    total: Int64


class Fault(Message, frozen=True, tag=6):
    """The worker cannot go on. It exits after this message."""

    epoch: Int64
    rank: Rank
    code: ShortText
    """`model_file`, `unsupported_model`, `setting`, `out_of_memory`, `protocol` or `internal`."""
    text: Text


class Shutdown(Message, frozen=True, tag=7):
    """Finish the steps at hand, answer them, exit with 0."""

    epoch: Int64


class StepPlan(Message, frozen=True, tag=3):
    """What one rank does in one step: a delta against everything sent before.

    Applied in this order: retire, admit, append blocks, run the rows.
    """

    epoch: Int64
    step_id: Int64
    rank: Rank
    padded_positions: Count
    """Positions that every rank of the group pads to (the largest of the group)."""
    retired: bytes
    """int32 LE: slots whose state is no longer needed."""
    admits: Annotated[list[SlotAdmit], Meta(max_length=MAX_ROWS)]
    appends: bytes
    """int32 LE, two columns of equal length: slots, then block ids. Block lists grow in this order."""
    rows: bytes
    """int32 LE, four columns of equal length: slots, generations, positions of the row, flags (`RowFlag`)."""
    most_drafts: bytes = b""
    """int32 LE, one a row, or nothing: how many of the slot's drafts may be verified behind the row's one position.
    Only rows of a single, sampled position verify any; those positions come on top of the row's."""
    verify_budget: Count = 0
    """How many drafts the step verifies, over all rows, if so many are there: those most likely to be reached. The
    device knows how likely that is now, so only the result says how many each row got."""
    num_drafts: Drafts = 0
    """How many tokens each sampled row drafts behind its new one, for a later step to verify. A row's older drafts are
    void in any case."""


class MaskBatch(Message, frozen=True, tag=4):
    """Masks for the rows of a step that wait for one: of each row's newest place, then of those behind its drafts."""

    epoch: Int64
    step_id: Int64
    rank: Rank
    slots: bytes
    """int32 LE: which rows, by slot."""
    bits: bytes
    """One bit a token, least significant first, ceil(vocab / 32) little-endian words a mask; 1 is allowed."""
    num_masks: bytes = b""
    """int32 LE, how many masks each slot has, one after another in `bits`; nothing: one each. A row takes at most as
    many tokens as it has masks, each as the mask of its place allows."""


class StepResult(Message, frozen=True, tag=5):
    """What one rank did in one step: for every row of the plan, in its order."""

    epoch: Int64
    step_id: Int64
    rank: Rank
    host_us: Count
    """Decoding the plan and building its tensors."""
    device_us: Count
    """Forward and sampling."""
    idle_us: Count
    """How long the device's queue was empty before this step."""
    rows: bytes
    """int32 LE, four columns of equal length: slots, generations, lengths after the step, tokens of the row."""
    tokens: bytes
    """int32 LE: the rows' tokens, one after another."""
    logprob_ids: bytes = b""
    """int32 LE: for each token of a row with logprobs k: its id, then the k best ids."""
    logprobs: bytes = b""
    """float32 LE: their log probabilities."""
    logprob_ranks: bytes = b""
    """int32 LE: for each token of a row with logprobs its own rank; 1 is the most probable."""
    prompt_logprob_ids: bytes = b""
    """int32 LE: for each computed position of a row with prompt logprobs k, where the next token is in the prompt: that
    token's id, then the k best ids."""
    prompt_logprobs: bytes = b""
    """float32 LE: their log probabilities."""
    prompt_logprob_ranks: bytes = b""
    """int32 LE: for each such position the rank of its next token."""
    num_verified: bytes = b""
    """int32 LE, one a row: how many drafts were verified. Nothing where the plan's `verify_budget` is 0."""
    survivals: bytes = b""
    """One byte for each draft that the step made, those of the first sampled row first: 255 times the probability
    that it and all drafts before it in its block will be accepted, as the model estimates it."""
    predicted: bytes = b""
    """float32 LE, by place in the block: such probabilities of the drafts verified in this step, summed over rows."""
    draft_us: Count = 0
    """Of `device_us`: making drafts."""
    draft_ids: bytes = b""
    """int32 LE: the drafts that the step made for each row that waited for a mask, `num_drafts` a row: what their masks
    will be made of."""


AnyMessage = Hello | Ready | Progress | Fault | Shutdown | StepPlan | MaskBatch | StepResult


def pack_int32(values: list[int] | array[int]) -> bytes:
    """Little-endian int32 bytes of `values`. Raises `OverflowError` beyond 32 bits."""
    column = array("i", values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def pack_float32(values: list[float] | array[float]) -> bytes:
    """Little-endian float32 bytes of `values`."""
    column = array("f", values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack_int32(data: bytes | memoryview) -> array[int]:
    """The inverse of `pack_int32`. Raises `ValueError` when the length is no multiple of four."""
    column = array("i")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def unpack_float32(data: bytes | memoryview) -> array[float]:
    """Little-endian float32 bytes as an array. Raises `ValueError` when the length is no multiple of four."""
    column = array("f")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def split_words(data: bytes) -> list[array[int]]:
    """The token ids of each of `SlotSampling.bad_words`. Raises `ValueError` where lengths and ids do not add up."""
    flat = unpack_int32(data)
    words: list[array[int]] = []
    start = 0
    while start < len(flat):
        end = start + 1 + flat[start]
        if not start + 1 < end <= len(flat):
            raise ValueError(f"a word of {flat[start]} ids where {len(flat) - start - 1} are left")
        words.append(flat[start + 1 : end])
        start = end
    return words


def split_columns(data: bytes, num_columns: int) -> list[array[int]]:
    """The `num_columns` equally long int32 columns that `data` holds one after another."""
    flat = unpack_int32(data)
    num_rows = len(flat) // num_columns
    return [flat[i * num_rows : (i + 1) * num_rows] for i in range(num_columns)]


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a worker is told on its private socket pair, before all else. One message, at most `MAX_CONFIG_BYTES`."""

    endpoint: str
    epoch: Int64
    rank: Rank
    num_ranks: NumRanks
    runner: Annotated[str, Meta(pattern=r"\A(model|fake)\Z")]
    model: str
    """A folder or a file; empty for the fake runner."""
    accelerator: str
    num_slots: Annotated[int, Meta(ge=1, lt=MAX_SLOTS)]
    block_size: Annotated[int, Meta(ge=0, le=4096)]
    """Tokens a block; 0 leaves it to the worker."""
    kv_cache_bytes: Int64
    """Memory for KV blocks; 0 leaves it to the worker."""
    num_blocks: Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
    """Number of KV blocks; 0 derives it from `kv_cache_bytes`."""
    max_model_len: Length
    """0: the model's own."""
    max_batch_positions: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    batch_invariant: bool
    num_threads: Count
    """CPU threads of the device; 0 leaves it to the worker."""
    fake_step_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """Fake runner only: how long a step takes."""
    fake_vocab_size: Annotated[int, Meta(ge=2, le=INT32_MAX)] = 32_000
    fake_check_stamps: bool = True
    """Fake runner only: assert the (token, position) stamp of every KV row at every read."""
    fake_replay_tokens: Length = 0
    """Fake runner only: what its slots keep of the latest positions, and so `bounded_replay_tokens`."""
    dtype: str = "auto"
    """Arithmetic of the model; which there are is the worker's to say."""
    load_format: str = "auto"
    """`dummy`: random weights of the configuration's shapes."""
    cuda_graphs: bool = True
    prefill_truncation: Annotated[str, Meta(pattern=r"\A(compact|off)\Z")] = "compact"
    """`compact`: where a model allows it, its second half computes the last positions of a prompt only."""
    prefill_keep_tokens: Length = 140
    """`compact` only: how many positions at the end of a prompt go through all layers."""
    cache_format: Annotated[str, Meta(pattern=r"\A(auto|packed|bfloat16|float32)\Z")] = "auto"
    """How rows are kept in the cache; `packed`: in the row formats that the model was released with."""
    quantize_activations: bool = True
    """Round activations as the released model does, where it does."""
    quantize_cache: bool = True
    """Round what goes into the cache as the released model does, where it does."""
    num_drafts: Annotated[int, Meta(ge=-1, le=MAX_DRAFTS)] = -1
    """The longest draft; -1: as long as the model's draft block, where it has draft stages; 0: none."""
    measure_costs: bool = False
    """Time steps of several sizes after loading, for `Ready.costs`."""
    fake_num_drafts: Drafts = 0
    """Fake runner only: the length of its draft block."""
