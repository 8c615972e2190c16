"""Drafters that hear logits: what they are told is what the target said, of all rows and of their own sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter, Verified
from paceline.drafters.guard import Guard
from paceline.drafters.portfolio import PortfolioDrafter
from paceline.types import Request, SamplingParams, Speculation
from tests.rig import build
from tests.rig_drafters import always
from tests.runs import prompt, run

PARAMS = SamplingParams(temperature=0, max_tokens=12)


class Hearing(Drafter):
    """Drafts two siblings now and then, and keeps what it is told."""

    name = "hearing"
    max_draft = 4
    hears_logits = True

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.heard: list[tuple[int, int, str, Draft, list[int], list[int]]] = []  # with the text before it was said

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        for ask in asks:
            self.texts[ask.key] = ask.tokens.tolist()
        tree = Draft(tokens=(3, 4, 5), parents=(-1, -1, 1))
        return [tree if len(ask.tokens) % 2 and ask.max_draft >= 3 else EMPTY for ask in asks]

    def hear(self, verified: Sequence[Verified]) -> None:
        for key, salt, token, draft, logits, best in verified:
            assert logits.shape == (1 + len(draft), 97)
            self.heard.append((key, token, salt, draft, [*best], logits.argmax(1).tolist()))


def asked(count: int, *, drafter: str | None = "hearing", salt: str = "") -> list[Request]:
    by = Speculation(drafter=drafter) if drafter else Speculation(enabled=False)
    texts = [prompt(9 + i, seed=i) for i in range(count)]
    return [
        Request(id=f"{drafter}{i}", prompt=text, sampling=PARAMS, speculation=by, cache_salt=salt)
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize("in_portfolio", [False, True])
def test_every_step_of_its_sequences_is_told(in_portfolio: bool) -> None:
    drafter = Hearing()
    made: Drafter = drafter
    if in_portfolio:
        made = PortfolioDrafter([Guard(drafter, vocab_size=97, timeout=60)])
        assert made.hears_logits
    rig = build("toy", {"hearing": always(made)}, fixed_draft=True)
    told = run(rig, [*asked(3, salt="s"), *asked(2, drafter=None)])
    assert {salt for _, _, salt, *_ in drafter.heard} == {"s"}
    assert all(best == argmax for *_, best, argmax in drafter.heard)
    assert any(draft.tokens for _, _, _, draft, *_ in drafter.heard)
    assert any(not draft.tokens for _, _, _, draft, *_ in drafter.heard)
    for i, request in enumerate(asked(3)):
        key = sorted({each[0] for each in drafter.heard})[i]
        text = [*request.prompt, *told[request.id, 0].tokens]
        steps = [each for each in drafter.heard if each[0] == key]
        follows: dict[int, list[int]] = {token: [] for token in text}
        for before, after in pairwise(text):
            follows[before].append(after)
        assert all(best[0] in follows[token] for _, token, _, _, best, _ in steps), "the root's row is the last token's"
        assert len(steps) >= 5


def test_the_last_step_of_a_sequence_and_others_sequences_are_not_told() -> None:
    drafter = Hearing()
    rig = build("toy", {"hearing": always(drafter), "other": always(Silent())})
    run(rig, asked(2, drafter="other"))
    assert not drafter.heard
    [told] = run(rig, asked(1)).values()
    assert len(drafter.heard) == told.stats.steps - 1


class Silent(Drafter):
    name = "other"

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [EMPTY] * len(asks)


def test_a_drafter_that_fails_to_hear_is_out_and_the_text_is_the_same() -> None:
    class Deaf(Hearing):
        def hear(self, verified: Sequence[Verified]) -> None:
            raise RuntimeError("too loud")

    rig = build("toy", {"hearing": always(Deaf())})
    told, plain = run(rig, asked(2)), run(build("toy"), asked(2, drafter=None))
    assert [each.tokens for each in told.values()] == [each.tokens for each in plain.values()]
    assert "too loud" in (rig.engine.drafters["hearing"].fault or "")


def test_a_drafter_that_joins_hears_and_one_that_left_does_not() -> None:
    drafter = Hearing()
    rig = build("toy", {"other": always(Silent())})
    rig.engine.add_drafter("hearing", Guard(drafter, vocab_size=97, timeout=60))
    run(rig, asked(1))
    assert drafter.heard
    rig.engine.remove_drafter("hearing")
    run(rig, asked(1, drafter="other"))
    assert np.array([each[1] for each in drafter.heard]).size < 20
