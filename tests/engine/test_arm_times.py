"""Who pays for a step: base by sequences, rows by rows, drafts by those that asked, within bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.arms import CANARY, CONTROL, Arm, ArmSpeed
from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter
from paceline.types import Request, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import always
from tests.runs import prompt, run
from tests.tiny_models import TARGET
from tests.toy import ToyForward

BASE, ROW, DRAFT = 0.010, 0.001, 0.004  # seconds of a pass, of each of its rows, and of a drafter's call


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(ToyForward):
    clock: Clock

    def __call__(self, batch: Any) -> Any:
        self.clock.now += BASE + ROW * len(batch.tokens)
        return super().__call__(batch)


class Costly(Drafter):
    """Drafts one token, in a time that does not depend on how many ask."""

    def __init__(self, name: str, clock: Clock, seconds: float = DRAFT) -> None:
        self.name, self._clock, self._seconds = name, clock, seconds

    def propose(self, asks: Any) -> list[Draft]:
        self._clock.now += self._seconds
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        return Draft(tokens=(1,)) if ask.max_draft else EMPTY


def rig_of(**seconds: float) -> Rig:
    clock = Clock()
    Timed.clock = clock
    forward = Timed(num_pages=160, seed=TARGET.seed)
    drafters = {name: always(Costly(name, clock, each)) for name, each in seconds.items()}
    options = {"min_acceptance": 0.0, "fixed_draft": True}
    return build("toy", drafters, forward=forward, clock=clock, **options)


def requests(*arms: tuple[str, str], tokens: int = 30) -> list[Request]:
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    return [
        Request(
            id=str(i),
            prompt=prompt(4, seed=i),
            sampling=sampling,
            speculation=Speculation(drafter=name or None, enabled=bool(name)),
            arm=Arm(arm, "t") if arm else None,
        )
        for i, (arm, name) in enumerate(arms)
    ]


def speeds(rig: Rig, asked: list[Request]) -> list[ArmSpeed | None]:
    return [told.stats.arm_speed for told in run(rig, asked).values()]


def test_a_sequence_alone_pays_everything_and_bounds_are_one() -> None:
    [speed] = speeds(rig_of(a=DRAFT), requests((CANARY, "a")))
    assert speed is not None
    assert speed.batch == 0
    assert speed.least == pytest.approx(speed.most)
    steps = speed.least / (BASE + 2 * ROW + DRAFT)
    assert steps == pytest.approx(round(steps))
    assert speed.tokens >= round(steps)


def test_the_cost_of_a_draft_is_divided_by_those_that_asked_or_by_all() -> None:
    rig = rig_of(a=DRAFT, b=2 * DRAFT)
    asked = requests((CANARY, "a"), (CONTROL, "b"), (CONTROL, "b"), ("", ""))
    canary, first, second, nobody = speeds(rig, asked)
    assert nobody is None
    assert canary is not None
    assert first is not None
    assert second is not None
    for speed, drafted, sharers in ((canary, DRAFT, 1), (first, 2 * DRAFT, 2), (second, 2 * DRAFT, 2)):
        steps = (speed.most - speed.least) / (drafted / sharers - drafted / 4)
        assert steps == pytest.approx(round(steps), abs=1e-6)
        assert round(steps) > 0
        assert speed.batch == 2
    assert canary.most - canary.least > first.most - first.least - 1e-9


def test_an_equal_drafter_is_within_the_bounds_of_its_equal_at_any_share() -> None:
    rig = rig_of(a=DRAFT, b=DRAFT)
    found = speeds(rig, requests((CANARY, "a"), *[(CONTROL, "b")] * 3))
    canary, *control = [speed for speed in found if speed is not None]
    for other in control:
        assert canary.tokens / canary.most <= other.tokens / other.least * 1.2
        assert canary.least / canary.tokens <= other.most / other.tokens * 1.2


def test_steps_with_prompts_and_last_steps_do_not_count_and_nothing_does_without_an_arm() -> None:
    rig = rig_of(a=DRAFT)
    [short] = speeds(rig, requests((CANARY, "a"), tokens=1))
    assert short is None
    [other] = run(rig, [replace(each, arm=None) for each in requests((CANARY, "a"))]).values()
    assert other.stats.arm_speed is None
    assert other.stats.arm is None
