from __future__ import annotations

import pytest

from bench.report import Run, paired_ratio, summarise, table, versus_peers
from bench.systems import System

OURS = System("Paceline", "paceline")
LLAMA = System("llama.cpp", "llamacpp")
INTEL = System("OpenVINO", "openvino")
NGRAM = System("Paceline ngram", "paceline", plain="Paceline")


def run(system: System, speed: float, *, turn: int = 0, text: str = "x", drafted: int = 0, accepted: int = 0) -> Run:
    return Run(
        system=system.name, round=turn, prompt="p", tokens=101, decode_s=100 / speed, text=text,
        drafted=drafted, accepted=accepted, elsewhere_s=0.5 * 100 / speed,
    )  # fmt: skip


def test_the_first_token_is_not_counted_as_decoded() -> None:
    assert run(OURS, 50).speed == pytest.approx(50)


def test_a_summary_takes_the_median_of_its_own_runs_only() -> None:
    runs = [run(OURS, s, turn=i) for i, s in enumerate((10, 30, 20))] + [run(LLAMA, 1000)]
    summary = summarise(OURS, runs)
    assert (summary.median, summary.low, summary.high, summary.runs) == pytest.approx((20, 10, 30, 3))
    assert summary.elsewhere == pytest.approx(0.5)
    assert summary.over_plain is summary.same_text is summary.acceptance is None


def test_ratios_compare_runs_of_the_same_turn() -> None:
    """A slow phase of the machine that hits both systems leaves the ratio alone."""
    runs = [run(OURS, s, turn=i) for i, s in enumerate((100, 10, 100))]
    runs += [run(LLAMA, s, turn=i) for i, s in enumerate((50, 5, 50))]
    assert paired_ratio(runs, "Paceline", "llama.cpp") == pytest.approx(2)


def test_speculation_is_held_against_its_own_plain_text_and_speed() -> None:
    runs = [run(OURS, 10, text="a"), run(OURS, 10, turn=1, text="b")]
    runs += [run(NGRAM, 15, text="a", drafted=8, accepted=6), run(NGRAM, 15, turn=1, text="c")]
    summary = summarise(NGRAM, runs)
    assert summary.over_plain == pytest.approx(1.5)
    assert summary.same_text == "1/2"
    assert summary.acceptance == pytest.approx(0.75)


def test_the_peer_to_beat_is_the_one_with_the_best_median() -> None:
    runs = [run(OURS, 90), run(LLAMA, 60), run(INTEL, 45)]
    assert versus_peers([OURS, LLAMA, INTEL], runs) == {"Paceline / llama.cpp": pytest.approx(1.5)}
    assert versus_peers([OURS], runs) == {}


def test_the_table_is_markdown_with_equal_columns() -> None:
    runs = [run(OURS, 10), run(NGRAM, 15, drafted=4, accepted=3)]
    lines = table([summarise(s, runs) for s in (OURS, NGRAM)]).splitlines()
    assert {len(line) for line in lines} == {len(lines[0])}
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        "Paceline ngram", "15.0", "15.0-15.0", "1.50", "1/1", "75%",
    ]  # fmt: skip
