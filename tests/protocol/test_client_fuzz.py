"""Any bytes become a message of the client wire or a `WireError`, in bounded time."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_protocol.client import WireError, decode_client, decode_hello, decode_server, encode
from deepinfer_protocol.client.limits import MAX_FRAME_BYTES, MAX_ITEMS
from deepinfer_protocol.client.structure import StructureError, read_kind
from protocol.client_frames import read_golden
from protocol.mutate import mutate

NUM_FRAMES: Final = 45_000
FRAMES: Final = [frame for frame in read_golden()[1] if len(frame.data) < 1000]
MIB: Final = 1 << 20


def fate(sender: str, data: bytes) -> str:
    """The kind of the message, or the code. A message that was taken in must be one that can be sent again."""
    decode: Any = decode_client if sender == "client" else decode_server
    try:
        message = decode(data)
    except WireError as error:
        return error.code.name
    assert decode(encode(message)) == message, data.hex()
    read_kind(data)  # also where a decoder has not looked: no `StructureError`
    return type(message).__name__


def test_mutated_frames_give_a_message_or_an_error() -> None:
    rng = random.Random(30)
    fates: Counter[str] = Counter()
    for _ in range(NUM_FRAMES):
        frame = rng.choice(FRAMES)
        data = mutate(frame.data, rng)
        try:
            fates[fate(frame.sender, data)] += 1
        except Exception as error:
            pytest.fail(f"{error!r} from {data.hex()}")
    assert fates["E_DECODE"] > NUM_FRAMES / 3 and fates["E_UNKNOWN_KIND"] > 10, fates
    assert len(fates) == 16 and min(fates.values()) > 10, fates  # every kind was also met alive


def test_random_bytes_are_refused() -> None:
    rng = random.Random(31)
    for _ in range(3000):
        data = rng.randbytes(rng.randint(0, 64))
        assert fate("client", data).startswith("E_"), data.hex()
        with pytest.raises(WireError):
            decode_hello(data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=40,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=20), plain, max_size=8))
def test_what_msgpack_writes_is_built_as_it_must_be(tree: dict[str, Any]) -> None:
    kind = tree.get("kind")
    assert read_kind(msgspec.msgpack.encode(tree)) == (kind if isinstance(kind, str) else "")


@given(st.binary(max_size=200))
def test_what_passes_the_walk_is_msgpack(data: bytes) -> None:
    """An independent reader agrees: whatever we let through, it can read."""
    try:
        read_kind(data)
    except StructureError:
        return
    assert isinstance(msgspec.msgpack.decode(data), dict)


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa4kind" + b"\x91" * MIB,
        b"\x81\xa4kind" + b"\x81\xa1a" * MIB,
        b"\x82\xa4kind\xa4ping\xa1a\xdd" + MIB.to_bytes(4, "big") + b"\xc0" * MIB,
        b"\x82\xa4kind\xa4ping\xa5nonce\xdb" + MIB.to_bytes(4, "big") + b"v" * MIB,
        b"\xdf" + MIB.to_bytes(4, "big") + b"\xa1a\xc0" * MIB,
        bytes(MAX_FRAME_BYTES + 1),
        bytes(MAX_FRAME_BYTES),
    ],
)
def test_a_large_frame_takes_no_time(data: bytes) -> None:
    started_s = time.process_time()
    assert fate("client", data).startswith("E_")
    assert time.process_time() - started_s < 0.5


def test_as_many_values_as_may_be_take_a_step_of_the_loop() -> None:
    data = msgspec.msgpack.encode({"kind": "pong", "later": [{"a": 1.5}] * (MAX_ITEMS // 4)})
    started_s = time.process_time()
    fate("server", data)
    assert time.process_time() - started_s < 0.5
