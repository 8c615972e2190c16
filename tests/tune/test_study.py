"""A study on a tiny model: its parts, what it costs in time, and what fails."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.grid import Budget
from paceline.bench.workloads import BenchPrompt
from paceline.errors import InvalidRequest
from paceline.llm import LLM
from paceline.tune.candidates import Engines, Group, groups, is_lookup, kind_of, memory_of, name_in, vocabulary_share
from paceline.tune.step_timing import (
    Answers,
    Run,
    Samples,
    answer_lengths,
    cost_steps,
    ladder,
    reading_of,
    samples_due,
    time_steps,
    timed_lengths,
    whole,
)
from paceline.tune.study import Study
from paceline.tune.traces import Recorded, Step, trace
from paceline.tune.tuning import Wanted, best, tune
from paceline.tune.ways import Arm, Asking
from tests.cli.tiny_model import write_model

FACTS: dict[str, Any] = {"target": "t", "sources": ["s"], "machine": {"cpu": "c", "paceline": "1", "commit": "x"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def asking(prompts: int = 12, **more: Any) -> Asking:
    asked = [BenchPrompt(str(i), "toy", max_tokens=6, seed=i) for i in range(prompts)]
    tokens = [(5 + i, 6, 7, 5 + i, 6, 7) for i in range(prompts)]
    return Asking(asked, tokens, **{"drafts": (2, 30), "batches": (1, 2), "ignore_eos": True, **more})


def study(model: str, *words: str, **more: Any) -> Study:
    def load(drafters: Any) -> LLM:
        return LLM(model, drafter=list(drafters), device="cpu", threads=1, measure_speedup=False)

    return Study([Group(words)], Engines(load), **{"asking": asking(), **more})


def test_slow_parts_are_cut(model: str) -> None:
    """By a clock on which everything takes 100 seconds, each part ends after as few answers as an interval needs."""
    ticks = count(0, 100)
    slow = study(model, model, budget=Budget(1e4, clock=lambda: next(ticks)))
    part = 60 * 1e4 / 2 / slow.planned
    assert slow._part_seconds == part
    slow.budget.minutes = 1.0
    assert len(slow.answers()) == 4
    slow.budget.began += 1e9
    rounds = slow._drafts(0, model)["rounds"]
    assert {length: len(rounds[length]["all"]) for length in rounds} == {"2": 4, "8": 4}
    assert slow._decoded(0, Arm(0, model, 8), 1.0) == rounds["8"]["all"]
    assert cost_steps(1e9, 1.0) == 8
    assert cost_steps(0.0, 1.0) == 16
    slow.known["steps of " + slow.groups[0].title + ", 1 at once"] = {"tables": {"plain": {"1": [[1, 1e3]]}}}
    assert slow._rounds(0, 1, 3, 1) == 4


def test_quick_parts_are_whole(model: str) -> None:
    quick = study(model, "ngram")
    assert len(quick.answers()) == 12
    assert quick._rounds(0, 2, 3, 1) == 6
    assert cost_steps(1e9, float("inf")) == 16
    assert best(quick, 3) == {1: [], 2: []}


def test_lengths_are_within_the_drafters_own(model: str) -> None:
    made = study(model, model)
    assert made._lengths(0, model) == [2, 8]  # of a model 8, whatever is asked for
    lookups = study(model, "ngram")
    assert lookups._lengths(0, "ngram") == [2, 16]


def test_drafters_by_their_names(model: str) -> None:
    llm = study(model, model, "suffix").engines.of(Group((model, "suffix")))
    assert (name_in(llm, model), name_in(llm, "suffix"), kind_of("eagle:x,y=1")) == ("model", "suffix", "eagle")
    assert (is_lookup(llm, model), is_lookup(llm, "suffix")) == (False, True)
    made = llm.parts.drafters["model"]
    assert vocabulary_share(made, llm.parts.target) == 1.0
    assert memory_of(made)["kv_bytes_per_token"] * 16 == made.page_bytes
    assert memory_of(llm.parts.drafters["suffix"]) == {"weight_bytes": 0, "kv_bytes_per_token": 0}
    assert Arm(0, model, 2).cell(llm, 1, 0.0).title == "model =2"


def test_engines_keep_the_latest() -> None:
    loaded: list[Any] = []
    engines = Engines(lambda words: loaded.append(words) or words)  # type: ignore[func-returns-value, return-value]
    first, second = groups(["a", "portfolio"], ["b", "a", "b"])
    assert (first.scored, second.words) == (("a",), ("b",))
    for group in (first, first, second, first):
        engines.of(group)
    assert loaded == [("a", "portfolio"), ("b",), ("a", "portfolio")]


def test_ladders() -> None:
    assert (ladder(1), ladder(8), ladder(4), ladder(64)) == ([1], [1, 8], [1, 4], [1, 8, 64])


def test_lengths_that_are_timed() -> None:
    assert timed_lengths((1, 2, 3, 4, 6, 8), 1) == [1, 8]
    assert timed_lengths((1, 2, 3, 4, 6, 8), 8) == [1, 4, 8]
    assert (timed_lengths((3,), 8), timed_lengths((2, 5), 8)) == ([3], [2, 5])


def test_a_prompt_is_read_once_for_each_arm(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(asking(2, drafts=(2,), batches=(2,)), tokens=[tuple(range(5 + i, 45 + i)) for i in range(2)])
    made = study(model, model, asking=asked)
    llm = made.engines.of(made.groups[0])
    rows: list[int] = []  # that each run computed

    def watched(engine: Any, *args: Any, **options: Any) -> Any:
        before = engine.stats.rows
        found = trace(engine, *args, **options)
        rows.append(engine.stats.rows - before)
        return found

    monkeypatch.setattr("paceline.tune.step_timing.trace", watched)
    paces, answers = {Arm(0, "plain"): 1.0, Arm(0, model, 2): 1.5}, Answers.middling(asked, made.answers(), 2)
    rows.clear()
    timed = time_steps(llm, paces, answers, seconds=1e9, clock=lambda: 0.0)
    assert timed.keys() == {"plain", model}
    assert len(rows) == 1 + 2  # a warm-up, two arms with new prompts
    assert all(each >= 2 * 40 for each in rows)
    rows.clear()
    samples = sampled(llm, paces, answers, rounds=3)
    assert samples.tables.keys() == timed.keys()
    assert len(rows) == 2 * 3
    assert not any(each >= 2 * 40 for each in rows)


def sampled(llm: LLM, paces: dict[Arm, float], answers: Answers, *, rounds: int, steps: int = 32) -> Samples:
    samples = Samples(llm, paces, answers, rounds=rounds, steps=steps, clock=count().__next__)
    for _ in range(rounds):
        samples.tick()
    return samples


def test_samples_are_spread_over_a_measurement() -> None:
    assert samples_due(40) == [7, 21, 34]
    assert samples_due(5) == [1, 3, 5]
    assert samples_due(1) == [1, 1, 1]
    assert samples_due(2) == [1, 2, 2]


def test_answers_that_are_timed_end_in_two_parts() -> None:
    assert answer_lengths(40, 1) == [40]
    assert answer_lengths(40, 2) == [40, 20]
    assert answer_lengths(40, 8) == [40] * 3 + [20] * 5
    assert answer_lengths(32, 64) == [32] * 8 + [16] * 56


def test_samples_take_turns(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What disturbs the machine for a moment meets the first arm of one sample and the last one of the next."""
    asked = asking(2, drafts=(2,), batches=(1,))
    asked = replace(asked, prompts=[replace(each, max_tokens=90) for each in asked.prompts])
    made = study(model, model, asking=asked)
    llm, answers = made.engines.of(Group((model,))), Answers.middling(asked, made.answers(), 1)
    order: list[tuple[str, int]] = []

    def watched(engine: Any, cell: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        order.append((cell.title, prompts[0].max_tokens))
        return trace(engine, cell, prompts, *args, **options)

    monkeypatch.setattr("paceline.tune.step_timing.trace", watched)
    samples = sampled(llm, {Arm(0, "plain"): 1.0, Arm(0, model, 2): 1.5}, answers, rounds=6)
    first, last = [("plain", 64)] * 2 + [("model =2", 48)] * 2, [("model =2", 48)] * 2 + [("plain", 64)] * 2
    assert order == [*first, *last, *first]
    assert samples.seconds == 3  # ticks of its clock


def test_middles_of_answers_are_timed(model: str) -> None:
    asked = replace(asking(3), prompts=[replace(each, max_tokens=90) for each in asking(3).prompts])
    answers = [Recorded((5, 6), tuple(range(count)), 90, False) for count in (80, 90, 20)]
    middle = Answers.middling(asked, answers, 3)
    prompts, tokens = middle.around(30)
    assert [len(each) for each in tokens] == [2 + 25, 2 + 30, 2]
    assert tokens[0] == (5, 6, *range(25))
    assert [each.max_tokens for each in prompts] == [30, 30, 15]
    assert middle.prompt_tokens(30) == 61
    assert [each.max_tokens for each in middle.around(300)[0]] == [90, 90, 90]


def test_predictions_beside_a_measurement_are_of_its_minutes(model: str) -> None:
    """Steps are timed again beside each check. What was timed then counts, and what a head reads is kept."""
    made = study(model, "ngram", asking=asking(4, drafts=(2,), batches=(1,)))
    tune(made, Wanted(best=1), FACTS)
    first, check = made.known["steps of ngram, 1 at once"], made.known["check of ngram =2, 1 at once"]
    again = check["samples"]
    assert again["tables"].keys() == first["tables"].keys()
    again["tables"]["ngram"], first["reading"]["ngram"] = {"1": [[1, 3.0]]}, 0.5
    costs = made._known_costs(0)["ngram"]
    assert (costs.seconds(1, 1), costs.reading(1)) == (3.0, 0.5)
    again["seconds"], check["took"] = 2.0, 5.0
    assert made.seconds["checks"] == 3.0
    del check["samples"]  # by an older version: its first timing stands
    assert made._known_costs(0)["ngram"].seconds(1, 1) != 3.0


def test_the_end_of_a_batch_does_not_replace_what_was_timed_by_itself(model: str) -> None:
    made = study(model, "ngram", asking=asking(8, drafts=(2,), batches=(1, 8)))
    for batch, tables in ((1, {"1": [[1, 1.0]]}), (8, {"1": [[1, 9.0]], "3": [[3, 2.0]], "8": [[8, 4.0]]})):
        made.known[f"steps of ngram, {batch} at once"] = {"tables": {"plain": tables}, "reading": {"plain": 0.0}}
    costs = made._known_costs(0)["plain"]
    assert [costs.seconds(count, count) for count in (1, 2, 3, 8)] == [1.0, 1.5, 2.0, 4.0]


def test_steps_after_new_prompts_that_take_longer_are_reading() -> None:
    usual, new = [Step(2, 6, 1.0)] * 5, [Step(2, 6, 4.0), Step(2, 6, 2.0), *[Step(2, 6, 1.0)] * 2, Step(2, 6, 9.0)]
    run = Run(Arm(0, "eagle", 2), [new, usual, new], 4)
    assert reading_of(run, {2: {6: 1.0}}, 20) == pytest.approx((3.0 + 1.0) / 10)
    assert reading_of(run._replace(fresh=1), {2: {6: 1.0}}, 20) == pytest.approx(3.0 / 10)
    assert reading_of(run, {2: {6: 9.0}}, 10) == 0.0
    assert reading_of(run._replace(arm=Arm(0, "plain")), {2: {6: 0.1}}, 10) == 0.0


def test_drafts_that_the_end_of_an_answer_cuts_take_as_long_as_whole_ones() -> None:
    full, cut, short = Step(2, 8, 1.0), Step(2, 5, 1.0), Step(1, 2, 1.0)
    assert whole([full, full, full, cut, short], 3) == [full, full, full, full, Step(1, 4, 1.0)]
    assert whole([full, cut, cut], 3) == [full, cut, cut]  # a lookup finds what it finds
    assert whole([Step(2, 2, 1.0), Step(1, 1, 1.0)], None) == [Step(2, 2, 1.0), Step(1, 1, 1.0)]


def test_smaller_numbers_of_sequences_are_timed_with_the_batch(model: str) -> None:
    """Answers end one after the other; a number with a few steps has no table, but that which was asked for."""
    asked = asking(4, drafts=(2,), batches=(4,))
    lengths = (7, 20, 90, 90)
    asked = replace(asked, prompts=[replace(p, max_tokens=n) for p, n in zip(asked.prompts, lengths, strict=True)])
    made = study(model, model, asking=asked)
    llm, answers = made.engines.of(Group((model,))), Answers.middling(asked, made.answers(), 4)
    paces = {Arm(0, "plain"): 1.0, Arm(0, model, 2): 1.0}
    timed = time_steps(llm, paces, answers, seconds=1e9, clock=lambda: 0.0)
    assert {count: [*table] for count, table in timed["plain"].tables.items()} == {4: [4], 3: [3]}
    again = sampled(llm, paces, answers, rounds=1, steps=12).tables["plain"]
    assert {count: [*table] for count, table in again.items()} == {4: [4], 3: [3], 1: [1]}


def test_the_target_itself_must_load(tmp_path: Path) -> None:
    def load(words: Any) -> LLM:
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest, match="no"):
        tune(Study([Group(("ngram",))], Engines(load), asking()), Wanted(), FACTS)


def test_a_drafter_that_goes_out_is_left_out(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = study(model, "suffix", asking=asking(4, drafts=(2,), batches=(1,)))
    made.groups = [made.groups[0], Group(("ngram",))]

    def fail(self: Any, key: int, committed: Any, number: int, *, longer_than: int = 0) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("paceline.drafters.ngram.NgramDrafter.continuation", fail)
    found = tune(made, Wanted(best=1, advises=True), FACTS)
    assert "ngram is out: it raised RuntimeError: broken" in found["failed"]["ngram"]
    assert [pair["drafter"] for pair in found["pairs"]] == ["suffix"]
    assert {cell["way"] for cell in found["cells"]} == {"plain", "default", "suffix k=2"}
