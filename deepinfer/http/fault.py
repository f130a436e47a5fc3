"""What goes wrong, in the words of HTTP: a status, a stable code, the field at fault, and the two forms of a body.

`code` is for programs and never changes; `message` is for people. Errors of the engine itself are told by their code
alone: what they say is for its log. Knows nothing of connections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from deepinfer.errors import (
    ContextLengthExceeded,
    DeepInferError,
    EngineClosed,
    EngineError,
    InvalidRequest,
    Overloaded,
    SlowConsumer,
    UnsupportedModel,
    WorkerLost,
)

RETRY_AFTER_S: Final = 1.0
"""Where nobody knows better."""
MAX_MESSAGE_CHARACTERS: Final = 500
_OPENAI_TYPES: Final[Mapping[int, str]] = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FIELDS: Final[Mapping[str, str]] = {"seq_seed": "seed"}
"""Fields of the engine that have another name in the APIs."""


class HttpFault(Exception):
    """Ends one request."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        more_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message[:MAX_MESSAGE_CHARACTERS]
        self.field = field
        self.retry_after_s = retry_after_s
        self._more_headers = more_headers

    @property
    def headers(self) -> dict[str, str]:
        found = {name.lower(): value for name, value in self._more_headers.items()}
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(math.ceil(self.retry_after_s), 1))
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def refused(field: str | None, message: str, code: str = "invalid_param") -> HttpFault:
    """What was asked cannot be served."""
    return HttpFault(400, code, message, field)


def head_too_large(max_head_bytes: int) -> HttpFault:
    return HttpFault(431, "head_too_large", f"line and headers: at most {max_head_bytes} bytes are read")


def fault_of(error: DeepInferError, names: Mapping[str, str] = MappingProxyType({})) -> HttpFault:
    """An error of the engine, as its user over HTTP gets it. `names` are what the API calls fields of the engine."""
    if isinstance(error, InvalidRequest):
        code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else error.code
        field = names.get(error.field) or _FIELDS.get(error.field, error.field)
        return refused(field, f"{field}: {str(error).removeprefix(f'{error.field}: ')}", code)
    if isinstance(error, Overloaded):
        return HttpFault(429, error.code, str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, SlowConsumer):
        return HttpFault(408, error.code, str(error))
    if isinstance(error, EngineClosed):
        return HttpFault(503, error.code, "the engine is closed", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, WorkerLost):
        return HttpFault(503, error.code, "the engine lost a worker", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, UnsupportedModel):
        return HttpFault(500, error.code, "the model's chat template failed")
    if isinstance(error, EngineError):
        return HttpFault(500, error.code, "the engine failed")
    return HttpFault(500, error.code, "the request failed")


def ended_early(reason: str) -> HttpFault:
    """A finish reason that is no answer."""
    if reason == "queue_timeout":
        return HttpFault(503, reason, "the request waited for too long", retry_after_s=RETRY_AFTER_S)
    if reason == "timeout":
        return HttpFault(504, reason, "the request took too long")
    return HttpFault(503, "aborted", "the request was aborted")


def openai_error(fault: HttpFault) -> dict[str, Any]:
    default = "invalid_request_error" if fault.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(fault.status, default)
    return {"error": {"message": fault.message, "type": kind, "param": fault.field, "code": fault.code}}


def anthropic_error(fault: HttpFault) -> dict[str, Any]:
    """With the code and the field beside what Anthropic has."""
    kind = _ANTHROPIC_TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    error = {"type": kind, "message": fault.message, "param": fault.field, "code": fault.code}
    return {"type": "error", "error": error}


def error_body(fault: HttpFault, path: str) -> bytes:
    """As the API at `path` has it."""
    return msgspec.json.encode((anthropic_error if is_anthropic(path) else openai_error)(fault))


def is_anthropic(path: str) -> bool:
    return "/v1/messages" in path
