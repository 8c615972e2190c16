"""The grid: its order, its budget, its file, and what is chosen on one half of the rounds and compared on the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.grid import HARD_KINDS, SET_KINDS, Asked, Budget, Place, arms, in_order, measure_place, run_places
from paceline.bench.grid_file import append, resume
from paceline.bench.grid_record import cell_record, record, text
from paceline.bench.workloads import BenchPrompt
from paceline.errors import InvalidRequest
from tests.rig import build
from tests.rig_drafters import RIGS
from tests.runs import prompt

KINDS = (*SET_KINDS, *HARD_KINDS)
PLACES = in_order(KINDS, (1, 2, 4, 8, 16, 32), (0.0, 1.0))
FACTS: dict[str, Any] = {"target": "t", "machine": {"cpu": "c", "paceline": "1", "commit": "x"}}


def measured(place: Place = PLACES[0], *, default: list[float], **fixed: list[float]) -> dict[str, Any]:
    """A place whose arms decode 100 tokens a round, plain in a second, the others this many times as fast."""
    speeds = {"plain": [1.0] * len(default), "default": default, **fixed}
    told = {
        title: {"tokens": [100] * len(each), "seconds": [1 / s for s in each], "tokens_per_step": 1, "acceptance": None}
        for title, each in speeds.items()
    }
    where = {"kind": place.kind.name, "batch": place.batch, "temperature": place.temperature}
    return where | {"arms": told, "answers": 8, "identical": 8, "degenerate": 0, "seconds": 1.0}


def test_every_cell_once_and_a_cover_first() -> None:
    assert len({place.name for place in PLACES}) == len(PLACES) == 11 * 12 + 6
    first = PLACES[: len(KINDS)]
    assert [place.kind for place in first] == list(KINDS)
    assert {place.batch for place in first} == {1, 2, 4, 8, 16, 32}
    assert {place.temperature for place in first} == {0.0, 1.0, 1.5}
    assert {place.temperature for place in PLACES if place.kind.name == "hot"} == {1.5}


class Runs:
    """Places that take a minute each by a clock of its own. Those of the kind humaneval have no prompts."""

    def __init__(self, *, stop_at: int | None = None) -> None:
        self.now, self.done, self._stop_at = 0.0, [], stop_at

    def measure(self, place: Place) -> dict[str, Any]:
        if len(self.done) == self._stop_at:
            raise KeyboardInterrupt
        if place.kind.name == "humaneval":
            raise InvalidRequest("no prompt leaves room for an answer")
        self.now += 60
        self.done.append(place.name)
        return measured(place, default=[1.0] * 4)

    def run(self, known: dict[str, Any], minutes: float | None, file: Path | None = None) -> Any:
        budget = Budget(minutes, clock=lambda: self.now)
        keep = (lambda each: None) if file is None else (lambda each: append(file, each))
        return run_places(PLACES[:5], known, budget=budget, measure=self.measure, keep=keep)


def test_no_place_begins_after_the_last_minute() -> None:
    found, skipped, stopped = Runs().run({}, 2)
    assert list(found) == [place.name for place in PLACES[:2]]
    assert [(place, why) for place, why in skipped] == [(each, "the 2 minutes were over") for each in PLACES[2:5]]
    found, skipped, _ = Runs().run({}, None)
    assert (len(found), skipped) == (4, [(PLACES[2], "no prompt leaves room for an answer")])
    assert not stopped


def test_an_interrupted_grid_goes_on_from_its_file(tmp_path: Path) -> None:
    file, setup = tmp_path / "grid.jsonl", {"target": "t", "draft": (2, 4)}
    assert resume(file, setup) == []
    found, skipped, stopped = Runs(stop_at=2).run({}, None, file)
    assert (len(found), len(skipped), stopped) == (2, 3, True)
    with file.open("a") as torn:
        torn.write('{"kind": "mt_be')
    known = dict(zip(found, resume(file, setup), strict=True))
    again = Runs()
    assert len(again.run(known, None, file)[0]) == 4
    assert again.done == [place.name for place in PLACES[3:5]]
    assert len(resume(file, setup)) == 4


def test_a_file_of_another_setup_is_refused(tmp_path: Path) -> None:
    resume(tmp_path / "grid.jsonl", {"target": "t", "rounds": 8})
    with pytest.raises(InvalidRequest, match="another setup \\(rounds 8, now 4\\): repeat that one, or save to a new"):
        resume(tmp_path / "grid.jsonl", {"target": "t", "rounds": 4})
    (tmp_path / "other.json").write_text(json.dumps({"benchmark": "offline"}) + "\n")
    with pytest.raises(InvalidRequest, match="is no file of --grid"):
        resume(tmp_path / "other.json", {})


def test_intervals_are_wider_for_many_cells() -> None:
    once = measured(default=[0.9, 0.95, 0.92, 0.94, 0.91, 0.93])
    alone, among = cell_record(once, comparisons=1), cell_record(once, comparisons=138)
    assert alone is not None
    assert among is not None
    assert alone["ratio"] == among["ratio"] == pytest.approx(0.925)
    assert alone["interval"] == pytest.approx([0.905, 0.945], abs=2e-3)
    assert among["interval"][0] < alone["interval"][0]
    assert alone["interval"][1] < 0.98 < among["interval"][1]


def test_the_best_is_chosen_on_one_half_and_compared_on_the_other() -> None:
    """The lucky setting is fast in the even rounds only: there it is chosen, and elsewhere it loses."""
    lucky, steady = [4.0, 1.0] * 4, [2.0] * 8
    found = cell_record(measured(default=[2.0] * 8, **{"a =2": lucky, "b =4": steady}), comparisons=1)
    assert found is not None
    assert (found["best"]["title"], found["best"]["ratio"]) == ("a =2", 2.0)


def test_what_is_said_of_a_grid() -> None:
    slow = measured(PLACES[0], default=[0.5] * 8, **{"a =2": [1.0] * 8})
    fast = measured(PLACES[1], default=[2.0] * 8, **{"a =2": [1.0] * 8})
    empty = measured(PLACES[2], default=[1.0] * 8)
    empty["arms"]["plain"]["tokens"] = [0] * 8
    found = record([fast, slow, empty], PLACES, [(PLACES[3].name, "the 2 minutes were over")], FACTS)
    assert [cell["ratio"] for cell in found["cells"]] == [0.5, 2.0]
    assert found["single"] == {"title": "a =2", "ratio": pytest.approx(1.0), "cells": 2}
    shown = text(found)
    for said in (
        f"The intervals of 1 of 2 cells lie below 0.98 of plain: {PLACES[0].name}.",
        "1 of 2 medians (50%) are below 0.98 of plain.",
        "1 of 2 medians are at least 0.97 of the best fixed setting of the cell.",
        "Geometric mean 1.000 of the best single fixed setting, a =2, over 2 cells.",
        "136 of 138 cells of the grid are not measured.",
        f"Left out, the 2 minutes were over: 1 cells: {PLACES[3].name}.",
        "answers too short to be timed",
    ):
        assert said in shown


def test_a_place_on_an_engine() -> None:
    """Fixed arms draft as long as they are told, though the governor would not; the texts are the same."""
    rig = build("toy", {"noisy": RIGS["model"]["noisy"]}, max_draft_batch=1)
    prompts = [BenchPrompt(str(i), "toy", max_tokens=12) for i in range(3)]
    asked = Asked(prompts, [prompt(9, seed=i) for i in range(3)])
    place = Place(SET_KINDS[0], 2, 0.0)
    found = measure_place(rig.engine, place, arms(["noisy"], (1, 3), place), asked, rounds=4, tick=lambda: None)
    told = found["arms"]
    assert [*told] == ["plain", "default", "noisy =1", "noisy =3"]
    assert (found["answers"], found["identical"]) == (8, 8)
    assert told["default"]["acceptance"] is None  # two sequences run, and one may draft
    assert 1 < told["noisy =1"]["tokens_per_step"] <= 2
    assert told["noisy =3"]["acceptance"] is not None
    assert [asked.turn_through(number, 2) for number in range(4)] == [0, 1, 1, 2]
