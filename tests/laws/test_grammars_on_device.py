"""Grammars in steps of a device (laws 1, 2, 6): the text is the host's, whoever drafts, and only who waits is late.

The masks of a step, those behind drafted tokens included, come while the device verifies."""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.drafters.ngram import LookupOnDevice
from paceline.errors import InvalidRequest
from paceline.sampling.grammar import Grammars
from paceline.sampling.grammar_state import GrammarState, Outlook
from paceline.sampling.words import pack
from paceline.types import Finish, Grammar, Origin, Request, Rule, SamplingParams, Speculation
from tests.laws.test_grammars import (
    CALLS,
    CHOICE,
    COMPACT,
    EOS,
    SIZE,
    TARGET,
    TEXT,
    TOKENIZER,
    WORDS,
    engine,
)
from tests.odd_drafters import TreesOnDevice
from tests.rig import Rig, build
from tests.rig_drafters import DeviceRig, PortfolioRig
from tests.runs import Key, Run, Told, plain, prompt, run, tokens_of
from tests.tiny_models import Model

LONG = Grammar.regex("[a-z]{900,}")
PARAMS = (
    SamplingParams(temperature=0, grammar=COMPACT),
    SamplingParams(temperature=1, seed=3, grammar=COMPACT, n=2),
    SamplingParams(temperature=0.8, seed=4, grammar=WORDS, top_k=3),
    SamplingParams(temperature=1.2, seed=5, grammar=COMPACT, top_p=0.4, min_p=0.01),
    SamplingParams(temperature=1.5, seed=6, grammar=CHOICE),
    SamplingParams(temperature=1, seed=7),
    SamplingParams(temperature=1, seed=8, grammar=CALLS, n=2),
    SamplingParams(temperature=1, seed=9, grammar=TEXT),
)
DRAFTERS: dict[str, DeviceRig] = {
    "good": TARGET,
    "noisy": replace(TARGET, noise=0.05),
    "narrow": Model(seed=5, vocab_size=200),
    "ngram": LookupOnDevice(min_ngram=1, max_ngram=2),
    "portfolio": PortfolioRig(replace(TARGET, noise=0.05)),
}


def asked(params: tuple[SamplingParams, ...] = PARAMS, **changes: Any) -> list[Request]:
    return [
        Request(
            id=str(i),
            prompt=tuple(token % SIZE for token in prompt(5 + 9 * i, seed=i, repeat=i % 2 == 0)),
            sampling=replace(each, max_tokens=70, **changes),
            speculation=Speculation(max_draft=None if i % 3 else 3),
        )
        for i, each in enumerate(params)
    ]


def device(name: str | None = None, **options: Any) -> Rig:
    return engine(on_device={name: DRAFTERS[name]} if name else {}, **options)


@functools.cache
def expected() -> dict[Key, Told]:
    return run(engine(), plain(asked()))


@pytest.mark.parametrize("name", [*DRAFTERS, None])
def test_same_answers_whoever_drafts(name: str | None) -> None:
    rig = device(name)
    told = run(rig, asked())
    assert tokens_of(told) == tokens_of(expected())
    for key, each in told.items():
        assert (each.text, each.finish) == (expected()[key].text, expected()[key].finish)
    assert rig.rounds.launches == rig.engine.stats.steps  # none ran on the host
    assert rig.engine.stats.accepted > 0  # without a drafter: what the grammar forces


def test_same_answers_with_drafted_trees() -> None:
    """Each node has the mask behind its path."""
    scripts = [[*asked()[int(i)].prompt, *told.tokens] for (i, _), told in expected().items()]
    rig = engine(on_device={"trees": TreesOnDevice(scripts, nodes=6, vocab_size=SIZE)})
    assert tokens_of(run(rig, asked())) == tokens_of(expected())
    assert rig.engine.stats.drafted > rig.engine.stats.accepted > 0


@pytest.mark.parametrize("every", [1, 3])
def test_arrivals_change_nothing(every: int) -> None:
    assert tokens_of(run(device("noisy"), asked(), every=every)) == tokens_of(expected())


def test_rules_that_need_masks_become_coupled() -> None:
    some = [replace(each, speculation=Speculation(rule=Rule.REJECTION)) for each in asked(PARAMS[:2])]
    rig = device("noisy")
    told = run(rig, some)
    assert tokens_of(told) == {key: expected()[key].tokens for key in told}
    assert rig.rounds.launches == rig.engine.stats.steps


def test_accepted_counts_what_is_kept() -> None:
    """Also where an answer ends by its length: a draft in flight may go beyond the last token."""
    told = run(device("good"), asked())
    assert {each.finish for each in told.values()} >= {Finish.LENGTH, Finish.STOP}
    for each in told.values():
        assert each.stats.accepted == each.origins.count(Origin.ACCEPTED)
        assert each.stats.output_tokens == len(each.tokens)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no mask to a worker, so that counts do not depend on the machine."""
    monkeypatch.setattr("paceline.sampling.grammar_state.MAX_INLINE_SECONDS", math.inf)


@pytest.mark.usefixtures("inline")
def test_sequences_with_grammars_take_part_in_every_step() -> None:
    """Their masks come while the device verifies: none waits for its last token to land."""
    rig = device()
    bound, free = SamplingParams(temperature=0, grammar=LONG), SamplingParams(temperature=0, ignore_eos=True)
    told = run(rig, plain(asked((bound, bound, bound, bound, free, free))))
    assert {each.finish for each in told.values()} == {Finish.LENGTH}
    assert rig.rounds.most_in_flight == 2
    assert sum(len(seats) == 6 for seats in rig.rounds.seats) > 60


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold up workers that compute masks until the event is set."""
    go, mask = threading.Event(), Grammars.mask

    def late(self: Grammars, matcher: Any) -> np.ndarray:
        if threading.current_thread().name.startswith("grammar"):
            go.wait()
        return mask(self, matcher)

    monkeypatch.setattr(Grammars, "mask", late)
    yield go
    go.set()


