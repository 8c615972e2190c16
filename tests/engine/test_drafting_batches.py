"""With how many sequences drafts are tried, by passes that were timed before: `engine.pass_meter`, and trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.engine.cost import CostModel
from paceline.engine.group import FIRST_REST, MAX_REST, RUN, TRIAL_GAP
from paceline.engine.pass_meter import ROWS, TURNS
from paceline.engine.truth import PRIOR_STEPS, Truth
from paceline.types import Off, OffKind, Request, SamplingParams
from tests.engine.test_truth import Asked, Machine
from tests.rig import Rig, build
from tests.rig_drafters import model_drafter
from tests.runs import prompt, run
from tests.tiny_models import NOISY, TARGET

FLAT, LINEAR = (lambda rows: 1.0), float  # seconds of a pass over some rows
WAITS = Off(OffKind.WOULD_NOT_PAY, "rows are dear")


def timed(seconds: Callable[[int], float], *, outs: list[int] | None = None, **options: Any) -> Rig:
    """Return an engine whose passes take these seconds, by a clock of its own, and add the logits that each computes to
    `outs`."""
    now, asked = [0.0], [] if outs is None else outs
    forward = TARGET.forward("compiled", num_pages=160)
    inner = type(forward).__call__

    class Charged(type(forward)):  # type: ignore[misc]
        def __call__(self, batch: Any) -> Any:
            now[0] += seconds(len(batch.tokens))
            asked.append(len(batch.logit_rows))
            return inner(self, batch)

    forward.__class__ = Charged
    drafters = {"model": model_drafter(NOISY)}
    return build("compiled", drafters, forward=forward, clock=lambda: now[0], measure_cost=True, **options)


def told(rig: Rig, count: int) -> list[Any]:
    """Run `count` requests at once, and return their statistics."""
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [Request(id=str(i), prompt=prompt(5, seed=i), sampling=sampling) for i in range(count)]
    return [answer.stats for answer in run(rig, requests).values()]


def measure(rig: Rig) -> int:
    calls = 0
    while rig.engine.improve():
        calls += 1
    return calls


def test_an_idle_engine_times_passes_and_holds_nothing() -> None:
    outs: list[int] = []
    rig = timed(lambda rows: 1.0 + 0.1 * rows, outs=outs)
    assert measure(rig) == TURNS * len(ROWS)
    beside = [each for rows in ROWS for each in 2 * [rows, 1]]
    assert outs == TURNS * beside  # logits of every row, as where drafts are judged
    rig.engine.check()
    assert not rig.engine.improve()


def test_a_machine_that_is_quick_for_a_moment_makes_no_rows_cheap() -> None:
    """It is slow but for the passes over 3 rows of the first turn."""
    passes: list[int] = []
    quick = range(4 * ROWS.index(3), 4 * ROWS.index(4))
    rig = timed(lambda rows: (1.0 + 0.1 * rows) * (0.5 if len(passes) in quick else 1.0), outs=passes)
    measure(rig)
    times = rig.engine._governor.cost._small_passes
    found = [times.seconds(rows) / times.seconds(1) for rows in ROWS]
    assert found == pytest.approx([(1.0 + 0.1 * rows) / 1.1 for rows in ROWS])


def test_an_engine_with_work_times_nothing() -> None:
    rig = timed(FLAT)
    rig.engine.submit(Request(id="a", prompt=(1, 2), sampling=SamplingParams(max_tokens=4)))
    assert not rig.engine.improve()


def test_an_engine_without_drafters_times_nothing() -> None:
    assert not build("compiled", measure_cost=True).engine.improve()


def test_several_sequences_wait_for_the_measurement_and_one_does_not() -> None:
    rig = timed(FLAT)
    assert all("not measured yet" in stats.off_reason for stats in told(rig, 3))
    assert told(rig, 1)[0].drafted > 0
    measure(rig)
    assert all(stats.drafted > 0 for stats in told(rig, 3))


def test_rows_that_cost_as_much_as_passes_keep_batches_from_drafting() -> None:
    rig = timed(LINEAR)
    measure(rig)
    stats = told(rig, 2)
    assert not any(each.drafted for each in stats)
    assert any("a second row for each of 2 sequences takes 100% of a plain step" in each.off_reason for each in stats)


@pytest.mark.parametrize(("steps", "paying"), [((1.0, 1.1), True), ((1.0, 1.6), False)])
def test_a_second_row_for_each_sequence_decides(steps: tuple[float, float], paying: bool) -> None:
    cost = CostModel()
    assert cost.doubling(4) is None
    for _ in range(20):
        for rows, seconds in zip((4, 8), steps, strict=True):
            cost.observe_rows(rows, seconds)
    found = cost.doubling(4)
    assert found == pytest.approx(steps[1] - 1, rel=0.05)
    assert (found < 0.35) is paying


@pytest.mark.parametrize(("ratio", "stays"), [(1.4, True), (0.8, False)])
def test_a_batch_that_waits_is_tried_after_a_rest(ratio: float, stays: bool) -> None:
    machine = Machine(ratio, tokens=1.5, batch=4, noise=0.05)
    machine.truth = Truth(guards=True, prior=lambda sequences: WAITS)
    for _ in range(FIRST_REST - 1):
        machine.step()
        assert machine.truth.guarded == WAITS
    for _ in range(20 * (TRIAL_GAP + RUN)):
        machine.step()
    (group,) = machine.truth.measurement().groups
    assert (group.off is None) is stays


def test_a_batch_that_waits_drafts_as_soon_as_rows_are_cheap() -> None:
    known: list[Off] = [WAITS]
    machine = Machine(1.4, batch=4)
    machine.truth = Truth(guards=True, prior=lambda sequences: known[0] if known else None)
    machine.step()
    assert machine.truth.guarded == WAITS
    known.clear()
    for _ in range(PRIOR_STEPS):
        machine.step()
    assert machine.truth.guarded is None


def test_a_hopeless_trial_of_a_batch_is_short() -> None:
    """Four runs of plain steps and a first one that only shows how long steps take, where eight and one are usual."""
    steps = {}
    for batch in (2, 4):
        machine = Machine(0.8, tokens=1.3, batch=batch, noise=0.02)
        machine.truth = Truth(guards=True)
        steps[batch] = 0
        while machine.truth.guarded is None and steps[batch] < MAX_REST:
            machine.step()
            steps[batch] += 1
    assert steps[4] < 6 * 1.5 * (TRIAL_GAP + RUN) < steps[2]


def test_sequences_that_cannot_be_measured_keep_to_what_is_expected() -> None:
    truth = Truth(guards=True, prior=lambda sequences: WAITS if sequences > 2 else None)
    asked: list[Any] = [Asked(drawable=False) for _ in range(4)]
    assert not truth.draws(asked, alone=True)
    assert truth.guarded == WAITS
    truth.draws(asked[:2], alone=True)
    assert truth.guarded is None


def test_an_answer_says_why_a_batch_that_waits_has_no_speed_up() -> None:
    machine = Machine(1.4, batch=4)
    machine.truth = Truth(guards=True, prior=lambda sequences: WAITS)
    machine.step()
    assert machine.truth.of(Asked()) == (None, WAITS.detail)  # type: ignore[arg-type]
