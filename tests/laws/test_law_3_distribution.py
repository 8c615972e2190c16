"""Law 3: `rejection` and `block` leave the distribution unchanged.

The joint distribution of the first three tokens is known exactly; χ² compares it with what comes out, by the rule
alone (many thousand sequences in one call) and by the whole engine. Seeds are fixed. Each statistic is also shown
rules with a planted bug, and must object.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.sampling.sampler import Sampler, Stream, noise_keys, uniforms
from paceline.text.bridge import VocabularyBridge
from paceline.types import Request, Rule, SamplingParams, Speculation
from tests.laws import mutants
from tests.laws.chi_squared import p_value
from tests.other_vocabularies import Other, of_five
from tests.rig import build
from tests.rig_drafters import EagleMade, Made, bridged_drafter, model_drafter
from tests.runs import run
from tests.tiny_models import Model
from tests.toy import ToyForward

VOCAB = 5
TOKENS = 3
DRAFT = 2
LIKELY, ABSURD = 1e-3, 1e-6  # p-values: of a sound rule at the least, of a planted bug at the most

# ── the rule alone ──

TABLES = {  # logits [VOCAB + 1, VOCAB] after each token, and in the last row at the beginning; target, then drafter
    "good": (1.0, 0.3, 0),
    "bad": (1.0, 4.0, 0),
    "filtered": (1.5, 1.0, 2),
}
RULES = (Rule.REJECTION, Rule.BLOCK)
BUGS = {
    (Rule.REJECTION, "coin turned"): ("coins * q_token < p_token", "coins * q_token > p_token"),
    (Rule.REJECTION, "coin ignored"): ("coins * q_token < p_token", "q_token < p_token"),
    (Rule.REJECTION, "always accepts"): ("coins * q_token < p_token", "coins < 2"),
    (Rule.REJECTION, "residual is p"): ("(p_last - q[rejected]).clamp(min=0)", "p_last"),
    (Rule.REJECTION, "residual is |p - q|"): ("(p_last - q[rejected]).clamp(min=0)", "(p_last - q[rejected]).abs()"),
    (Rule.REJECTION, "corrects what was accepted"): ("rejected = (last + 1)", "rejected = last"),
    (Rule.REJECTION, "forgets the correction"): ("was_rejected[:, None] & ~empty", "empty"),
    (Rule.BLOCK, "coin ignored"): ("coins < chance", "chance > 0.5"),
    (Rule.BLOCK, "residual is p"): ("(weights[:, None] * p - q[after])", "p"),
    (Rule.BLOCK, "residual without the weight"): ("weights[:, None] * p - q[after]", "p - q[after]"),
    (Rule.BLOCK, "chance is the weight"): ("left / (left + 1 - weights).clamp(min=1e-12)", "weights"),
    (Rule.BLOCK, "weight not cut"): ("(weights[rows.parents] * ratio).clamp(max=1)", "weights[rows.parents] * ratio"),
    (Rule.BLOCK, "forgets the correction"): ("left[last] > 0", "left[last] < 0"),
}


def tables(kind: str) -> tuple[Tensor, Tensor]:
    spread, difference, filtered = TABLES[kind]
    generator = torch.Generator().manual_seed(3)
    p_logits, other = (spread * torch.randn((VOCAB + 1, VOCAB), generator=generator) for _ in range(2))
    q_logits = p_logits + difference * other
    for logits in (p_logits, q_logits):
        if filtered:  # both lose their least likely tokens, and not always the same
            logits[logits < logits.topk(VOCAB - filtered).values[:, -1:]] = -torch.inf
    return p_logits.softmax(-1), q_logits.softmax(-1)


def exact(p: Tensor) -> Tensor:
    """The probability of every TOKENS tokens [VOCAB ** TOKENS]."""
    texts = itertools.product(range(VOCAB), repeat=TOKENS)
    chains = [zip((VOCAB, *text), text, strict=False) for text in texts]
    return torch.tensor([np.prod([float(p[before, token]) for before, token in chain]) for chain in chains])


def emitted(code: SimpleNamespace, rule: Rule, p: Tensor, q: Tensor, *, count: int) -> Tensor:
    """The first TOKENS tokens [count, TOKENS] of as many sequences that draft once and go on plainly."""
    generator = torch.Generator().manual_seed(11)

    def draw(table: Tensor, before: Tensor) -> Tensor:
        return torch.multinomial(table[before], 1, generator=generator)[:, 0]

    start = torch.full((count,), VOCAB)
    first = draw(q, start)
    drafted = torch.stack((start, first, draw(q, first)), dim=1)  # [count, 1 + DRAFT]
    roots = torch.arange(count) * (1 + DRAFT)
    parents = torch.stack((roots, roots, roots + 1), dim=1).flatten()
    rows = code.Rows(
        tokens=drafted.flatten() % VOCAB,  # a root's own is not looked at
        parents=parents,
        owners=torch.arange(count).repeat_interleave(1 + DRAFT),
        roots=roots,
        depth=DRAFT,
    )
    coins = torch.rand(len(parents), generator=generator, dtype=torch.float64)
    noise = -(-torch.rand((count, VOCAB), generator=generator).clamp(min=1e-9).log()).log()
    accept = getattr(code, f"accept_{rule}")
    outcome = accept(rows, p[drafted.flatten()], q[drafted.flatten()[parents]], coins, noise)
    accepted = outcome.alive.view(count, -1).sum(1) - 1
    text = torch.zeros((count, TOKENS), dtype=torch.int64)
    for place in range(TOKENS):
        before = text[:, place - 1] if place else start
        text[:, place] = draw(p, before)
        text[:, place] = torch.where(place == accepted, outcome.tokens, text[:, place])
        if place < DRAFT:
            text[:, place] = torch.where(place < accepted, drafted[:, 1 + place], text[:, place])
    return text


def judged(texts: Tensor, probabilities: Tensor) -> float:
    weights = VOCAB ** torch.arange(TOKENS - 1, -1, -1)
    counts = torch.bincount((texts * weights).sum(1), minlength=VOCAB**TOKENS)
    return p_value(counts, probabilities * len(texts))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("rule", RULES)
def test_the_rule_leaves_the_distribution_alone(rule: Rule, kind: str) -> None:
    p, q = tables(kind)
    assert judged(emitted(mutants.load({}), rule, p, q, count=40_000), exact(p)) > LIKELY


def planted(rule: Rule, bug: str) -> SimpleNamespace:
    before, after = BUGS[rule, bug]
    name = f"paceline.accept.{rule}"
    assert before in mutants.SOURCES[name]
    return mutants.load({name: mutants.SOURCES[name].replace(before, after)})


@pytest.mark.parametrize(("rule", "bug"), BUGS)
def test_a_planted_bug_is_seen(rule: Rule, bug: str) -> None:
    p, q = tables("good" if bug in ("corrects what was accepted", "weight not cut") else "bad")
    assert judged(emitted(planted(rule, bug), rule, p, q, count=40_000), exact(p)) < ABSURD


# ── the engine ──

PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "hot, top-k": SamplingParams(temperature=1.7, top_k=3),
    "cold, biased": SamplingParams(temperature=0.8, logit_bias={1: 1.0}, presence_penalty=0.5),
}
TARGET = Model(vocab_size=VOCAB, sharpness=1.0)
DRAFTERS = {
    "good": model_drafter(Model(vocab_size=VOCAB, sharpness=1.0, noise=0.3)),
    "bad": model_drafter(Model(seed=9, vocab_size=VOCAB, sharpness=1.5)),
    "hesitant": model_drafter(Model(seed=9, vocab_size=VOCAB, sharpness=1.5), min_confidence=0.5),
    "eagle": EagleMade(vocab_size=VOCAB, draft_vocab=VOCAB - 1),  # there is a token that it never says
    "bridged": bridged_drafter(  # one of its tokens is two of the target's
        Other(vocab_size=VOCAB, sharpness=1.0, noise=0.3, order=of_five()[2]), VocabularyBridge(*of_five()[:2])
    ),
}
REQUESTS = 5  # of 128 samples each
PROMPT = (2,)  # of one token, so that the first token is drafted


def engine_exact(params: SamplingParams) -> Tensor:
    forward = ToyForward(num_pages=1, vocab_size=VOCAB, sharpness=1.0)
    probabilities = []
    for text in itertools.product(range(VOCAB), repeat=TOKENS):
        sampler = Sampler(params, seed=0, vocab_size=VOCAB, eos_ids=())
        product = 1.0
        for i, token in enumerate(text):
            logits = torch.from_numpy(forward.logits_after(np.array(PROMPT + text[:i])))[None]
            product *= float(sampler.probs(sampler.edit(logits, [()]))[0, token])
            sampler.advance([token])
        probabilities.append(product)
    return torch.tensor(probabilities)


def engine_texts(params: SamplingParams, rule: Rule, drafter: Made, *, requests: int) -> Tensor:
    rig = build(
        "toy",
        {"model": drafter},
        forward=TARGET.forward("toy", num_pages=300, taps=sorted({*getattr(drafter, "taps", ())})),
        max_context=32,
        min_acceptance=0.0,
        prefix_cache=False,
        max_sequences=128,
        max_step_tokens=512,
        max_draft_tokens=512,
        max_draft_batch=128,
    )
    asked = [
        Request(
            id=str(i),
            prompt=PROMPT,
            sampling=SamplingParams.of(**{**_fields(params), "seed": 1000 + i, "n": 128, "max_tokens": TOKENS}),
            speculation=Speculation(rule=rule, max_draft=DRAFT),
        )
        for i in range(requests)
    ]
    told = run(rig, asked)
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    return torch.tensor([each.tokens for each in told.values()])


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__slots__}


@pytest.mark.parametrize(
    ("rule", "params", "drafter"),
    [
        (Rule.REJECTION, "plain", "good"),
        (Rule.REJECTION, "plain", "bad"),
        (Rule.REJECTION, "hot, top-k", "hesitant"),
        (Rule.REJECTION, "cold, biased", "good"),
        (Rule.REJECTION, "plain", "eagle"),
        (Rule.REJECTION, "plain", "bridged"),
        (Rule.BLOCK, "plain", "bad"),
        (Rule.BLOCK, "cold, biased", "good"),
        (Rule.BLOCK, "hot, top-k", "hesitant"),
    ],
)
def test_the_engine_leaves_the_distribution_alone(rule: Rule, params: str, drafter: str) -> None:
    requests = REQUESTS if rule is Rule.REJECTION else 3  # of a rule that differs from it in `accept` alone
    texts = engine_texts(PARAMS[params], rule, DRAFTERS[drafter], requests=requests)
    assert judged(texts, engine_exact(PARAMS[params])) > LIKELY


def noise_of_the_draft(seed: int, positions: np.ndarray, stream: Stream) -> np.ndarray:
    """What the drafter drew the first token of this round with."""
    return noise_keys(seed, (positions << 32) + positions, Stream.DRAFT)


@pytest.mark.parametrize(
    ("rule", "bug"),
    [
        (Rule.REJECTION, "residual is p"),
        (Rule.REJECTION, "one noise for draft and correction"),
        (Rule.BLOCK, "residual is p"),
    ],
)
def test_a_bug_planted_in_the_engine_is_seen(rule: Rule, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (rule, bug) in BUGS:
        accept = f"accept_{rule}"
        monkeypatch.setattr(f"paceline.accept.registry.{accept}", getattr(planted(rule, bug), accept))
    else:
        monkeypatch.setattr("paceline.engine.judge.noise_keys", noise_of_the_draft)
    texts = engine_texts(PARAMS["plain"], rule, DRAFTERS["bad"], requests=REQUESTS)
    assert judged(texts, engine_exact(PARAMS["plain"])) < ABSURD


def test_no_coin_of_a_block_is_thrown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """All coins of a round are looked at, and say something of tokens that the next round judges again."""
    thrown: list[tuple[int, int]] = []

    def watched(seed: int, places: np.ndarray, stream: Stream) -> Tensor:
        thrown.extend((seed, place) for place in places.tolist())
        return uniforms(seed, places, stream)

    monkeypatch.setattr("paceline.engine.judge.uniforms", watched)
    rig = build("toy", {"model": model_drafter(Model(noise=0.5))})
    sampling = SamplingParams(temperature=1, seed=1, n=4, max_tokens=20)
    run(rig, [Request(id="0", prompt=PROMPT, sampling=sampling, speculation=Speculation(rule=Rule.BLOCK))])
    assert rig.engine.stats.accepted < rig.engine.stats.drafted - 20
    assert len(thrown) == len(set(thrown)) > 100
