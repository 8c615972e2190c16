"""Rules that keep the distribution and not the tokens: are tokens under many seeds drawn as the target's logits say?

At a few *places* in plain answers, where the target hesitates most, the same context is continued under many seeds. A
context ends one token after a full page, so that all before it comes from the prefix cache and the very first token
can be drafted. The counts of the first two tokens together are held against their exact probabilities, from the
target's own logits, by one chi-squared test over all places. Greedy answers need no such test: there these rules give
the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.audit import chances
from paceline.audit.replay import Tick, replay
from paceline.engine.engine import Engine
from paceline.engine.probe import Probe
from paceline.kernels.base import PAGE_SIZE
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation

POWER = 0.9  # with which a shift of the stated size is found
AT_ONCE = 16
TOKENS = 3  # of an answer: the two that are looked at, and one more, without which the second would need no draft
REST = -1
FIRSTS = 6  # first tokens after which the second is looked at, too


@dataclass(frozen=True, slots=True)
class Place:
    """A context, and what the target says of the tokens after it."""

    prompt: int  # which
    tokens: tuple[int, ...]
    first: Tensor  # [vocab] probabilities of the next token
    seconds: dict[int, Tensor]  # of the one after it, by the next token, for the likeliest ones

    @property
    def entropy(self) -> float:
        return float(torch.special.entr(self.first).sum())


@dataclass(frozen=True, slots=True)
class Worst:
    """The cell that is furthest off."""

    prompt: int
    position: int  # of the token in prompt and answer together, from 0 on
    tokens: tuple[int, ...]  # one or two; empty: all that are rare
    counted: int
    expected: float
    off: float  # by how many standard deviations


@dataclass(frozen=True, slots=True)
class Tested:
    drafter: str
    rule: Rule
    sampling: str
    places: int
    samples: int
    drafted: int  # tokens, in all samples
    accepted: int
    freedom: int
    p_value: float
    alarm: float  # below which the test fails
    shift: float  # of probability that would have been found with probability POWER
    worst: Worst | None

    @property
    def failed(self) -> bool:
        return self.p_value < self.alarm

    @property
    def proves(self) -> bool:
        """False: nothing was drafted, so that nothing was tested."""
        return self.drafted > 0 and self.freedom > 0


def choose_places(
    engine: Engine, contexts: Sequence[tuple[int, tuple[int, ...]]], params: SamplingParams, *, count: int
) -> list[Place]:
    """Of contexts (which prompt, tokens), the `count` at which the target hesitates most."""
    fitting = [(prompt, tokens[: _page_and_one(tokens)]) for prompt, tokens in contexts]
    places = [_place(engine, prompt, tokens, params) for prompt, tokens in fitting]
    return [
        replace(place, seconds=_seconds(engine, place, params))
        for place in sorted(places, key=lambda place: -place.entropy)[:count]
    ]


def check_distribution(
    engine: Engine,
    places: Sequence[Place],
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
    """`samples` seeds at each place. Unless logits are `bitwise` a token at the border of a filter may come or not."""
    total, freedom, drafted, accepted = 0.0, 0, 0, 0
    worst: list[Worst] = []
    for place in places:
        salt = f"audit/{name}/{drafter}/{rule}/{place.prompt}"
        _warm(engine, place, salt)
        requests = [_request(place, params, drafter, rule, seed=seed, salt=salt) for seed in range(samples)]
        answers = replay(engine, requests, at_once=AT_ONCE, tick=tick)
        drafted += sum(answer.stats.drafted for answer in answers)
        accepted += sum(answer.stats.accepted for answer in answers)
        cells = _count(place, [tuple(answer.tokens[:2]) for answer in answers])
        counts, expected = chances.pool(*_columns(cells))
        total += (
            math.inf
            if bitwise and any(cell.impossible for cell in cells.values())
            else chances.statistic(counts, expected)
        )
        freedom += len(counts) - 1
        worst.append(_worst(place, cells))
    return Tested(
        drafter=drafter,
        rule=rule,
        sampling=name,
        places=len(places),
        samples=samples,
        drafted=drafted,
        accepted=accepted,
        freedom=freedom,
        p_value=chances.p_value(total, freedom) if freedom else 1.0,
        alarm=alarm,
        shift=chances.smallest_shift(samples * len(places), freedom, alarm=alarm, power=POWER) if freedom else 1.0,
        worst=max(worst, key=lambda cell: cell.off) if worst else None,
    )


def _page_and_one(tokens: Sequence[int]) -> int:
    return (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE + 1


def _place(engine: Engine, prompt: int, tokens: tuple[int, ...], params: SamplingParams) -> Place:
    return Place(prompt=prompt, tokens=tokens, first=_probabilities(_probe(engine, tokens, params, ())), seconds={})


def _seconds(engine: Engine, place: Place, params: SamplingParams) -> dict[int, Tensor]:
    likeliest = torch.topk(place.first, min(FIRSTS, int((place.first > 0).sum()))).indices.tolist()
    return {token: _probabilities(_probe(engine, place.tokens, params, (token,))) for token in likeliest}


def _probe(engine: Engine, tokens: tuple[int, ...], params: SamplingParams, output: tuple[int, ...]) -> Probe:
    return engine.probes.at(Request(id="probe", prompt=tokens, sampling=params, speculation=OFF), output)


def _probabilities(found: Probe) -> Tensor:
    """Float64 [vocab] of what is drawn."""
    edited = found.sampler.edit(found.logits[None], [()])
    return torch.softmax(found.sampler.shape(edited).double(), dim=-1)[0]


def _warm(engine: Engine, place: Place, salt: str) -> None:
    """Fill the prefix cache with the context, so that its continuations begin by decoding."""
    once = SamplingParams(temperature=0, max_tokens=1)
    request = Request(id=f"{salt}/warm", prompt=place.tokens, sampling=once, speculation=OFF, cache_salt=salt)
    replay(engine, [request], at_once=1)


def _request(place: Place, params: SamplingParams, drafter: str, rule: Rule, *, seed: int, salt: str) -> Request:
    return Request(
        id=f"{salt}/{seed}",
        prompt=place.tokens,
        sampling=replace(params, seed=seed, max_tokens=TOKENS, ignore_eos=True),
        speculation=Speculation(drafter=drafter, rule=rule, max_draft=TOKENS - 1),
        cache_salt=salt,
    )


@dataclass(slots=True)
class Cell:
    """Answers that begin alike: with one token, or with two, or with what no other cell has."""

    expected: float
    counted: int = 0
    impossible: bool = False  # the target never says it

    @property
    def off(self) -> float:
        if self.impossible:
            return math.inf
        return abs(self.counted - self.expected) / math.sqrt(max(self.expected, 1.0))


def _count(place: Place, said: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Cell]:
    """By how answers begin: pairs after the likeliest first tokens, and else single tokens. (5, REST) are the rare
    pairs after 5, () is all that is rarer."""
    cells = _expected(place, len(said))
    for pair in said:
        begins = pair if pair[0] in place.seconds else pair[:1]
        rest = (pair[0], REST) if pair[0] in place.seconds else ()
        if _possible(place, begins):
            cells[begins if begins in cells else rest].counted += 1
        else:
            cells.setdefault(begins, Cell(expected=0.0, impossible=True)).counted += 1
    return cells


def _expected(place: Place, samples: int) -> dict[tuple[int, ...], Cell]:
    cells: dict[tuple[int, ...], Cell] = {}
    for token, second in place.seconds.items():
        share = float(place.first[token]) * samples
        likely = _likely(second * share)
        cells |= {(token, after): Cell(expected=count) for after, count in likely.items()}
        cells[token, REST] = Cell(expected=max(0.0, share - sum(likely.values())))
    for token, count in _likely(place.first * samples).items():
        if token not in place.seconds:
            cells[token,] = Cell(expected=count)
    cells[()] = Cell(expected=max(0.0, samples - sum(cell.expected for cell in cells.values())))
    return cells


def _likely(expected: Tensor) -> dict[int, float]:
    """Tokens that should be met often enough for a cell of their own."""
    tokens = torch.nonzero(expected >= chances.LEAST)[:, 0].tolist()
    return {token: float(expected[token]) for token in tokens}


def _possible(place: Place, begins: tuple[int, ...]) -> bool:
    if not place.first[begins[0]] > 0:
        return False
    return len(begins) == 1 or bool(place.seconds[begins[0]][begins[1]] > 0)


def _columns(cells: dict[tuple[int, ...], Cell]) -> tuple[Tensor, Tensor]:
    both = [(float(cell.counted), cell.expected) for cell in cells.values()]
    counts, expected = torch.tensor(both, dtype=torch.float64).T
    return counts, expected


def _worst(place: Place, cells: dict[tuple[int, ...], Cell]) -> Worst:
    begins, cell = max(cells.items(), key=lambda item: item[1].off)
    tokens = tuple(token for token in begins if token != REST)
    return Worst(
        prompt=place.prompt,
        position=len(place.tokens) + max(len(tokens) - 1, 0),
        tokens=tokens,
        counted=cell.counted,
        expected=cell.expected,
        off=cell.off,
    )
