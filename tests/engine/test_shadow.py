"""Drafts for texts that have ended, while the engine is idle: scores as in traffic, and nothing stays behind."""

from __future__ import annotations

import pytest

from paceline.draft import EMPTY, Draft
from paceline.engine.redraft import count_right
from paceline.engine.shadow import Shadow
from paceline.types import Request, SamplingParams, Speculation
from tests.odd_drafters import raising
from tests.rig import Rig, build
from tests.rig_drafters import RIGS, always
from tests.runs import prompt, run

MADE = {name: made for kinds in RIGS.values() for name, made in kinds.items()}


def asked(count: int, *, drafter: str, seed: int = 0, **sampling: object) -> list[Request]:
    params = SamplingParams.of(**{"temperature": 0, "max_tokens": 40} | sampling)
    by = Speculation(drafter=drafter)
    return [
        Request(id=str(i), prompt=prompt(20, seed=seed + i, repeat=True), sampling=params, speculation=by)
        for i in range(count)
    ]


def idle(rig: Rig, *, most: int = 3000) -> int:
    return next((turns for turns in range(most) if not rig.engine.improve()), most)


@pytest.mark.unwatched
@pytest.mark.parametrize("name", ["ngram", "suffix", "good", "noisy", "bad", "eagle", "medusa", "layers", "portfolio"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_those_of_traffic(name: str, temperature: float) -> None:
    """Drafts in the shadow are as right as in the step that they replay."""
    rig = build("toy", {name: MADE[name]}, fixed_draft=True)
    told = run(rig, asked(3, drafter=name, temperature=temperature, seed=3))
    rig.engine.shadow.watch([name], texts=3)
    idle(rig)
    score = rig.engine.shadow.scores[name]
    assert score.texts == 3
    drafted = sum(each.stats.drafted for each in told.values())
    accepted = sum(each.stats.accepted for each in told.values())
    assert score.rounds >= 3
    if name not in ("suffix", "portfolio"):  # they have learnt from the answers since
        assert score.accepted == pytest.approx(accepted, abs=3 + 0.2 * accepted)
        assert score.drafted == pytest.approx(drafted, abs=24 + 0.3 * drafted)
    rig.engine.check()
    assert rig.lanes.free == len(rig.lanes.lengths)


def test_a_request_ends_a_replay_at_once_and_its_text_is_the_same() -> None:
    rig = build("toy", {"noisy": MADE["noisy"]})
    want = run(rig, asked(2, drafter="noisy"))
    rig.engine.shadow.watch(["noisy"], texts=8)
    assert rig.engine.improve()
    assert rig.engine.improve()
    assert rig.cache.pool.held > 0
    again = run(rig, asked(2, drafter="noisy"))
    assert {key: told.tokens for key, told in again.items()} == {key: told.tokens for key, told in want.items()}
    rig.engine.improve()
    rig.engine.check()  # an engine that is checked holds nothing
    assert rig.cache.pool.held == 0


def test_nothing_is_replayed_that_nobody_watches_or_that_does_not_fit() -> None:
    rig = build("toy", {"ngram": MADE["ngram"]})
    run(rig, asked(1, drafter="ngram"))
    assert not rig.engine.improve()
    run(rig, asked(1, drafter="ngram", max_tokens=2))
    run(rig, asked(1, drafter="ngram", max_tokens=None, seed=9))  # as long as the context
    rig.engine.shadow.watch(["ngram", "gone"], texts=8)
    idle(rig)
    assert {name: score.texts for name, score in rig.engine.shadow.scores.items()} == {"ngram": 1}
    rig.engine.shadow.watch(["ngram"], texts=8)
    assert not rig.engine.shadow.scores


def test_a_drafter_that_raises_does_so_behind_its_guard() -> None:
    rig = build("toy", {"ngram": MADE["ngram"], "odd": always(raising("propose"))})
    run(rig, asked(2, drafter="ngram"))
    rig.engine.shadow.watch(["odd"], texts=2)
    idle(rig)
    assert rig.engine.dead is None
    assert "raised" in (rig.engine.drafters["odd"].fault or "")
    rig.engine.check()


def test_a_drafter_may_be_unloaded_in_the_middle_of_its_replay() -> None:
    rig = build("toy", {"ngram": MADE["ngram"], "noisy": MADE["noisy"]})
    run(rig, asked(2, drafter="ngram"))
    rig.engine.shadow.watch(["noisy"], texts=2)
    assert rig.engine.improve()
    rig.engine.remove_drafter("noisy")
    assert idle(rig) == 0
    rig.engine.check()
    assert isinstance(rig.engine.shadow, Shadow)


def test_tokens_of_a_tree_that_a_text_begins_with() -> None:
    tree = Draft(tokens=(5, 6, 7, 8), parents=(-1, -1, 1, 2))
    assert count_right(tree, [6, 7, 8, 9]) == 3
    assert count_right(tree, [5, 7]) == 1
    assert count_right(tree, [7]) == 0
    assert count_right(EMPTY, [1]) == 0
    assert count_right(Draft(tokens=(1, 2)), [1, 2]) == 2
