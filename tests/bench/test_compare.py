from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.compare import compare, text
from paceline.errors import InvalidRequest


def served(scale: float, *, ids: bool = True, shuffled: bool = False, **more: Any) -> dict[str, Any]:
    """Ten requests whose latencies differ tenfold, all of them so many times as long."""
    order = list(reversed(range(10))) if shuffled else list(range(10))
    latencies = [scale * (1 + i) for i in order]
    return {
        "completed": 10,
        "output_throughput": 100 / scale,
        "mean_ttft_ms": 1e3 * scale,
        "mean_tpot_ms": 1e2 * scale,
        "mean_e2el_ms": 5.5e3 * scale,
        "ttfts": [0.1 * latency for latency in latencies],
        "latencies": latencies,
        "output_lens": [11] * 10,
        "errors": [""] * 10,
        **({"prompt_ids": [str(i) for i in order]} if ids else {}),
        **more,
    }


def by_name(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {found.name: found for found in compare(first, second)}


def test_latencies_are_paired_by_prompt() -> None:
    """However the requests are ordered: every one of them took 1.1 times as long."""
    found = by_name(served(1), served(1.1, shuffled=True))
    e2e = found["mean_e2el_ms"]
    assert (e2e.ratio.low, e2e.ratio.high) == pytest.approx((1.1, 1.1))
    assert e2e.verdict == "worse"
    assert found["output_throughput"].verdict == "no interval"
    assert e2e.worse_by(0.05)
    assert not e2e.worse_by(0.15)
    assert found["output_throughput"].worse_by(0.05)  # by its value


def test_without_names_of_prompts_nothing_is_sure() -> None:
    """As `vllm bench serve` writes it."""
    found = by_name(served(1, ids=False), served(1.1, ids=False))
    assert found["mean_e2el_ms"].ratio.value == pytest.approx(1.1)
    assert found["mean_e2el_ms"].verdict == "no difference shown"


def test_failed_requests_are_left_out() -> None:
    broken = served(1, errors=["", "gone", *[""] * 8])
    broken["latencies"][1] = 0.0
    broken["ttfts"][1] = 0.0
    for pair in ((served(1), broken), (broken, served(1))):
        found = by_name(*pair)
        assert found["mean_e2el_ms"].ratio.value == pytest.approx(1)
        assert found["mean_e2el_ms"].ratio.units == 9


def test_speeds_have_an_interval_where_there_are_blocks() -> None:
    blocks = [served(1, block_seconds=[s] * 5, block_output_tokens=[50] * 5) for s in (2.0, 1.0)]
    found = by_name(*blocks)["output_throughput"]
    assert (found.ratio.value, found.verdict) == (2.0, "better")


def test_runs_are_matched_by_what_was_asked() -> None:
    runs = [served(1, arm=arm, temperature=0.0, max_concurrency=c, request_rate="inf") for arm in "ab" for c in (1, 8)]
    found = compare({"runs": runs}, {"runs": list(reversed(runs[1:]))})
    assert list(dict.fromkeys(each.run for each in found)) == ["c8 T=0 a", "c1 T=0 b", "c8 T=0 b"]
    assert "c8 T=0 a" in text(found)
    other = [served(1, arm="x", temperature=0.0, max_concurrency=c) for c in (1, 2)]
    with pytest.raises(InvalidRequest, match="no run in common"):
        compare({"runs": runs}, {"runs": other})
    with pytest.raises(InvalidRequest, match="cannot be compared"):
        compare({"runs": runs}, {"benchmark": "offline", "cells": []})


def test_files_without_lists_are_compared_by_their_figures() -> None:
    bare = {"completed": 5, "output_throughput": 10.0}
    assert [each.name for each in compare(bare, bare)] == ["output_throughput"]
    assert compare(bare, bare | {"output_throughput": 0.0}) == []
