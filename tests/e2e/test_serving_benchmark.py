"""benchmarks/serving.py, every way and mode, with a fake worker and little to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.serving import PROMPTS, draw, main

QUICK = ("--json", "--streams", "4", "--step-ms", "1", "--tokens", "8")


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    main([*QUICK, *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("way", ["process", "wire", "http"])
def test_all_tokens_come_by_every_way_and_what_does_not_fit_is_told(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ("--rates", "40,1000", "--seconds", "0.3", "--set", "max_queued_requests=16")
    full, paced, flooded = lines(capsys, "--ways", way, *rates)
    for found, rate, num_requests in ((full, 0.0, 16), (paced, 40.0, 12)):
        asked = draw(PROMPTS, num_requests, 8, rate, 0)
        assert found["way"] == way and found["rate"] == rate and found["refusals"] == {}
        assert found["requests"] == num_requests and found["tokens"] == sum(one.max_tokens for one in asked)
        assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["duration_s"], rel=0.05)
        for name in ("ttft_ms", "inter_token_ms"):
            assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
        assert found["host_us_per_token"] > 0 and (found["server_us_per_token"] is None) is (way == "process")
    assert paced["duration_s"] >= asked[-1].at_s
    num_refused = flooded["refusals"].pop("overloaded")
    assert num_refused > 10 and flooded["refusals"] == {} and flooded["requests"] == 300
    assert flooded["requests_per_s"] == pytest.approx((300 - num_refused) / flooded["duration_s"], rel=0.05)


def test_the_others_are_watched_while_a_client_does_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = lines(capsys, "--stalled", "--pairs", "1", "--window-s", "0.2")
    assert len(found["p99_reading_ms"]) == len(found["p99_stalled_ms"]) == 1
    assert min(found["p99_reading_ms"] + found["p99_stalled_ms"]) >= 0.9 and found["ratio"] > 0
