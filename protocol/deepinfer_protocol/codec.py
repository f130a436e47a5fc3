"""Bytes to messages and back. Pure: any bytes become a message or a `ProtocolError`, in bounded time and memory.

One message is one frame: a msgpack array whose first element is the kind. Field types, ranges and lengths are checked
by the decoder; that the columns of a message fit together is checked here. Whether a slot or a block exists is for the
receiver to say.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from math import inf
from typing import Final

import msgspec

from deepinfer_protocol.errors import ProtocolError
from deepinfer_protocol.limits import (
    INT32_MAX,
    MAX_BIAS,
    MAX_BIAS_IDS,
    MAX_BLOCKS,
    MAX_CONFIG_BYTES,
    MAX_COSTS,
    MAX_DRAFTS,
    MAX_LENGTH,
    MAX_LOGPROBS,
    MAX_MESSAGE_BYTES,
    MAX_ROWS,
    MAX_SLOTS,
)
from deepinfer_protocol.messages import (
    AnyMessage,
    LogitShaping,
    MaskBatch,
    Ready,
    RowFlag,
    SlotAdmit,
    StepCosts,
    StepPlan,
    StepResult,
    WorkerConfig,
    split_words,
    unpack_float32,
    unpack_int32,
)

PLAN_COLUMNS: Final = 4
RESULT_COLUMNS: Final = 4
_ALL_FLAGS: Final = int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)
_CONFIG_PREFIX: Final = struct.Struct("<I")
_NUM_LANES: Final = 1024
_LANES: Final = int.from_bytes(b"\1\0\0\0" * _NUM_LANES, "little")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_config_decoder = msgspec.msgpack.Decoder(WorkerConfig)


def encode(message: AnyMessage) -> bytes:
    """The frame of `message`."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in `frame`. Raises `ProtocolError` when it is none, or larger than `MAX_MESSAGE_BYTES`."""
    num_bytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {num_bytes} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, BufferError) as error:
        raise ProtocolError(f"not a message of the worker wire: {error}") from None
    if isinstance(message, StepPlan):
        _check_plan(message)
    elif isinstance(message, StepResult):
        _check_result(message)
    elif isinstance(message, MaskBatch):
        _check_masks(message)
    elif isinstance(message, Ready) and message.costs is not None:
        _check_costs(message.costs)
    return message


def encode_config(config: WorkerConfig) -> bytes:
    """`config` behind its length (uint32 LE). Raises `ProtocolError` beyond `MAX_CONFIG_BYTES`."""
    body = _encoder.encode(config)
    if len(body) > MAX_CONFIG_BYTES:
        raise ProtocolError(f"configuration of {len(body)} bytes, at most {MAX_CONFIG_BYTES} are allowed")
    return _CONFIG_PREFIX.pack(len(body)) + body


def config_length(prefix: bytes) -> int:
    """How many bytes follow the four of `prefix`. Raises `ProtocolError` beyond `MAX_CONFIG_BYTES`."""
    if len(prefix) != _CONFIG_PREFIX.size:
        raise ProtocolError(f"a length of {len(prefix)} bytes, {_CONFIG_PREFIX.size} were expected")
    (length,) = _CONFIG_PREFIX.unpack(prefix)
    if length > MAX_CONFIG_BYTES:
        raise ProtocolError(f"configuration of {length} bytes, at most {MAX_CONFIG_BYTES} are allowed")
    return int(length)


def decode_config(body: bytes) -> WorkerConfig:
    """The configuration in `body`. Raises `ProtocolError`."""
    try:
        config = _config_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a worker configuration: {error}") from None
    if config.rank >= config.num_ranks:
        raise ProtocolError(f"rank {config.rank} of {config.num_ranks}")
    return config


