"""Rounds without masks under a grammar (laws 1, 2, 4, 6, 7): whatever is cut, the text is that of masks in every round.

Untrained models draw tokens that a grammar forbids all the time, so that nearly every answer is cut."""

from __future__ import annotations

import functools
import math
import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.drafters.ngram import LookupOnDevice
from paceline.engine import caution
from paceline.runner.rounds.portable import PortableRounds
from paceline.runner.rounds.portable_step import PortableStep
from paceline.sampling.grammar import Grammars
from paceline.types import Finish, Grammar, Origin, Request, Rule, SamplingParams, Speculation
from tests.laws.test_grammars import CALLS, CHOICE, COMPACT, EOS, SIZE, TARGET, TEXT, TOKENIZER, engine
from tests.odd_drafters import Scripted, TreesOnDevice
from tests.rig import build
from tests.rig_drafters import DeviceRig, EagleMade, always
from tests.runs import Key, Run, Told, plain, prompt, run

FEW = Grammar.regex(r"(?s:[^eq])*")  # forbids every eighth token or so: cuts are in the middle of drafts
SINGLE = {token: 90.0 for letter in " !dehlorw" for token in TOKENIZER.encode(letter, add_bos=False)}
DIGITS = Grammar.regex("[0-9]+")
INTEGERS = Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6})
PARAMS = (
    SamplingParams(temperature=0, grammar=FEW),
    SamplingParams(temperature=1, seed=2, grammar=FEW, n=2, logprobs=2),
    SamplingParams(temperature=0, grammar=FEW, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=1, seed=3, grammar=FEW, frequency_penalty=0.7, presence_penalty=0.2),
    SamplingParams(temperature=1, seed=4, grammar=COMPACT, n=2),
    SamplingParams(temperature=1, seed=5, grammar=CHOICE, min_tokens=2),
    SamplingParams(temperature=1, seed=6, grammar=INTEGERS, logit_bias={EOS: 3.0}),
    SamplingParams(temperature=0, grammar=DIGITS, min_tokens=20, logit_bias={EOS: 50.0}),
    SamplingParams(temperature=1, seed=7, grammar=TEXT, stop=("a",)),
    SamplingParams(temperature=1, seed=8, grammar=CALLS),
    SamplingParams(temperature=1, seed=9, grammar=FEW, logit_bias=dict.fromkeys(range(3, 120), 2.0)),
    SamplingParams(temperature=1, seed=10),
    SamplingParams(temperature=1, seed=11, grammar=FEW, top_k=5, min_p=0.01),
    # Masks allow one spelling of forced text. The model would rather write letters, which the grammar itself allows.
    SamplingParams(temperature=0, grammar=Grammar.regex("hello( world){3}!"), logit_bias=SINGLE),
)
DRAFTERS: dict[str, DeviceRig] = {
    "good": TARGET,
    "noisy": replace(TARGET, noise=0.05),
    "ngram": LookupOnDevice(min_ngram=1, max_ngram=2),
    "eagle": EagleMade(vocab_size=SIZE, draft_vocab=SIZE),
    "branches": EagleMade(vocab_size=SIZE, draft_vocab=SIZE, branches=3),
}


def asked(**changes: Any) -> list[Request]:
    return [
        Request(
            id=str(i),
            prompt=tuple(token % SIZE for token in prompt(5 + 6 * i, seed=i, repeat=i % 2 == 0)),
            sampling=replace(each, max_tokens=45, **changes),
            speculation=Speculation(max_draft=None if i % 3 else 3),
        )
        for i, each in enumerate(PARAMS)
    ]


