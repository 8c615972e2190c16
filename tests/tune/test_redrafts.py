"""One longest draft behind every token of an answer gives the rounds that an engine has at each draft length."""

from __future__ import annotations

import pytest

from paceline.draft import Draft
from paceline.drafters.guard import Guard
from paceline.errors import PacelineError
from paceline.tune.redrafts import Scored, most_confident, redraft, walked
from paceline.tune.traces import Recorded, Round
from tests.rig import build
from tests.rig_drafters import RIGS
from tests.tiny_models import VOCAB
from tests.tune.test_traces import Raising, fixed, plain_answers, rounds_of, samplers

LENGTHS = (1, 3, 6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "name"), [("eagle", "eagle"), ("model", "noisy")])
def test_rounds_are_those_of_an_engine(kind: str, name: str, temperature: float) -> None:
    drafters = {name: RIGS[kind][name]}
    answers = plain_answers(build("torch"), temperature)
    rig = build("torch", drafters, max_step_tokens=128)
    guard, probes = rig.engine.drafters[name], rig.engine.probes
    found = [*redraft(guard, probes, answers, samplers(rig, temperature), lengths=LENGTHS, at_once=3)]
    rig.engine.check()
    for place, length in enumerate(LENGTHS):
        made = rounds_of(build("torch", drafters, max_step_tokens=128), fixed(name, length, 1, temperature))
        assert [rounds[place] for rounds in found] == made
        assert sum(r.drafted for each in made for r in each) > 0


def test_a_text_up_to_the_end_of_the_context() -> None:
    rig = build("torch", {"eagle": RIGS["eagle"]["eagle"]}, max_step_tokens=128)
    whole = rig.engine.probes.admission.max_context
    long = Recorded((3, 4) * (whole // 2 - 3), (3, 4, 5, 6, 7), max_tokens=6, stopped=False)
    guard, probes = rig.engine.drafters["eagle"], rig.engine.probes
    [[rounds]] = redraft(guard, probes, [long], samplers(rig)[:1], lengths=(4,), at_once=8)
    assert sum(r.tokens for r in rounds) == 4


def test_a_drafter_that_fails_is_named() -> None:
    rig, guard = build("torch"), Guard(Raising(), vocab_size=VOCAB, timeout=1.0)
    with pytest.raises(PacelineError, match="raising is out: it raised RuntimeError: no"):
        [*redraft(guard, rig.engine.probes, plain_answers(build("torch")), samplers(rig), lengths=(2,), at_once=2)]
    rig.engine.check()


def test_shorter_drafts_of_a_longest_one() -> None:
    chain = Draft((5, 6, 7))
    assert [most_confident(chain, length).tokens for length in (1, 2, 9)] == [(5,), (5, 6), (5, 6, 7)]
    tree = Draft((5, 6, 7, 8), (-1, -1, 0, 1), confidence=(0.5, 0.4, 0.1, 0.3))
    assert most_confident(tree, 3) == Draft((5, 6, 8), (-1, -1, 1))
    assert most_confident(tree, 1) == Draft((5,), (-1,))
    unsure = Draft((5, 6, 7, 8), (-1, -1, 0, 1))
    assert most_confident(unsure, 3) == Draft((5, 6, 7), (-1, -1, 0))


def test_a_walk_goes_on_behind_what_was_right() -> None:
    scored = [Scored((right,), (3,)) for right in (1, 3, 0, 2)]
    answer = Recorded((1,), (9, 9, 9, 9, 9), max_tokens=8, stopped=True)
    assert walked(scored, answer, 0) == [Round(2, 3), Round(1, 3), Round(1, 3)]
