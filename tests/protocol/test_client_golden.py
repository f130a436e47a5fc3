"""The frames of the client wire are, byte for byte, those of the golden file, which every client's tests run."""

from __future__ import annotations

from collections import Counter
from typing import Final, get_args

import pytest

from deepinfer_protocol.client import CLIENT_VERSION, ClientMessage, ServerMessage, codec
from deepinfer_protocol.client.structure import read_kind
from protocol.client_cases import raw
from protocol.client_frames import Frame, decode, from_readable, golden_frames, read_golden, shortest, verdict_of

VERSION, FRAMES = read_golden()
ACCEPTED: Final = [frame for frame in FRAMES if frame.verdict == "ok"]
REFUSED: Final = [frame for frame in FRAMES if frame.verdict != "ok"]
ON_PURPOSE: Final = (
    "the frames have changed; if that is on purpose and old clients can live with it, run "
    "`cd tests && python -m protocol.client_frames`; else raise CLIENT_VERSION, too"
)


def by_name(frame: Frame) -> str:
    return frame.name.replace(" ", "-")


def test_the_golden_file_holds_what_the_cases_give() -> None:
    assert list(golden_frames()) == FRAMES, ON_PURPOSE
    assert VERSION == CLIENT_VERSION
    assert len({frame.name for frame in FRAMES}) == len(FRAMES) >= 300


def test_every_kind_and_every_verdict_are_there() -> None:
    kinds = {type(decode(frame.sender, frame.data)) for frame in ACCEPTED}
    assert kinds == {*get_args(ClientMessage), *get_args(ServerMessage)}
    verdicts = Counter(frame.verdict for frame in REFUSED)
    assert set(verdicts) == {"E_DECODE", "E_UNKNOWN_KIND"} and verdicts["E_DECODE"] > 200


def test_the_cases_say_what_is_refused() -> None:
    """The file's verdicts are the decoder's; these are what we meant."""
    strange = {name: verdict_of(case.sender, case.data) for name, case in raw().items()}
    assert {name: verdict for name, verdict in strange.items() if verdict != raw()[name].verdict} == {}


@pytest.mark.parametrize("frame", ACCEPTED, ids=by_name)
def test_a_frame_is_read_and_written_as_ever(frame: Frame) -> None:
    message = decode(frame.sender, frame.data)
    assert frame.value is not None
    assert message == from_readable(frame.value, frame.sender), ON_PURPOSE
    if frame.is_canonical:
        assert shortest(message) == frame.data, ON_PURPOSE


def test_a_frame_is_walked_once_at_most_also_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = list[bytes]()

    def walk(data: bytes) -> str:
        walked.append(data)
        return read_kind(data)

    monkeypatch.setattr(codec, "read_kind", walk)
    for frame in FRAMES:
        verdict_of(frame.sender, frame.data)
    left = iter([frame.data for frame in FRAMES])
    assert all(data in left for data in walked), "one was walked twice"
    assert len(walked) > 0.9 * len(FRAMES)  # all but plain deltas


@pytest.mark.parametrize("frame", REFUSED, ids=by_name)
def test_a_frame_is_refused_for_its_reason(frame: Frame) -> None:
    assert verdict_of(frame.sender, frame.data) == frame.verdict, ON_PURPOSE