@functools.cache
def expected() -> dict[Key, Told]:
    return run(engine(), plain(asked()))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw without masks from the first round on, and never with masks for long. No mask is left to a worker."""
    for name, rounds in (("FIRST_ROUNDS", 0), ("MAX_ROUNDS", 2)):
        monkeypatch.setattr(caution, name, rounds)
    monkeypatch.setattr("paceline.sampling.grammar_state.MAX_INLINE_SECONDS", math.inf)


def assert_told(told: dict[Key, Told]) -> None:
    for key, each in told.items():
        wanted = expected()[key]
        assert (each.tokens, each.text, each.finish, each.stop) == (
            wanted.tokens,
            wanted.text,
            wanted.finish,
            wanted.stop,
        )
        assert [(one.token, one.rank) for one in each.logprobs] == [(one.token, one.rank) for one in wanted.logprobs]
        assert each.stats.output_tokens == len(each.tokens)
        assert each.stats.accepted == each.origins.count(Origin.ACCEPTED)


@pytest.mark.parametrize("name", [*DRAFTERS, None])
def test_same_answers_whoever_drafts(name: str | None) -> None:
    rig = engine(on_device={name: DRAFTERS[name]} if name else {})
    assert_told(run(rig, asked()))
    assert rig.rounds.cuts > 50
    assert 0 < sum(map(len, rig.rounds.masked)) < sum(map(len, rig.rounds.seats))
    assert {each.finish for each in expected().values()} == {Finish.LENGTH, Finish.STOP}


def test_same_answers_with_drafted_trees() -> None:
    rig = engine(on_device={"trees": TreesOnDevice(scripts(), nodes=6, vocab_size=SIZE)})
    assert_told(run(rig, asked()))
    assert rig.rounds.cuts > 50
    assert rig.engine.stats.drafted > rig.engine.stats.accepted > 0


def test_same_answers_with_a_drafter_of_the_host() -> None:
    """Its offers begin behind the last token that the host knows, which a cut may be right behind."""
    rig = engine({"scripted": always(Scripted(scripts(), vocab_size=SIZE))}, on_device={})
    assert_told(run(rig, asked()))
    assert rig.rounds.cuts > 20
    assert rig.engine.stats.accepted > 50


@pytest.mark.parametrize("first", [0, 3, math.inf])
def test_arrivals_and_the_choice_of_masks_change_nothing(first: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caution, "FIRST_ROUNDS", first)
    rig = engine(on_device={"good": TARGET})
    assert_told(run(rig, asked(), every=2))
    assert bool(rig.rounds.cuts) is not math.isinf(first)


def test_preempted_and_aborted_sequences_are_cut_like_others() -> None:
    forward = TARGET.forward("toy", num_pages=12)
    rig = build("toy", forward=forward, tokenizer=TOKENIZER, eos_ids=(EOS,), on_device={"good": TARGET})
    going = Run(rig)
    going.submit(asked()[:6])
    for turn in range(16):
        going.step()
        if turn in (9, 14):
            rig.engine.abort(f"{turn % 4}")
    told = going.finish()
    assert rig.engine.stats.preemptions > 0
    for key, each in told.items():
        aborted = each.finish is Finish.ABORT
        assert each.tokens == expected()[key].tokens[: len(each.tokens) if aborted else None]
    assert rig.rounds.cuts > 10
    assert sum(each.finish is Finish.ABORT for each in told.values()) == 3


def test_filters_and_lossy_rules_draw_with_masks_in_every_round() -> None:
    """They depend on tokens that the mask leaves out."""
    lossy = replace(asked()[0], speculation=Speculation(rule=Rule.THRESHOLD, threshold=0.5))
    for request in (lossy, asked()[12]):
        rig = engine(on_device={"good": TARGET})
        run(rig, [request])
        assert [*map(len, rig.rounds.masked)] == [*map(len, rig.rounds.seats)]


@pytest.mark.parametrize("name", ["eagle", "good"])
def test_what_is_drafted_after_a_cut_is_what_would_be_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter has read the text up to the cut, and nothing behind it: its draft depends on the text alone."""
    verify = PortableRounds._verify
    drafts: defaultdict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)  # by text

    def watched(self: PortableRounds, step: PortableStep) -> None:
        for seat, drafted in zip(step.seats, step.drafted, strict=True):
            length = int(self._state.lengths[seat.lane])
            tokens = self._state.tokens[seat.lane, : length + drafted].tolist()
            drafts[tuple(tokens[:length])].add(tuple(tokens[length:]))
        verify(self, step)

    monkeypatch.setattr(PortableRounds, "_verify", watched)
    sampling = SamplingParams(temperature=0, grammar=FEW, logit_bias={EOS: -100.0}, max_tokens=40)
    for first in (0, math.inf):
        monkeypatch.setattr(caution, "FIRST_ROUNDS", first)
        rig = engine(on_device={name: DRAFTERS[name]}, fixed_draft=True)
        run(rig, [replace(asked()[1], sampling=sampling)])
        assert bool(rig.rounds.cuts > 5) is not math.isinf(first)
    early = [each for text, each in drafts.items() if len(text) < 40]
    assert len(early) > 12
    assert all(len(each) == 1 for each in early)


def test_pages_of_a_cut_answer_serve_the_next() -> None:
    """What a round wrote behind a cut never reaches the prefix cache (law 4)."""
    rig = engine(on_device={"good": TARGET})
    sampling = SamplingParams(temperature=0, grammar=FEW, logit_bias={EOS: -100.0}, max_tokens=40)
    first = replace(asked()[0], sampling=sampling)
    told = run(rig, [first])["0", 0]
    more = replace(first, id="more", prompt=(*first.prompt, *told.tokens))
    found = run(rig, [more])["more", 0]
    assert found.tokens == run(engine(), plain([more]))["more", 0].tokens
    assert found.stats.cached_tokens >= 32
    assert rig.rounds.cuts > 5


def test_a_slow_grammar_needs_no_masks_as_long_as_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute none for its drafts, and it flies like the others. After a cut it alone waits for its mask."""
    monkeypatch.setattr("paceline.sampling.grammar_state.MAX_INLINE_SECONDS", -1.0)
    go, mask, late = threading.Event(), Grammars.mask, []

    def held(self: Grammars, matcher: Any) -> np.ndarray:
        late.append(threading.current_thread().name)
        assert late[-1].startswith("grammar"), "a slow mask on the engine's thread"
        go.wait()
        return mask(self, matcher)

    wanted = expected()
    rig = engine(on_device={"good": TARGET})
    going = Run(rig)
    going.submit([asked()[3], asked()[11]])
    monkeypatch.setattr(Grammars, "mask", held)
    while going.told["11", 0].finish is None:
        going.step()
    assert going.told["11", 0].tokens == wanted["11", 0].tokens
    assert len(late) == rig.rounds.cuts + 1 == 1
    assert 1 < len(going.told["3", 0].tokens) < len(wanted["3", 0].tokens)
    go.set()
    assert going.finish()["3", 0].tokens == wanted["3", 0].tokens
    assert rig.rounds.cuts > 2


def scripts() -> list[list[int]]:
    return [[*asked()[int(i)].prompt, *told.tokens] for (i, _), told in expected().items()]
