"""Every error that a user can meet, with a stable `code`. Knows nothing of where they are raised.

DeepInferError
├── InvalidRequest                refused before the core sees it; names the field and the limit
│   ├── ContextLengthExceeded
│   ├── DuplicateRequestId
│   └── GrammarError              a schema, an expression or a grammar that cannot be had
├── Overloaded                    refused for now; says when to come back
├── SlowConsumer                  the stream was held but not read for too long
├── ModelError                    the model cannot be served
│   ├── UnknownModel
│   ├── ModelFileError            names the file
│   ├── ModelTooLarge
│   └── UnsupportedModel
├── ConfigError                   a setting of the engine
└── EngineError
    ├── WorkerLost                a worker died, hung or drifted
    ├── WorkerStartError          a worker could not start
    ├── EngineClosed
    ├── ConnectionLost            of a client: the server cannot be reached, or has forgotten the stream
    ├── ConnectionRejected        of a client: the server does not admit it
    ├── InternalError             one request failed inside the engine; others go on
    ├── WrongLoop
    └── ForkedEngine
"""

from __future__ import annotations

from typing import ClassVar


class DeepInferError(Exception):
    """Base of all errors of DeepInfer."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class InvalidRequest(DeepInferError, ValueError):
    """The request cannot be served as it is. `field` is the parameter at fault."""

    code = "invalid_param"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and `max_tokens`, do not fit the model's context or the KV cache."""

    code = "context_length"


class DuplicateRequestId(InvalidRequest):
    """A request with this id is open."""

    code = "duplicate"


class GrammarError(InvalidRequest):
    """What the output is to be forced into cannot be parsed, or enforced within the limits, or contradicts what else
    was asked. Found before the request runs; a contradiction, or a limit, also while it does."""

    code = "grammar"


class Overloaded(DeepInferError):
    """More waits than the engine admits. Try again in about `retry_after_s` seconds."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message}; retry in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class SlowConsumer(DeepInferError):
    """The stream stood at its cap of unread tokens for longer than the engine waits."""

    code = "slow_consumer"


class ModelError(DeepInferError):
    """The model cannot be served."""

    code = "model"


class UnknownModel(ModelError):
    """Neither a known name nor a path."""

    code = "unknown_model"


class ModelFileError(ModelError):
    """A file of the model is missing, truncated or wrong. `file` names it."""

    code = "model_file"

    def __init__(self, file: str, message: str) -> None:
        super().__init__(f"{file}: {message}")
        self.file = file


class ModelTooLarge(ModelError):
    """This machine's memory does not hold the model. Both figures are in bytes."""

    code = "model_too_large"

    def __init__(self, message: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class UnsupportedModel(ModelError):
    """The files are whole, but this runtime does not serve such a model."""

    code = "unsupported_model"


class ConfigError(DeepInferError, ValueError):
    """A setting of the engine is out of its bounds. `field` names the argument or the environment variable."""

    code = "config"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class EngineError(DeepInferError):
    """The engine, not the request, is at fault."""

    code = "engine"


class WorkerLost(EngineError):
    """A worker died, stopped answering, or its state no longer matches the engine's."""

    code = "worker_lost"
    retryable = True


class WorkerStartError(EngineError):
    """A worker could not start."""

    code = "worker_start"


class EngineClosed(EngineError):
    """The engine is closed, or was never started."""

    code = "shutdown"


class ConnectionLost(EngineError):
    """Of a client: the server could not be reached in time, or has forgotten the stream."""

    code = "connection_lost"
    retryable = True


class ConnectionRejected(EngineError):
    """Of a client: the server does not admit it, or speaks no version of the wire that it does."""

    code = "connection_rejected"


class InternalError(EngineError):
    """One request failed inside the engine, which goes on with others."""

    code = "internal"


class WrongLoop(EngineError):
    """A stream belongs to the loop that started its engine; see `Engine(own_thread=True)`."""

    code = "wrong_loop"


class ForkedEngine(EngineError):
    """The engine was started before a fork; the child cannot use it."""

    code = "forked"
