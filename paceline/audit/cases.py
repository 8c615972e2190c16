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


@dataclass(frozen=True, slots=True)
class Group:
    drafter: str | None  # None: plain
    rule: Rule
    at_once: int

    @property
    def speculation(self) -> Speculation:
        return OFF if self.drafter is None else Speculation(drafter=self.drafter, rule=self.rule)

    def keeps_tokens(self, sampling: SamplingParams) -> bool:
        """True if answers must equal the plain ones token by token. Greedy answers of every lossless rule must."""
        return self.drafter is None or self.rule is Rule.COUPLED or (self.rule.lossless and sampling.greedy)

    def requests(self, items: Sequence[Item]) -> list[Request]:
        """Requests of this group; their cache salt keeps pages from being shared with other groups."""
        salt = f"audit/{self.drafter}/{self.rule}/{self.at_once}"
        return [
            replace(item.request, id=f"{salt}/{i}", speculation=self.speculation, cache_salt=salt)
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
    prompts: Sequence[Prompt], tokens: Sequence[tuple[int, ...]], variants: Sequence[Variant], *, seed: int
) -> list[Item]:
    """Every prompt under every variant, with a seed of its own; recorded requests keep their sampling parameters."""
    return [
        Item(
            prompt=i,
            variant=name,
            request=Request(id=f"{i}/{name}/{sampling.seed}", prompt=tokens[i], sampling=sampling),
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


def groups(drafters: Sequence[str], rules: Sequence[Rule], at_once: Sequence[int]) -> list[Group]:
    """All groups but ALONE, the plain ones first."""
    plain = [Group(drafter=None, rule=Rule.COUPLED, at_once=n) for n in at_once if n > 1]
    return plain + [Group(drafter=d, rule=rule, at_once=n) for d in drafters for rule in rules for n in at_once]
