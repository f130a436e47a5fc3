"""What the client wire says went wrong: numbers that never change their meaning, each with one text.

No number is used again for anything else. Knows nothing of what raises them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ErrorCode(IntEnum):
    """Below 10: the frame or its sender; below 20: the request; below 30: the load; below 40: the server."""

    E_PROTOCOL = 1
    E_VERSION = 2
    E_AUTH = 3
    E_DECODE = 4
    E_TOO_LARGE = 5
    E_UNKNOWN_KIND = 6
    E_HELLO = 7
    E_INVALID_PARAM = 10
    E_CONTEXT_LENGTH = 11
    E_GRAMMAR = 12
    E_DUPLICATE = 13
    E_NOT_FOUND = 14
    E_OVERLOADED = 20
    E_SLOW_CONSUMER = 21
    E_WORKER_LOST = 30
    E_SHUTDOWN = 31
    E_ENGINE_DEAD = 32
    E_INTERNAL = 33


TEXTS: Final = {
    ErrorCode.E_PROTOCOL: "this message is not allowed here",
    ErrorCode.E_VERSION: "no version of the wire that both ends speak",
    ErrorCode.E_AUTH: "not a client that this server admits",
    ErrorCode.E_DECODE: "not a message of the client wire",
    ErrorCode.E_TOO_LARGE: "the message is larger than the limit",
    ErrorCode.E_UNKNOWN_KIND: "no such kind of message",
    ErrorCode.E_HELLO: "this connection has not said HELLO",
    ErrorCode.E_INVALID_PARAM: "the request cannot be served as it is",
    ErrorCode.E_CONTEXT_LENGTH: "the request does not fit the model's context",
    ErrorCode.E_GRAMMAR: "the grammar or schema cannot be enforced",
    ErrorCode.E_DUPLICATE: "another request of this session has this id",
    ErrorCode.E_NOT_FOUND: "no such stream, or it is no longer kept",
    ErrorCode.E_OVERLOADED: "more waits than the server admits",
    ErrorCode.E_SLOW_CONSUMER: "the stream was not read for too long",
    ErrorCode.E_WORKER_LOST: "a worker was lost",
    ErrorCode.E_SHUTDOWN: "the server is shutting down",
    ErrorCode.E_ENGINE_DEAD: "the engine has failed",
    ErrorCode.E_INTERNAL: "an error inside the server",
}
RETRYABLE: Final = frozenset({ErrorCode.E_HELLO, ErrorCode.E_OVERLOADED, ErrorCode.E_WORKER_LOST, ErrorCode.E_SHUTDOWN})
"""The same request may succeed later, here or elsewhere."""
