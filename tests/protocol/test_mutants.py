"""Mutated frames, at every decoder and at both ends of the client wire. `make test-nightly` throws many more."""

from __future__ import annotations

import time
from functools import cache
from typing import Final

import pytest

from deepinfer.wire.session import ServerSession
from protocol import fuzz
from protocol.fuzz import BLOCK, TARGETS, TURNS, Fates, FuzzFailure, checked, run_block, run_blocks

SEED: Final = 30
NUM_BLOCKS: Final = 108
"""Of `BLOCK` frames each."""


@cache
def all_fates() -> dict[str, Fates]:
    *_, (_, fates) = run_blocks(SEED, 0, NUM_BLOCKS)
    return fates


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
def test_nothing_comes_of_a_frame_but_what_may(target: str) -> None:
    fates = all_fates()[target]
    share = sum(each.name == target for each in TURNS) / len(TURNS)
    assert fates.total() == share * NUM_BLOCKS * BLOCK
    refused = sum(number for fate, number in fates.items() if fate.startswith("E_") or fate == "refused")
    assert fates.total() / 4 < refused < fates.total(), fates
    alive = {fate for fate in fates if not fate.startswith("E_")} - {"refused"}
    assert len(alive) == {"worker wire": 9, "client wire": 14, "server": 7, "client": 7}[target], fates


def test_they_are_a_hundred_thousand() -> None:
    assert sum(fates.total() for fates in all_fates().values()) >= 100_000


@pytest.mark.parametrize("block", [0, 4, 8, 11])
def test_a_block_is_always_the_same(block: int) -> None:
    assert run_block(7, block) == run_block(7, block)


# ---- what these tests would not let pass


def test_a_wrong_exception_is_told_with_how_to_meet_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        raise KeyError(len(data))

    monkeypatch.setattr(fuzz, "decode_worker", fail)
    with pytest.raises(FuzzFailure, match=r"worker wire, --seed 7 --block 0: KeyError\(\d+\) from [0-9a-f]+"):
        run_block(7, 0)


def test_a_frame_that_takes_too_long_is_told() -> None:
    def wait(data: bytes) -> str:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 1.1 * fuzz.MAX_FRAME_S:
            pass
        return "late"

    with pytest.raises(FuzzFailure, match=r"more than 0.005 s for abcd"):
        checked(wait, b"\xab\xcd")


@pytest.mark.parametrize("what", ["an answer to somebody else", "no answer", "a stream that is not forgotten"])
def test_a_server_that_is_not_as_it_must_be_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    send, forget = ServerSession._send, ServerSession._forget

    def send_wrongly(server: ServerSession, connection: bytes, message: object) -> None:
        if connection != fuzz.HONEST and what == "an answer to somebody else":
            connection = fuzz.HONEST
        if connection == fuzz.HONEST or what != "no answer":
            send(server, connection, message)  # type: ignore[arg-type]

    def forget_seldom(server: ServerSession, session: object, stream: object) -> None:
        if what != "a stream that is not forgotten":
            forget(server, session, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerSession, "_send", send_wrongly)
    monkeypatch.setattr(ServerSession, "_forget", forget_seldom)
    with pytest.raises(FuzzFailure):
        run_block(7, TURNS.index(next(target for target in TARGETS if target.name == "server")))
