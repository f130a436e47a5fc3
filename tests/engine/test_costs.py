"""Tables of what steps take: between and beyond what was measured, and files that are none."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.costs import CostTable
from deepinfer.errors import ConfigError
from deepinfer_protocol import StepCosts, pack_float32, pack_int32
from deepinfer_protocol.limits import MAX_COSTS

FILE: dict[str, Any] = {
    "accelerator": "cpu",
    "device": "a device",
    "model": "a model",
    "positions": [1, 8, 64],
    "forward_us": [1000, 1500.5, 9000],
    "draft_rows": [1, 8],
    "draft_us": [300.0, 700.0],
}


def write(path: Path, **changes: Any) -> Path:
    path.write_bytes(msgspec.json.encode(FILE | changes))
    return path


def test_between_two_sizes_times_lie_on_a_line() -> None:
    costs = CostTable([2, 6, 10], [100.0, 200.0, 240.0], [1, 3], [10.0, 30.0])
    assert [costs.forward_us(size) for size in (1, 2, 4, 6, 7, 10)] == [100, 100, 150, 200, 210, 240]
    assert [costs.draft_us(rows) for rows in (1, 2, 3)] == [10, 20, 30]


def test_padded_steps_are_flat_stretches_with_jags_between_them() -> None:
    costs = CostTable([1, 2, 3, 6, 7, 10], [100.0, 100.0, 200.0, 200.0, 240.0, 240.0])
    assert [costs.forward_us(size) for size in (1, 2, 3, 5, 6, 7, 9, 10)] == [100, 100, 200, 200, 200, 240, 240, 240]


def test_beyond_the_largest_size_times_rise_as_from_half_of_it_on() -> None:
    costs = CostTable([1, 8, 16, 32], [90.0, 100.0, 100.0, 260.0])
    assert costs.forward_us(32) == 260
    assert costs.forward_us(36) == pytest.approx(260 + 4 * 10)
    assert CostTable([4], [100.0]).forward_us(8) == pytest.approx(200), "of one size: as many times its time"


def test_a_larger_step_is_never_faster() -> None:
    costs = CostTable([1, 2, 3, 4], [100.0, 90.0, 120.0, 80.0])
    assert [costs.forward_us(size) for size in range(1, 6)] == [100, 100, 120, 120, 130], "its last two rise by 10 each"


def test_without_measured_drafts_they_take_no_time() -> None:
    assert CostTable([1], [100.0]).draft_us(7) == 0


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=9),
    st.lists(st.floats(0.5, 1e6), min_size=9, max_size=9),
    st.integers(0, 400),
    st.integers(1, 300),
)
def test_a_range_is_its_sizes_one_by_one_and_rises(
    gaps: list[int], times_us: list[float], start: int, count: int
) -> None:
    sizes = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    costs = CostTable(sizes, times_us[: len(sizes)])
    found = costs.forward_range(start, count)
    assert found == [costs.forward_us(size) for size in range(start, start + count)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(found))
    assert costs.forward_range(start, count) is not found, "a copy: the caller's own"


def test_a_table_comes_from_what_a_worker_measured() -> None:
    columns = pack_int32([1, 4]), pack_float32([10.0, 30.0]), pack_int32([1, 2]), pack_float32([5.0, 6.0])
    costs = CostTable.of(StepCosts(*columns))
    assert costs.forward_us(2) == pytest.approx(10 + 20 / 3)
    assert costs.draft_us(2) == 6
    with pytest.raises(ConfigError, match="forward_us: 1 times for 2 sizes"):
        CostTable.of(StepCosts(columns[0], pack_float32([1.0])))


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    costs = CostTable.read(write(tmp_path / "costs.json"), "cpu")
    assert (costs.forward_us(8), costs.draft_us(8)) == (1500.5, 700)
    again = tmp_path / "again.json"
    again.write_bytes(msgspec.json.encode(costs.file(accelerator="cpu", device="a device", model="a model")))
    assert msgspec.json.decode(again.read_bytes()) == FILE
    assert CostTable.read(again, "cpu").forward_points == costs.forward_points == [(1, 1000), (8, 1500.5), (64, 9000)]
    assert CostTable.read(again, "cpu").draft_points == [(1, 300), (8, 700)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accelerator": "nvidia"}, "accelerator: measured on 'nvidia', this is 'cpu'"),
        ({"positions": [], "forward_us": []}, "positions: at least one size is expected"),
        ({"positions": [1, 8]}, "forward_us: 3 times for 2 sizes"),
        ({"positions": [1, 8, 8]}, "positions: 8 behind 8: sizes rise"),
        ({"positions": [0, 8, 9]}, "positions: 0 behind 0: sizes rise"),
        ({"positions": [1, 8, 2**31]}, "positions: 2147483648 behind 8: sizes rise, up to 2147483647"),
        ({"forward_us": [1, 0, 3]}, "forward_us: 0.0 is no time: at least 0.001 us are expected"),
        ({"forward_us": [1, -5, 3]}, "forward_us: -5.0 is no time"),
        ({"draft_us": [1.0]}, "draft_us: 1 times for 2 sizes"),
        ({"draft_rows": [8, 1]}, "draft_rows: 1 behind 8: sizes rise"),
        ({"forward_us": "fast"}, "Expected `array`, got `str` - at `$.forward_us`"),
        ({"speed": 3}, "Object contains unknown field `speed`"),
        (
            {"positions": list(range(1, MAX_COSTS + 2)), "forward_us": [1.0] * (MAX_COSTS + 1)},
            f"positions: {MAX_COSTS + 1} sizes, the limit is {MAX_COSTS}",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_file_that_is_no_table_is_refused_by_its_field(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "costs.json", **changes)
    with pytest.raises(ConfigError) as refusal:
        CostTable.read(path, "cpu")
    assert refusal.value.field == "cost_table"
    assert str(refusal.value).startswith(f"cost_table: {path}: ")
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"", "Input data was truncated"),
        (b'{"draft_rows": ' + b"[" * 100_000, "`$.draft_rows[0]`"),
        (b"[1, 2]", "Expected `object`"),
        (b" " * (2 << 20), "more than 1048576 bytes"),
        (b'{"accelerator": "\xff"}', "UTF-8"),
        (b'{"accelerator": "cpu", "positions": [1], "forward_us": [NaN]}', "JSON is malformed"),
    ],
    ids=["absent", "empty", "deep", "array", "large", "not-utf8", "nan"],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cost_table: ") as refusal:
        CostTable.read(path, "cpu")
    assert reason.lower() in str(refusal.value).lower()


def test_times_that_are_no_numbers_are_refused() -> None:
    for us in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"forward_us: (nan|inf) is no time"):
            CostTable([1], [us])
