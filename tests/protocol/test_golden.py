"""The frames of the worker wire are, byte for byte, those of the golden file."""

from __future__ import annotations

from typing import Final

import pytest

from deepinfer_protocol.messages import WIRE_REVISION
from protocol.frames import Frame, decode_any, encode_any, golden_frames, read_golden, readable, verdict_of

REVISION, FRAMES = read_golden()
ACCEPTED: Final = [frame for frame in FRAMES if frame.verdict == "ok"]
REFUSED: Final = [frame for frame in FRAMES if frame.verdict != "ok"]
ON_PURPOSE: Final = (
    "the frames have changed; if that is on purpose, raise WIRE_REVISION in deepinfer_protocol/messages.py and run "
    "`cd tests && python -m protocol.frames`"
)


def by_name(frame: Frame) -> str:
    return frame.name.replace(" ", "-")


def test_the_golden_file_is_of_this_revision() -> None:
    assert REVISION == WIRE_REVISION, ON_PURPOSE


def test_the_golden_file_holds_what_the_cases_give() -> None:
    made = {frame.name: (frame.data.hex(), frame.verdict) for frame in golden_frames()}
    kept = {frame.name: (frame.data.hex(), frame.verdict) for frame in FRAMES}
    assert made == kept, ON_PURPOSE
    assert len(FRAMES) == len(kept), "two frames have one name"


def test_every_kind_and_enough_refusals_are_there() -> None:
    kinds = {frame.value["message"] for frame in ACCEPTED}
    assert kinds == {
        *("Hello", "Ready", "Progress", "Fault", "Shutdown", "StepPlan", "MaskBatch", "StepResult", "WorkerConfig")
    }
    assert len(REFUSED) >= 40


@pytest.mark.parametrize("frame", ACCEPTED, ids=by_name)
def test_a_frame_is_read_and_written_as_ever(frame: Frame) -> None:
    message = decode_any(frame.name, frame.data)
    assert readable(message) == frame.value, ON_PURPOSE
    assert encode_any(message) == frame.data, ON_PURPOSE


@pytest.mark.parametrize("frame", REFUSED, ids=by_name)
def test_a_frame_is_refused_for_its_reason(frame: Frame) -> None:
    assert verdict_of(frame.name, frame.data).startswith(frame.verdict), ON_PURPOSE
