"""Distribution tests, for rules that keep the distribution but not the tokens.

At a few *places* in plain answers, where the entropy of the target is highest, the same context is continued under many
seeds. A context ends one token after a full page, so that everything before it comes from the prefix cache and the very
first token can be drafted. The counts of the first two tokens are compared with their exact probabilities, from the
target's own logits, by one chi-squared test over all places. Greedy answers need no such test: there these rules give
the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.audit import chi_squared
from paceline.audit.replay import Tick, replay
from paceline.engine.engine import Engine
from paceline.engine.probe import Probe
from paceline.kernels.base import PAGE_SIZE
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation

POWER = 0.9  # probability with which a shift of the stated size is found
AT_ONCE = 16  # requests that run at a time
ANSWER_TOKENS = 3  # two that are counted, and one more, without which the second would not be drafted
RARE = -1  # stand-in for all rare second tokens
FIRST_TOKENS = 6  # likeliest first tokens after which the second is counted too


@dataclass(frozen=True, slots=True)
class SampledPlace:
    """A context, and the target's distribution of the two tokens after it."""

    prompt: int  # index of the prompt
    tokens: tuple[int, ...]
    first: Tensor  # [vocab] probabilities of the next token
    seconds: dict[int, Tensor]  # [vocab] of the token after it, for the likeliest next tokens

    @property
    def entropy(self) -> float:
        return float(torch.special.entr(self.first).sum())


@dataclass(frozen=True, slots=True)
class Worst:
    """The bin with the largest deviation."""

    prompt: int
    position: int  # index of the token in prompt and answer together, from 0 on
    tokens: tuple[int, ...]  # one or two; empty: all rare ones
    counted: int
    expected: float
    off: float  # standard deviations


@dataclass(frozen=True, slots=True)
class Tested:
    """The result of one distribution test."""

    drafter: str
    rule: Rule
    sampling: str
    places: int
    samples: int
    drafted: int  # tokens, in all samples
    accepted: int
    freedom: int  # degrees of freedom
    p_value: float
    alarm: float  # the test fails if p_value is below it
    shift: float  # smallest total variation that the test finds with probability POWER
    worst: Worst | None

    @property
    def failed(self) -> bool:
        return self.p_value < self.alarm

    @property
    def proves(self) -> bool:
        """False if nothing was drafted: then nothing was tested."""
        return self.drafted > 0 and self.freedom > 0


def choose_places(
    engine: Engine, contexts: Sequence[tuple[int, tuple[int, ...]]], params: SamplingParams, *, count: int
) -> list[SampledPlace]:
    """Choose the `count` contexts (index of the prompt, tokens) with the highest entropy of the next token."""
    fitting = [(prompt, tokens[: _page_and_one(tokens)]) for prompt, tokens in contexts]
    places = [_place(engine, prompt, tokens, params) for prompt, tokens in fitting]
    return [
        replace(place, seconds=_seconds(engine, place, params))
        for place in sorted(places, key=lambda place: -place.entropy)[:count]
    ]


def check_distribution(
    engine: Engine,
    places: Sequence[SampledPlace],
    params: SamplingParams,
    *,
    name: str,
    drafter: str,
    rule: Rule,
    samples: int,
    alarm: float,
    bitwise: bool,
    tick: Tick = lambda: None,
) -> Tested:
    """Test one drafter and rule with `samples` seeds at each place. If logits are `bitwise`, a token that the target
    never samples fails the test; otherwise a token at the border of a filter may or may not come."""
    total, freedom, drafted, accepted = 0.0, 0, 0, 0
    worst: list[Worst] = []
    for place in places:
        salt = f"audit/{name}/{drafter}/{rule}/{place.prompt}"
        _warm(engine, place, salt)
        requests = [_request(place, params, drafter, rule, seed=seed, salt=salt) for seed in range(samples)]
        answers = replay(engine, requests, at_once=AT_ONCE, tick=tick)
        drafted += sum(answer.stats.drafted for answer in answers)
        accepted += sum(answer.stats.accepted for answer in answers)
        bins = _count(place, [tuple(answer.tokens[:2]) for answer in answers])
        counts, expected = chi_squared.pool(*_columns(bins))
        total += (
            math.inf
            if bitwise and any(bin.impossible for bin in bins.values())
            else chi_squared.statistic(counts, expected)
        )
        freedom += len(counts) - 1
        worst.append(_worst(place, bins))
    return Tested(
        drafter=drafter,
        rule=rule,
        sampling=name,
        places=len(places),
        samples=samples,
        drafted=drafted,
        accepted=accepted,
        freedom=freedom,
        p_value=chi_squared.p_value(total, freedom) if freedom else 1.0,
        alarm=alarm,
        shift=chi_squared.smallest_shift(samples * len(places), freedom, alarm=alarm, power=POWER) if freedom else 1.0,
        worst=max(worst, key=lambda bin: bin.off) if worst else None,
    )


