"""Turns a frame into one that its sender never wrote. Seeded: the same seed gives the same frames.

Some mutations know msgpack (another type, another number of elements, a length that lies, nesting), the rest know
bytes. Knows nothing of the messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

STRANGERS: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 127, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -1.5, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "text", "\0", "x" * 300, b"", b"\0\0\0", bytes(16), b"\xff" * 32, [], [0], [[]], {}, {"a": 1}),
    msgspec.msgpack.Ext(5, b"data"),
)
# The header of a value, and how many bytes of length follow it.
LENGTHS: Final = dict(
    zip(b"\xc4\xc5\xc6\xc7\xc8\xc9\xd9\xda\xdb\xdc\xdd\xde\xdf", (1, 2, 4, 1, 2, 4, 1, 2, 4, 2, 4, 2, 4), strict=True)
)


def mutate(frame: bytes, rng: random.Random) -> bytes:
    """One to three mutations of `frame`."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        frame = rng.choice(MUTATIONS)(frame, rng)
    return frame


def _flip_bits(frame: bytes, rng: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _truncate(frame: bytes, rng: random.Random) -> bytes:
    return frame[: rng.randint(0, len(frame))]


def _insert(frame: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(frame))
    return frame[:at] + rng.randbytes(rng.randint(1, 8)) + frame[at:]


def _remove(frame: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(frame))
    return frame[:at] + frame[at + rng.randint(1, 8) :]


def _lie_about_a_length(frame: bytes, rng: random.Random) -> bytes:
    """Some header (or a byte that looks like one) announces another length, often a huge one."""
    headers = [index for index, byte in enumerate(frame) if byte in LENGTHS]
    if not headers:
        return b"\xdd\xff\xff\xff\xff" + frame[1:]
    at = rng.choice(headers)
    width = LENGTHS[frame[at]]
    length = rng.choice((rng.randbytes(width), b"\xff" * width, bytes(width)))
    return frame[: at + 1] + length + frame[at + 1 + width :]


def _nest(frame: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(frame))
    return frame[:at] + rng.choice((b"\x91", b"\x81", b"\x81\xa0", b"\xdc\0\1")) * rng.randint(1, 3000) + frame[at:]


def _swap_a_value(frame: bytes, rng: random.Random) -> bytes:
    return _rebuild(frame, rng, lambda branch, index: branch.__setitem__(index, rng.choice(STRANGERS)))


def _nudge_a_value(frame: bytes, rng: random.Random) -> bytes:
    """Stays of its type: a message of which one figure is wrong."""

    def nudge(branch: list[Any], index: int) -> None:
        value = branch[index]
        if isinstance(value, int):
            branch[index] = rng.choice((value + 1, max(value - 1, -(2**63)), rng.getrandbits(63)))
        elif isinstance(value, bytes):
            branch[index] = rng.choice((value[:-4], value + rng.randbytes(4), rng.randbytes(len(value)), value * 2))
        elif isinstance(value, list):
            branch[index] = value * 2

    return _rebuild(frame, rng, nudge)


def _move_values(frame: bytes, rng: random.Random) -> bytes:
    def move(branch: list[Any], index: int) -> None:
        value = branch.pop(index)
        if rng.random() < 0.7:
            branch.insert(rng.randint(0, len(branch)), value)

    return _rebuild(frame, rng, move)


def _rebuild(frame: bytes, rng: random.Random, change: Callable[[list[Any], int], None]) -> bytes:
    """`frame` with `change` made at a random place of its tree; bytes that are no tree stay as they are."""
    try:
        tree = msgspec.msgpack.decode(frame)
        branches = _branches(tree)
        if branches:
            branch = rng.choice(branches)
            if isinstance(branch, dict):
                _rebuild_map(branch, rng, change)
            else:
                change(branch, rng.randrange(len(branch)))
        return msgspec.msgpack.encode(tree)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return _flip_bits(frame, rng)


def _rebuild_map(branch: dict[Any, Any], rng: random.Random, change: Callable[[list[Any], int], None]) -> None:
    """`change` made to the values, under the same keys; where their number or order changes, keys and values part."""
    keys, values = list(branch), list(branch.values())
    change(values, rng.randrange(len(values)))
    if rng.random() < 0.1:
        keys[rng.randrange(len(keys))] = rng.choice(("id", "kind", "seq", "token_ids", "sampling", "later", "", 7))
    branch.clear()
    branch.update(zip(keys, values, strict=False))


def _branches(tree: Any) -> list[Any]:
    """The arrays and maps in `tree` that have elements."""
    if not isinstance(tree, list | dict) or not tree:
        return []
    below = tree.values() if isinstance(tree, dict) else tree
    return [tree, *(branch for item in below for branch in _branches(item))]


MUTATIONS: Final = (
    _flip_bits,
    _truncate,
    _insert,
    _remove,
    _lie_about_a_length,
    _nest,
    _swap_a_value,
    _nudge_a_value,
    _move_values,
)
