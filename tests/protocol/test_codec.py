"""Whatever is valid survives the wire, and what the columns of a message may hold is what their definition says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_protocol import (
    VERSION,
    AnyMessage,
    Fault,
    Hello,
    LogitShaping,
    MaskBatch,
    Progress,
    ProtocolError,
    Ready,
    RowFlag,
    Shutdown,
    SlotAdmit,
    SlotSampling,
    StepCosts,
    StepPlan,
    StepResult,
    config_length,
    decode,
    decode_config,
    encode,
    encode_config,
    pack_float32,
    pack_int32,
    split_columns,
    split_words,
    unpack_int32,
    wire_version,
)
from deepinfer_protocol.codec import _check_range
from deepinfer_protocol.limits import (
    INT32_MAX,
    INT64_MAX,
    MAX_BIAS,
    MAX_BLOCKS,
    MAX_CONFIG_BYTES,
    MAX_DRAFTS,
    MAX_LENGTH,
    MAX_LOGPROBS,
    MAX_RANKS,
    MAX_SLOTS,
)
from deepinfer_protocol.messages import WIRE_REVISION
from protocol.cases import CONFIG, columns

WIRE: Final = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def upto(high: int, low: int = 0) -> st.SearchStrategy[int]:
    return st.integers(low, high)


def ints(high: int, low: int = 0, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    return st.lists(upto(high, low), max_size=max_size)


def packed(high: int, low: int = 0, max_size: int = 12) -> st.SearchStrategy[bytes]:
    return ints(high, low, max_size).map(pack_int32)


count, int64, rank, slot = upto(INT32_MAX), upto(INT64_MAX), upto(MAX_RANKS - 1), upto(MAX_SLOTS - 1)
short_text = st.text(max_size=256)


@st.composite
def shapings(draw: st.DrawFn) -> LogitShaping:
    ids = draw(st.lists(count, unique=True, max_size=6))
    words = draw(st.lists(ints(INT32_MAX, max_size=4).filter(bool), max_size=4))
    biases = st.one_of(st.just(float("-inf")), st.floats(-MAX_BIAS, MAX_BIAS, width=32))
    return LogitShaping(
        repetition_penalty=draw(st.floats(0.01, 100)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        bias_ids=pack_int32(ids),
        bias_values=pack_float32([draw(biases) for _ in ids]),
        allowed_bits=draw(st.binary(min_size=4, max_size=4)) * draw(upto(3)),
        bad_words=pack_int32([number for word in words for number in (len(word), *word)]),
    )


samplings = st.builds(
    SlotSampling,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=count,
    seed=int64,
    min_length=upto(MAX_LENGTH),
    stop_ids=packed(INT32_MAX),
    num_logprobs=upto(MAX_LOGPROBS, -1),
    num_prompt=upto(1),
    min_p=st.floats(0, 1),
    num_prompt_logprobs=upto(MAX_LOGPROBS, -1),
    shaping=st.none() | shapings(),
)


@st.composite
def admits(draw: st.DrawFn) -> SlotAdmit:
    tokens = draw(st.lists(count, min_size=1, max_size=40))
    floor = draw(upto(len(tokens) - 1))
    return SlotAdmit(
        slot=draw(slot),
        generation=draw(count),
        length=draw(upto(floor)),
        floor=floor,
        tokens=pack_int32(tokens),
        block_ids=draw(packed(MAX_BLOCKS - 1)),
        sampling=draw(samplings),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    slots = draw(st.lists(slot, unique=True, max_size=12))
    rows = [draw(st.tuples(count, upto(1000, 1), upto(3))) for _ in slots]
    appends = draw(st.lists(st.tuples(slot, upto(MAX_BLOCKS - 1)), max_size=12))
    may_verify = [count == 1 and bool(flags & RowFlag.SAMPLE) for _, count, flags in rows]
    most_drafts = [draw(upto(MAX_DRAFTS)) if may else 0 for may in may_verify] if draw(st.booleans()) else []
    budget = draw(upto(INT32_MAX)) if most_drafts else 0
    num_positions = sum(row[1] for row in rows) + min(budget, sum(most_drafts))
    return StepPlan(
        epoch=draw(int64),
        step_id=draw(int64),
        rank=draw(rank),
        padded_positions=num_positions + draw(upto(1000)),
        retired=draw(packed(MAX_SLOTS - 1)),
        admits=draw(st.lists(admits(), max_size=3)),
        appends=columns([pair[0] for pair in appends], [pair[1] for pair in appends]),
        rows=columns(slots, *([row[i] for row in rows] for i in range(3))),
        most_drafts=columns(most_drafts),
        verify_budget=budget,
        num_drafts=draw(upto(MAX_DRAFTS)),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    rows = draw(st.lists(st.tuples(slot, count, upto(MAX_LENGTH, 1), upto(4)), max_size=12))
    num_tokens = sum(row[3] for row in rows)
    num_ranks, num_prompt_ranks = draw(upto(num_tokens)), draw(upto(4))
    num_logprobs = num_ranks * (1 + draw(upto(MAX_LOGPROBS)))
    num_prompt_logprobs = num_prompt_ranks * (1 + draw(upto(MAX_LOGPROBS)))
    num_drafts, has_verified = draw(upto(MAX_DRAFTS)), draw(st.booleans())
    return StepResult(
        *(draw(int64), draw(int64), draw(rank), draw(count), draw(count), draw(count)),
        rows=columns(*([row[i] for row in rows] for i in range(4))),
        tokens=pack_int32([draw(count) for _ in range(num_tokens)]),
        logprob_ids=pack_int32([draw(count)] * num_logprobs),
        logprobs=draw(st.binary(min_size=4, max_size=4)) * num_logprobs,
        logprob_ranks=pack_int32([draw(upto(INT32_MAX, 1))] * num_ranks),
        prompt_logprob_ids=pack_int32([draw(count)] * num_prompt_logprobs),
        prompt_logprobs=draw(st.binary(min_size=4, max_size=4)) * num_prompt_logprobs,
        prompt_logprob_ranks=pack_int32([draw(upto(INT32_MAX, 1))] * num_prompt_ranks),
        num_verified=columns([max(row[3] - 1, draw(upto(MAX_DRAFTS))) for row in rows] if has_verified else []),
        survivals=bytes([draw(upto(255))]) * (num_drafts * sum(row[3] > 0 for row in rows)),
        predicted=pack_float32([draw(st.floats(0, 1e6, width=32))] * num_drafts),
        draft_us=draw(count),
        draft_ids=pack_int32([draw(count)] * (num_drafts * draw(upto(len(rows))))),
    )


@st.composite
def masks(draw: st.DrawFn) -> MaskBatch:
    slots = draw(st.lists(slot, unique=True, max_size=6))
    num_words = draw(upto(9, 1))
    counts = [draw(upto(1 + MAX_DRAFTS, 1)) for _ in slots] if draw(st.booleans()) else []
    bits = draw(st.binary(min_size=4 * num_words, max_size=4 * num_words)) * (sum(counts) or len(slots))
    return MaskBatch(draw(int64), draw(int64), draw(rank), pack_int32(slots), bits, pack_int32(counts))


@st.composite
def readies(draw: st.DrawFn) -> Ready:
    return Ready(
        epoch=draw(int64),
        rank=draw(rank),
        vocab_size=draw(upto(INT32_MAX, 1)),
        max_model_len=draw(upto(MAX_LENGTH, 1)),
        num_slots=draw(upto(MAX_SLOTS - 1, 1)),
        num_blocks=draw(upto(MAX_BLOCKS - 1, 1)),
        block_size=draw(upto(4096, 1)),
        block_bytes=draw(int64),
        slot_bytes=draw(int64),
        global_bytes_per_token=draw(st.floats(0, INT32_MAX)),
        bounded_replay_tokens=draw(upto(MAX_LENGTH)),
        exact_replay_tokens=draw(upto(MAX_LENGTH)),
        weights_version=draw(short_text),
        device=draw(short_text),
        num_drafts=draw(upto(MAX_DRAFTS)),
        costs=draw(st.none() | costs()),
    )


@st.composite
def costs(draw: st.DrawFn) -> StepCosts:
    sizes = [sorted(draw(st.sets(upto(INT32_MAX, 1), min_size=low, max_size=9))) for low in (1, 0)]
    times = [pack_float32([draw(st.floats(0, 1e9, width=32)) for _ in some]) for some in sizes]
    return StepCosts(columns(sizes[0]), times[0], columns(sizes[1]), times[1])


messages: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(Hello, version=short_text, epoch=int64, rank=rank, pid=count),
    readies(),
    st.builds(Progress, epoch=int64, rank=rank, done=int64, total=int64),
    st.builds(Fault, epoch=int64, rank=rank, code=short_text, text=st.text(max_size=4096)),
    st.builds(Shutdown, epoch=int64),
    plans(),
    masks(),
    results(),
)


@settings(WIRE, max_examples=600)
@given(messages)
def test_a_message_survives_the_wire(message: AnyMessage) -> None:
    frame = encode(message)
    assert decode(frame) == message
    assert encode(decode(memoryview(frame))) == frame


@WIRE
@given(st.lists(st.integers(-(2**31), INT32_MAX), max_size=60), st.integers(1, 4))
def test_columns_survive_packing(values: list[int], num_columns: int) -> None:
    assert list(unpack_int32(pack_int32(values))) == values
    whole = values * num_columns
    assert [list(column) for column in split_columns(pack_int32(whole), num_columns)] == [values] * num_columns


@WIRE
@given(st.lists(ints(INT32_MAX).filter(bool), max_size=8))
def test_words_survive_packing(words: list[list[int]]) -> None:
    packed_words = pack_int32([number for word in words for number in (len(word), *word)])
    assert [word.tolist() for word in split_words(packed_words)] == words


class Bounds(NamedTuple):
    low: int
    high: int


BOUNDS: Final = [
    Bounds(0, MAX_SLOTS - 1),
    Bounds(0, MAX_BLOCKS - 1),
    Bounds(0, INT32_MAX),
    Bounds(0, 3),
    Bounds(0, MAX_LENGTH),
    Bounds(1, MAX_LENGTH),
]


@settings(WIRE, max_examples=800)
@given(st.sampled_from(BOUNDS), st.data())
def test_a_column_is_within_its_bounds_as_defined(bounds: Bounds, data: st.DataObject) -> None:
    near = [bounds.low - 1, bounds.low, bounds.low + 1, bounds.high - 1, bounds.high, bounds.high + 1]
    edges = [value for value in (*near, -(2**31), -1, 0, INT32_MAX) if -(2**31) <= value <= INT32_MAX]
    inside = [value for value in edges if bounds.low <= value <= bounds.high]
    values = data.draw(st.lists(st.sampled_from(inside), max_size=20))
    if data.draw(st.booleans()):
        values.insert(data.draw(upto(len(values))), data.draw(st.sampled_from(edges)))
    assert is_accepted(values, bounds) == all(bounds.low <= value <= bounds.high for value in values), values


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 2048, 5000])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_one_value_outside_is_found_wherever_it_is(bounds: Bounds, size: int) -> None:
    values = [bounds.low, bounds.high] * size
    assert is_accepted(values[:size], bounds)
    for at in {0, size // 2, size - 1}:
        for stranger in {bounds.low - 1, min(bounds.high + 1, INT32_MAX)} - {bounds.high}:
            spoiled = values[:size]
            spoiled[at] = stranger
            assert not is_accepted(spoiled, bounds), (at, stranger)


def is_accepted(values: list[int], bounds: Bounds) -> bool:
    try:
        _check_range("column", pack_int32(values), bounds.low, bounds.high)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("figure", [-1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**31), -(2**63)])
def test_every_figure_of_the_configuration_has_bounds(figure: int) -> None:
    names = {name for name, value in msgspec.structs.asdict(CONFIG).items() if isinstance(value, int)}
    if 0 <= figure < 2**63:
        names -= {"epoch", "kv_cache_bytes"}  # they have 63 bits
    if figure == -1:
        names -= {"num_drafts"}  # as long as the model's own block
    for name in names:
        with pytest.raises(ProtocolError):
            decode_config(config_body(**{name: figure}))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -0.5])
def test_the_time_of_a_step_is_finite(seconds: float) -> None:
    with pytest.raises(ProtocolError, match="fake_step_s"):
        decode_config(config_body(fake_step_s=seconds))


def test_a_configuration_is_refused_beyond_its_limit_on_both_sides() -> None:
    large = msgspec.structs.replace(CONFIG, model="m" * MAX_CONFIG_BYTES)
    with pytest.raises(ProtocolError, match="at most 65536"):
        encode_config(large)
    with pytest.raises(ProtocolError, match="at most 65536"):
        config_length((MAX_CONFIG_BYTES + 1).to_bytes(4, "little"))
    assert config_length(MAX_CONFIG_BYTES.to_bytes(4, "little")) == MAX_CONFIG_BYTES


def config_body(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.asdict(CONFIG) | changes)


def test_a_version_names_package_and_revision() -> None:
    assert wire_version() == f"{VERSION}+wire{WIRE_REVISION}"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
