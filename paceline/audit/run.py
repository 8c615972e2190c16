"""An audit: replay all cases, compare them with plain decoding, and test distributions. It prints nothing.

The findings hold for what was replayed, and count how much of it was drafted: without drafts nothing is shown.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.audit.arithmetic import Arithmetic
from paceline.audit.cases import ALONE, Group, Item, Variant, groups, items
from paceline.audit.degeneration import Sign, degeneration, void
from paceline.audit.differences import Difference, DifferenceKind, compare, same
from paceline.audit.distribution import Tested, check_distribution, choose_places
from paceline.audit.loss import Loss, loss
from paceline.audit.replay import Replay, Tick, replay
from paceline.engine.engine import Engine
from paceline.prompts.files import Prompt
from paceline.types import Finish, Rule
from paceline.work_kinds import WorkKind

FALSE_ALARM = 1e-3  # probability that an audit without a bug fails by any of its tests
Say = Callable[[str, int], Tick]
CANDIDATES = 4  # contexts considered for each place of a distribution test


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything to replay: all combinations of these values."""

    drafters: Sequence[str]
    rules: Sequence[Rule]
    at_once: Sequence[int]
    variants: Sequence[Variant]
    seed: int = 0
    samples: int = 0  # seeds at each place of a distribution test; 0: no test
    places: int = 4
    thresholds: Sequence[float | WorkKind | None] = (None,)  # of rules that take one; None: the rule's own


@dataclass(frozen=True, slots=True)
class Judged:
    """One replayed answer, beside the plain one."""

    item: Item
    answer: Replay
    plain: Replay
    exact: bool  # it must equal the plain one token by token
    same: bool  # it equals the plain one
    difference: Difference | None  # judged only if the answer must equal the plain one
    degenerate: Sign | None

    @property
    def kind(self) -> DifferenceKind | None:
        return self.difference.kind if self.difference is not None else None


@dataclass(frozen=True, slots=True)
class Case:
    """One group under one variant."""

    group: Group
    variant: str
    judged: Sequence[Judged]

    @property
    def loss(self) -> Loss | None:
        """Changes that a lossy rule made; None for other rules."""
        if self.group.rule.lossless:
            return None
        return loss([j.plain for j in self.judged], [j.answer for j in self.judged])

    @property
    def exact(self) -> int:
        """Number of answers that must equal the plain ones token by token."""
        return sum(j.exact for j in self.judged)

    @property
    def same(self) -> int:
        return sum(j.same for j in self.judged)

    def of_kind(self, kind: DifferenceKind) -> int:
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
        """Number of answers that ended at their limit of tokens."""
        return sum(j.answer.finish is Finish.LENGTH for j in self.judged)

    def tokens_per_step(self, *, sound_only: bool = False) -> float:
        stats = [j.answer.stats for j in self.judged if not (sound_only and j.degenerate)]
        steps = sum(s.steps for s in stats)
        return sum(s.output_tokens for s in stats) / steps if steps else 0.0

    @property
    def off_reasons(self) -> list[str]:
        """Reasons why answers were not drafted to the end, the most frequent first."""
        reasons = Counter(j.answer.stats.off_reason for j in self.judged if j.answer.stats.off_reason)
        return [reason for reason, _ in reasons.most_common(3)]


@dataclass(slots=True)
class Findings:
    prompts: Sequence[Prompt]
    arithmetic: Arithmetic
    cases: list[Case] = field(default_factory=list)  # those of ALONE first
    tests: list[Tested] = field(default_factory=list)
    interrupted: bool = False  # the user stopped the audit; the findings are of the groups that were complete

    @property
    def differences(self) -> list[tuple[Case, Judged]]:
        """Differences of answers that must equal the plain ones."""
        return [(case, judged) for case in self.cases for judged in case.judged if judged.difference is not None]

    @property
    def structural(self) -> list[tuple[Case, Judged]]:
        return [(case, judged) for case, judged in self.differences if judged.kind is DifferenceKind.STRUCTURAL]

    def prompts_by_worst(self) -> Counter[DifferenceKind | None]:
        """Number of prompts by their worst difference; None: all answers are identical."""
        worst: dict[int, DifferenceKind | None] = dict.fromkeys(range(len(self.prompts)))
        for _, judged in self.differences:
            if worst[judged.item.prompt] is not DifferenceKind.STRUCTURAL:
                worst[judged.item.prompt] = judged.kind
        return Counter(worst.values())

    @property
    def degenerate_prompts(self) -> int:
        """Number of prompts with a degenerate answer, plain or not."""
        return len({j.item.prompt for case in self.cases for j in case.judged if j.degenerate})

    @property
    def claim_is_void(self) -> bool:
        """True if a speed measured on these answers, plain or speculative, does not count."""
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
    say: Say = lambda what, answers: lambda: None,
) -> Findings:
    """Run an audit. `tokens`: token ids of each prompt. `say` gets the name of each part as it starts and the number of
    its answers, and returns a function that is called for each of them. Ctrl-C keeps what is complete."""
    found = Findings(prompts=prompts, arithmetic=arithmetic)
    lossy = any(not rule.lossless for rule in scope.rules)
    todo = items(prompts, tokens, scope.variants, seed=scope.seed, scored=lossy)
    all_groups = groups(scope.drafters, scope.rules, scope.at_once, scope.thresholds)
    try:
        plain = replay(engine, ALONE.requests(todo), at_once=1, tick=say(_part(ALONE, 0, all_groups), len(todo)))
        found.cases += _cases(engine, ALONE, todo, plain, plain, arithmetic)
        for number, group in enumerate(all_groups, start=1):
            answers = _shuffled(engine, group, todo, tick=say(_part(group, number, all_groups), len(todo)))
            found.cases += _cases(engine, group, todo, answers, plain, arithmetic)
        if scope.samples:
            found.tests += _tests(engine, scope, todo, plain, say, bitwise=arithmetic.bitwise)
    except KeyboardInterrupt:
        if not any(case.exact for case in found.cases):
            raise
        found.interrupted = True
    return found


def _part(group: Group, number: int, all_groups: Sequence[Group]) -> str:
    return f"replaying {number + 1}/{len(all_groups) + 1}, {title(group)}"


def title(group: Group) -> str:
    how = "plain" if group.drafter is None else f"{group.drafter}, {group.how}"
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
    say: Say,
    *,
    bitwise: bool,
) -> list[Tested]:
    """Distribution tests of every rule that keeps only the distribution, under every variant that samples."""
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
            alarm=FALSE_ALARM / len(grid),
            bitwise=bitwise,
            tick=say(f"distribution of {drafter}, {rule}, {variant.name}", scope.samples * len(places[variant.name])),
        )
        for variant, drafter, rule in grid
        if places[variant.name]
    ]


def _contexts(
    variant: Variant, todo: Sequence[Item], plain: Sequence[Replay], scope: Scope
) -> list[tuple[int, tuple[int, ...]]]:
    """Contexts of a variant: prompts with the first half of their plain answers."""
    pairs = [(item, answer) for item, answer in zip(todo, plain, strict=True) if item.variant == variant.name]
    chosen = pairs[: CANDIDATES * scope.places]
    return [(item.prompt, (*item.request.prompt, *answer.tokens[: len(answer.tokens) // 2])) for item, answer in chosen]
