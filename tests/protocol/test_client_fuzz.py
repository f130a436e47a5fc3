"""Any bytes become a message of the client wire or a `WireError`, in bounded time."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_protocol.client import WireError, decode_client, decode_hello, decode_server
from deepinfer_protocol.client.limits import MAX_FRAME_BYTES, MAX_ITEMS
from deepinfer_protocol.client.structure import StructureError, read_kind
from protocol.fuzz import CLIENT, client_fate
from protocol.mutate import mutate

MIB: Final = 1 << 20
MAX_MEMORY_FACTOR: Final = 16
"""Most memory in use during a decode, in sizes of the frame: an array of small values costs an object for each."""


def many_values() -> Iterator[bytes]:
    """As many as may be, as small as may be, where they are looked at and where they are not."""
    yield msgspec.msgpack.encode({"kind": "submit", "id": "r", "messages": [{"a": []}] * 4000})
    yield msgspec.msgpack.encode({"kind": "submit", "id": "r", "sampling": {"stop": ["" for _ in range(16_000)]}})
    yield msgspec.msgpack.encode({"kind": "pong", "later": [[] for _ in range(MAX_ITEMS - 10)]})
    yield msgspec.msgpack.encode({"kind": "ping", "later": {f"{key}": None for key in range(8000)}})


def peak_of(data: bytes) -> int:
    """Bytes in use at most while `data` is read by either end."""
    tracemalloc.start()
    try:
        for decode in (decode_client, decode_server):
            try:
                decode(data)
            except WireError:
                pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_random_bytes_are_refused() -> None:
    rng = random.Random(31)
    for _ in range(3000):
        data = rng.randbytes(rng.randint(0, 64))
        assert client_fate("client", data).startswith("E_"), data.hex()
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


LARGE: Final = [
    b"\x81\xa4kind" + b"\x91" * MIB,
    b"\x81\xa4kind" + b"\x81\xa1a" * MIB,
    b"\x82\xa4kind\xa4ping\xa1a\xdd" + MIB.to_bytes(4, "big") + b"\xc0" * MIB,
    b"\x82\xa4kind\xa4ping\xa5nonce\xdb" + MIB.to_bytes(4, "big") + b"v" * MIB,
    b"\xdf" + MIB.to_bytes(4, "big") + b"\xa1a\xc0" * MIB,
    bytes(MAX_FRAME_BYTES + 1),
    bytes(MAX_FRAME_BYTES),
]


@pytest.mark.parametrize("data", LARGE)
def test_a_large_frame_takes_no_time(data: bytes) -> None:
    started_s = time.process_time()
    assert client_fate("client", data).startswith("E_")
    assert time.process_time() - started_s < 0.5


@pytest.mark.parametrize("data", [*LARGE, *many_values()])
def test_a_frame_takes_memory_in_proportion(data: bytes) -> None:
    peak_bytes = peak_of(data)
    assert peak_bytes <= MAX_MEMORY_FACTOR * len(data) + MIB, f"{peak_bytes} for {len(data)}"


def test_a_mutated_frame_takes_memory_in_proportion() -> None:
    rng = random.Random(33)
    for _ in range(500):
        data = mutate(rng.choice(CLIENT).data, rng)
        assert peak_of(data) <= MAX_MEMORY_FACTOR * len(data) + 64 * 1024, data.hex()


def test_as_many_values_as_may_be_take_a_step_of_the_loop() -> None:
    data = msgspec.msgpack.encode({"kind": "pong", "later": [{"a": 1.5}] * (MAX_ITEMS // 4)})
    started_s = time.process_time()
    client_fate("server", data)
    assert time.process_time() - started_s < 0.5
