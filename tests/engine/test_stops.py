from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import InvalidRequest
from deepinfer.stops import StopMatcher


def stream(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """All the text that comes out, and the stop that ended it."""
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        released, stop = matcher.push(piece)
        text += released
        if stop is not None:
            return text, stop
    return text + matcher.flush(), None


def naive(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def longest_start_of_a_stop(stops: tuple[str, ...], text: str) -> str:
    starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((start for start in starts if text.endswith(start)), key=len, default="")


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    return [text[start:end] for start, end in pairwise(edges)]


stop_sets = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)
texts = st.text("abc", max_size=40)


@given(stop_sets, texts, st.lists(st.integers(0, 50)))
def test_any_cut_of_the_text_gives_what_the_naive_definition_gives(
    stops: tuple[str, ...], text: str, cuts: list[int]
) -> None:
    assert stream(stops, cut(text, cuts)) == naive(stops, text)


@given(stop_sets, texts, st.lists(st.integers(0, 50)))
def test_no_more_is_held_than_may_become_a_stop(stops: tuple[str, ...], text: str, cuts: list[int]) -> None:
    matcher, seen, released = StopMatcher(stops), "", ""
    for piece in cut(text, cuts):
        seen += piece
        more, stop = matcher.push(piece)
        released += more
        if stop is not None:
            return
        assert released == seen.removesuffix(longest_start_of_a_stop(stops, seen)), (stops, seen)


def test_nothing_of_a_stop_over_several_tokens_is_released() -> None:
    matcher = StopMatcher(("DEFGHIJ",))
    released = [matcher.push(piece) for piece in ("abc DEF", "G", "HI", "J and more")]
    assert released == [("abc ", None), ("", None), ("", None), ("", "DEFGHIJ")]
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("pieces", "released"),
    [
        (["DEF", "G", "HI", "x"], ["", "", "", "DEFGHIx"]),
        (["DEF", "DEF"], ["", "DEF"]),  # the second may still become one
        (["abc"], ["abc"]),
    ],
)
def test_text_that_becomes_no_stop_is_released_at_once(pieces: list[str], released: list[str]) -> None:
    matcher = StopMatcher(("DEFGHIJ",))
    assert [matcher.push(piece).text for piece in pieces] == released


def test_the_end_of_the_text_releases_what_was_held() -> None:
    matcher = StopMatcher(("</answer>",))
    assert matcher.push("42 </ans") == ("42 ", None)
    assert (matcher.flush(), matcher.flush()) == ("</ans", "")


def test_the_first_complete_stop_wins_and_of_two_at_once_the_longest() -> None:
    assert stream(("abcd", "bc"), ["xabcd"]) == ("xa", "bc")
    assert stream(("cd", "bcd", "d"), ["abcd"]) == ("a", "bcd")


def test_stops_of_any_script() -> None:
    assert stream(("。", "👩‍👩‍👧"), ["你好", "👩‍👩", "‍👧!"]) == ("你好", "👩‍👩‍👧")


def test_a_fresh_matcher_has_the_same_stops_and_another_text() -> None:
    first = StopMatcher(("abab", "b!"))
    first.push("aba")
    second = first.fresh()
    assert second.push("xb") == ("x", None) and second.push("!") == ("", "b!")
    assert first.push("b") == ("", "abab")


def test_samples_share_what_is_computed_of_their_stops() -> None:
    # Tables of 65,536 characters, once for 128 samples.
    started_s = time.process_time()
    matcher = StopMatcher(tuple(f"{index:02}" * 512 for index in range(64)))
    once_s = time.process_time() - started_s
    fresh_s = min(_cpu_time_of(lambda: [matcher.fresh() for _ in range(128)]) for _ in range(3))
    assert fresh_s < 10 * once_s, (fresh_s, once_s)


def _cpu_time_of(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        StopMatcher(("a", ""))


@pytest.mark.parametrize("piece_size", [1, 4096])
def test_time_is_in_proportion_to_an_adversarial_text(piece_size: int) -> None:
    def cpu_time(num_chars: int) -> float:
        pieces = ["a" * piece_size] * (num_chars // piece_size)
        started = time.process_time()
        assert stream(("a" * 999 + "b",), pieces) == ("a" * piece_size * len(pieces), None)
        return time.process_time() - started

    short, long = (min(cpu_time(num_chars) for _ in range(3)) for num_chars in (10_000, 100_000))
    assert long / short < 20, (short, long)  # 10 if linear, 100 if quadratic
