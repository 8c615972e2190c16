"""Drafters on the host beside a device: they draft for a step before the one in flight has landed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.prediction import NEAR_TOKENS, PREDICTION, PredictionDrafter
from paceline.engine.offers import Answer, likely_path
from paceline.types import OFF, Request, SamplingParams, Speculation
from tests.laws.under_law import nearly
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, always
from tests.runs import Run, plain, prompt, run, tokens_of
from tests.tiny_models import TARGET


def ask(id: str = "a", *, tokens: int = 60, text: int = 3, **changes: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": tokens, **changes})
    return Request(id=id, prompt=prompt(9, seed=text), sampling=sampling)


class Seer(Drafter):
    """Knows all answers, and notes what it was asked and told."""

    name = "seer"

    def __init__(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        told = run(build("toy"), plain(requests))
        self.texts = [(*request.prompt, *told[request.id, 0].tokens) for request in requests]
        self.asks: list[tuple[int, int]] = []  # committed tokens, and most tokens of the draft
        self.observed: list[tuple[int, int]] = []  # committed tokens, and accepted ones

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asks += [(len(ask.tokens), ask.max_draft) for ask in asks]
        return [Draft(tokens=self.after(ask)[: ask.max_draft]) for ask in asks]

    def after(self, ask: Ask) -> tuple[int, ...]:
        said = tuple(ask.tokens.tolist())
        return next(text[len(said) :] for text in self.texts if text[: len(said)] == said)

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        self.observed.append((len(tokens), accepted))


def engine(drafter: Drafter, **options: Any) -> Rig:
    return build("toy", {drafter.name: always(drafter)}, **{"on_device": {}, "max_draft": 4, **options})


def test_drafts_are_aligned_with_the_step_in_flight() -> None:
    requests = [ask(str(i), text=i, temperature=i % 2, seed=i) for i in range(4)]
    seer = Seer(requests)
    rig = engine(seer)
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(run(build("toy"), plain(requests)))
    stats = rig.engine.stats
    assert rig.rounds.most_in_flight == 2
    assert rig.rounds.launches == stats.steps
    assert stats.accepted == stats.drafted
    assert max(told[key].stats.steps for key in told) < 60 / 4, "hardly five tokens a step"
    assert {most for _, most in seer.asks} >= {4 + 5}, "asked for the draft, and for what is in flight before it"
    assert max(most for _, most in seer.asks) <= 4 + 5


def test_a_drafter_hears_how_far_its_draft_was_right() -> None:
    """Counted from where it was asked, the tokens of the step in flight included."""
    requests = [ask(tokens=40)]
    seer = Seer(requests)
    run(engine(seer), requests)
    starts = {start for start, _ in seer.asks}
    assert len(seer.observed) > 5
    assert {length - 1 - accepted for length, accepted in seer.observed} <= starts
    assert {accepted for _, accepted in seer.observed} >= {9}


class Mistaken(Seer):
    """Is wrong in every fifth token of the text."""

    def after(self, ask: Ask) -> tuple[int, ...]:
        right = super().after(ask)
        return tuple(token + (i % 5 == 0) for i, token in enumerate(right, start=len(ask.tokens)))


def test_drafts_that_do_not_fit_are_dropped() -> None:
    """The step in flight commits something else than the drafter thought: the next one goes plain, and drafts again."""
    requests = [ask(str(i), text=i) for i in range(3)]
    rig = engine(Mistaken(requests), fixed_draft=True)
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(run(build("toy"), plain(requests)))
    offered = sum(seat.offer is not None for seats in rig.rounds.seats for seat in seats)
    rounds = sum(each.stats.rounds for each in told.values())
    assert 0 < rounds < offered
    assert rig.engine.stats.accepted > rounds / 2


def test_one_that_never_drafts_leaves_plain_steps() -> None:
    seer = Seer([ask()])
    seer.after = lambda ask: ()  # type: ignore[method-assign]
    rig = engine(seer)
    run(rig, [ask()])
    assert rig.rounds.launches == 60
    assert {(seat.max_draft, seat.offer) for seats in rig.rounds.seats for seat in seats} == {(0, None)}
    assert len(seer.asks) > 50
    assert seer.observed == []


@pytest.mark.unwatched
@pytest.mark.parametrize(
    "other", [{}, {"good": TARGET}, {"ngram": DEVICE_RIGS["ngram"]}], ids=["alone", "model", "ngram"]
)
def test_predictions(other: dict[str, Any]) -> None:
    """Where the answer leaves its prediction, and when that has ended, the device's drafter takes over."""
    requests = [ask(str(i), text=i) for i in range(3)]
    answers = run(build("toy"), plain(requests))
    predicted = [replace(each, prediction=nearly(answers[each.id, 0].tokens[:40], seed=7)) for each in requests]
    plainly = replace(ask("plain", text=5), speculation=OFF)
    rig = build("toy", {PREDICTION: always(PredictionDrafter())}, on_device=other)
    told = run(rig, [*predicted, plainly, ask("other", text=6)])
    expected = run(build("toy"), plain([*requests, plainly, ask("other", text=6)]))
    assert tokens_of(told) == tokens_of(expected)
    assert rig.rounds.launches == rig.engine.stats.steps
    for each in requests:
        stats = told[each.id, 0].stats
        assert stats.prediction_accepted > 15
        assert stats.accepted >= stats.prediction_accepted
    assert told["plain", 0].stats.drafted == 0
    if "good" in other:
        assert sum(told[each.id, 0].stats.accepted - told[each.id, 0].stats.prediction_accepted for each in requests)


