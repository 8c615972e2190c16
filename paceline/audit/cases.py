"""The cases of an audit: prompts under sampling parameters, by drafter and rule, alone and in batches.

A `Variant` is a set of sampling parameters that every prompt is replayed with. A `Group` is one way to replay all of
them: one drafter (or none), one rule, one concurrency. If its concurrency is above 1, all variants run together in
random order, so that greedy and sampled sequences share batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.prompts.files import Prompt
from paceline.sampling.sampler import sample_seed
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation
from paceline.work_kinds import WorkKind, detect_kind

# Strong on purpose: mild penalties change no token that a draft has just used, and would hide a bug in their state.
PENALTIES: Mapping[str, Any] = {"presence_penalty": 4.0, "frequency_penalty": 1.0}
FILTERS: Mapping[str, Any] = {"repetition_penalty": 1.05, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt under one variant."""

    prompt: int  # index of the prompt
    variant: str
    request: Request  # plain
    kind: WorkKind = WorkKind.NARRATIVE  # the kind of work that its text shows


@dataclass(frozen=True, slots=True)
class Group:
    drafter: str | None  # None: plain
    rule: Rule
    at_once: int
    threshold: float | WorkKind | None = None  # None: the rule's own

    @property
    def how(self) -> str:
        """Rule and threshold, for people."""
        return str(self.rule) if self.threshold is None else f"{self.rule} {self.threshold}"

    def speculation(self, kind: WorkKind) -> Speculation:
        """Make the parameters of speculation for a prompt of this kind."""
        if self.drafter is None:
            return OFF
        threshold = kind if self.threshold is WorkKind.AUTO else self.threshold
        return Speculation(drafter=self.drafter, rule=self.rule, threshold=threshold)

    def keeps_tokens(self, sampling: SamplingParams) -> bool:
        """True if answers must equal the plain ones token by token. Greedy answers of every lossless rule must."""
        return self.drafter is None or self.rule is Rule.COUPLED or (self.rule.lossless and sampling.greedy)

    def requests(self, items: Sequence[Item]) -> list[Request]:
        """Requests of this group; their cache salt keeps pages from being shared with other groups."""
        salt = f"audit/{self.drafter}/{self.how}/{self.at_once}"
        return [
            replace(item.request, id=f"{salt}/{i}", speculation=self.speculation(item.kind), cache_salt=salt)
            for i, item in enumerate(items)
        ]


ALONE = Group(drafter=None, rule=Rule.COUPLED, at_once=1)  # the reference of all other groups


def variants(temperatures: Sequence[float], *, edits: bool, max_tokens: int) -> list[Variant]:
    """Make the variants of each temperature: bare, and if `edits` one with penalties, above 0 also with filters."""
    found = []
    for temperature in temperatures:
        bare = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        found.append(Variant(f"T={temperature:g}", bare))
        if edits:
            more = {**PENALTIES, **({} if bare.greedy else FILTERS)}
            found.append(Variant(f"T={temperature:g} edited", replace(bare, **more)))
    return found


def items(
    prompts: Sequence[Prompt],
    tokens: Sequence[tuple[int, ...]],
    variants: Sequence[Variant],
    *,
    seed: int,
    scored: bool = False,
) -> list[Item]:
    """Every prompt under every variant, with a seed of its own; recorded requests keep their sampling parameters.
    `scored`: requests ask for the log-probability of each token."""
    return [
        Item(
            prompt=i,
            variant=name,
            request=Request(
                id=f"{i}/{name}/{sampling.seed}",
                prompt=tokens[i],
                sampling=replace(sampling, logprobs=0) if scored else sampling,
            ),
            kind=detect_kind(prompt.text, structured=sampling.grammar is not None),
        )
        for i, prompt in enumerate(prompts)
        for name, sampling in _samplings(prompt, variants, seed=seed + i)
    ]


def _samplings(prompt: Prompt, variants: Sequence[Variant], *, seed: int) -> Iterator[tuple[str, SamplingParams]]:
    if prompt.sampling is None:
        yield from ((variant.name, replace(variant.sampling, seed=seed)) for variant in variants)
        return
    first = seed if prompt.sampling.seed is None else prompt.sampling.seed
    for sample in range(prompt.sampling.n):
        yield (
            RECORDED,
            replace(prompt.sampling, n=1, seed=sample_seed(first, sample), logprobs=None, prompt_logprobs=None),
        )


def groups(
    drafters: Sequence[str],
    rules: Sequence[Rule],
    at_once: Sequence[int],
    thresholds: Sequence[float | WorkKind | None] = (None,),
) -> list[Group]:
    """All groups but ALONE, the plain ones first. A rule that takes a threshold has a group for each of them."""
    plain = [Group(drafter=None, rule=Rule.COUPLED, at_once=n) for n in at_once if n > 1]
    ways = [(rule, each) for rule in rules for each in (thresholds if rule.threshold is not None else (None,))]
    return plain + [Group(drafter, rule, n, each) for drafter in drafters for rule, each in ways for n in at_once]
