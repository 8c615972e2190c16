"""Answers that are drafted again: every arm comes to the same text, in fewer steps and modelled time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.portfolio_replay import ARMS, Replay, main

PHRASE = [*range(100, 112)]
TEXT = [1, 2, 3, *PHRASE, 4, 5, *PHRASE, 6, 7, 8, 9, *PHRASE, 10]
# A head that knows the next two tokens wherever the text is new, and nothing else.
DRAFTS = {str(n): [TEXT[n : n + 2], [], [0.8, 0.6], 2] for n in range(4, len(TEXT) - 2) if TEXT[n] < 100}
ANSWER: dict[str, Any] = {"temperature": 0.0, "prompt": 3, "tokens": TEXT, "drafts": DRAFTS}


@pytest.mark.parametrize("arm", ARMS)
def test_a_replay_says_the_recorded_text_in_fewer_steps(arm: str) -> None:
    run = Replay(arm)
    for key in range(3):
        run.answer(key, ANSWER)
    assert run.tokens == 3 * (len(TEXT) - 4)
    assert run.steps < run.tokens
    assert run.clock.now > 0.0


def test_the_head_is_asked_at_every_position(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A recorder drafts nothing, so that steps that are drawn to run plain would find it slow, and forbid it."""
    options: dict[str, Any] = {}

    class Stopped(Exception): ...

    def load(*args: Any, **given: Any) -> None:
        options.update(given)
        raise Stopped

    monkeypatch.setattr("peers.portfolio_replay.register", lambda *kind: None)  # for this process, for ever
    monkeypatch.setattr("peers.portfolio_replay.LLM", load)
    monkeypatch.setattr("sys.argv", ["portfolio_replay", "record", str(tmp_path / "some.json")])
    with pytest.raises(Stopped):
        main()
    assert options["measure_speedup"] is False


def test_together_they_need_fewer_steps_than_alone() -> None:
    steps = {}
    for arm in ("head", "suffix", "suffix+head"):
        run = Replay(arm)
        run.answer(0, ANSWER)
        steps[arm] = run.steps
    assert steps["suffix+head"] < min(steps["head"], steps["suffix"])
