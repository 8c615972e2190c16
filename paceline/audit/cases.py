"""What is replayed: prompts under sampling parameters, by drafters and rules, alone and beside others.

A `Variant` is a set of sampling parameters that every prompt is replayed with, a `Group` is one way to replay all of
them: one drafter (or none), one rule, so many at once. All variants of a group run side by side, in an order of no
meaning, so that greedy sequences ride along with sampled ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.prompts.files import Prompt
from paceline.sampling.sampler import sample_seed
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation

# Strong on purpose: mild ones change no token that a draft has just said, and a bug in their state would not show.
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

    prompt: int  # which of the prompts
    variant: str
    request: Request  # plain


@dataclass(frozen=True, slots=True)
class Group:
    drafter: str | None  # None: plain, beside others
    rule: Rule
    at_once: int

    @property
    def speculation(self) -> Speculation:
        return OFF if self.drafter is None else Speculation(drafter=self.drafter, rule=self.rule)

    def keeps_tokens(self, sampling: SamplingParams) -> bool:
        """True: answers must be the plain ones, token by token. Rules that keep the distribution do so when greedy."""
        return self.drafter is None or self.rule is Rule.COUPLED or (self.rule.lossless and sampling.greedy)

    def requests(self, items: Sequence[Item]) -> list[Request]:
        """Nothing that one group computed is seen by another."""
        salt = f"audit/{self.drafter}/{self.rule}/{self.at_once}"
        return [
            replace(item.request, id=f"{salt}/{i}", speculation=self.speculation, cache_salt=salt)
            for i, item in enumerate(items)
        ]


ALONE = Group(drafter=None, rule=Rule.COUPLED, at_once=1)  # what all others are held against


def variants(temperatures: Sequence[float], *, edits: bool, max_tokens: int) -> list[Variant]:
    """Each temperature as it is; with `edits` also with penalties, and with filters where it samples."""
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
    """Every prompt under every variant, each with a seed of its own; a recorded one as it was."""
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
    """The plain ones first, without ALONE."""
    plain = [Group(drafter=None, rule=Rule.COUPLED, at_once=n) for n in at_once if n > 1]
    return plain + [Group(drafter=d, rule=rule, at_once=n) for d in drafters for rule in rules for n in at_once]
