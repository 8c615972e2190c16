"""Measurements become the right figures."""

from __future__ import annotations

from peers.results import Measurement, Results
from peers.tables import best_ratios, best_table, disturbed, failed, same, whole_table

MODES = {
    "Ours, drafts": {"system": "Ours", "plain": "Ours, plain", "is_peer": False},
    "Ours, plain": {"system": "Ours", "plain": None, "is_peer": False},
    "Theirs, plain": {"system": "Theirs", "plain": None, "is_peer": True},
    "Theirs, lookup": {"system": "Theirs", "plain": "Theirs, plain", "is_peer": True},
}
ABOUT = {"plan": {"sets": ["chat", "code"], "counts": {"1": 2}}, "modes": MODES}


def run(
    mode: str, round: int, seconds: float, *, digests: tuple[str, ...] = ("a", "b"), other: float = 0.0
) -> Measurement:
    return Measurement(
        set="chat", at_once=1, round=round, mode=mode, prompts=["p", "q"][: len(digests)], seconds=seconds,
        tokens=[50] * len(digests), digests=list(digests), drafted=0, accepted=0, elsewhere_s=other,
    )  # fmt: skip  # a field a line would hide what belongs together


def results() -> Results:
    runs = [
        *(run("Ours, drafts", i, seconds) for i, seconds in enumerate((0.5, 1.0, 0.25))),  # 200, 100, 400 tokens/s
        *(run("Ours, plain", i, 1.0, digests=("a", "x" if i else "b")) for i in range(3)),
        *(run("Theirs, plain", i, seconds, other=1.0) for i, seconds in enumerate((1.0, 1.0, 2.0))),  # 100, 100, 50
        run("Theirs, lookup", 0, 1.0, digests=("y",)),  # 50
    ]
    return Results(ABOUT, runs, {"Nobody, plain": "not installed"})


def test_speed_is_the_median_over_rounds_with_the_range() -> None:
    lines = whole_table(results(), at_once=1).splitlines()
    assert lines[0] == "| system, mode | chat | code | same as own plain |"
    assert lines[2] == "| Ours, drafts | 200.0 (100.0–400.0) |  | 4/6 |"
    assert lines[4] == "| Theirs, plain | 100.0 (50.0–100.0) |  |  |"


def test_answers_are_compared_prompt_by_prompt_as_far_as_both_have_them() -> None:
    assert same(results(), "Ours, drafts") == "4/6"
    assert same(results(), "Theirs, lookup") == "0/1"
    assert same(results(), "Theirs, plain") == ""


def test_the_best_mode_of_each_system() -> None:
    lines = best_table(results()).splitlines()
    assert lines[2:] == ["| Ours | 200 |  | 4/6 |", "| Theirs | 100 |  | 0/1 |"]


def test_ratios_are_taken_within_a_round() -> None:
    lines = best_ratios(results()).splitlines()
    assert lines[2:] == ["| chat | 1 | Ours, drafts | Theirs, plain | 2.00 (1.00–8.00) |"]


def test_a_round_that_a_killed_run_has_of_one_system_only_is_no_ratio() -> None:
    cut = results()
    cut.measurements = [run for run in cut.measurements if (run.mode, run.round) != ("Theirs, plain", 2)]
    assert best_ratios(cut).splitlines()[2:] == ["| chat | 1 | Ours, drafts | Theirs, plain | 1.50 (1.00–2.00) |"]


def test_a_machine_that_was_not_quiet_and_what_failed_is_said() -> None:
    assert disturbed(results()) == [
        "While Theirs, plain ran, other processes used 75% of a core: its speeds mean little."
    ]
    assert failed(results()) == ["Nobody, plain could not be measured: not installed"]
