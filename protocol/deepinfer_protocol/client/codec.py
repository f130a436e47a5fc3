"""Bytes to messages of the client wire and back. Pure: any bytes become a message or a `WireError`.

Structure first (`structure`), then kind, then fields: their types and bounds are those of the structs. A delta that is,
byte for byte, what we would write needs no look at its structure: there is one for every token. Whether a stream exists
or a parameter suits the model is for the receiver to say.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar, get_args

import msgspec

from deepinfer_protocol.client.codes import TEXTS, ErrorCode
from deepinfer_protocol.client.limits import MAX_FRAME_BYTES, MAX_HELLO_BYTES, MAX_NAME_CHARACTERS
from deepinfer_protocol.client.messages import ClientMessage, Delta, Hello, Id, ServerMessage, Submit
from deepinfer_protocol.client.structure import StructureError, read_kind
from deepinfer_protocol.errors import ProtocolError

M = TypeVar("M")


class _Head(msgspec.Struct):
    id: Id


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(_Head)
_client_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ServerMessage)
_delta_decoder = msgspec.msgpack.Decoder(Delta)
_DELTA_HEAD: Final = b"\xa4kind\xa5delta"
_CLIENT_KINDS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(ClientMessage))
_SERVER_KINDS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(ServerMessage))
_PATH: Final = re.compile(r"at `\$\.([^`]*)`\Z")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")


class WireError(ProtocolError):
    """The frame is no message of the client wire. `code` is what a server answers, `field` where the fault lies."""

    def __init__(self, code: ErrorCode, detail: str, field: str = "") -> None:
        super().__init__(f"{TEXTS[code]}: {detail}")
        self.code = code
        self.field = field[:MAX_NAME_CHARACTERS]
        self.id = ""
        """Of the request that the frame was to make, where that can be read."""


def encode(message: ClientMessage | ServerMessage) -> bytes:
    """The frame of `message`. Raises `WireError` when it is larger than a frame may be."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(ErrorCode.E_TOO_LARGE, f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return frame


def decode_hello(frame: bytes) -> Hello:
    """What a stranger says. Raises `WireError`: `E_HELLO` for every kind but `hello`."""
    if len(frame) > MAX_HELLO_BYTES:
        raise WireError(ErrorCode.E_HELLO, f"{len(frame)} bytes came, at most {MAX_HELLO_BYTES} are read")
    if _kind(frame) != "hello":
        raise WireError(ErrorCode.E_HELLO, "it is no hello")
    hello = _decode(_client_decoder, frame)
    assert isinstance(hello, Hello)
    return hello


def decode_client(frame: bytes) -> ClientMessage:
    """What a client sent. Raises `WireError`."""
    kind = _known_kind(frame, _CLIENT_KINDS)
    try:
        message: ClientMessage = _decode(_client_decoder, frame)
        if isinstance(message, Submit):
            _check_submit(message)
    except WireError as error:
        error.id = _request_id(frame) if kind == "submit" else ""
        raise
    if isinstance(message, Hello) and message.min_version > message.max_version:
        raise WireError(ErrorCode.E_DECODE, "the lowest version is above the highest", "min_version")
    return message


def decode_server(frame: bytes) -> ServerMessage:
    """What a server sent. Raises `WireError`; one of `E_UNKNOWN_KIND` is of a later version and to be skipped."""
    message = _plain_delta(frame) or _read_server(frame)
    if isinstance(message, Delta):
        _check_token_ids(message.token_ids)
        if message.logprobs is not None and 4 * len(message.logprobs) != len(message.token_ids):
            raise WireError(ErrorCode.E_DECODE, "tokens and logprobs differ in number", "logprobs")
    return message


def _read_server(frame: bytes) -> ServerMessage:
    _known_kind(frame, _SERVER_KINDS)
    message: ServerMessage = _decode(_server_decoder, frame)
    return message


def _plain_delta(frame: bytes) -> Delta | None:
    """A delta without logprobs that is what we would write; `None` for any other frame."""
    if not frame.startswith(_DELTA_HEAD, 1) or len(frame) > MAX_FRAME_BYTES:
        return None
    try:
        delta = _delta_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError):
        return None
    return delta if delta.logprobs is None and _encoder.encode(delta) == frame else None


def _request_id(frame: bytes) -> str:
    """Of a SUBMIT that cannot be read as a whole; empty where nothing can."""
    try:
        return _head_decoder.decode(frame).id
    except msgspec.DecodeError:
        return ""


def _kind(frame: bytes) -> str:
    try:
        return read_kind(frame)
    except StructureError as error:
        raise WireError(ErrorCode.E_DECODE, str(error)) from None


def _known_kind(frame: bytes, kinds: frozenset[Any]) -> str:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(ErrorCode.E_TOO_LARGE, f"{len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    kind = _kind(frame)
    if kind not in kinds:
        raise WireError(ErrorCode.E_UNKNOWN_KIND if kind else ErrorCode.E_DECODE, "there is no such kind", "kind")
    return kind


def _decode(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M:
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise WireError(ErrorCode.E_DECODE, str(error), _field_of(str(error))) from None
    except (RecursionError, UnicodeDecodeError, OverflowError):
        raise WireError(ErrorCode.E_DECODE, "it cannot be read") from None


def _field_of(complaint: str) -> str:
    """The place that msgspec's words name, such as `sampling.max_tokens`."""
    path, name = _PATH.search(complaint), _MISSING.search(complaint) or _UNKNOWN.search(complaint)
    return ".".join(found[1] for found in (path, name) if found is not None)


def _check_submit(submit: Submit) -> None:
    if sum(given is not None for given in (submit.prompt, submit.token_ids, submit.messages)) != 1:
        raise WireError(ErrorCode.E_DECODE, "exactly one of prompt, token_ids and messages is expected", "prompt")
    if submit.token_ids is not None:
        _check_token_ids(submit.token_ids)


def _check_token_ids(token_ids: bytes) -> None:
    """Whole int32 LE, none negative: the highest byte of each is below 128."""
    if len(token_ids) % 4:
        raise WireError(ErrorCode.E_DECODE, f"{len(token_ids)} bytes are no int32", "token_ids")
    if not token_ids[3::4].isascii():
        raise WireError(ErrorCode.E_DECODE, "a token id is negative", "token_ids")
