"""Any bytes become a message or a `ProtocolError`, in bounded time and memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from deepinfer_protocol import (
    LogitShaping,
    MaskBatch,
    ProtocolError,
    SlotAdmit,
    SlotSampling,
    StepPlan,
    StepResult,
    decode,
    encode,
    pack_int32,
)
from deepinfer_protocol.limits import MAX_MESSAGE_BYTES, MAX_ROWS
from protocol.cases import FOREIGN
from protocol.fuzz import SMALL_WORKER, worker_fate

MAX_MEMORY_FACTOR: Final = 16
"""Most memory in use during a decode, in sizes of the frame: an array of small arrays costs an object for each."""
MIB: Final = 1 << 20


def test_random_bytes_are_refused() -> None:
    rng = random.Random(21)
    for _ in range(3000):
        data = rng.randbytes(rng.randint(0, 64))
        assert worker_fate(data) == "refused", data.hex()


def many_admits(count: int) -> bytes:
    """A plan with `count` of the smallest admits that there are."""
    smallest = msgspec.msgpack.encode([0, 0, 0, 0, pack_int32([1]), b"", []])
    head = b"\x99\x03\x01\x01\x00\x00\xc4\x00\xdd" + count.to_bytes(4, "big")
    return head + smallest * count + b"\xc4\x00\xc4\x00"


def many_shaped_admits(count: int) -> bytes:
    """As above, each with the smallest part that shapes its logits."""
    sampling = [0, 1, 0, 0, 0, b"", -1, 0, 0, -1, []]
    smallest = msgspec.msgpack.encode([0, 0, 0, 0, pack_int32([1]), b"", sampling])
    head = b"\x99\x03\x01\x01\x00\x00\xc4\x00\xdd" + count.to_bytes(4, "big")
    return head + smallest * count + b"\xc4\x00\xc4\x00"


def wordy_admits(count: int) -> bytes:
    """Each with as many bad words as may be."""
    sampling = SlotSampling(shaping=LogitShaping(bad_words=pack_int32([1, 5] * 4096)))
    admit = SlotAdmit(0, 0, 0, 0, pack_int32([1]), b"", sampling)
    return encode(StepPlan(1, 1, 0, 0, b"", [admit] * count, b"", b""))


def full_plan() -> bytes:
    ones = [1] * MAX_ROWS
    rows = pack_int32(list(range(MAX_ROWS)) + ones * 3)
    return encode(StepPlan(1, 1, 0, MAX_ROWS, b"", [], pack_int32([1]) * MAX_ROWS * 4, rows))


def full_result() -> bytes:
    num_tokens = MIB
    rows = pack_int32([1, 1, 1, num_tokens])
    return encode(StepResult(1, 1, 0, 1, 1, 1, rows, pack_int32([7]) * num_tokens))


LARGE: Final[dict[str, Callable[[], bytes]]] = {
    "all rows": full_plan,
    "many tokens": full_result,
    "many masks": lambda: encode(MaskBatch(1, 1, 0, pack_int32(list(range(64))), bytes(4 * MIB))),
    "as many admits as may be": lambda: many_admits(MAX_ROWS),
    "as many shaped admits as may be": lambda: many_shaped_admits(MAX_ROWS),
    "many bad words": lambda: wordy_admits(64),
    "more admits than may be": lambda: many_admits(2 * MAX_ROWS),
    "tokens that do not fit": lambda: full_result()[:-4] + b"\xff" * 4,
    "nested arrays": lambda: b"\x91" * MIB,
    "nested arrays for admits": lambda: b"\x99\x03\x01\x01\x00\x00\xc4\x00" + b"\x91" * MIB,
    "nested maps": lambda: b"\x81\xa0" * MIB,
    "an array of nil": lambda: b"\xdd" + MIB.to_bytes(4, "big") + b"\xc0" * MIB,
    "fields beyond the last": lambda: b"\xdd" + MIB.to_bytes(4, "big") + encode_fields() + b"\xc0" * MIB,
    "one long text": lambda: b"\x95\x01\xdb" + MIB.to_bytes(4, "big") + b"v" * MIB + b"\x01\x00\x01",
}


def encode_fields() -> bytes:
    return encode(StepPlan(1, 1, 0, 0, b"", [], b"", b""))[1:]


@pytest.mark.parametrize("name", LARGE)
def test_decoding_takes_memory_in_proportion_to_the_frame(name: str) -> None:
    data = LARGE[name]()
    tracemalloc.start()
    try:
        fate_of_it = _decode_only(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= MAX_MEMORY_FACTOR * len(data) + MIB, f"{name}: {peak_bytes} for {len(data)}: {fate_of_it}"


@pytest.mark.parametrize("name", LARGE)
def test_decoding_takes_time_in_proportion_to_the_frame(name: str) -> None:
    data = LARGE[name]()
    started_s = time.process_time()
    _decode_only(data)
    assert time.process_time() - started_s < 2.0, f"{name}: {len(data)} bytes"


def _decode_only(data: bytes) -> str:
    try:
        return type(decode(data)).__name__
    except ProtocolError as error:
        return str(error)


def test_a_frame_beyond_the_limit_is_refused_unread() -> None:
    data = bytes(MAX_MESSAGE_BYTES + 1)
    with pytest.raises(ProtocolError, match=f"message of {len(data)} bytes"):
        decode(data)


def test_a_memoryview_is_measured_in_bytes_and_read_like_bytes() -> None:
    frame = SMALL_WORKER[0]
    assert decode(memoryview(frame)) == decode(frame)
    with pytest.raises(ProtocolError, match="message of"):
        decode(memoryview(bytes(MAX_MESSAGE_BYTES + 4)).cast("i"))
    with pytest.raises(ProtocolError, match=FOREIGN):
        decode(memoryview(frame)[::2])
