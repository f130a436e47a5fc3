"""What an HTTP server counts, read from a scrape by Prometheus' own parser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer import Engine
from doubles.serving import Served, post_head, read_head, serving

ASKED: Final[dict[str, Any]] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
COMPLETIONS: Final = "/v1/completions"
STEP_S: Final = 0.02

Scrape = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture
async def served(no_tasks_left: None) -> AsyncIterator[Served]:
    async with (
        Engine("fake", fake_step_s=STEP_S, fake_vocab_size=97, max_num_seqs=8, max_queued_requests=8) as engine,
        serving(engine) as served,
    ):
        yield served


async def scrape(served: Served) -> Scrape:
    """By name, and by the labels' values."""
    reply = await served.get("/metrics")
    found: Scrape = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            if sample.name.startswith("deepinfer:http_"):
                assert sample.labels.keys() <= {"handler", "status", "le"}, sample
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_requests_are_counted_by_handler_and_status(served: Served) -> None:
    await served.post(COMPLETIONS, ASKED)
    await served.post(COMPLETIONS, ASKED | {"max_tokens": -1})
    await served.post(COMPLETIONS, ASKED | {"model": "other"})
    await served.get(COMPLETIONS)
    await served.get("/v1/models/fake")
    await served.get("/v1/models/fa/ke")
    await served.get("/health")
    found = await scrape(served)
    assert found["deepinfer:http_requests_total"] == {
        (COMPLETIONS, "200"): 1,
        (COMPLETIONS, "400"): 1,
        (COMPLETIONS, "404"): 1,
        (COMPLETIONS, "405"): 1,
        ("/v1/models/{name:path}", "200"): 1,
        ("/v1/models/{name:path}", "404"): 1,
        ("/health", "200"): 1,
    }
    assert found["deepinfer:http_request_duration_seconds_count"][(COMPLETIONS,)] == 4
    assert found["deepinfer:http_request_duration_seconds_sum"][(COMPLETIONS,)] >= 8 * STEP_S
    assert found["deepinfer:http_requests_inprogress"][("/metrics",)] == 1
    assert found["deepinfer:http_requests_inprogress"][(COMPLETIONS,)] == 0
    assert "deepinfer:http_time_to_first_token_seconds_count" not in found, "nothing was streamed"


async def test_nothing_that_a_client_writes_becomes_a_label(served: Served) -> None:
    for index in range(50):
        await served.get(f"/{index}?handler=x")
        await served.get(f"/v1/models/{index}")
        await served.send(f"BREW{index} {COMPLETIONS} HTTP/1.1\r\nhost: x{index}\r\nconnection: close\r\n\r\n")
    found = await scrape(served)
    assert found["deepinfer:http_requests_total"] == {
        ("none", "404"): 50,
        ("/v1/models/{name:path}", "404"): 50,
        (COMPLETIONS, "405"): 50,
    }


async def test_bytes_are_those_of_the_bodies(served: Served) -> None:
    replies = [await served.post(COMPLETIONS, body) for body in (ASKED, b"x" * 5000)]
    found = await scrape(served)
    assert found["deepinfer:http_request_size_bytes_count"][(COMPLETIONS,)] == 2
    assert 5000 < found["deepinfer:http_request_size_bytes_sum"][(COMPLETIONS,)] < 5200
    wanted = sum(len(reply.body) for reply in replies)
    assert found["deepinfer:http_response_size_bytes_sum"][(COMPLETIONS,)] == wanted


async def test_times_of_tokens_are_those_of_a_stream(served: Served) -> None:
    """With several samples each has gaps of its own; all that can be told for certain is what steps take at least."""
    await served.post(COMPLETIONS, ASKED | {"stream": True})
    await served.post(COMPLETIONS, ASKED | {"stream": True, "n": 4})
    found = await scrape(served)
    assert found["deepinfer:http_time_to_first_token_seconds_count"][(COMPLETIONS,)] == 2
    assert found["deepinfer:http_time_to_first_token_seconds_sum"][(COMPLETIONS,)] >= 2 * STEP_S
    assert found["deepinfer:http_inter_token_latency_seconds_count"][(COMPLETIONS,)] == 5 * 7
    assert found["deepinfer:http_inter_token_latency_seconds_sum"][(COMPLETIONS,)] >= 5 * 7 * STEP_S * 0.8


async def test_a_client_that_goes_is_counted_and_no_longer_in_progress(served: Served) -> None:
    async with served.connected() as (reader, writer):
        raw = b'{"model": "fake", "prompt": [1], "max_tokens": 3000, "ignore_eos": true, "stream": true, "logprobs": 0}'
        writer.write(post_head(COMPLETIONS, len(raw)).encode() + raw)
        await read_head(reader)
        found = await scrape(served)
        assert found["deepinfer:http_requests_inprogress"][(COMPLETIONS,)] == 1
    async with asyncio.timeout(10):
        while (found := await scrape(served))["deepinfer:http_requests_inprogress"][(COMPLETIONS,)]:
            pass
    assert sum(value for (path, _), value in found["deepinfer:http_requests_total"].items() if path == COMPLETIONS) == 1
