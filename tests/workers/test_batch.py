"""What a plan may name: admissions within the bounds of a worker, and those that are refused."""

from __future__ import annotations

from typing import Final

import pytest

from deepinfer_protocol import ProtocolError
from deepinfer_workers.batch import Admission, DeviceBatch, Limits
from doubles.driver import admit, plan

LIMITS: Final = Limits(num_slots=2, num_blocks=8, block_size=4, max_len=16, vocab_size=50, max_batch_positions=32)


def admitted(num_tokens: int, length: int, floor: int, num_blocks: int) -> Admission:
    step = plan(admits=[admit(1, [7] * num_tokens, range(num_blocks), length=length, floor=floor)])
    (admission,) = DeviceBatch.from_plan(step, LIMITS).admissions
    return admission


@pytest.mark.parametrize(("length", "floor"), [(0, 0), (3, 8), (8, 8), (0, 9)])
def test_an_admission_says_where_it_computes_and_where_it_writes(length: int, floor: int) -> None:
    admission = admitted(num_tokens=10, length=length, floor=floor, num_blocks=3)
    assert (admission.length, admission.floor) == (length, floor)
    assert admission.block_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("num_tokens", "length", "floor", "num_blocks", "words"),
    [
        (10, 9, 8, 3, r"3 blocks of 4 for length 9, floor 8, at most 4"),
        (10, 4, 8, 1, r"1 blocks of 4 for length 4, floor 8, at most 4"),
        (10, 4, 10, 3, r"10 tokens at floor 10, the model takes 16 positions"),
        (18, 4, 8, 4, r"18 tokens at floor 8, the model takes 16 positions"),
        (10, 4, 8, 5, r"5 blocks of 4 for length 4, floor 8, at most 4"),
    ],
)
def test_a_floor_that_its_tokens_or_blocks_do_not_reach_is_refused(
    num_tokens: int, length: int, floor: int, num_blocks: int, words: str
) -> None:
    with pytest.raises(ProtocolError, match=f"admission to slot 1: {words}"):
        admitted(num_tokens, length, floor, num_blocks)
