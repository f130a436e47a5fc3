"""Bytes to messages and back. Pure: any bytes become a message or a `ProtocolError`, in bounded time and memory.

One message is one frame: a msgpack array whose first element is the kind. Field types, ranges and lengths are checked
by the decoder; that the columns of a message fit together is checked here. Whether a slot or a block exists is for the
receiver to say.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from deepinfer_protocol.errors import ProtocolError
from deepinfer_protocol.limits import (
    MAX_BLOCKS,
    MAX_CONFIG_BYTES,
    MAX_LENGTH,
    MAX_LOGPROBS,
    MAX_MESSAGE_BYTES,
    MAX_ROWS,
    MAX_SLOTS,
)
from deepinfer_protocol.messages import (
    WIRE_REVISION,
    AnyMessage,
    MaskBatch,
    RowFlag,
    SlotAdmit,
    StepPlan,
    StepResult,
    WorkerConfig,
    split_columns,
    unpack_int32,
)

PLAN_COLUMNS: Final = 4
RESULT_COLUMNS: Final = 4
_ALL_FLAGS: Final = int(RowFlag.SAMPLE | RowFlag.WAITS_FOR_MASK)
_CONFIG_PREFIX: Final = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_config_decoder = msgspec.msgpack.Decoder(WorkerConfig)


def wire_version(package_version: str) -> str:
    """What both ends must agree on to the letter."""
    return f"{package_version}+wire{WIRE_REVISION}"


def encode(message: AnyMessage) -> bytes:
    """The frame of `message`."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in `frame`. Raises `ProtocolError` when it is none, or larger than `MAX_MESSAGE_BYTES`."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of the worker wire: {error}") from None
    if isinstance(message, StepPlan):
        _check_plan(message)
    elif isinstance(message, StepResult):
        _check_result(message)
    elif isinstance(message, MaskBatch):
        _check_masks(message)
    return message


def encode_config(config: WorkerConfig) -> bytes:
    """`config` behind its length (uint32 LE). Raises `ProtocolError` beyond `MAX_CONFIG_BYTES`."""
    body = _encoder.encode(config)
    if len(body) > MAX_CONFIG_BYTES:
        raise ProtocolError(f"configuration of {len(body)} bytes, at most {MAX_CONFIG_BYTES} are allowed")
    return _CONFIG_PREFIX.pack(len(body)) + body


def config_length(prefix: bytes) -> int:
    """How many bytes follow the four of `prefix`. Raises `ProtocolError` beyond `MAX_CONFIG_BYTES`."""
    (length,) = _CONFIG_PREFIX.unpack(prefix)
    if length > MAX_CONFIG_BYTES:
        raise ProtocolError(f"configuration of {length} bytes, at most {MAX_CONFIG_BYTES} are allowed")
    return int(length)


def decode_config(body: bytes) -> WorkerConfig:
    """The configuration in `body`. Raises `ProtocolError`."""
    try:
        return _config_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a worker configuration: {error}") from None


def _check_plan(plan: StepPlan) -> None:
    _check_columns("rows", plan.rows, PLAN_COLUMNS, MAX_ROWS)
    slots, generations, positions, flags = split_columns(plan.rows, PLAN_COLUMNS)
    _check_range("slot", slots, 0, MAX_SLOTS - 1)
    _check_range("generation", generations, 0)
    _check_range("positions", positions, 1, MAX_LENGTH)
    _check_range("flags", flags, 0, _ALL_FLAGS)
    if sum(positions) > plan.padded_positions:
        raise ProtocolError(f"{sum(positions)} positions in the rows, padded to {plan.padded_positions}")
    if len(set(slots)) != len(slots):
        raise ProtocolError("a slot has two rows in one step")
    _check_columns("appends", plan.appends, 2, MAX_BLOCKS)
    append_slots, append_blocks = split_columns(plan.appends, 2)
    _check_range("append slot", append_slots, 0, MAX_SLOTS - 1)
    _check_range("append block", append_blocks, 0, MAX_BLOCKS - 1)
    _check_columns("retired", plan.retired, 1, MAX_SLOTS)
    _check_range("retired slot", unpack_int32(plan.retired), 0, MAX_SLOTS - 1)
    for admit in plan.admits:
        _check_admit(admit)


def _check_admit(admit: SlotAdmit) -> None:
    _check_columns("admit tokens", admit.tokens, 1, MAX_LENGTH)
    _check_columns("admit block_ids", admit.block_ids, 1, MAX_BLOCKS)
    _check_columns("admit stop_ids", admit.sampling.stop_ids, 1, MAX_LENGTH)
    tokens = unpack_int32(admit.tokens)
    _check_range("admit token", tokens, 0)
    _check_range("admit block", unpack_int32(admit.block_ids), 0, MAX_BLOCKS - 1)
    _check_range("admit stop id", unpack_int32(admit.sampling.stop_ids), 0)
    if not tokens:
        raise ProtocolError("an admitted slot has no tokens")
    if admit.length >= len(tokens):
        raise ProtocolError(f"admitted at length {admit.length} with {len(tokens)} tokens: none is left to compute")


def _check_result(result: StepResult) -> None:
    _check_columns("rows", result.rows, RESULT_COLUMNS, MAX_ROWS)
    slots, generations, lengths, num_tokens = split_columns(result.rows, RESULT_COLUMNS)
    _check_range("slot", slots, 0, MAX_SLOTS - 1)
    _check_range("generation", generations, 0)
    _check_range("length", lengths, 1, MAX_LENGTH)
    _check_range("number of tokens", num_tokens, 0, MAX_LENGTH)
    _check_columns("tokens", result.tokens, 1, MAX_MESSAGE_BYTES)
    if sum(num_tokens) * 4 != len(result.tokens):
        raise ProtocolError(f"rows announce {sum(num_tokens)} tokens, {len(result.tokens) // 4} came")
    _check_range("token", unpack_int32(result.tokens), 0)
    _check_columns("logprob_ids", result.logprob_ids, 1, MAX_MESSAGE_BYTES)
    if len(result.logprob_ids) != len(result.logprobs):
        raise ProtocolError("logprob_ids and logprobs differ in length")
    if len(result.logprob_ids) > len(result.tokens) * (1 + MAX_LOGPROBS):
        raise ProtocolError("more logprobs than the tokens can have")


def _check_masks(masks: MaskBatch) -> None:
    _check_columns("slots", masks.slots, 1, MAX_ROWS)
    slots = unpack_int32(masks.slots)
    _check_range("slot", slots, 0, MAX_SLOTS - 1)
    if len(masks.bits) % (4 * max(len(slots), 1)):
        raise ProtocolError(f"{len(masks.bits)} bytes of masks for {len(slots)} rows")


def _check_columns(name: str, data: bytes, num_columns: int, max_rows: int) -> None:
    if len(data) % (4 * num_columns):
        raise ProtocolError(f"{name}: {len(data)} bytes are no {num_columns} columns of int32")
    if len(data) // (4 * num_columns) > max_rows:
        raise ProtocolError(f"{name}: more than {max_rows} rows")


def _check_range(name: str, values: object, low: int, high: int | None = None) -> None:
    column = memoryview(values)  # type: ignore[arg-type]
    if not len(column):
        return
    smallest, largest = min(column), max(column)
    if smallest < low or (high is not None and largest > high):
        bound = f"at least {low}" if high is None else f"{low} to {high}"
        raise ProtocolError(f"{name}: {smallest} to {largest} came, {bound} is allowed")