def test_a_slow_grammar_holds_up_its_own_sequence_alone(held: threading.Event) -> None:
    wanted = expected()
    rig = device("noisy")
    going = Run(rig)
    going.submit([asked()[0], asked()[5]])
    while going.told["5", 0].finish is None:
        going.step()
    assert going.told["5", 0].tokens == wanted["5", 0].tokens
    assert going.told["0", 0].tokens == wanted["0", 0].tokens[:1]
    held.set()
    assert going.finish()["0", 0].tokens == wanted["0", 0].tokens


@pytest.mark.parametrize("name", ["noisy", None])
def test_a_sequence_whose_mask_is_missing_draws_nothing_in_that_step(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seat is void: a worker computes the mask, and the text is the same. The others go on."""
    monkeypatch.setattr("paceline.sampling.grammar_state.MAX_INLINE_SECONDS", math.inf)
    fill, turns = GrammarState.fill, itertools.count()

    def misses(self: GrammarState, branches: Any, sheet: Any) -> Outlook:
        return fill(self, branches, sheet) if next(turns) % 4 or self.looked else Outlook.UNKNOWN

    monkeypatch.setattr(GrammarState, "fill", misses)
    rig = device(name)
    told = run(rig, asked())
    assert tokens_of(told) == tokens_of(expected())
    assert rig.engine.stats.wasted > 5


def test_an_engine_that_waits_for_a_mask_still_serves_aborts_and_deadlines(held: threading.Event) -> None:
    now = [0.0]
    going = Run(device(clock=lambda: now[0]))
    going.submit([asked()[0], replace(asked()[4], deadline=5.0)])
    for _ in range(8):  # each returns, with every sequence waiting
        going.step()
    assert [len(each.tokens) for each in going.told.values()] == [1, 1]
    now[0] = 6.0
    going.step()
    assert going.told["4", 0].finish is Finish.DEADLINE
    going.rig.engine.abort("0")
    going.step()
    assert going.told["0", 0].finish is Finish.ABORT
    assert not going.rig.engine.has_work


def test_an_end_that_only_the_mask_shows_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no token of the vocabulary goes on, though the grammar does."""
    mask = Grammars.mask

    def ends(self: Grammars, matcher: Any) -> np.ndarray:
        late = threading.current_thread().name.startswith("grammar")
        return pack([EOS], SIZE) if late else mask(self, matcher)

    monkeypatch.setattr(Grammars, "mask", ends)
    told = run(device(), [asked()[0]])["0", 0]
    assert (told.finish, told.tokens) == (Finish.STOP, expected()["0", 0].tokens[:1])


def test_a_worker_that_raises_ends_its_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Grammars.mask

    def broken(self: Grammars, matcher: Any) -> np.ndarray:
        if threading.current_thread().name.startswith("grammar"):
            raise RuntimeError("out of luck")
        return mask(self, matcher)

    wanted = expected()["5", 0].tokens
    monkeypatch.setattr(Grammars, "mask", broken)
    told = run(device(), [asked()[0], asked()[5]])
    assert told["0", 0].finish is Finish.ERROR
    assert told["0", 0].error == "out of luck"
    assert told["5", 0].tokens == wanted


def test_a_grammar_at_its_limits_ends_its_answer_alone() -> None:
    grammar = Grammar.regex("((a{1,100}){1,100}){100}")
    explosive = Request("x", (5, 6), SamplingParams(temperature=0, grammar=grammar, max_tokens=140))
    told = run(device("ngram"), [explosive, asked()[4]])
    assert told["x", 0].finish is Finish.ERROR
    assert "the grammar cannot be followed any further" in (told["x", 0].error or "")
    assert told["4", 0].tokens == expected()["4", 0].tokens
    assert told["x", 0].tokens == run(engine(), plain([explosive]))["x", 0].tokens


def test_many_grammars_at_once() -> None:
    texts = [f"{'ab'[i % 2]}{{{2 + i // 2}}} (hello|world)!" for i in range(64)]
    requests = [
        Request(str(i), (i,), SamplingParams(temperature=1, seed=i, grammar=Grammar.regex(text), max_tokens=60))
        for i, text in enumerate(texts)
    ]
    told = run(device("ngram", max_sequences=64, max_step_tokens=128, max_draft_batch=64), requests)
    for i, text in enumerate(texts):
        assert re.fullmatch(text, told[str(i), 0].text)


def test_preempted_sequences_keep_their_place() -> None:
    some = asked()[:3]
    tight = build("toy", forward=TARGET.forward("toy", num_pages=9), tokenizer=TOKENIZER, eos_ids=(EOS,), on_device={})
    told = run(tight, some)
    assert tokens_of(told) == {key: expected()[key].tokens for key in told}
    assert tight.engine.stats.preemptions > 0


def test_an_engine_without_a_tokenizer_refuses() -> None:
    rig = build("toy", on_device={})
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        rig.engine.submit(Request("x", (5,), SamplingParams(grammar=CHOICE)))
    assert not rig.engine.has_work
