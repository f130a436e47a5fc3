"""DeepSeek models through the whole engine: the same samples, to the last bit, whatever the schedule."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from msgspec.structs import replace

from benchmarks.bounded_agreement import measure, workload
from deepinfer import Completion, Engine, WorkerLost
from deepinfer_workers.models.deepseek.generator import write_model
from doubles.deepseek_requests import (
    GREEDY,
    SEEDED,
    VOCAB,
    Asked,
    Said,
    Watch,
    interrupted,
    one_after_another,
    own,
    said,
    said_alone,
    say,
    together,
)  # fmt: skip
from doubles.reading import tokens_of
from doubles.tiny_deepseek import tiny_v4, tiny_v41

EXACT: Final[dict[str, Any]] = {"num_threads": 1, "prefix_hits": "exact", "prefill_truncation": "off"}
PLAIN: Final[dict[str, Any]] = EXACT | {"overlap": False, "prefix_cache": False}
WINDOW: Final = 16
REPLAY: Final = 10 * (WINDOW - 1)
"""Positions before an exact hit that are computed again: a window less one for each of ten layers."""
WHOLE: Final = 512
SHARED: Final = own(208, seed=1)
FIRST: Final = SHARED + own(38, seed=2)
REQUESTS: Final = [
    Asked(FIRST, replace(GREEDY, max_tokens=30), is_early=True),
    Asked(own(24, seed=3), replace(SEEDED, max_tokens=30), is_early=True),
    Asked(SHARED + own(9, seed=4), replace(SEEDED, n=2)),
    Asked(FIRST + own(64, seed=5), GREEDY),  # the next turn of a conversation
    Asked(own(97, seed=6), replace(SEEDED, prompt_logprobs=1)),
    Asked(SHARED[:180] + own(50, seed=7), GREEDY),
    Asked(SHARED + own(192, seed=8), SEEDED),
]
NUM_FEW: Final = 4
"""Of them, where each is asked by itself or computed position by position: that takes longest."""


class Case(NamedTuple):
    """One schedule. Greedy and seeded requests are in each."""

    overlap: bool
    chunk: int
    prefix_cache: bool
    is_alone: bool
    is_preempted: bool
    num_workers: int
    own_thread: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return EXACT | {
            "overlap": self.overlap,
            "prefill_chunk": self.chunk,
            "prefix_cache": self.prefix_cache,
            "num_workers": self.num_workers,
            "own_thread": self.own_thread,
            **(self._scarcity if self.is_preempted else {}),
        }

    @property
    def _scarcity(self) -> dict[str, Any]:
        """One slot a worker, and others that are more urgent; or blocks that do not let all grow who are admitted."""
        has_one_slot = self.is_alone or self.num_workers > 1 or self.chunk == 1
        return {"max_num_seqs": 1, "ageing_s": 1e5} if has_one_slot else {"num_blocks": 28}

    def __str__(self) -> str:
        words = (
            "overlap" if self.overlap else "one",
            f"chunk{self.chunk}",
            "cache" if self.prefix_cache else "cold",
            "alone" if self.is_alone else "together",
            "preempted" if self.is_preempted else "free",
            f"{self.num_workers}",
        )
        return "-".join(words)


_YES_NO: Final = (True, False)
EVERY: Final = [
    *itertools.starmap(Case, itertools.product(_YES_NO, (7, 64, WHOLE), _YES_NO, (False,), _YES_NO, (1, 2))),
    *itertools.starmap(Case, itertools.product(_YES_NO, (7, WHOLE), _YES_NO, (True,), _YES_NO, (1,))),
    *itertools.starmap(Case, itertools.product((True,), (1,), _YES_NO, (False,), _YES_NO, (1,))),
]
"""Those with one request at a time have one worker; position by position, the long way, is left to a few."""
SOME: Final = [
    Case(True, 37, True, False, True, 1),
    Case(True, 64, True, False, False, 2, own_thread=True),
]


@pytest.fixture(scope="module")
def v41(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("v41")
    write_model(tiny_v41(vocab_size=VOCAB), folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain(v41: str) -> list[Said]:
    """What each says alone, one step at a time, nothing cached, nothing shared."""
    return asyncio.run(say_plainly(v41, REQUESTS))


async def say_plainly(folder: str, requests: list[Asked], **settings: Any) -> list[Said]:
    async with Engine(folder, **PLAIN | settings) as engine:
        return [await said_alone(engine, asked) for asked in requests]


async def run(folder: str, case: Case, **settings: Any) -> list[Completion]:
    watch = Watch()
    requests = REQUESTS[:NUM_FEW] if case.is_alone or case.chunk == 1 else REQUESTS
    async with Engine(folder, observers=[watch], **case.settings | settings) as engine:
        if not case.is_alone:
            found = await together(engine, requests, watch, late=-1)
        elif case.is_preempted:
            found = await interrupted(engine, requests, watch)
        else:
            found = await one_after_another(engine, requests)
        assert (engine.stats().scheduler.num_preempted > 0) == case.is_preempted
        assert any(completion.num_preemptions for completion in found) == case.is_preempted
        assert watch.num_replays > 0 or not case.prefix_cache
        engine.check_integrity()
    return found


def check(found: list[Completion], plain: list[Said]) -> None:
    for index, (completion, expected) in enumerate(zip(found, plain, strict=False)):
        assert said(completion) == expected, f"request {index}"


@pytest.mark.parametrize("case", SOME, ids=str)
def test_no_sample_depends_on_the_schedule(v41: str, plain: list[Said], case: Case, nothing_left: None) -> None:
    check(asyncio.run(run(v41, case)), plain)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_no_sample_depends_on_any_schedule(v41: str, plain: list[Said], case: Case) -> None:
    check(asyncio.run(run(v41, case)), plain)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_nor_does_one_whose_prompt_is_truncated_as_long_as_hits_are_exact(v41: str) -> None:
    """What prefixes share comes from the encoder, which truncation leaves alone."""
    truncated = {"prefill_truncation": "compact", "prefill_keep_tokens": 24}
    plain = asyncio.run(say_plainly(v41, REQUESTS, **truncated))
    for case in (SOME[0], Case(True, 64, True, False, False, 1), Case(True, 64, True, False, True, 2)):
        check(asyncio.run(run(v41, case, **truncated)), plain)


# ---- a bounded hit, and what descends from it


def test_what_a_bounded_hit_has_computed_is_never_adopted_by_an_exact_one(
    v41: str, plain: list[Said], nothing_left: None
) -> None:
    """The setting is an engine's. So that both kinds look into one cache, the rank's is changed between requests."""
    short, long, expected = Asked(SHARED + own(9, seed=10), SEEDED), REQUESTS[-1], plain[-1]
    bounded = EXACT | {"prefix_hits": "bounded", "prefill_truncation": "compact", "prefill_keep_tokens": WHOLE}

    async def main() -> None:
        async with Engine(v41, **bounded) as engine:
            check([await say(engine, 0, REQUESTS[0])], plain)
            once = await say(engine, 0, short)
            hit = await say(engine, 1, long)
            assert hit.num_cached_tokens == len(SHARED) - WINDOW
            assert hit.samples != expected[0], "an approximation"
            [rank] = engine._core.scheduler.ranks
            seen = (len(long.prompt) - 1) // 16 * 16  # whole blocks without the last token
            assert (await say(engine, 2, long)).num_cached_tokens == seen - WINDOW
            again = await say(engine, 0, short)
            assert again.num_cached_tokens == len(SHARED) - WINDOW
            assert again.samples == once.samples, "it depends on what the slot held before"

            rank.shape = replace(rank.shape, replay_tokens=REPLAY, is_replay_bounded=False)
            for num_hit in (len(SHARED), seen):  # the second time it finds what the first time computed
                exact = await say(engine, 3, long)
                assert (exact.num_cached_tokens, said(exact)) == (num_hit - REPLAY, expected)
            engine.check_integrity()

    asyncio.run(main())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_bounded_settings_often_say_what_exact_ones_say(v41: str, record_property: Callable[[str, Any], None]) -> None:
    """How often is reported. Without any agreement, one in 512 first tokens would be the same."""
    work = workload(num_prompts=50, prefix_tokens=len(SHARED), max_tokens=4, vocab_size=VOCAB)
    figures = asyncio.run(measure(v41, work, keep_tokens=24, num_threads=1))
    for name, shares in figures.items():
        print(name, shares)
        record_property(name, shares)
        assert shares["prompts_with_hits"] == (0 if name == "truncation" else 50)
        assert shares["first_token"] > 0.2
    assert figures["exact"]["answers"] == 1.0
    assert figures["both"]["spared"] == 50 * (len(SHARED) - WINDOW) > figures["exact"]["spared"] > 0


# ---- another engine


@pytest.mark.full
def test_an_engine_after_one_that_lost_its_worker_says_the_same(
    v41: str, plain: list[Said], nothing_left: None
) -> None:
    async def lose() -> None:
        async with Engine(v41, **EXACT) as engine:
            stream = engine.stream(FIRST, GREEDY)
            await anext(stream)
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            with pytest.raises(WorkerLost):
                await tokens_of(stream)

    asyncio.run(lose())
    check(asyncio.run(run(v41, SOME[0])), plain)


# ---- V4


V4_SHARED: Final = own(256, seed=20)
V4_REQUESTS: Final = [
    Asked(V4_SHARED + own(124, seed=21), replace(GREEDY, max_tokens=24), is_early=True),
    Asked(V4_SHARED + own(20, seed=22), SEEDED),
    Asked(V4_SHARED[:140] + own(112, seed=24), GREEDY),
]


def test_v4_has_blocks_of_its_own_size_and_says_the_same_on_any_schedule(tmp_path: Path, nothing_left: None) -> None:
    """Rows of 128 tokens: so are the blocks, where nobody chooses."""
    write_model(tiny_v4(vocab_size=VOCAB), tmp_path)
    replay = 5 * (WINDOW - 1)

    async def main() -> None:
        plain = await say_plainly(str(tmp_path), V4_REQUESTS)
        watch = Watch()
        few_slots = EXACT | {"prefill_chunk": 50, "max_num_seqs": 2}
        async with Engine(str(tmp_path), observers=[watch], **few_slots) as engine:
            found = await together(engine, V4_REQUESTS, watch, late=-1)
            check(found, plain)
            assert [completion.num_cached_tokens for completion in found] == [0, 256 - replay, 128 - replay]
            assert watch.num_replays > 1 and engine.stats().scheduler.num_preempted > 0
            engine.check_integrity()

    asyncio.run(main())
