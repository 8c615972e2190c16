"""The measured speed-up: its interval holds the truth, drawing costs little, and the guard turns slow drafts off."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.engine import group
from paceline.engine.group import FIRST_REST, RUN, batch_label
from paceline.engine.truth import Truth
from paceline.runner.batch import Batch
from paceline.types import OffKind, Request, SamplingParams
from tests.rig import build
from tests.rig_drafters import always
from tests.runs import prompt, run
from tests.stub_rounds import TOKEN, Clock, StubRounds, engine_with, submit
from tests.tiny_models import TARGET

STEP = 0.005  # seconds of a speculative step of the simulated machine


@dataclass
class Asked:
    """A sequence, as far as `Truth` looks at it."""

    drafting: str = "head"
    drawable: bool = True
    sampled: bool = False


@dataclass
class Machine:
    """A machine whose speed drifts by 20 % over some seconds, with noise in each step."""

    ratio: float  # true speed-up
    tokens: float = 2.5  # of a sequence in a speculative step
    batch: int = 1
    noise: float = 0.2  # standard deviation of the logarithm of a step's time
    seed: int = 0

    def __post_init__(self) -> None:
        self.truth = Truth(guards=False)
        self.now, self.plain_steps = 0.0, 0
        self._random = random.Random(self.seed)
        self._phase, self._period = self._random.uniform(0, 2 * math.pi), self._random.uniform(3, 12)
        self._sequences: list[Any] = [Asked() for _ in range(self.batch)]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def step(self) -> None:
        drawn = self.truth.draws(self._sequences, alone=True)
        plain = drawn or self.truth.guarded is not None
        accepted = 0 if plain else sum(self._accept() for _ in self._sequences)
        seconds = STEP * (self.ratio / self.tokens if plain else 1.0)
        seconds /= 1 + 0.2 * math.sin(self._phase + 2 * math.pi * self.now / self._period)
        seconds *= self._random.lognormvariate(-self.noise * self.noise / 2, self.noise)
        if self.truth.side is not None:
            self.truth.side.add(sequences=self.batch, accepted=accepted, drafted=4 * self.batch, seconds=seconds)
        self.now += seconds
        self.plain_steps += plain

    def _accept(self) -> int:
        """Draw how many tokens are accepted: geometric, as each drafted token is right with the same probability."""
        right = 1 - 1 / self.tokens
        return int(math.log(1 - self._random.random()) / math.log(right))


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize(("batch", "noise", "trials"), [(1, 0.3, 40), (8, 0.1, 10)])
def test_the_interval_holds_the_truth_and_is_narrow_after_a_minute(batch: int, noise: float, trials: int) -> None:
    held, ratio = 0, 1.5
    for seed in range(trials):
        machine = Machine(ratio, batch=batch, noise=noise, seed=seed)
        machine.run(60)
        found = machine.truth.overall()
        assert found is not None
        held += found.low <= ratio <= found.high
        assert found.high - found.low < 0.2 * found.ratio  # a half-width of 10 %
    assert held >= 0.9 * trials


@pytest.mark.parametrize("ratio", [1.2, 2.4])
def test_drawing_costs_less_than_one_percent(ratio: float) -> None:
    machine = Machine(ratio)
    machine.run(60)
    truth = machine.truth
    assert truth.drawn == machine.plain_steps > 10 * RUN
    assert truth.drawn / truth.steps * (1 - 1 / ratio) < 0.008


def test_a_number_comes_only_after_enough_runs() -> None:
    machine = Machine(2.0)
    seen = []
    while machine.truth.overall() is None:
        machine.step()
        seen = [group.runs for group in machine.truth.measurement().groups]
        assert machine.now < 60
    assert seen == [8]
    assert machine.truth.of(Asked()) == (machine.truth.overall(), None)  # type: ignore[arg-type]


def test_one_hiccup_of_the_machine_hardly_shows() -> None:
    calm, hit = Machine(1.5, noise=0.1), Machine(1.5, noise=0.1)
    for machine in (calm, hit):
        machine.run(30)
    side = hit.truth._groups["head", 0, False].plain
    side.add(sequences=1, accepted=0, drafted=0, seconds=1.0)
    for machine in (calm, hit):
        machine.run(10)
    before, after = calm.truth.overall(), hit.truth.overall()
    assert before is not None
    assert after is not None
    assert before.ratio < after.ratio < 1.06 * before.ratio


def test_the_guard_turns_slow_drafts_off_and_tries_again_less_and_less_often() -> None:
    """A governor that believes drafts are free always drafts, at four fifths of the speed of plain decoding."""
    machine = Machine(0.8, tokens=1.3)
    machine.truth = Truth(guards=True)
    trials, was_off = [], False
    for step in range(10 * FIRST_REST):
        machine.step()
        (group,) = machine.truth.measurement().groups
        if group.off is not None:
            assert f"{group.speedup}" in group.off
        elif was_off:
            trials.append(step)
        was_off = group.off is not None
    rests = [after - before for before, after in itertools.pairwise(trials)]
    assert len(rests) >= 2
    assert all(1.5 * shorter < longer for shorter, longer in itertools.pairwise(rests))


def test_the_guard_lets_drafts_go_on_where_they_have_become_fast() -> None:
    machine = Machine(0.8, tokens=1.3)
    machine.truth = Truth(guards=True)
    machine.run(10)
    assert machine.truth.measurement().groups[0].off is not None
    machine.ratio, machine.tokens = 2.0, 2.5
    for _ in range(4 * FIRST_REST):
        machine.step()
    found = machine.truth.overall()
    assert machine.truth.measurement().groups[0].off is None
    assert found is not None
    assert found.low < 2.0 < found.high


class Slow(Drafter):
    """A drafter that takes a millisecond for a guess."""

    name = "slow"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self._clock.now += 0.001
        return [Draft((TOKEN,)) for _ in asks]


def test_steps_of_the_host_are_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass and a draft take a millisecond each, so a speculative step takes two plain ones."""
    monkeypatch.setattr(group, "FIRST_GAP", 8)
    clock, forward = Clock(), TARGET.forward("toy", num_pages=160)
    compute = forward.__class__.__call__

    class Charged(type(forward)):  # type: ignore[misc]
        def __call__(self, batch: Batch) -> Any:
            clock.now += 0.001
            return compute(self, batch)

    forward.__class__ = Charged
    options = {"measure_speedup": True, "min_acceptance": 0.0, "max_draft": 1}
    rig = build("toy", {"slow": always(Slow(clock))}, forward=forward, clock=clock, **options)
    for i in range(3):
        sampling = SamplingParams(temperature=0, max_tokens=60)
        run(rig, [Request(id=f"{i}", prompt=prompt(5, seed=i), sampling=sampling)])
    (found,) = rig.engine.snapshot().measurement.groups
    assert found.speedup.ratio == pytest.approx(found.tokens_per_step / 2, rel=0.02)


