from __future__ import annotations

import numpy as np
import pytest

from paceline.audit.degeneration import Sign, degeneration, void

SOUND = np.random.default_rng(0).integers(0, 500, 200).tolist()


def test_a_text_that_goes_on_is_sound() -> None:
    assert degeneration(SOUND, stopped=False) is None
    assert degeneration(SOUND[:1], stopped=False) is None


@pytest.mark.parametrize("period", [1, 2, 7, 30])
def test_a_loop_is_seen_wherever_it_is(period: int) -> None:
    loop = (SOUND[:period] * 200)[: max(32, 4 * period)]
    assert degeneration([*SOUND[50:90], *loop], stopped=False) is Sign.LOOP
    assert degeneration([*loop, *SOUND[50:]], stopped=True) is Sign.LOOP


@pytest.mark.parametrize(("period", "length"), [(1, 31), (10, 39), (30, 90)])
def test_a_refrain_is_no_loop(period: int, length: int) -> None:
    """Shorter than a loop must be, or fewer times round."""
    said = (SOUND[:period] * 200)[:length]
    assert degeneration([*SOUND[50:150], *said, *SOUND[150:]], stopped=False) is None


def test_the_same_few_phrases_over_and_over() -> None:
    phrases = [SOUND[i : i + 12] for i in (0, 20, 40)]
    order = np.random.default_rng(1).integers(0, 3, 20).tolist()
    said = [token for i in order for token in phrases[i]]
    assert degeneration(said, stopped=False) is Sign.REPEATS
    assert degeneration(said[:40], stopped=False) is None  # too short to tell


def test_answers_that_say_nothing() -> None:
    assert degeneration([], stopped=False) is Sign.EMPTY
    assert degeneration([2], stopped=True) is Sign.EMPTY
    assert degeneration([2], stopped=False) is None


def test_an_answer_that_ends_before_the_plain_one() -> None:
    assert degeneration(SOUND[:20], stopped=False, plain=SOUND[:21]) is Sign.TRUNCATED
    assert degeneration(SOUND[:20], stopped=False, plain=SOUND[:20]) is None
    assert degeneration(SOUND[1:20], stopped=False, plain=SOUND) is None  # other words, not fewer


def test_a_claim_is_void_above_a_tenth() -> None:
    assert not void(20, 2)
    assert void(20, 3)