def _check_plan(plan: StepPlan) -> None:
    _check_columns("rows", plan.rows, PLAN_COLUMNS, MAX_ROWS)
    slots, generations, positions, flags = _split(plan.rows, PLAN_COLUMNS)
    _check_range("slot", slots, 0, MAX_SLOTS - 1)
    _check_range("generation", generations, 0)
    _check_range("positions", positions, 1, MAX_LENGTH)
    _check_range("flags", flags, 0, _ALL_FLAGS)
    num_positions = sum(unpack_int32(positions))
    num_positions += _check_drafts(plan, positions, flags)
    if num_positions > plan.padded_positions:
        raise ProtocolError(f"{num_positions} positions in the rows, padded to {plan.padded_positions}")
    _check_unique("a slot has two rows in one step", slots)
    _check_columns("appends", plan.appends, 2, MAX_BLOCKS)
    append_slots, append_blocks = _split(plan.appends, 2)
    _check_range("append slot", append_slots, 0, MAX_SLOTS - 1)
    _check_range("append block", append_blocks, 0, MAX_BLOCKS - 1)
    _check_columns("retired", plan.retired, 1, MAX_SLOTS)
    _check_range("retired slot", plan.retired, 0, MAX_SLOTS - 1)
    if len(plan.admits) > MAX_ROWS:
        raise ProtocolError(f"admits: more than {MAX_ROWS} slots")
    for admit in plan.admits:
        _check_admit(admit)


def _check_drafts(plan: StepPlan, positions: bytes, flags: bytes) -> int:
    """How many drafts the step verifies, at most."""
    if not plan.most_drafts:
        if plan.verify_budget:
            raise ProtocolError(f"verify_budget: {plan.verify_budget} came, and no row has drafts")
        return 0
    _check_columns("most_drafts", plan.most_drafts, 1, MAX_ROWS)
    if len(plan.most_drafts) != len(positions):
        raise ProtocolError(f"most_drafts: {len(plan.most_drafts) // 4} came for {len(positions) // 4} rows")
    _check_range("most_drafts", plan.most_drafts, 0, MAX_DRAFTS)
    most, total = unpack_int32(plan.most_drafts), 0
    for row, (num_drafts, count, flag) in enumerate(
        zip(most, unpack_int32(positions), unpack_int32(flags), strict=True)
    ):
        if num_drafts and (count != 1 or not flag & RowFlag.SAMPLE):
            raise ProtocolError(f"row {row} verifies drafts: one sampled position was expected, {count} came")
        total += num_drafts
    return min(total, plan.verify_budget)


def _check_admit(admit: SlotAdmit) -> None:
    _check_columns("admit tokens", admit.tokens, 1, MAX_LENGTH)
    _check_columns("admit block_ids", admit.block_ids, 1, MAX_BLOCKS)
    _check_range("admit token", admit.tokens, 0)
    _check_range("admit block", admit.block_ids, 0, MAX_BLOCKS - 1)
    num_tokens = len(admit.tokens) // 4
    if not num_tokens:
        raise ProtocolError("an admitted slot has no tokens")
    if not admit.length <= admit.floor < num_tokens:
        bounds = f"length {admit.length}, floor {admit.floor}"
        raise ProtocolError(f"admitted at {bounds} with {num_tokens} tokens: they must rise, and leave one to compute")
    if admit.sampling.num_prompt > num_tokens:
        raise ProtocolError(f"a prompt of {admit.sampling.num_prompt} tokens, {num_tokens} tokens came")
    _check_columns("admit stop_ids", admit.sampling.stop_ids, 1, MAX_LENGTH)
    _check_range("admit stop id", admit.sampling.stop_ids, 0)
    if admit.sampling.shaping is not None:
        _check_shaping(admit.sampling.shaping)


def _check_shaping(shaping: LogitShaping) -> None:
    _check_columns("bias_ids", shaping.bias_ids, 1, MAX_BIAS_IDS)
    _check_range("bias id", shaping.bias_ids, 0)
    _check_unique("a token has two biases", shaping.bias_ids)
    if len(shaping.bias_values) != len(shaping.bias_ids):
        raise ProtocolError("bias_ids and bias_values differ in length")
    for value in unpack_float32(shaping.bias_values):
        if not (-MAX_BIAS <= value <= MAX_BIAS or value == -inf):
            raise ProtocolError(f"bias: {value} came, {-MAX_BIAS} to {MAX_BIAS} or minus infinity is allowed")
    if len(shaping.allowed_bits) % 4:
        raise ProtocolError(f"allowed_bits: {len(shaping.allowed_bits)} bytes are no whole words")
    _check_columns("bad_words", shaping.bad_words, 1, MAX_LENGTH)
    _check_range("bad word", shaping.bad_words, 0)
    try:
        split_words(shaping.bad_words)
    except ValueError as error:
        raise ProtocolError(f"bad_words: {error}") from None


