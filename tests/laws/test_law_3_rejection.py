"""Law 3: `rejection` leaves the distribution unchanged.

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

from paceline.sampling import Sampler, Stream, noise_keys
from paceline.types import Request, Rule, SamplingParams, Speculation
from tests.laws import mutants
from tests.laws.chi_squared import p_value
from tests.rig import Made, Model, build, model_drafter, run
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
BUGS = {
    "coin turned": ("coins * q_token < p_token", "coins * q_token > p_token"),
    "coin ignored": ("coins * q_token < p_token", "q_token < p_token"),
    "always accepts": ("coins * q_token < p_token", "coins < 2"),
    "residual is p": ("(p_last - q[rejected]).clamp(min=0)", "p_last"),
    "residual is |p - q|": ("(p_last - q[rejected]).clamp(min=0)", "(p_last - q[rejected]).abs()"),
    "corrects what was accepted": ("rejected = (last + 1)", "rejected = last"),
    "forgets the correction": ("was_rejected[:, None] & ~empty", "empty"),
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


def emitted(code: SimpleNamespace, p: Tensor, q: Tensor, *, count: int) -> Tensor:
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
    outcome = code.accept_rejection(rows, p[drafted.flatten()], q[drafted.flatten()[parents]], coins, noise)
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
def test_the_rule_leaves_the_distribution_alone(kind: str) -> None:
    p, q = tables(kind)
    assert judged(emitted(mutants.load({}), p, q, count=40_000), exact(p)) > LIKELY


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug: str) -> None:
    before, after = BUGS[bug]
    name = "paceline.accept.rejection"
    assert before in mutants.SOURCES[name]
    code = mutants.load({name: mutants.SOURCES[name].replace(before, after)})
    p, q = tables("good" if bug == "corrects what was accepted" else "bad")
    assert judged(emitted(code, p, q, count=40_000), exact(p)) < ABSURD


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


def engine_texts(params: SamplingParams, drafter: Made, *, requests: int) -> Tensor:
    rig = build(
        "toy",
        {"model": drafter},
        forward=TARGET.forward("toy", num_pages=300),
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
            speculation=Speculation(rule=Rule.REJECTION, max_draft=DRAFT),
        )
        for i in range(requests)
    ]
    told = run(rig, asked)
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    return torch.tensor([each.tokens for each in told.values()])


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__slots__}


@pytest.mark.parametrize(
    ("params", "drafter"),
    [("plain", "good"), ("plain", "bad"), ("hot, top-k", "hesitant"), ("cold, biased", "good")],
)
def test_the_engine_leaves_the_distribution_alone(params: str, drafter: str) -> None:
    texts = engine_texts(PARAMS[params], DRAFTERS[drafter], requests=REQUESTS)
    assert judged(texts, engine_exact(PARAMS[params])) > LIKELY


def noise_of_the_draft(seed: int, positions: np.ndarray, stream: Stream) -> np.ndarray:
    """What the drafter drew the first token of this round with."""
    return noise_keys(seed, (positions << 32) + positions, Stream.DRAFT)


@pytest.mark.parametrize("bug", ["residual is p", "one noise for draft and correction"])
def test_a_bug_planted_in_the_engine_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug in BUGS:
        name = "paceline.accept.rejection"
        code = mutants.load({name: mutants.SOURCES[name].replace(*BUGS[bug])})
        monkeypatch.setattr("paceline.engine.judge.accept_rejection", code.accept_rejection)
    else:
        monkeypatch.setattr("paceline.engine.judge.noise_keys", noise_of_the_draft)
    texts = engine_texts(PARAMS["plain"], DRAFTERS["bad"], requests=REQUESTS)
    assert judged(texts, engine_exact(PARAMS["plain"])) < ABSURD
