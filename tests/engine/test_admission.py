"""Bad input is refused before the core sees it: by a typed error that names the field and the limit, at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pytest

from deepinfer.admission import (
    ModelLimits,
    admit,
    check_params,
    check_priority,
    check_request_id,
    check_timeout,
    check_token_ids,
    freeze_params,
    is_long,
)
from deepinfer.errors import ContextLengthExceeded, InvalidRequest
from deepinfer_protocol import LogitShaping, SamplingParams, SlotSampling, pack_float32, pack_int32

LIMITS = ModelLimits(vocab_size=1000, max_model_len=100, max_cached_tokens=96, eos_token_ids=(2, 7), has_tokenizer=True)
NAN, INF = float("nan"), float("inf")

BAD_PARAMS: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "1 to"),
    ("max_tokens", -5, "1 to"),
    ("max_tokens", 2**31, "1 to 2147483647"),
    ("max_tokens", 1.5, "integer"),
    ("max_tokens", True, "integer"),
    ("max_tokens", "16", "integer"),
    ("min_tokens", -1, "0 to 96"),
    ("min_tokens", 97, "0 to 96"),
    ("temperature", -0.1, "0.0 to 100.0"),
    ("temperature", NAN, "0.0 to 100.0"),
    ("temperature", INF, "0.0 to 100.0"),
    ("temperature", -INF, "0.0 to 100.0"),
    ("temperature", "hot", "number"),
    ("temperature", None, "number"),
    ("top_p", 0.0, "more than 0"),
    ("top_p", -0.5, "0.0 to 1.0"),
    ("top_p", 1.01, "0.0 to 1.0"),
    ("top_p", NAN, "0.0 to 1.0"),
    ("top_k", -2, "-1 to"),
    ("top_k", 2**31, "-1 to"),
    ("top_k", 2.0, "integer"),
    ("n", 0, "1 to 128"),
    ("n", -1, "1 to 128"),
    ("n", 129, "1 to 128"),
    ("n", 10**9, "1 to 128"),
    ("n", 2**63, "1 to 128"),
    ("logprobs", -1, "0 to 20"),
    ("logprobs", 21, "0 to 20"),
    ("logprobs", 10**12, "0 to 20"),
    ("seq_seed", -1, "0 to 9223372036854775807"),
    ("seq_seed", 2**63, "0 to 9223372036854775807"),
    ("seq_seed", 0.5, "integer"),
    ("ignore_eos", 1, "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("detokenize", "no", "True or False"),
    ("min_p", -0.1, "0.0 to 1.0"),
    ("min_p", 1.5, "0.0 to 1.0"),
    ("min_p", NAN, "0.0 to 1.0"),
    ("min_p", None, "number"),
    ("repetition_penalty", 0, "0.01 to 100.0"),
    ("repetition_penalty", -1.0, "0.01 to 100.0"),
    ("repetition_penalty", INF, "0.01 to 100.0"),
    ("repetition_penalty", "1", "number"),
    ("presence_penalty", 2.1, "-2.0 to 2.0"),
    ("presence_penalty", NAN, "-2.0 to 2.0"),
    ("frequency_penalty", -2.1, "-2.0 to 2.0"),
    ("frequency_penalty", True, "number"),
    ("logit_bias", [5], "mapping of token ids"),
    ("logit_bias", {1000: 1.0}, "0 to 999"),
    ("logit_bias", {-1: 1.0}, "0 to 999"),
    ("logit_bias", {"a": 1.0}, "integer"),
    ("logit_bias", {1.0: 1.0}, "integer"),
    ("logit_bias", {5: 100.5}, "-100.0 to 100.0"),
    ("logit_bias", {5: NAN}, "-100.0 to 100.0"),
    ("logit_bias", {5: "x"}, "number"),
    ("logit_bias", {5: 1.0, "5": 2.0}, "two biases"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024"),
    ("allowed_token_ids", [], "no token could be sampled"),
    ("allowed_token_ids", [1000], "0 to 999"),
    ("allowed_token_ids", [-1], "0 to 999"),
    ("allowed_token_ids", ["a"], "integer"),
    ("allowed_token_ids", [1.5], "integer"),
    ("allowed_token_ids", "12", "list of token ids"),
    ("allowed_token_ids", {1, 2}, "list of token ids"),
    ("allowed_token_ids", [1] * 1001, "at most 1000"),
    ("banned_token_ids", [1000], "0 to 999"),
    ("banned_token_ids", [2**31], "0 to 999"),
    ("banned_token_ids", b"ab", "list of token ids"),
    ("banned_token_ids", 5, "list of token ids"),
    ("bad_words", "word", "list of words"),
    ("bad_words", [""], "1 to 1024 characters"),
    ("bad_words", ["  "], "1 to 1024 characters"),
    ("bad_words", ["x" * 1025], "1 to 1024 characters"),
    ("bad_words", [[]], "without tokens"),
    ("bad_words", [[1000]], "0 to 999"),
    ("bad_words", [[1, "a"]], "integer"),
    ("bad_words", [5], "list of token ids"),
    ("bad_words", ["x"] * 1025, "at most 1024"),
    ("include_stop_str_in_output", 1, "True or False"),
    ("skip_reading_prefix_cache", 1, "True or False"),
    ("prompt_logprobs", -1, "0 to 20"),
    ("prompt_logprobs", 21, "0 to 20"),
    ("prompt_logprobs", True, "integer"),
    ("stop_token_ids", [1000], "0 to 999"),
    ("stop_token_ids", [-1], "0 to 999"),
    ("stop_token_ids", [2**31], "0 to 999"),
    ("stop_token_ids", ["a"], "integer"),
    ("stop_token_ids", "12", "list of token ids"),
    ("stop_token_ids", 5, "list of token ids"),
    ("stop_token_ids", list(range(600)), "at most 512"),
    ("stop", [""], "1 to 1024 characters"),
    ("stop", "", "1 to 1024 characters"),
    ("stop", ["x" * 1025], "1 to 1024 characters"),
    ("stop", ["x"] * 65, "at most 64"),
    ("stop", [b"x"], "1 to 1024 characters"),
    ("stop", b"x", "string or a list"),
    ("stop", 7, "string or a list"),
]


@pytest.mark.parametrize(("field", "value", "limit"), BAD_PARAMS, ids=lambda value: f"{value!r:.24}")
def test_a_parameter_out_of_bounds_is_named_with_its_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_params(SamplingParams(**{field: value}), LIMITS)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ") and limit in str(caught.value)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([1000], "0 to 999"),
    ([5, -1], "0 to 999"),
    ([2**31], "0 to 999"),
    ([2**70], "0 to 999"),
    ([1.5], "integer"),
    (["a"], "integer"),
    ([None], "integer"),
    ([[1]], "integer"),
    (b"bytes", "text or a sequence"),
    (17, "text or a sequence"),
    ({1, 2}, "text or a sequence"),
]


@pytest.mark.parametrize(("prompt", "limit"), BAD_PROMPTS, ids=lambda value: f"{value!r:.24}")
def test_a_prompt_that_the_model_does_not_know_is_refused(prompt: Any, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit) as caught:
        check_token_ids(prompt, LIMITS)
    assert caught.value.field == "prompt"


def test_the_context_is_the_smaller_of_model_and_cache() -> None:
    assert LIMITS.max_length == 96
    with pytest.raises(InvalidRequest, match="is empty"):
        admit(SamplingParams(), 0, LIMITS)
    with pytest.raises(ContextLengthExceeded, match="at most 95"):
        check_token_ids([1] * 96, LIMITS)
    with pytest.raises(ContextLengthExceeded, match="90 prompt tokens and 7 new ones make 97, 96 fit") as caught:
        admit(SamplingParams(max_tokens=7), 90, LIMITS)
    assert caught.value.field == "max_tokens"
    assert admit(SamplingParams(max_tokens=6), 90, LIMITS).max_length == 96
    assert admit(SamplingParams(), 90, LIMITS).max_length == 96


def test_fields_that_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens: 5, more than max_tokens 4"):
        check_params(SamplingParams(min_tokens=5, max_tokens=4), LIMITS)
    with pytest.raises(InvalidRequest, match="stop: stop strings need text"):
        check_params(SamplingParams(stop="x", detokenize=False), LIMITS)
    with pytest.raises(InvalidRequest, match="params: a dict came"):
        check_params({"max_tokens": 3}, LIMITS)


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "a\nb", "é", 5, b"id", "\x1b[31m"])
def test_request_ids_are_plain(request_id: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"request_id: .*1 to 128 characters"):
        check_request_id(request_id)


@pytest.mark.parametrize("priority", [2_000_000, -2_000_000, 1.0, None, "high"])
def test_priorities_are_bounded_integers(priority: Any) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        check_priority(priority)


@pytest.mark.parametrize("timeout_s", [-1, NAN, INF, "5", True])
def test_timeouts_are_seconds(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        check_timeout("timeout_s", timeout_s)


def test_what_is_right_becomes_words_of_the_device() -> None:
    params = check_params(
        SamplingParams(max_tokens=9, min_tokens=2, temperature=0, top_k=-1, n=2, stop="x", stop_token_ids=[11]), LIMITS
    )
    admitted = admit(params, 10, LIMITS)
    assert admitted.max_length == 19
    assert admitted.stop_ids == {2, 7, 11} and admitted.stop_strings == ("x",)
    stop_ids = b"\2\0\0\0\7\0\0\0\x0b\0\0\0"
    assert admitted.sampling == [SlotSampling(0.0, 1.0, 0, 0, 12, stop_ids, -1, 10)] * 2
    assert admit(SamplingParams(ignore_eos=True), 10, LIMITS).stop_ids == set()


def shaping(params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> LogitShaping:
    found = admit(check_params(params, LIMITS), 10, LIMITS, bad_words).sampling[0].shaping
    assert found is not None
    return found


def test_what_is_not_asked_for_is_not_sent() -> None:
    assert admit(SamplingParams(), 10, LIMITS).sampling[0].shaping is None
    nothing = SamplingParams(
        stop=None, stop_token_ids=None, logit_bias=None, allowed_token_ids=None, banned_token_ids=None, bad_words=None
    )
    assert admit(check_params(nothing, LIMITS), 10, LIMITS).sampling[0].shaping is None
    assert check_params(SamplingParams(skip_reading_prefix_cache=None), LIMITS).n == 1
    empty = SamplingParams(logit_bias={}, banned_token_ids=[], bad_words=[])
    assert admit(check_params(empty, LIMITS), 10, LIMITS).sampling[0].shaping is None


def test_penalties_biases_and_bans_become_words_of_the_device() -> None:
    as_json: dict[Any, float] = {"9": 2, 4: -100}
    params = SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias=as_json,
        banned_token_ids=[7, 4],
    )
    assert shaping(params, [[5], [1, 2, 3]]) == LogitShaping(
        1.5,
        1.0,
        -1.0,
        pack_int32([4, 5, 7, 9]),
        pack_float32([-INF, -INF, -INF, 2.0]),  # a ban wins over a bias
        b"",
        pack_int32([3, 1, 2, 3]),
    )


def test_allowed_tokens_travel_as_bits_without_those_that_are_banned() -> None:
    found = shaping(SamplingParams(allowed_token_ids=[0, 33, 999], banned_token_ids=[33], logit_bias={0: 1}))
    assert len(found.allowed_bits) == 4 * 32
    assert int.from_bytes(found.allowed_bits, "little") == 1 | 1 << 999
    assert (found.bias_ids, found.bias_values) == (pack_int32([0]), pack_float32([1.0]))


def test_many_bans_travel_as_bits() -> None:
    limits = msgspec.structs.replace(LIMITS, vocab_size=5000)
    params = check_params(SamplingParams(banned_token_ids=range(3000)), limits)
    found = admit(params, 10, limits).sampling[0].shaping
    assert found is not None and found.bias_ids == b""
    assert int.from_bytes(found.allowed_bits, "little") == (1 << 5000) - (1 << 3000)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allowed_token_ids": [5], "banned_token_ids": [5]}, "allowed_token_ids: every token of it is banned"),
        ({"allowed_token_ids": [5], "bad_words": [[5]]}, "allowed_token_ids: every token of it is banned"),
        ({"banned_token_ids": range(1000)}, "banned_token_ids: every token is banned"),
        ({"allowed_token_ids": [2, 7], "min_tokens": 3}, "min_tokens: 3, every allowed token ends the sample"),
    ],
)
def test_what_would_leave_no_token_is_refused(fields: dict[str, Any], words: str) -> None:
    params = check_params(SamplingParams(**fields), LIMITS)
    with pytest.raises(InvalidRequest, match=words):
        admit(params, 10, LIMITS, fields.get("bad_words", ()))


def test_only_the_first_sample_has_the_log_probabilities_of_the_prompt() -> None:
    found = admit(SamplingParams(n=3, prompt_logprobs=2), 10, LIMITS).sampling
    assert [sampling.num_prompt_logprobs for sampling in found] == [2, -1, -1]
    assert {sampling.num_prompt for sampling in found} == {10}


def test_a_stop_token_that_the_user_named_is_told() -> None:
    params = SamplingParams(stop_token_ids=[2, 11])
    assert admit(params, 10, LIMITS).told_stop_ids == {11}
    assert admit(msgspec.structs.replace(params, ignore_eos=True), 10, LIMITS).told_stop_ids == {2, 11}


def test_words_as_text_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequest, match="bad_words: words as text need a tokenizer"):
        check_params(SamplingParams(bad_words=["x"]), msgspec.structs.replace(LIMITS, has_tokenizer=False))


def test_long_lists_and_text_are_work_for_a_thread() -> None:
    assert not is_long(SamplingParams(allowed_token_ids=[1, 2], bad_words=[[1, 2]], stop=["ab"], n=128))
    assert is_long(SamplingParams(bad_words=[[1] * 600] * 2)) and is_long(SamplingParams(stop=["a" * 1000, "b" * 100]))
    assert is_long(SamplingParams(stop=["ab"] * 64, n=128)) and is_long(SamplingParams(stop="a" * 1025))
    assert is_long(SamplingParams(bad_words=["x"])) and is_long(SamplingParams(banned_token_ids=range(2000)))


def test_seeds_are_kept_apart_and_kept() -> None:
    seeded = [admit(SamplingParams(seq_seed=5, n=3), 10, LIMITS) for _ in range(2)]
    seeds = [sampling.seed for sampling in seeded[0].sampling]
    assert seeded[0] == seeded[1] and seeds[0] == 5 and len(set(seeds)) == 3
    assert admit(SamplingParams(), 10, LIMITS).sampling != admit(SamplingParams(), 10, LIMITS).sampling


def test_refusals_take_no_time_and_no_memory() -> None:
    """The cheapest of several tries: this machine may be busy."""
    cases = [
        SamplingParams(n=10**9),
        SamplingParams(stop=["x"] * 10**5),
        SamplingParams(stop_token_ids=range(10**6)),
        SamplingParams(allowed_token_ids=range(10**6)),
        SamplingParams(logit_bias=dict.fromkeys(range(10**5), 1.0)),
        SamplingParams(bad_words=["x"] * 10**5),
    ]
    for params in cases:
        assert min(_refusal_s(params) for _ in range(20)) < 0.001


HUGE: Final = 10**5000
LONG: Final = "x" * 10**7


class Loud:
    def __repr__(self) -> str:
        raise AssertionError("a refusal runs no code of what came")


LISTED: Final = ("stop", "stop_token_ids", "allowed_token_ids", "banned_token_ids", "bad_words")
FIELDS: Final = [*{field: None for field, _, _ in BAD_PARAMS}, "priority", "request_id", "timeout_s"]


@pytest.mark.parametrize("value", [HUGE, -HUGE, LONG, LONG.encode(), Loud(), [LONG], {"a": HUGE}], ids=type)
@pytest.mark.parametrize("field", FIELDS)
def test_a_refusal_shows_little_of_what_came(field: str, value: Any) -> None:
    """However large it is; the cheapest of several tries."""
    assert min(_huge_refusal_s(field, value) for _ in range(20)) < 0.001


def _huge_refusal_s(field: str, value: Any) -> float:
    listed: Any = [value] if field in LISTED else value
    params: dict[str, Any] = {field: listed}
    started_s = time.perf_counter()
    with pytest.raises(InvalidRequest) as caught:
        match field:
            case "priority":
                check_priority(value)
            case "request_id":
                check_request_id(value)
            case "timeout_s":
                check_timeout(field, value)
            case _:
                check_params(SamplingParams(**params), LIMITS)
    elapsed_s = time.perf_counter() - started_s
    assert caught.value.field == field and len(str(caught.value)) < 160
    return elapsed_s


def _refusal_s(params: SamplingParams) -> float:
    started_s = time.perf_counter()
    with pytest.raises(InvalidRequest):
        check_params(params, LIMITS)
    return time.perf_counter() - started_s


def test_numbers_and_texts_of_the_users_own_classes_become_plain_ones() -> None:
    """The codec of the wire takes no others."""

    class Number(int):
        pass

    class Name(str):
        pass

    given = SamplingParams(
        top_k=Number(5),
        logprobs=Number(2),
        prompt_logprobs=Number(1),
        min_tokens=Number(2),
        max_tokens=Number(9),
        seq_seed=Number(3),
        stop_token_ids=[Number(4)],
        allowed_token_ids=[Number(4), Number(6)],
        n=Number(2),
    )
    found = admit(check_params(given, LIMITS), 10, LIMITS)
    msgspec.msgpack.encode(found.sampling)
    assert {type(token) for token in found.stop_ids | found.told_stop_ids} == {int} == {type(found.max_length)}
    assert type(check_request_id(Name("abc"))) is str


def test_a_range_that_no_list_could_hold_is_refused() -> None:
    endless = range(10**30)
    with pytest.raises(InvalidRequest, match="prompt: a range of too many items came"):
        check_token_ids(endless, LIMITS)
    for field in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        with pytest.raises(InvalidRequest, match=f"{field}: a range of too many items came"):
            check_params(SamplingParams(**{field: endless}), LIMITS)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="bad_words: a range of too many"):
        check_params(SamplingParams(bad_words=[endless]), LIMITS)


def test_truth_is_no_token() -> None:
    for ids in ([True], (5, False)):
        with pytest.raises(InvalidRequest, match="prompt: every token id must be an integer"):
            check_token_ids(ids, LIMITS)
        with pytest.raises(InvalidRequest, match="banned_token_ids: every token id must be an integer"):
            check_params(SamplingParams(banned_token_ids=ids), LIMITS)


def test_too_many_bad_words_are_refused_before_all_of_them_are_read() -> None:
    read: list[int] = []

    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            read.append(len(self))
            return super().__iter__()

    with pytest.raises(InvalidRequest, match="bad_words: 9009 token ids and lengths"):
        check_params(SamplingParams(bad_words=[Watched([1] * 1000) for _ in range(1000)]), LIMITS)
    assert sum(read) <= 3 * 8192
    with pytest.raises(InvalidRequest, match="bad_words: 9009 token ids and lengths, at most 8192"):
        admit(SamplingParams(), 10, LIMITS, [[1] * 1000] * 9)  # as texts become them


def test_frozen_params_do_not_follow_the_callers_lists() -> None:
    bias, stops, words, word, ids = {5: 1.0}, ["a"], ["x"], [3, 4], [7]
    lists = {"stop": stops, "bad_words": [*words, word], "stop_token_ids": ids, "banned_token_ids": ids}
    given = SamplingParams(logit_bias=bias, seq_seed=1, **lists)  # type: ignore[arg-type]
    frozen = freeze_params(check_params(given, LIMITS))
    before = admit(frozen, 10, LIMITS, [[3, 4]])
    bias[6] = NAN
    for changed in (stops, word, ids):
        changed.clear()
    assert admit(frozen, 10, LIMITS, [[3, 4]]) == before
    assert frozen.stop == ("a",) and frozen.bad_words is not None and list(frozen.bad_words[1]) == [3, 4]
