"""A pass that draws without masks (laws 1, 2): the text is that of masks before every draw, whoever drafts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.sampling.grammar import Grammars
from paceline.types import Grammar, Request, SamplingParams
from tests.laws.test_grammars import CHOICE, COMPACT, DRAFTERS, EOS, SIZE, TARGET, TOKENIZER, WORDS
from tests.rig import Rig, build
from tests.rig_drafters import EagleMade, Made
from tests.runs import Key, plain, prompt, run, tokens_of

HEAD = EagleMade(draft_vocab=SIZE, vocab_size=SIZE)
OFTEN = Grammar.regex("([a-z ,.]|[^a-z ]){20,60}")  # allows most tokens: many of the pass stay
UNCHANGED = {0: 0.0}  # a bias that changes no logit, but keeps the pass from drawing
PARAMS = (
    SamplingParams(temperature=0, grammar=COMPACT),
    SamplingParams(temperature=1, seed=3, grammar=OFTEN, n=2),
    SamplingParams(temperature=0, grammar=OFTEN, logprobs=2),
    SamplingParams(temperature=0.8, seed=4, grammar=OFTEN, top_k=20),
    SamplingParams(temperature=0.6, seed=5, grammar=WORDS, top_p=0.8),
    SamplingParams(temperature=1.5, seed=6, grammar=CHOICE),
    SamplingParams(temperature=1, seed=7, max_tokens=40),  # a neighbour without one
)


def asked(params: Sequence[SamplingParams] = PARAMS) -> list[Request]:
    return [
        Request(str(i), tuple(token % SIZE for token in prompt(5 + 7 * i, seed=i)), replace(each, max_tokens=60))
        for i, each in enumerate(params)
    ]


def engine(drafter: Made | None) -> Rig:
    taps = HEAD.taps if drafter is HEAD else ()
    forward = TARGET.forward("compiled", num_pages=160, taps=taps)
    drafters = {} if drafter is None else {"one": drafter}
    limits = {"max_draft_batch": len(PARAMS) + 2}
    return build("compiled", drafters, forward=forward, tokenizer=TOKENIZER, eos_ids=(EOS,), **limits)


@functools.cache
def expected() -> dict[Key, list[int]]:
    masked = [replace(params, logit_bias=UNCHANGED) if params.grammar else params for params in PARAMS]
    return tokens_of(run(engine(None), plain(asked(masked))))


@pytest.mark.parametrize("name", ["plain", "ngram", "noisy", "head"])
def test_the_text_is_that_of_masks_before_the_draw(name: str) -> None:
    rig = engine({"plain": None, "head": HEAD, **DRAFTERS}[name])
    assert tokens_of(run(rig, asked())) == expected()


def test_few_masks_are_computed_where_most_tokens_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, compute = [], Grammars.mask
    monkeypatch.setattr(Grammars, "mask", lambda self, matcher: masks.append(1) or compute(self, matcher))
    told = run(engine(None), plain(asked([PARAMS[2]])))
    assert len(masks) < 0.8 * len(told["0", 0].tokens), "one for each token before"
