"""How a sequence paces its drafting, alone and in an engine: longer, shorter, a pause, another try."""

from __future__ import annotations

from typing import Any

from paceline.config import EngineConfig
from paceline.engine.pace import FIRST_DRAFT, Pace
from paceline.types import Request, SamplingParams
from tests.odd_drafters import Silent
from tests.rig import build
from tests.rig_drafters import RIGS, always
from tests.runs import Run, prompt, run

CONFIG = EngineConfig(max_draft=16, min_acceptance=0.25, acceptance_window=20, pause_tokens=10)


def learn(pace: Pace, drafted: int, accepted: int, *, at: int = 0) -> None:
    pace.learn(drafted, accepted, output_tokens=at, config=CONFIG)


def test_drafts_grow_while_they_are_right() -> None:
    pace = Pace()
    assert pace.length == FIRST_DRAFT
    lengths = []
    for _ in range(4):
        learn(pace, pace.length, pace.length)
        lengths.append(pace.length)
    assert lengths == [8, 16, 16, 16]


def test_a_miss_shortens_them_to_what_was_right_and_a_little() -> None:
    pace = Pace(length=16)
    learn(pace, 10, 5)
    assert pace.length == 7
    learn(pace, 7, 0)
    assert pace.length == 2


def test_a_hopeless_window_pauses_and_pauses_double() -> None:
    pace = Pace()
    learn(pace, 19, 0, at=50)
    assert not pace.paused(50)
    learn(pace, 1, 0, at=50)
    assert [pace.paused(output) for output in (50, 59, 60)] == [True, True, False]
    learn(pace, 20, 4, at=60)  # 20 %
    assert [pace.paused(output) for output in (79, 80)] == [True, False]
    learn(pace, 20, 5, at=80)  # 25 %: good enough, and forgiven
    assert not pace.paused(80)
    learn(pace, 20, 0, at=100)
    assert [pace.paused(output) for output in (109, 110)] == [True, False]
    assert pace.pauses == 3


def ask(tokens: int) -> Request:
    return Request(id="a", prompt=prompt(5, seed=0), sampling=SamplingParams(temperature=0, max_tokens=tokens))


def engine(drafter: Any, **options: Any) -> Any:
    return build("toy", {"odd": drafter}, acceptance_window=12, pause_tokens=10, **options)


def test_a_sequence_pauses_tries_again_and_says_so() -> None:
    rig = engine(always(Silent()), min_acceptance=0.3)
    going = Run(rig)
    going.submit([ask(100)])
    drafted: list[int] = []
    while rig.engine.has_work:
        before = rig.engine.stats.drafted
        going.step()
        drafted.append(rig.engine.stats.drafted - before)
    stats = going.finish()["a", 0].stats
    quiet = "".join("d" if each else "-" for each in drafted).split("d")
    pauses = [len(each) for each in quiet if len(each) >= 9]
    assert len(pauses) == stats.pauses >= 3
    assert pauses[:2] == [10, 20]
    assert stats.off_reason == "paused: less than 30% of the last drafts was accepted"


def test_a_good_drafter_never_pauses() -> None:
    stats = run(engine(RIGS["model"]["good"]), [ask(100)])["a", 0].stats
    assert (stats.pauses, stats.off_reason) == (0, None)
    assert stats.acceptance == 1.0


def test_each_sequence_has_a_pace_of_its_own() -> None:
    rig = build("toy", {"odd": always(Silent()), "good": RIGS["model"]["good"]}, acceptance_window=12)
    requests = [
        Request(
            id=name,
            prompt=prompt(5, seed=0),
            sampling=SamplingParams(temperature=0, max_tokens=60),
            speculation=type(ask(1).speculation)(drafter=name),
        )
        for name in ("odd", "good")
    ]
    told = run(rig, requests)
    assert told["odd", 0].stats.pauses > 0
    assert told["good", 0].stats.pauses == 0