class Slow(Seer):
    """Answers on its own thread, one proposal whenever it is allowed to."""

    inline = False

    def __init__(self, requests: Iterable[Request], longest: int) -> None:
        super().__init__(requests)
        self.allowed = threading.Semaphore(0)
        self.max_draft = longest

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.allowed.acquire()
        return super().propose(asks)


def test_a_late_answer_is_used_where_it_still_fits() -> None:
    requests = [ask(tokens=40), ask("other", text=1)]
    slow = Slow(requests, longest=8)
    rig = engine(slow, max_draft=8, fixed_draft=True)
    going = Run(rig)
    going.submit(requests)
    for _ in range(6):
        going.step()
    assert rig.engine.stats.drafted == 0
    assert len(going.told["a", 0].tokens) == 5, "somebody waited"
    guard = rig.engine.drafters["seer"]
    while rig.engine.has_work:
        slow.allowed.release()
        if guard._proposing is not None:
            guard._proposing[1].result(timeout=60)
        going.step()
        going.step()
    told = going.finish()
    assert tokens_of(told) == tokens_of(run(build("toy"), plain(requests)))
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 10
    assert max(each.stats.steps for each in told.values()) < 60


@pytest.mark.parametrize(
    ("start", "tokens", "rest"),
    [(4, (7, 8), (7, 8)), (2, (3, 4, 5, 6), (5, 6)), (2, (3, 9, 5), ()), (2, (3,), ()), (2, (3, 4), ()), (4, (), ())],
)
def test_what_is_left_of_an_answer(start: int, tokens: tuple[int, ...], rest: tuple[int, ...]) -> None:
    assert Answer("seer", start, tokens).after([1, 2, 3, 4]) == rest


@pytest.mark.parametrize(
    ("draft", "path"),
    [
        (EMPTY, ()),
        (Draft((5, 6, 7)), (5, 6, 7)),
        (Draft((5, 6, 7, 8, 9), (-1, -1, 1, 0, 3)), (5, 8, 9)),
        (Draft((5, 6, 7), (-1, -1, 1)), (5,)),
    ],
)
def test_the_likely_path_of_a_tree(draft: Draft, path: tuple[int, ...]) -> None:
    assert likely_path(draft) == path


@pytest.mark.parametrize("speculation", [Speculation(max_draft=2), Speculation(max_draft=1)])
def test_a_request_s_own_limit(speculation: Speculation) -> None:
    requests = [replace(ask(), speculation=speculation)]
    rig = engine(Seer(requests))
    run(rig, requests)
    assert max(seat.max_draft for seats in rig.rounds.seats for seat in seats) == speculation.max_draft
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 10


def test_after_an_edit_a_prediction_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer leaves out two tokens now and then. The device looks for its place in the offer, before the host has
    seen what the step in flight committed."""
    (said,) = tokens_of(run(build("toy"), plain([ask()]))).values()
    edited = tuple(each for i, token in enumerate(said) for each in ((1, 2, token) if i % 12 == 5 else (token,)))
    steps = {}
    for near in (NEAR_TOKENS, 0):
        monkeypatch.setattr("paceline.engine.offers.NEAR_TOKENS", near)
        rig = engine(PredictionDrafter(), fixed_draft=True)
        told = run(rig, [replace(ask(), prediction=edited)])
        assert tokens_of(told) == {("a", 0): said}
        steps[near] = rig.engine.stats.steps
    assert steps[NEAR_TOKENS] <= steps[0] - 4, "a step for each of the edits"
