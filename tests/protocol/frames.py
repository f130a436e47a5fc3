"""The golden frames of the worker wire: how the file is written and read.

    cd tests && python -m protocol.frames

writes `protocol/golden/worker_wire.jsonl` anew. Do so only together with a higher `WIRE_REVISION`. Knows nothing of
how a frame travels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from deepinfer_protocol import (
    ProtocolError,
    WorkerConfig,
    config_length,
    decode,
    decode_config,
    encode,
    encode_config,
    split_columns,
    unpack_float32,
    unpack_int32,
)
from deepinfer_protocol.messages import WIRE_REVISION
from protocol.cases import Refused, Whole, raw, spoiled, valid

GOLDEN: Final = Path(__file__).resolve().parents[2] / "protocol" / "golden" / "worker_wire.jsonl"


class Frame(NamedTuple):
    """One line of the file."""

    name: str
    data: bytes
    value: Any
    """For people; of a refused frame None."""
    verdict: str
    """`ok`, or how the refusal begins."""


def golden_frames() -> Iterator[Frame]:
    for name, message in valid().items():
        yield Frame(name, encode_any(message), readable(message), "ok")
    for name, case in spoiled().items():
        yield Frame(name, spoil(case), None, case.verdict)
    for name, (data, verdict) in raw().items():
        yield Frame(name, data, None, verdict)


def spoil(case: Refused) -> bytes:
    tree = msgspec.msgpack.decode(encode_any(case.base))
    branch = tree
    for index in case.path[:-1]:
        branch = branch[index]
    branch[case.path[-1] : case.path[-1] + 1] = [case.value]
    return msgspec.msgpack.encode(tree)


def encode_any(message: Whole) -> bytes:
    return encode_config(message) if isinstance(message, WorkerConfig) else encode(message)


def decode_any(name: str, data: bytes) -> Whole:
    """`name` says which of the two channels it comes from."""
    if not name.startswith("config"):
        return decode(data)
    config_length(data[:4])
    return decode_config(data[4:])


def readable(message: msgspec.Struct) -> dict[str, Any]:
    fields = {name: _show(name, getattr(message, name)) for name in message.__struct_fields__}
    return {"message": type(message).__name__, **fields}


def _show(name: str, value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return readable(value)
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, bytes):
        return value
    if name in ("bits", "allowed_bits", "survivals"):
        return value.hex()
    if name in ("logprobs", "prompt_logprobs", "bias_values", "predicted", "forward_us", "draft_us"):
        return [str(number) for number in unpack_float32(value)]
    num_columns = {"rows": 4, "appends": 2}.get(name, 1)
    shown = [list(column) for column in split_columns(value, num_columns)]
    return shown if num_columns > 1 else list(unpack_int32(value))


def read_golden() -> tuple[int, list[Frame]]:
    """The revision that the file is of, and its frames."""
    head, *lines = (json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines())
    return head["wire_revision"], [
        Frame(line["name"], bytes.fromhex(line["hex"]), line["value"], line["verdict"]) for line in lines
    ]


def write_golden() -> None:
    lines: list[dict[str, Any]] = [{"wire": "worker", "wire_revision": WIRE_REVISION}]
    lines += [
        {"name": frame.name, "hex": frame.data.hex(), "value": frame.value, "verdict": frame.verdict}
        for frame in golden_frames()
    ]
    GOLDEN.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def verdict_of(name: str, data: bytes) -> str:
    """`ok`, or the whole refusal."""
    try:
        decode_any(name, data)
    except ProtocolError as error:
        return str(error)
    return "ok"


if __name__ == "__main__":
    write_golden()
