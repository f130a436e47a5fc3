"""Errors of the engine as errors of the client wire, and back. Knows nothing of sockets or sessions.

No text of an exception leaves the process, but the words of our own refusals, which say what came and what is allowed.
"""

from __future__ import annotations

from typing import Final

from deepinfer.errors import (
    ConnectionLost,
    ContextLengthExceeded,
    DeepInferError,
    DuplicateRequestId,
    EngineClosed,
    EngineError,
    GrammarError,
    InternalError,
    InvalidRequest,
    Overloaded,
    SlowConsumer,
    WorkerLost,
)
from deepinfer_protocol.client import Error, ErrorCode
from deepinfer_protocol.client.limits import MAX_DETAIL_CHARACTERS, MAX_NAME_CHARACTERS

_CODES: Final = {
    "invalid_param": ErrorCode.E_INVALID_PARAM,
    "context_length": ErrorCode.E_CONTEXT_LENGTH,
    "grammar": ErrorCode.E_GRAMMAR,
    "duplicate": ErrorCode.E_DUPLICATE,
    "overloaded": ErrorCode.E_OVERLOADED,
    "slow_consumer": ErrorCode.E_SLOW_CONSUMER,
    "worker_lost": ErrorCode.E_WORKER_LOST,
    "shutdown": ErrorCode.E_SHUTDOWN,
    "engine": ErrorCode.E_ENGINE_DEAD,
    "internal": ErrorCode.E_INTERNAL,
}
"""By `DeepInferError.code`."""


def to_wire(error: Exception, id: str = "", seq: int = 0) -> Error:
    """What a client is told of `error`."""
    code = _CODES.get(getattr(error, "code", ""), ErrorCode.E_INTERNAL)
    field, detail, retry_after_ms = "", "", 0
    if isinstance(error, InvalidRequest):
        field = error.field[:MAX_NAME_CHARACTERS]
        if error.__cause__ is None:  # else it quotes somebody else's exception
            detail = _printable(str(error).removeprefix(f"{error.field}: "))
    elif isinstance(error, Overloaded):
        retry_after_ms = max(int(1000 * error.retry_after_s), 1)
    return Error.of(code, id, seq=seq, field=field, detail=detail, retry_after_ms=retry_after_ms)


def from_wire(error: Error) -> DeepInferError:
    """What a client raises."""
    if error.code == ErrorCode.E_CONTEXT_LENGTH:
        return ContextLengthExceeded(error.field, error.detail or error.text)
    if error.code == ErrorCode.E_DUPLICATE:
        return DuplicateRequestId(error.field or "request_id", error.detail or error.text)
    if error.code == ErrorCode.E_GRAMMAR:
        return GrammarError(error.field or "grammar", error.detail or error.text)
    if error.code in _REQUESTS_FAULT:
        return InvalidRequest(error.field or "request", error.detail or error.text)
    if error.code == ErrorCode.E_OVERLOADED:
        return Overloaded(error.text, error.retry_after_ms / 1000)
    if error.code == ErrorCode.E_SLOW_CONSUMER:
        return SlowConsumer(error.text)
    if error.code == ErrorCode.E_WORKER_LOST:
        return WorkerLost(error.text)
    if error.code == ErrorCode.E_SHUTDOWN:
        return EngineClosed(error.text)
    if error.code == ErrorCode.E_NOT_FOUND:
        return ConnectionLost(error.text)
    if error.code == ErrorCode.E_INTERNAL:
        return InternalError(error.text)
    return EngineError(f"{error.name}: {error.text}")


_REQUESTS_FAULT: Final = frozenset({ErrorCode.E_DECODE, ErrorCode.E_TOO_LARGE, ErrorCode.E_INVALID_PARAM})


def _printable(text: str) -> str:
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown[:MAX_DETAIL_CHARACTERS]