class Mistaken(StubRounds):
    """A device on which a drafted token takes half as long as a plain round, and whose table says that it is free."""

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        return 0.001


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize("measured", [False, True])
def test_a_wrong_cost_table_is_put_right(measured: bool) -> None:
    rounds = Mistaken(Clock(), lambda seats, drafted: 0.001 + 0.0005 * drafted, lambda seats: 0.0, rate=0.4)
    engine = engine_with(rounds, batch=1, measure_speedup=measured)
    answers, events = itertools.count(), []
    for step in range(6000):
        if not engine.has_work:
            submit(engine, f"{next(answers)}")
        events += [event for event in engine.step() if event.finish is not None]
        if step == 3000:
            began, before = rounds.clock.now, rounds.tokens
    plain = 1000.0  # tokens per second
    speed = (rounds.tokens - before) / (rounds.clock.now - began)
    assert speed > 0.9 * plain if measured else speed < 0.75 * plain
    told = events[-1].stats
    assert told is not None
    assert (told.off is not None and told.off.kind is OffKind.MEASURED_SLOWER) == measured
    assert (told.speedup is not None and told.speedup.high < 1) == measured


def test_no_step_is_drawn_whose_text_could_change() -> None:
    truth = Truth(guards=True)
    mixed: list[Any] = [Asked(), Asked(drawable=False)]
    assert not any(truth.draws(mixed, alone=True) or truth.side for _ in range(500))
    assert not any(truth.draws([Asked()], alone=False) for _ in range(500))  # type: ignore[list-item]
    assert not any(truth.draws([Asked(drafting="")], alone=True) for _ in range(500))  # type: ignore[list-item]
    assert truth.drawn == 0


def test_a_clock_that_stands_still_tells_nothing() -> None:
    truth = Truth(guards=True)
    for _ in range(2000):
        truth.draws([Asked()], alone=True)  # type: ignore[list-item]
        if truth.side is not None:
            truth.side.add(sequences=1, accepted=1, drafted=2, seconds=0.0)
    assert truth.drawn > 0
    assert truth.overall() is None


def test_labels_of_batch_sizes() -> None:
    assert [batch_label((size - 1).bit_length()) for size in (1, 2, 3, 4, 5, 8, 9)] == [
        "1", "2", "3-4", "3-4", "5-8", "5-8", "9-16"
    ]  # fmt: skip


def test_greedy_and_sampled_steps_are_measured_apart() -> None:
    """Where one request of a batch is sampled, the step counts as sampled."""
    truth = Truth(guards=False)
    for sequences in ([Asked()], [Asked(sampled=True)], [Asked(), Asked()], [Asked(), Asked(sampled=True)]):
        truth.draws(sequences, alone=True)  # type: ignore[arg-type]
    told = {(group.batch, group.kind) for group in truth.measurement().groups}
    assert told == {("1", "greedy"), ("1", "sampled"), ("2", "greedy"), ("2", "sampled")}


def test_a_plain_step_takes_what_the_latest_runs_of_plain_steps_took() -> None:
    machine = Machine(2.0, noise=0.05, batch=2)
    assert machine.truth.plain_seconds == 0.0
    machine.run(30)
    assert machine.truth.plain_seconds == pytest.approx(STEP * 2.0 / machine.tokens, rel=0.3)
