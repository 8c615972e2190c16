"""The audit: replay everything, compare, test, and say what was found. It prints nothing.

What comes out holds for what was replayed, and says how much of it speculation had a part in: where nothing was
drafted, nothing was shown.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.audit.arithmetic import Arithmetic
from paceline.audit.cases import ALONE, Group, Item, Variant, groups, items
from paceline.audit.degeneration import Sign, degeneration, void
from paceline.audit.differences import Difference, Kind, compare, same
from paceline.audit.distribution import Tested, check_distribution, choose_places
from paceline.audit.replay import Replay, Tick, replay
from paceline.engine.engine import Engine
from paceline.prompts.files import Prompt
from paceline.types import Finish, Rule

ALARM = 1e-3  # probability of any false alarm in an audit without a bug
CANDIDATES = 4  # contexts looked at for each place that is tested


@dataclass(frozen=True, slots=True)
class Scope:
    """What to replay."""

    drafters: Sequence[str]
    rules: Sequence[Rule]
    at_once: Sequence[int]
    variants: Sequence[Variant]
    seed: int = 0
    samples: int = 0  # seeds at each place of a distribution test; 0: none
    places: int = 4


@dataclass(frozen=True, slots=True)
class Judged:
    """One replayed answer."""

    item: Item
    answer: Replay
    plain: Replay
    exact: bool  # it must be the plain one, token by token
    same: bool  # it is
    difference: Difference | None  # why not, where it must be
    degenerate: Sign | None

    @property
    def kind(self) -> Kind | None:
        return self.difference.kind if self.difference is not None else None


@dataclass(frozen=True, slots=True)
class Case:
    """One group under one variant."""

    group: Group
    variant: str
    judged: Sequence[Judged]

    @property
    def exact(self) -> int:
        """Answers that must be the plain ones, token by token."""
        return sum(j.exact for j in self.judged)

    @property
    def same(self) -> int:
        return sum(j.same for j in self.judged)

    def of_kind(self, kind: Kind) -> int:
        return sum(j.kind is kind for j in self.judged)

    @property
    def drafted(self) -> int:
        return sum(j.answer.stats.drafted for j in self.judged)

    @property
    def accepted(self) -> int:
        return sum(j.answer.stats.accepted for j in self.judged)

    @property
    def degenerate(self) -> int:
        return sum(j.degenerate is not None for j in self.judged)

    @property
    def is_reference(self) -> bool:
        return self.group == ALONE

    @property
    def cut(self) -> int:
        """Answers that ended only because they had reached their limit."""
        return sum(j.answer.finish is Finish.LENGTH for j in self.judged)

    def tokens_per_round(self, *, sound_only: bool = False) -> float:
        stats = [j.answer.stats for j in self.judged if not (sound_only and j.degenerate)]
        steps = sum(s.steps for s in stats)
        return sum(s.output_tokens for s in stats) / steps if steps else 0.0

    @property
    def off_reasons(self) -> list[str]:
        """Why answers were not drafted to the end, the most frequent first."""
        reasons = Counter(j.answer.stats.off_reason for j in self.judged if j.answer.stats.off_reason)
        return [reason for reason, _ in reasons.most_common(3)]


@dataclass(slots=True)
class Findings:
    prompts: Sequence[Prompt]
    arithmetic: Arithmetic
    cases: list[Case] = field(default_factory=list)  # the plain ones, alone, come first
    tests: list[Tested] = field(default_factory=list)

    @property
    def differences(self) -> list[tuple[Case, Judged]]:
        """Of answers that must be the plain ones, token by token."""
        return [(case, judged) for case in self.cases for judged in case.judged if judged.difference is not None]

    @property
    def structural(self) -> list[tuple[Case, Judged]]:
        return [(case, judged) for case, judged in self.differences if judged.kind is Kind.STRUCTURAL]

    def prompts_by_worst(self) -> Counter[Kind | None]:
        """How many prompts were identical (None) in all their answers, had a near-tie, or a structural difference."""
        worst: dict[int, Kind | None] = dict.fromkeys(range(len(self.prompts)))
        for _, judged in self.differences:
            if worst[judged.item.prompt] is not Kind.STRUCTURAL:
                worst[judged.item.prompt] = judged.kind
        return Counter(worst.values())

    @property
    def degenerate_prompts(self) -> int:
        """That have a degenerate answer, plain or not."""
        return len({j.item.prompt for case in self.cases for j in case.judged if j.degenerate})

    @property
    def claim_is_void(self) -> bool:
        """A speed measured on these answers, plain or speculative, says nothing."""
        return any(void(len(case.judged), case.degenerate) for case in self.cases)

    @property
    def drafted(self) -> int:
        return sum(case.drafted for case in self.cases)

    @property
    def passed(self) -> bool:
        return not self.structural and not any(test.failed for test in self.tests)


def audit(
    engine: Engine,
    prompts: Sequence[Prompt],
    tokens: Sequence[tuple[int, ...]],
    scope: Scope,
    *,
    arithmetic: Arithmetic,
    say: Callable[[str], Tick] = lambda what: lambda: None,
) -> Findings:
    """`tokens`: of each prompt. `say` is told what begins, and gives what is called for each answer of it."""
    found = Findings(prompts=prompts, arithmetic=arithmetic)
    todo = items(prompts, tokens, scope.variants, seed=scope.seed)
    plain = replay(engine, ALONE.requests(todo), at_once=1, tick=say(f"plain, alone: {len(todo)} answers"))
    found.cases += _cases(engine, ALONE, todo, plain, plain, arithmetic)
    for group in groups(scope.drafters, scope.rules, scope.at_once):
        answers = _shuffled(engine, group, todo, tick=say(f"{title(group)}: {len(todo)} answers"))
        found.cases += _cases(engine, group, todo, answers, plain, arithmetic)
    if scope.samples:
        found.tests += _tests(engine, scope, todo, plain, say, bitwise=arithmetic.bitwise)
    return found


def title(group: Group) -> str:
    how = "plain" if group.drafter is None else f"{group.drafter}, {group.rule}"
    return f"{how}, {'alone' if group.at_once == 1 else f'{group.at_once} at once'}"


def _shuffled(engine: Engine, group: Group, todo: Sequence[Item], *, tick: Tick) -> list[Replay]:
    order = random.Random(0).sample(range(len(todo)), len(todo)) if group.at_once > 1 else list(range(len(todo)))
    requests = group.requests(todo)
    answers = replay(engine, [requests[i] for i in order], at_once=group.at_once, tick=tick)
    by_place = dict(zip(order, answers, strict=True))
    return [by_place[i] for i in range(len(todo))]


def _cases(
    engine: Engine,
    group: Group,
    todo: Sequence[Item],
    answers: Sequence[Replay],
    plain: Sequence[Replay],
    arithmetic: Arithmetic,
) -> list[Case]:
    by_variant: dict[str, list[Judged]] = {}
    for item, answer, reference in zip(todo, answers, plain, strict=True):
        judged = _judge(engine, group, item, answer, reference, arithmetic)
        by_variant.setdefault(item.variant, []).append(judged)
    return [Case(group=group, variant=variant, judged=judged) for variant, judged in by_variant.items()]


def _judge(engine: Engine, group: Group, item: Item, answer: Replay, plain: Replay, arithmetic: Arithmetic) -> Judged:
    exact, is_reference = group.keeps_tokens(item.request.sampling), answer is plain
    stopped = answer.finish is Finish.STOP and answer.stop is not None and not isinstance(answer.stop, str)
    return Judged(
        item=item,
        answer=answer,
        plain=plain,
        exact=exact and not is_reference,
        same=same(plain, answer),
        difference=compare(engine, item.request, plain, answer, arithmetic) if exact else None,
        degenerate=degeneration(answer.tokens, stopped=stopped, plain=None if is_reference else plain.tokens),
    )


def _tests(
    engine: Engine,
    scope: Scope,
    todo: Sequence[Item],
    plain: Sequence[Replay],
    say: Callable[[str], Tick],
    *,
    bitwise: bool,
) -> list[Tested]:
    """Of every rule that keeps the distribution alone, under every variant that samples."""
    rules = [rule for rule in scope.rules if rule.lossless and rule is not Rule.COUPLED]
    sampled = [variant for variant in scope.variants if not variant.sampling.greedy]
    grid = [(variant, drafter, rule) for variant in sampled for drafter in scope.drafters for rule in rules]
    places = {
        variant.name: choose_places(
            engine, _contexts(variant, todo, plain, scope), variant.sampling, count=scope.places
        )
        for variant in (sampled if grid else ())
    }
    return [
        check_distribution(
            engine,
            places[variant.name],
            variant.sampling,
            name=variant.name,
            drafter=drafter,
            rule=rule,
            samples=scope.samples,
            alarm=ALARM / len(grid),
            bitwise=bitwise,
            tick=say(f"{drafter}, {rule}, {variant.name}: {scope.samples} seeds at {len(places[variant.name])} places"),
        )
        for variant, drafter, rule in grid
        if places[variant.name]
    ]


def _contexts(
    variant: Variant, todo: Sequence[Item], plain: Sequence[Replay], scope: Scope
) -> list[tuple[int, tuple[int, ...]]]:
    """Prompts with half of their plain answers."""
    pairs = [(item, answer) for item, answer in zip(todo, plain, strict=True) if item.variant == variant.name]
    chosen = pairs[: CANDIDATES * scope.places]
    return [(item.prompt, (*item.request.prompt, *answer.tokens[: len(answer.tokens) // 2])) for item, answer in chosen]
