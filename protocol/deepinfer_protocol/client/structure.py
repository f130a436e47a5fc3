"""What holds of every frame of the client wire before its fields are looked at: a walk over msgpack, without a copy.

One map; keys are text and each is there once; whole numbers have 64 bits with a sign, others are finite; text is
UTF-8; no extension types; bytes only as a field of the message itself; bounded depth and number of values.
"""

from __future__ import annotations

from math import isfinite
from struct import Struct
from typing import Final

from deepinfer_protocol.client.limits import MAX_DEPTH, MAX_ITEMS, MAX_KEY_BYTES

_FLOATS: Final = {0xCA: Struct(">f"), 0xCB: Struct(">d")}
_INT_BYTES: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_STR_LENGTHS: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BIN_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_ARRAY_LENGTHS: Final = {0xDC: 2, 0xDD: 4}
_MAP_LENGTHS: Final = {0xDE: 2, 0xDF: 4}
_CONSTANTS: Final = frozenset({0xC0, 0xC2, 0xC3})


class StructureError(ValueError):
    """The frame is not built as every message is."""


def read_kind(data: bytes) -> str:
    """The text under `kind` of a frame that is built as it must be; empty if there is none. Raises `StructureError`."""
    if not data or not (0x80 <= data[0] <= 0x8F or data[0] in _MAP_LENGTHS):
        raise StructureError("not a map")
    try:
        return _walk(data)
    except IndexError:
        raise StructureError("it ends early") from None
    except UnicodeDecodeError:
        raise StructureError("text is no UTF-8") from None


def _walk(data: bytes) -> str:
    """`levels` holds, for each map or array that is open, how many values are left in it and the keys seen so far."""
    at, num_items, kind = 0, 0, ""
    levels: list[tuple[int, set[bytes] | None]] = []
    left, keys = 1, None  # in the level that is open: values still to come; the keys of a map
    key = b""
    while True:
        while not left:
            if not levels:
                if at != len(data):
                    raise StructureError("bytes follow the message")
                return kind
            left, keys = levels.pop()
        left -= 1
        num_items += 1
        if num_items > MAX_ITEMS:
            raise StructureError(f"more than {MAX_ITEMS} values")
        byte = data[at]
        at += 1
        if keys is not None and left & 1:  # of a map's values the keys come first
            if not (0xA0 <= byte <= 0xBF or byte in _STR_LENGTHS):
                raise StructureError("a key is no text")
            key, at = _read_str(data, at, byte)
            if len(key) > MAX_KEY_BYTES:
                raise StructureError(f"a key of more than {MAX_KEY_BYTES} bytes")
            if key in keys:
                raise StructureError("a key is there twice")
            keys.add(key)
            continue
        if byte < 0x80 or byte >= 0xE0 or byte in _CONSTANTS:
            continue
        if byte < 0xA0 or byte in _ARRAY_LENGTHS or byte in _MAP_LENGTHS:
            length, at, is_map = _read_branch(data, at, byte)
            if len(levels) >= MAX_DEPTH:
                raise StructureError(f"deeper than {MAX_DEPTH}")
            levels.append((left, keys))
            left, keys = (2 * length, set()) if is_map else (length, None)
        elif byte < 0xC0 or byte in _STR_LENGTHS:
            text, at = _read_str(data, at, byte)
            if len(levels) == 1 and key == b"kind":
                kind = text.decode()
        else:
            at = _skip_scalar(data, at, byte, may_be_bytes=len(levels) == 1)


def _read_branch(data: bytes, at: int, byte: int) -> tuple[int, int, bool]:
    """How many elements, where they begin, whether it is a map. The elements must have room in the frame."""
    is_map = byte < 0x90 or byte in _MAP_LENGTHS
    if byte < 0xA0:
        length = byte & 0x0F
    else:
        width = _MAP_LENGTHS[byte] if is_map else _ARRAY_LENGTHS[byte]
        length, at = _read_length(data, at, width)
    if (2 * length if is_map else length) > len(data) - at:
        raise StructureError("it ends early")
    return length, at, is_map


def _read_str(data: bytes, at: int, byte: int) -> tuple[bytes, int]:
    """The text, as UTF-8, and where it ends."""
    if byte < 0xC0:
        end = at + (byte & 0x1F)
    else:
        length, at = _read_length(data, at, _STR_LENGTHS[byte])
        end = at + length
    if end > len(data):
        raise StructureError("it ends early")
    text = data[at:end]
    if not text.isascii():
        str(text, "utf-8")
    return text, end


def _skip_scalar(data: bytes, at: int, byte: int, *, may_be_bytes: bool) -> int:
    if byte in _INT_BYTES:
        end = _end(data, at, _INT_BYTES[byte])
        if byte == 0xCF and data[at] >= 0x80:
            raise StructureError("a number of 64 bits without a sign")
        return end
    if byte in _FLOATS:
        end = _end(data, at, _FLOATS[byte].size)
        if not isfinite(_FLOATS[byte].unpack_from(data, at)[0]):
            raise StructureError("a number is not finite")
        return end
    if byte in _BIN_LENGTHS:
        if not may_be_bytes:
            raise StructureError("bytes are no field of the message itself")
        length, at = _read_length(data, at, _BIN_LENGTHS[byte])
        return _end(data, at, length)
    raise StructureError("an extension, or a byte that msgpack does not have")


def _read_length(data: bytes, at: int, width: int) -> tuple[int, int]:
    end = _end(data, at, width)
    return int.from_bytes(data[at:end], "big"), end


def _end(data: bytes, at: int, length: int) -> int:
    end = at + length
    if end > len(data):
        raise StructureError("it ends early")
    return end
