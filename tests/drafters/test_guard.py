"""The guard: what a drafter may do wrong, how often, and what becomes of it. The engine's side is law 8."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Seen
from paceline.drafters.guard import FAILURES, Guard
from paceline.drafters.ngram import NgramDrafter
from paceline.sampling.sampler import Sampler
from paceline.types import Request, SamplingParams
from tests.odd_drafters import METHODS, Silent, hanging, raising
from tests.rig import build
from tests.rig_drafters import always
from tests.runs import plain, prompt, run, tokens_of
from tests.tiny_models import TARGET

TOKENS = np.arange(4, dtype=np.int32)
ASK = Ask(
    key=0,
    lane=0,
    tokens=TOKENS,
    max_draft=3,
    sampler=Sampler(SamplingParams(), seed=0, vocab_size=97, eos_ids=()),
)


def guard(drafter: Any, *, timeout: float = 60.0) -> Guard:
    return Guard(drafter, vocab_size=97, timeout=timeout)


class Moody(Silent):
    """Fails where it is told to."""

    def __init__(self, moods: str) -> None:
        self.moods = list(moods)
        self.calls = 0

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls += 1
        mood = self.moods.pop(0)
        if mood == "x":
            raise ValueError("not in the mood")
        return [Draft(tokens=(200,) if mood == "n" else (1, 2))] * len(asks)


def test_sound_drafts_pass() -> None:
    assert guard(Silent()).propose([ASK, ASK]) == [Draft(tokens=(1, 1, 1))] * 2


@pytest.mark.parametrize("bad", ["x", "n"])
def test_out_after_so_many_failures_in_a_row(bad: str) -> None:
    drafter = Moody(bad * 10)
    guarded = guard(drafter)
    for turn in range(1, 6):
        assert guarded.propose([ASK]) == [EMPTY]
        assert (guarded.out is None) == (turn < FAILURES)
    assert drafter.calls == FAILURES, "who is out is not asked"
    assert guarded.out is not None
    said = {"x": "it raised ValueError: not in the mood", "n": "it returned a token outside of the vocabulary of 97"}
    assert guarded.out == f"drafter odd is out: {said[bad]}"


def test_a_success_forgives() -> None:
    guarded = guard(Moody("xx.nx.xn."))
    lengths = [len(guarded.propose([ASK])[0]) for _ in range(9)]
    assert lengths == [0, 0, 2, 0, 0, 2, 0, 0, 2]
    assert guarded.out is None


class Learning(Silent):
    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None: ...


@pytest.mark.parametrize("kind", [Silent, Learning])
def test_only_drafters_that_learn_from_acceptance_are_told_of_it(
    kind: type[Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a call in each step."""
    posted: list[object] = []
    guarded = guard(kind())
    monkeypatch.setattr(guarded, "_post", lambda call, *rest: posted.append(call))
    guarded.observe(0, TOKENS, 1)
    assert len(posted) == (kind is Learning)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_lets_an_error_through(method: str) -> None:
    guarded = guard(raising(method))
    for _ in range(FAILURES):
        guarded.start(0, 0, TOKENS)
        guarded.propose([ASK])
        guarded.observe(0, TOKENS, 0)
        guarded.stop(0)
    assert (guarded.out is not None) == (method == "propose"), "a sound draft forgives the rest"


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_one_hang_is_enough(released: threading.Event) -> None:
    guarded = guard(hanging("propose", released), timeout=0.02)
    assert guarded.propose([ASK, ASK]) == [EMPTY, EMPTY]
    assert guarded.out == "drafter odd is out: it did not answer within 0.02 s"
    released.set()
    assert guarded.propose([ASK]) == [EMPTY]


def test_a_foreign_drafter_runs_on_a_thread_of_its_own() -> None:
    seen: list[threading.Thread] = []

    class Foreign(Silent):
        inline = False

        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            seen.append(threading.current_thread())
            if len(seen) == 1:
                raise KeyError("once")
            return super().propose(asks)

    guarded = guard(Foreign())
    assert guarded.propose([ASK]) == [EMPTY]
    assert guarded.propose([ASK]) == [Draft(tokens=(1, 1, 1))]
    assert guarded.out is None
    assert seen[0] is seen[1]
    assert seen[0] is not threading.current_thread()
    assert seen[0].daemon


class Reading(NgramDrafter):
    """Reads hidden states, and fails at it."""

    taps = (0, 1)

    def __init__(self, *, fails: str) -> None:
        super().__init__()
        self._fails = fails

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, str]:
        if self._fails == "feed":
            raise RuntimeError("fed up")
        return 5 if self._fails == "nonsense" else {}  # type: ignore[return-value]  # the point

    def knows(self, page: int) -> bool:
        if self._fails == "knows":
            raise RuntimeError("who knows")
        return self._fails == "nonsense"


@pytest.mark.parametrize("fails", ["feed", "knows", "nonsense", ""])
def test_whoever_fails_at_hidden_states_costs_speed_only(fails: str) -> None:
    made = always(Reading(fails=fails))
    rig = build("toy", {"reading": made}, forward=TARGET.forward("toy", num_pages=160, taps=(0, 1)))
    asked = [
        Request(str(i), prompt(40, seed=1, repeat=True), SamplingParams(temperature=0, max_tokens=12)) for i in range(3)
    ]
    for one in asked:
        assert tokens_of(run(rig, [one])) == tokens_of(run(build(), plain([one])))
    assert (rig.engine.drafters["reading"].out is not None) == (fails == "feed")
    assert (rig.engine.stats.drafted > 0) or fails == "feed"