def _page_and_one(tokens: Sequence[int]) -> int:
    return (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE + 1


def _place(engine: Engine, prompt: int, tokens: tuple[int, ...], params: SamplingParams) -> SampledPlace:
    return SampledPlace(
        prompt=prompt, tokens=tokens, first=_probabilities(_probe(engine, tokens, params, ())), seconds={}
    )


def _seconds(engine: Engine, place: SampledPlace, params: SamplingParams) -> dict[int, Tensor]:
    likeliest = torch.topk(place.first, min(FIRST_TOKENS, int((place.first > 0).sum()))).indices.tolist()
    return {token: _probabilities(_probe(engine, place.tokens, params, (token,))) for token in likeliest}


def _probe(engine: Engine, tokens: tuple[int, ...], params: SamplingParams, output: tuple[int, ...]) -> Probe:
    return engine.probes.at(Request(id="probe", prompt=tokens, sampling=params, speculation=OFF), output)


def _probabilities(found: Probe) -> Tensor:
    """Probabilities that the target samples with, float64 [vocab]."""
    edited = found.sampler.edit(found.logits[None], [()])
    return torch.softmax(found.sampler.shape(edited).double(), dim=-1)[0]


def _warm(engine: Engine, place: SampledPlace, salt: str) -> None:
    """Fill the prefix cache with the context, so that its continuations start with decoding."""
    once = SamplingParams(temperature=0, max_tokens=1)
    request = Request(id=f"{salt}/warm", prompt=place.tokens, sampling=once, speculation=OFF, cache_salt=salt)
    replay(engine, [request], at_once=1)


def _request(place: SampledPlace, params: SamplingParams, drafter: str, rule: Rule, *, seed: int, salt: str) -> Request:
    return Request(
        id=f"{salt}/{seed}",
        prompt=place.tokens,
        sampling=replace(params, seed=seed, max_tokens=ANSWER_TOKENS, ignore_eos=True),
        speculation=Speculation(drafter=drafter, rule=rule, max_draft=ANSWER_TOKENS - 1),
        cache_salt=salt,
    )


@dataclass(slots=True)
class Bin:
    """Answers that start with the same one or two tokens, or with tokens too rare for a bin of their own."""

    expected: float
    counted: int = 0
    impossible: bool = False  # the target never samples it

    @property
    def off(self) -> float:
        if self.impossible:
            return math.inf
        return abs(self.counted - self.expected) / math.sqrt(max(self.expected, 1.0))


def _count(place: SampledPlace, said: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Bin]:
    """Count answers in bins: by both tokens after the likeliest first tokens, otherwise by the first. The bin (5, RARE)
    has the rare second tokens after token 5, the bin () the rare first tokens."""
    bins = _expected(place, len(said))
    for pair in said:
        begins = pair if pair[0] in place.seconds else pair[:1]
        rest = (pair[0], RARE) if pair[0] in place.seconds else ()
        if _possible(place, begins):
            bins[begins if begins in bins else rest].counted += 1
        else:
            bins.setdefault(begins, Bin(expected=0.0, impossible=True)).counted += 1
    return bins


def _expected(place: SampledPlace, samples: int) -> dict[tuple[int, ...], Bin]:
    bins: dict[tuple[int, ...], Bin] = {}
    for token, second in place.seconds.items():
        share = float(place.first[token]) * samples
        likely = _likely(second * share)
        bins |= {(token, after): Bin(expected=count) for after, count in likely.items()}
        bins[token, RARE] = Bin(expected=max(0.0, share - sum(likely.values())))
    for token, count in _likely(place.first * samples).items():
        if token not in place.seconds:
            bins[token,] = Bin(expected=count)
    bins[()] = Bin(expected=max(0.0, samples - sum(bin.expected for bin in bins.values())))
    return bins


def _likely(expected: Tensor) -> dict[int, float]:
    """Tokens expected often enough for a bin of their own."""
    tokens = torch.nonzero(expected >= chi_squared.MIN_EXPECTED)[:, 0].tolist()
    return {token: float(expected[token]) for token in tokens}


def _possible(place: SampledPlace, begins: tuple[int, ...]) -> bool:
    if not place.first[begins[0]] > 0:
        return False
    return len(begins) == 1 or bool(place.seconds[begins[0]][begins[1]] > 0)


def _columns(bins: dict[tuple[int, ...], Bin]) -> tuple[Tensor, Tensor]:
    both = [(float(bin.counted), bin.expected) for bin in bins.values()]
    counts, expected = torch.tensor(both, dtype=torch.float64).T
    return counts, expected


def _worst(place: SampledPlace, bins: dict[tuple[int, ...], Bin]) -> Worst:
    begins, bin = max(bins.items(), key=lambda item: item[1].off)
    tokens = tuple(token for token in begins if token != RARE)
    return Worst(
        prompt=place.prompt,
        position=len(place.tokens) + max(len(tokens) - 1, 0),
        tokens=tokens,
        counted=bin.counted,
        expected=bin.expected,
        off=bin.off,
    )