def _check_result(result: StepResult) -> None:
    _check_columns("rows", result.rows, RESULT_COLUMNS, MAX_ROWS)
    slots, generations, lengths, num_tokens = _split(result.rows, RESULT_COLUMNS)
    _check_range("slot", slots, 0, MAX_SLOTS - 1)
    _check_range("generation", generations, 0)
    _check_range("length", lengths, 1, MAX_LENGTH)
    _check_range("number of tokens", num_tokens, 0, MAX_LENGTH)
    _check_columns("tokens", result.tokens, 1, MAX_MESSAGE_BYTES)
    num_announced = sum(unpack_int32(num_tokens))
    if num_announced * 4 != len(result.tokens):
        raise ProtocolError(f"rows announce {num_announced} tokens, {len(result.tokens) // 4} came")
    _check_range("token", result.tokens, 0)
    _check_columns("logprob_ids", result.logprob_ids, 1, MAX_MESSAGE_BYTES)
    if len(result.logprob_ids) != len(result.logprobs):
        raise ProtocolError("logprob_ids and logprobs differ in length")
    if len(result.logprob_ids) > len(result.tokens) * (1 + MAX_LOGPROBS):
        raise ProtocolError("more logprobs than the tokens can have")
    _check_range("logprob id", result.logprob_ids, 0)
    _check_ranks("logprob_ranks", result.logprob_ranks, result.logprob_ids)
    _check_columns("prompt_logprob_ids", result.prompt_logprob_ids, 1, MAX_MESSAGE_BYTES)
    if len(result.prompt_logprob_ids) != len(result.prompt_logprobs):
        raise ProtocolError("prompt_logprob_ids and prompt_logprobs differ in length")
    _check_range("prompt logprob id", result.prompt_logprob_ids, 0)
    _check_ranks("prompt_logprob_ranks", result.prompt_logprob_ranks, result.prompt_logprob_ids)
    _check_verified(result, num_tokens)
    _check_columns("draft_ids", result.draft_ids, 1, len(num_tokens) // 4 * MAX_DRAFTS)
    _check_range("draft id", result.draft_ids, 0)


def _check_verified(result: StepResult, num_tokens: bytes) -> None:
    """What a result says of drafts, beside the tokens of its rows."""
    _check_columns("predicted", result.predicted, 1, MAX_DRAFTS)
    if not all(0.0 <= value < inf for value in unpack_float32(result.predicted)):
        raise ProtocolError("predicted: a value is no number of drafts")
    counts = unpack_int32(num_tokens)
    num_sampled = len(counts) - counts.count(0)
    if len(result.survivals) > num_sampled * MAX_DRAFTS or len(result.survivals) % max(num_sampled, 1):
        raise ProtocolError(f"survivals: {len(result.survivals)} came for {num_sampled} sampled rows")
    if not result.num_verified:
        return
    _check_columns("num_verified", result.num_verified, 1, MAX_ROWS)
    if len(result.num_verified) != len(num_tokens):
        raise ProtocolError(f"num_verified: {len(result.num_verified) // 4} came for {len(counts)} rows")
    _check_range("num_verified", result.num_verified, 0, MAX_DRAFTS)
    for row, (count, most) in enumerate(zip(counts, unpack_int32(result.num_verified), strict=True)):
        if count > 1 + most:
            raise ProtocolError(f"row {row}: {count} tokens came of {most} drafts")


def _check_costs(costs: StepCosts) -> None:
    for name, sizes, times in (
        ("positions", costs.positions, costs.forward_us),
        ("draft rows", costs.draft_rows, costs.draft_us),
    ):
        _check_columns(f"costs: {name}", sizes, 1, MAX_COSTS)
        _check_range(f"costs: {name}", sizes, 1)
        _check_columns(f"costs: times of {name}", times, 1, MAX_COSTS)
        if len(sizes) != len(times):
            raise ProtocolError(f"costs: {len(sizes) // 4} {name} and {len(times) // 4} times")
        numbers = unpack_int32(sizes).tolist()
        if any(low >= high for low, high in pairwise(numbers)):
            raise ProtocolError(f"costs: {name} must rise")
        if not all(0.0 <= value < inf for value in unpack_float32(times)):
            raise ProtocolError(f"costs: a time of {name} is no number of microseconds")
    if not costs.positions:
        raise ProtocolError("costs: no positions were measured")


def _check_ranks(name: str, ranks: bytes, ids: bytes) -> None:
    """One rank for one to `1 + MAX_LOGPROBS` ids."""
    _check_columns(name, ranks, 1, MAX_MESSAGE_BYTES)
    _check_range(name, ranks, 1)
    if not len(ranks) <= len(ids) <= len(ranks) * (1 + MAX_LOGPROBS):
        raise ProtocolError(f"{name}: {len(ranks) // 4} ranks for {len(ids) // 4} ids")


def _check_masks(masks: MaskBatch) -> None:
    _check_columns("slots", masks.slots, 1, MAX_ROWS)
    _check_range("slot", masks.slots, 0, MAX_SLOTS - 1)
    _check_unique("a slot has two masks in one step", masks.slots)
    num_slots = total = len(masks.slots) // 4
    if masks.num_masks:
        _check_columns("num_masks", masks.num_masks, 1, MAX_ROWS)
        _check_range("num_masks", masks.num_masks, 1, 1 + MAX_DRAFTS)
        counts = unpack_int32(masks.num_masks)
        if len(counts) != num_slots:
            raise ProtocolError(f"num_masks: {len(counts)} came for {num_slots} rows")
        total = sum(counts)
    if len(masks.bits) % (4 * max(total, 1)) or bool(masks.bits) != bool(total):
        raise ProtocolError(f"{len(masks.bits)} bytes of masks for {total} places of {num_slots} rows")


def _check_columns(name: str, data: bytes, num_columns: int, max_rows: int) -> None:
    if len(data) % (4 * num_columns):
        raise ProtocolError(f"{name}: {len(data)} bytes are no {num_columns} columns of int32")
    if len(data) // (4 * num_columns) > max_rows:
        raise ProtocolError(f"{name}: more than {max_rows} rows")


def _split(data: bytes, num_columns: int) -> list[bytes]:
    width = len(data) // num_columns
    return [data[i * width : (i + 1) * width] for i in range(num_columns)]


def _check_unique(complaint: str, column: bytes) -> None:
    if len(set(unpack_int32(column))) * 4 != len(column):
        raise ProtocolError(complaint)


def _check_range(name: str, column: bytes, low: int, high: int = INT32_MAX) -> None:
    """Every int32 of `column` is `low` to `high`."""
    for start in range(0, len(column), 4 * _NUM_LANES):
        part = column[start : start + 4 * _NUM_LANES]
        if not _is_within(part, low, high):
            values = unpack_int32(part)
            bound = f"at least {low}" if high == INT32_MAX else f"{low} to {high}"
            raise ProtocolError(f"{name}: {min(values)} to {max(values)} came, {bound} is allowed")


def _is_within(part: bytes, low: int, high: int) -> bool:
    """All values at once, as one large number with 32 bits for each: an eighth of the time of `min` and `max`.

    Of a value that is not negative, adding `INT32_MAX - high` sets the sign bit if it is above `high`, and with the
    sign bit set, subtracting `low` clears it if it is below `low`. Neither touches a neighbour.
    """
    lanes = _LANES >> 32 * (_NUM_LANES - len(part) // 4)
    signs = lanes << 31
    values = int.from_bytes(part, "little")
    if (values | values + lanes * (INT32_MAX - high)) & signs:
        return False
    return low == 0 or ((values | signs) - lanes * low) & signs == signs
