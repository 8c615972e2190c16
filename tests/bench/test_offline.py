"""What turns on an engine come to; the command is tested in tests/cli."""

from __future__ import annotations

from paceline.audit.replay import Replay
from paceline.bench.charts import charts
from paceline.bench.offline import PARTS, Cell, Grid, Turn, Unit, measure, take_turn
from paceline.bench.offline_record import cell_record, row, text
from paceline.bench.workloads import BenchPrompt
from paceline.drafters.suffix import SuffixDrafter
from paceline.kernels.cpu.build import load_library
from paceline.types import Finish, SequenceStats, Speculation
from tests.rig import build
from tests.rig_drafters import always
from tests.runs import prompt

PLAIN, FAST = Cell(1, 0.0), Cell(1, 0.0, Speculation(), "fast")


def turn(seconds: float, *, sizes: tuple[int, ...], same: bool = True) -> Turn:
    """An answer that came in steps of these sizes."""
    tokens = sum(sizes)
    stats = SequenceStats(
        output_tokens=tokens,
        steps=len(sizes),
        rounds=len(sizes),
        drafted=4 * len(sizes),
        accepted=tokens - len(sizes),
        accepted_by_position=tuple(sum(size > i + 1 for size in sizes) for i in range(max(sizes) - 1)),
    )
    said = list(range(tokens)) if same else list(range(1, tokens + 1))
    answer = Replay(
        tokens=said,
        steps=[i for i, size in enumerate(sizes) for _ in range(size)],
        finish=Finish.LENGTH,
        stats=stats,
    )
    return Turn(tokens=tokens, seconds=seconds, steps=len(sizes), parts=dict.fromkeys(PARTS, 0.1), answers=[answer])


def units(count: int, rounds: int) -> list[Unit]:
    """Speculation is twice as fast, but for one slow turn of each."""
    return [
        Unit(
            [BenchPrompt(str(i), "ab"[i % 2])],
            {
                PLAIN: [turn(2.0, sizes=(1,) * 8)] * rounds,
                FAST: [turn(1.0 if r else 50.0, sizes=(3, 1, 4), same=i > 0) for r in range(rounds)],
            },
        )
        for i in range(count)
    ]


def test_a_file_with_the_older_names_is_read() -> None:
    found = cell_record(FAST, PLAIN, units(6, rounds=3))
    older = {name: value for name, value in found.items() if "per_step" not in name or name.endswith("ms_per_step")}
    assert older.keys() < found.keys()
    assert row(older) == row(found)
    sizes = [chart for chart in charts({"benchmark": "offline", "cells": [older]}) if chart.file == "rounds"]
    assert sizes == [chart for chart in charts({"benchmark": "offline", "cells": [found]}) if chart.file == "rounds"]
    assert sizes[0].names == ["1", "3", "4"]


def test_medians_leave_a_slow_turn_out() -> None:
    found = cell_record(FAST, PLAIN, units(6, rounds=3))
    assert (found["plain_tok_s"], found["speculative_tok_s"], found["ratio"]) == (4, 8, 2)
    assert (found["ratio_interval"], found["units"], found["verdict"]) == ([2, 2], 6, "higher")
    assert (found["identical"], found["prompts"]) == (5, 6)


def test_few_prompts_have_the_interval_of_their_turns() -> None:
    found = cell_record(FAST, PLAIN, units(2, rounds=3))
    assert (found["ratio"], found["units"], found["verdict"]) == (2, 6, "same")
    assert found["ratio_interval"][0] < 0.2
    assert cell_record(FAST, PLAIN, units(1, rounds=3))["ratio_interval"] is None


def test_what_drafts_did() -> None:
    found = cell_record(FAST, PLAIN, units(4, rounds=1))
    assert found["tokens_per_step_counts"] == {"1": 4, "3": 4, "4": 4}
    assert found["acceptance_by_position"] == [8 / 12, 8 / 12, 4 / 12]
    assert found["acceptance"] == 5 / 12
    assert found["plain_ms_per_step"]["verify"] == 100 / 8
    assert found["categories"]["a"]["prompts"] == 2
    assert found["categories"]["a"]["tokens_per_step"] == 8 / 3


def test_loops_void_the_claim() -> None:
    looping = units(4, rounds=3)
    for unit in looping:
        for one in unit.turns[FAST]:
            one.answers[0].tokens = [7] * 200
    cell = cell_record(FAST, PLAIN, looping)
    assert (cell["degenerate"], cell["claim_is_void"]) == (4, True)
    machine = {"cpu": "c", "paceline": "1", "commit": "x"}
    found = {"machine": machine, "target": "t", "sources": ["s"], "cells": [cell], "definition": "d", "conclusion": "c"}
    shown = text(found)
    assert "no speed of such text means anything" in shown
    assert not cell_record(FAST, PLAIN, units(4, rounds=3))["claim_is_void"]


def test_no_round_finds_its_answer_of_an_earlier_one() -> None:
    """A drafter that remembers answers would be far too fast from the second round on."""
    rig = build("toy", {"suffix": always(SuffixDrafter(load_library()))})
    prompts, tokens = [BenchPrompt("a", "a", max_tokens=40)], [prompt(12, seed=4)]
    grid = Grid(drafters=["suffix"], drafts=[None, 4], rounds=3, ignore_eos=True)
    [(cells, [unit])] = measure(rig.engine, prompts, tokens, grid)
    for cell in cells[1:]:
        steps = [turn.steps for turn in unit.turns[cell]]
        assert min(steps) > 0.7 * steps[0]


def test_plain_and_fixed_turns_teach_the_governor_nothing() -> None:
    rig = build("toy", {"suffix": always(SuffixDrafter(load_library()))}, measure_cost=True)
    cost = rig.engine._governor.cost
    prompts, tokens = [BenchPrompt("a", "toy", max_tokens=12)], [prompt(6, seed=1)]
    for cell, learns in (
        (Cell(1, 0.0), False),
        (Cell(1, 0.0, Speculation(drafter="suffix", max_draft=2), "suffix", fixed=True), False),
        (Cell(1, 0.0, Speculation(), "default"), True),
    ):
        take_turn(rig.engine, cell, prompts, tokens, number=0, ignore_eos=True)
        assert rig.engine._governor.cost is cost
        assert (cost._step_seconds > 0) is learns
