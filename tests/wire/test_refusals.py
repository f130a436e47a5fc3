"""Every error of the engine that a request can meet arrives as itself."""

from __future__ import annotations

import pytest

from deepinfer import (
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
from deepinfer.wire.refusals import from_wire, to_wire
from deepinfer_protocol.client import ErrorCode


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("top_p", "2.0, a number of 0.0 to 1.0 is expected"),
        ContextLengthExceeded("max_tokens", "3 prompt tokens and 9 new ones make 12, 8 fit"),
        DuplicateRequestId("request_id", "r1 is open"),
        GrammarError("json_schema", 'Unimplemented keys: ["not"]'),
        Overloaded("4096 requests wait", 1.5),
        SlowConsumer("not read"),
        WorkerLost("rank 0 has died"),
        EngineClosed("the engine is closed"),
        EngineError("it has failed"),
        InternalError("a request has failed"),
    ],
)
def test_an_error_arrives_as_itself(error: DeepInferError) -> None:
    told = to_wire(error, "r1", 3)
    assert (told.id, told.seq, told.retryable) == ("r1", 3, error.retryable or isinstance(error, EngineClosed))
    arrived = from_wire(told)
    assert type(arrived) is type(error)
    if isinstance(error, InvalidRequest):
        assert str(arrived) == str(error)
    if isinstance(error, Overloaded) and isinstance(arrived, Overloaded):
        assert arrived.retry_after_s == error.retry_after_s


def test_what_is_no_error_of_ours_is_told_without_its_text() -> None:
    told = to_wire(KeyError("/secret"))
    assert told.code == ErrorCode.E_INTERNAL and "secret" not in repr(told)


def test_control_characters_do_not_travel() -> None:
    assert to_wire(InvalidRequest("prompt", "a\x1b[31m\nb" + "c" * 2000)).detail[:10] == "a [31m bcc"
