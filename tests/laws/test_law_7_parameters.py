"""Law 7: whatever parameters are valid without speculation are valid with it, and mean the same."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.types import Grammar, Logprob, Request, Rule, SamplingParams, Speculation
from tests.laws import under_law
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS, SELF, Made
from tests.runs import Key, Told, plain, prompt, run
from tests.tiny_models import BACKENDS, tiny_tokenizer

EOS = (5,)
BASE = SamplingParams(temperature=1.0, seed=7, max_tokens=22)

# For every field at least one value that shows: the answer differs from that of BASE.
VALUES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "temperature": [{"temperature": 0}, {"temperature": 2.5}, {"temperature": 0.2}],
    "top_k": [{"top_k": 1}, {"top_k": 3}, {"temperature": 3, "top_k": 10}],
    "top_p": [{"top_p": 0.3}, {"temperature": 3, "top_p": 0.9}],
    "min_p": [{"min_p": 1.0}, {"temperature": 3, "min_p": 0.1}],
    "repetition_penalty": [{"repetition_penalty": 1.9}, {"temperature": 0, "repetition_penalty": 0.5}],
    "presence_penalty": [{"presence_penalty": 2.0}, {"temperature": 0, "presence_penalty": -3.0}],
    "frequency_penalty": [{"frequency_penalty": 1.5}, {"temperature": 0, "frequency_penalty": -1.0}],
    "logit_bias": [{"logit_bias": {3: 9.0}}, {"temperature": 0, "logit_bias": {8: 4.0, 9: -5.0}}],
    "allowed_tokens": [{"allowed_tokens": (1, 2, 3)}, {"temperature": 0, "allowed_tokens": tuple(range(60, 90))}],
    "min_tokens": [{"stop_ids": tuple(range(1, 90, 3)), "min_tokens": 12}],
    "max_tokens": [{"max_tokens": 1}, {"max_tokens": 6}, {"max_tokens": None, "temperature": 0}],
    "stop": [{"stop": ("a", "e")}, {"stop": "it", "temperature": 0, "logit_bias": {9: 3.0, 20: 3.0}}],
    "stop_ids": [{"stop_ids": tuple(range(1, 90, 5))}],
    "include_stop": [
        {"stop": ("a", "e"), "include_stop": True},
        {"stop_ids": tuple(range(1, 90, 5)), "include_stop": True},
    ],
    "ignore_eos": [{"logit_bias": {5: 9.0}}, {"logit_bias": {5: 9.0}, "ignore_eos": True}],
    "seed": [{"seed": 8}, {"seed": 0}, {"seed": 2**64 - 1}],
    "n": [{"n": 3}, {"temperature": 0, "n": 2}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 3}, {"temperature": 0, "logprobs": 5, "stop": ("a",)}],
    "prompt_logprobs": [{"prompt_logprobs": 0}, {"prompt_logprobs": 2, "n": 2}],
    "grammar": [
        {"grammar": Grammar.regex("([aeiou][^aeiou ]{1,3} ){2,5}")},
        {"grammar": Grammar.regex("[a-z]{9}( [a-m]+)*"), "temperature": 0, "min_tokens": 15, "n": 2},
        {"grammar": Grammar.choice(["banana boat", "bandana"]), "logprobs": 1},
    ],
}
VARIANTS = [(name, values) for name, each in VALUES.items() for values in each]


def asked(rule: Rule = Rule.COUPLED) -> list[Request]:
    return [
        Request(
            id=str(i),
            prompt=prompt(40, seed=1),  # longer than a step has rows beside the others
            sampling=dataclasses.replace(BASE, **values),
            speculation=Speculation(rule=rule),
        )
        for i, (_, values) in enumerate([("", {}), *VARIANTS])
    ]


def engine(backend: str, drafters: Mapping[str, Made] | None = None, **options: Any) -> Rig:
    return build(backend, drafters, tokenizer=tiny_tokenizer(), eos_ids=EOS, max_context=100, **options)


@functools.cache
def expected(backend: str) -> dict[Key, Told]:
    return run(engine(backend), plain(asked()))


def assert_same_scores(mine: Sequence[Logprob | None], plain: Sequence[Logprob | None]) -> None:
    assert len(mine) == len(plain)
    for ours, theirs in zip(mine, plain, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)


def assert_same(mine: Mapping[Key, Told], plain: Mapping[Key, Told]) -> None:
    assert mine.keys() == plain.keys()
    for key, ours in mine.items():
        theirs = plain[key]
        assert (ours.tokens, ours.text, ours.finish, ours.stop) == (
            theirs.tokens,
            theirs.text,
            theirs.finish,
            theirs.stop,
        )
        assert_same_scores(ours.logprobs, theirs.logprobs)
        assert_same_scores(ours.prompt_logprobs or (), theirs.prompt_logprobs or ())


def test_every_field_is_covered() -> None:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    assert VALUES.keys() == known, "give every field of SamplingParams values in VALUES"
    for name, each in VALUES.items():
        assert any(name in values for values in each), f"{name} is not among its own values"


def test_every_field_shows() -> None:
    """A parameter that does nothing would pass all the tests below."""
    told = expected("toy")
    base = told["0", 0]
    for name in VALUES:
        ids = [str(i + 1) for i, (field, _) in enumerate(VARIANTS) if field == name]
        assert any(told[i, 0] != base_like(told[i, 0], base) or (i, 1) in told for i in ids), f"{name} does not show"


def base_like(told: Told, base: Told) -> Told:
    """The answer to BASE, as if it had the statistics of another."""
    return dataclasses.replace(base, stats=told.stats)


@pytest.mark.parametrize(
    ("backend", "name"),
    [*((b, n) for b in BACKENDS[:2] for n in ("noisy", "ngram-1", "chain", "tree", "bushy-tree")), ("eager", "chain")],
)
def test_same_answers(backend: str, name: str) -> None:
    if name in under_law.REGISTERED:
        made = under_law.REGISTERED[name]
    else:
        told = expected(backend)
        made = under_law.scripted(name, [[*asked()[int(i)].prompt, *each.tokens] for (i, _), each in told.items()])
    rig = engine(backend, {name: made})
    assert_same(run(rig, asked()), expected(backend))
    assert rig.engine.stats.accepted > 0


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((b, n) for b in BACKENDS[:2] for n in (None, "noisy", "ngram-1", "portfolio-model")),
        ("eager", "noisy"),
        ("toy", "self"),
    ],
)
def test_same_answers_on_a_device(backend: str, name: str | None) -> None:
    """Every step with every parameter but a grammar runs there."""
    rig = engine(backend, on_device={} if name is None else {name: {**DEVICE_RIGS, **SELF}[name]})
    mine = [request for request in asked() if request.sampling.grammar is None]
    ids = {request.id for request in mine}
    assert_same(run(rig, mine), {key: told for key, told in expected(backend).items() if key[0] in ids})
    assert rig.rounds is not None
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.stats.accepted > 0 or name is None


def test_same_answers_by_rejection_without_distributions() -> None:
    told = expected("toy")
    scripts = [[*asked()[int(i)].prompt, *each.tokens] for (i, _), each in told.items()]
    rig = engine("toy", {"chain": under_law.scripted("chain", scripts)})
    assert_same(run(rig, asked(Rule.REJECTION)), told)


def test_valid_with_rejection_and_distributions() -> None:
    """Not the same tokens, but every parameter is served, and its promises kept."""
    rig = engine("toy", {"noisy": RIGS["model"]["noisy"]})
    told = run(rig, asked(Rule.REJECTION))
    assert told.keys() == expected("toy").keys()
    for i, request in enumerate(asked()):
        params, each = request.sampling, told[str(i), 0]
        assert each.finish is not None
        if params.greedy:
            assert each.tokens == expected("toy")[str(i), 0].tokens
        assert len(each.logprobs) == (0 if params.logprobs is None else len(each.tokens))
        if params.allowed_tokens:
            assert set(each.tokens) <= set(params.allowed_tokens)
        if params.min_tokens:
            assert len(each.tokens) >= params.min_tokens
            assert not set(each.tokens[: params.min_tokens]) & set(params.stop_ids)
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
