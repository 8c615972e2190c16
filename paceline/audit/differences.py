"""The first difference of two answers to one request, and its cause: arithmetic or a bug.

The judge is the target itself, asked anew at the first position where the two differ (`engine.probe`). A token's
*shortfall* is its distance in logits from the token sampled there, with the request's penalties, filters and noise; the
sampled token has 0. A difference is a *near-tie* if the shortfalls of both tokens are within the bound of the
arithmetic in use, and *structural* otherwise. Two tokens close to each other, but far from the sampled one, are
structural too. Under bitwise arithmetic the bound is 0, so that no difference is a near-tie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from paceline.audit.arithmetic import Arithmetic
from paceline.audit.replay import Replay
from paceline.engine.engine import Engine
from paceline.engine.probe import Probe
from paceline.kernels.noise import gumbel_noise
from paceline.sampling.filters import filter_floor
from paceline.sampling.sampler import Stream, noise_keys
from paceline.types import Origin, Request, SamplingParams


class DifferenceKind(StrEnum):
    NEAR_TIE = "near_tie"
    STRUCTURAL = "structural"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which a replayed answer differs from the plain one."""

    kind: DifferenceKind
    position: int  # index of the token in the answer, from 0 on
    plain: int | None  # token of the plain answer; None: it had ended
    replayed: int | None
    expected: int | None  # token of the target asked anew; None: the answers differ only in their ends
    step: int  # number of the step of the replayed sequence, from 1 on
    place: int  # index among the tokens of that step, from 0 on
    origin: Origin | None  # origin of the replayed token
    gap: float  # the larger of the two shortfalls, in logits
    bound: float  # largest gap of a near-tie
    reason: str


def compare(engine: Engine, request: Request, plain: Replay, other: Replay, by: Arithmetic) -> Difference | None:
    """Judge the first difference of two answers; None if they are the same."""
    if same(plain, other):
        return None
    both = range(min(len(plain.tokens), len(other.tokens)))
    position = next((i for i in both if plain.tokens[i] != other.tokens[i]), len(both))
    if position == len(plain.tokens) or position == len(other.tokens):
        return _difference(plain, other, position, None, math.inf, 0.0, _about_the_end(plain, other))
    found = engine.probes.at(request, plain.tokens[:position])
    bound = by.bound(found.logits) * _stretch(request.sampling)
    gap = max(shortfalls(found, [plain.tokens[position], other.tokens[position]], bound=bound))
    return _difference(plain, other, position, found.token, gap, bound, _about_a_token(plain, other, position, found))


def same(plain: Replay, other: Replay) -> bool:
    """True if tokens, text and finish are equal."""
    return (plain.tokens, plain.text, plain.finish) == (other.tokens, other.text, other.finish)


def shortfalls(found: Probe, tokens: list[int], *, bound: float) -> list[float]:
    """Shortfall of each token, in logits; infinite for a token that the sampling parameters exclude, whatever the
    rounding."""
    sampler = found.sampler
    edited = sampler.edit(found.logits[None], [()])  # [1, vocab]
    if sampler.greedy:
        return [_below(edited[0], edited[0], token) for token in tokens]
    temperature = sampler.params.temperature
    scaled = edited / temperature
    keys = torch.from_numpy(noise_keys(sampler.seed, np.array([found.position]), Stream.TOKEN))
    scores = (scaled + gumbel_noise(keys, scaled.shape[-1]))[0]
    surely, maybe = (_kept(scaled, sampler.params, slack=sign * bound / temperature) for sign in (1, -1))
    sure_scores = torch.where(surely, scores, -torch.inf)
    return [temperature * _below(sure_scores, scores, t) if bool(maybe[t]) else math.inf for t in tokens]


def _below(rivals: Tensor, scores: Tensor, token: int) -> float:
    return max(0.0, float(rivals.max() - scores[token]))


def _kept(scaled: Tensor, params: SamplingParams, *, slack: float) -> Tensor:
    """Mark the tokens of scaled logits [1, vocab] that the filters keep: bool [vocab]. A positive `slack` makes them
    stricter, a negative one more lenient. Noise of size s moves a floor by s, and multiplies the mass beyond a nucleus
    by exp(s)."""
    if not params.filters:
        return scaled[0] > -torch.inf
    beyond = (1 - params.top_p) * math.exp(min(slack, 50.0))
    floor = filter_floor(
        scaled,
        min_p=min(1.0, params.min_p * math.exp(min(slack, 50.0))),
        top_k=params.top_k,
        top_p=min(1.0, max(1e-6, 1 - beyond)),
    )
    return scaled[0] >= min(float(floor[0, 0]) + slack, float(scaled.max()))  # filters always keep the best token


def _stretch(params: SamplingParams) -> float:
    """Compute the factor by which the repetition penalty, which multiplies logits, enlarges their noise."""
    return max(1.0, params.repetition_penalty, 1 / params.repetition_penalty)


def _difference(
    plain: Replay, other: Replay, position: int, expected: int | None, gap: float, bound: float, reason: str
) -> Difference:
    there = position < len(other.tokens)
    step = other.steps[position] if there else (other.steps[-1] if other.steps else 1)
    return Difference(
        kind=DifferenceKind.NEAR_TIE if bound > 0 and gap <= bound else DifferenceKind.STRUCTURAL,
        position=position,
        plain=plain.tokens[position] if position < len(plain.tokens) else None,
        replayed=other.tokens[position] if there else None,
        expected=expected,
        step=step,
        place=position - other.steps.index(step) if there else 0,
        origin=other.origins[position] if there else None,
        gap=gap,
        bound=bound,
        reason=reason,
    )


def _about_a_token(plain: Replay, other: Replay, position: int, found: Probe) -> str:
    if found.token == plain.tokens[position]:
        return "the plain answer has the token that the target gives when asked anew"
    if found.token == other.tokens[position]:
        return "the plain answer is the one that differs from what the target gives when asked anew"
    return "neither has the token that the target gives when asked anew"


def _about_the_end(plain: Replay, other: Replay) -> str:
    if plain.tokens == other.tokens and plain.finish == other.finish:
        return "the same tokens became different texts"
    if plain.tokens == other.tokens:
        return f"the same tokens, but one ended by {plain.finish} and the other by {other.finish}"
    longer, shorter = ("plain", "replayed") if len(plain.tokens) > len(other.tokens) else ("replayed", "plain")
    ended = other if shorter == "replayed" else plain
    return f"the {shorter} answer ended ({ended.error or ended.finish}) where the {longer} one went on"
