"""The golden frames of the client wire: how the file is written and read.

    cd tests && python -m protocol.client_frames

writes `protocol/golden/client_wire.jsonl` anew. Knows nothing of how a frame travels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from deepinfer_protocol import pack_int32, unpack_int32
from deepinfer_protocol.client import (
    CLIENT_VERSION,
    ClientMessage,
    ServerMessage,
    WireError,
    decode_client,
    decode_server,
    encode,
)
from protocol.client_cases import from_client, from_server, raw

GOLDEN: Final = Path(__file__).resolve().parents[2] / "protocol" / "golden" / "client_wire.jsonl"


class Frame(NamedTuple):
    """One line of the file."""

    name: str
    sender: str
    """`client` or `server`."""
    data: bytes
    value: dict[str, Any] | None
    """The fields that differ from their defaults; `token_ids` as numbers. Of a refused frame None."""
    verdict: str
    """`ok`, or the name of the error."""
    is_canonical: bool
    """Encoding the value gives the same bytes."""


def golden_frames() -> Iterator[Frame]:
    for sender, messages in (("client", from_client()), ("server", from_server())):
        for name, message in messages.items():
            yield Frame(name, sender, shortest(message), readable(message), "ok", True)
    for name, (sender, data, _) in raw().items():
        verdict = verdict_of(sender, data)
        yield Frame(name, sender, data, readable(decode(sender, data)) if verdict == "ok" else None, verdict, False)


def shortest(message: ClientMessage | ServerMessage) -> bytes:
    """The frame with the shortest header for each map. What we send has long ones where a map may have many fields."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(message)))


def decode(sender: str, data: bytes) -> ClientMessage | ServerMessage:
    return decode_client(data) if sender == "client" else decode_server(data)


def verdict_of(sender: str, data: bytes) -> str:
    try:
        decode(sender, data)
    except WireError as error:
        return error.code.name
    return "ok"


def readable(message: ClientMessage | ServerMessage) -> dict[str, Any]:
    """As JSON has it."""
    fields: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    if fields.get("token_ids") is not None:
        fields["token_ids"] = list(unpack_int32(fields["token_ids"]))
    return fields


def from_readable(value: dict[str, Any], sender: str) -> ClientMessage | ServerMessage:
    """The message that `value` stands for."""
    token_ids = value.get("token_ids")
    changes = {} if token_ids is None else {"token_ids": pack_int32(token_ids)}
    return decode(sender, msgspec.msgpack.encode(value | changes))


def read_golden() -> tuple[int, list[Frame]]:
    """The version that the file is of, and its frames."""
    head, *lines = (json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines())
    return head["version"], [
        Frame(
            line["name"],
            line["from"],
            bytes.fromhex(line["hex"]),
            line["value"],
            line["verdict"],
            line["canonical"],
        )
        for line in lines
    ]


def write_golden() -> None:
    lines: list[dict[str, Any]] = [{"wire": "client", "version": CLIENT_VERSION}]
    lines += [
        {
            "name": frame.name,
            "from": frame.sender,
            "verdict": frame.verdict,
            "canonical": frame.is_canonical,
            "hex": frame.data.hex(),
            "value": frame.value,
        }
        for frame in golden_frames()
    ]
    GOLDEN.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    write_golden()
