"""The host's stepper: draft, verify and accept on the host, with any drafter, rule and sampling parameter.

A step is complete when `launch` returns; `land` only hands out its outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.draft import Draft
from paceline.engine.governor import Governor
from paceline.engine.grammar_drafts import follow_grammar
from paceline.engine.host_drafters import HostDrafters
from paceline.engine.judge import COUPLED, judge, rule_of
from paceline.engine.scheduler import StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.engine.stepper import Landing
from paceline.kernels.base import Forward, Output
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.runner.rounds.protocol import Times
from paceline.sampling.sampler import logprobs_of
from paceline.types import Verdict

PASSING_TOKENS = 32  # new tokens that a drafter reads along with a draft without distorting the draft's measured cost


class HostStepper:
    """Implements Stepper."""

    def __init__(
        self,
        forward: Forward,
        *,
        lanes: Lanes,
        drafters: HostDrafters,
        governor: Governor,
        clock: Callable[[], float],
    ) -> None:
        self._forward = forward
        self._lanes = lanes
        self._drafters = drafters
        self._governor = governor
        self._clock = clock
        self._landing: Landing | None = None  # outcome of the step that was launched; None: no step in flight
        # (drafter, sequence) → length of the sequence when the drafter last drafted or had read all of it
        self._asked: dict[tuple[str, int], int] = {}

    @property
    def in_flight(self) -> int:
        return self._landing is not None

    @property
    def depth(self) -> int:
        return 0

    def ready(self, sequence: Sequence) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        if not plan.works:
            return
        clock = self._clock
        began = clock()
        drafting = self._draft(plan)
        drafted = clock()
        output = self._verify(plan)
        verified = clock()
        self._accept(plan, output)
        times = Times(draft=drafted - began, verify=verified - drafted, accept=clock() - verified)
        self._landing = Landing(
            plan.works,
            times,
            decodes=plan.decodes,
            output=output,
            inside=True,
            crowded=plan.crowded,
            side=plan.side,
            drafting=drafting,
        )

    def land(self) -> Landing:
        landing, self._landing = self._landing, None
        assert landing is not None, "no step was launched"
        return landing

    def improve(self) -> bool:
        return False

    def abandon(self, sequences: Seq[Sequence]) -> None:
        self._landing = None

    def observe(self, landing: Landing) -> None:
        self._drafters.observe(landing.works)
        if landing.output is not None and landing.output.features is not None:
            self._drafters.feed(landing.works, landing.output.features, crowded=landing.crowded)
        if landing.output is not None and not landing.crowded and self._drafters.hearers:
            self._drafters.hear(landing.works, landing.output)

    def start(self, sequence: Sequence) -> None:
        self._drafters.start(sequence)

    def knows(self, sequence: Sequence, page: int) -> bool:
        return self._drafters.knows(sequence, page)

    def stop(self, sequence: Sequence) -> None:
        self._drafters.stop(sequence)
        for name in sequence.drafters:
            self._asked.pop((name, sequence.key), None)

    def _draft(self, plan: StepPlan) -> dict[str, float]:
        """Ask each drafter once for all its sequences, and write the drafts behind the committed tokens. Late requests
        that draft although their batch must not are asked for apart: others may only copy. Tokens that a grammar forces
        are a draft of their own, without a drafter. Returns the seconds of each drafter's calls."""
        spent: dict[str, float] = {}
        asking: dict[tuple[str, bool], list[Work]] = {}
        unguarded = self._governor.grants.unguarded
        for work in plan.works:
            if not work.max_draft:
                continue
            grammar = work.sequence.sampler.grammar
            if grammar is not None and (forced := grammar.forced[: work.max_draft]):
                work.forced = True
                self._attach(work, Draft(tokens=forced))
            elif self._drafters.may_ask(work):
                asking.setdefault((work.drafter or "", work.sequence.key in unguarded), []).append(work)
        for (name, _), works in asking.items():
            began = self._clock()
            drafts = self._drafters.guards[name].propose(self._drafters.asks(name, works))
            seconds = self._clock() - began
            spent[name] = spent.get(name, 0.0) + seconds
            in_step = [self._is_in_step(name, work.sequence) for work in works]
            if all(in_step):
                self._learn_cost(name, drafts, seconds=seconds)
            for work, draft, knew in zip(works, drafts, in_step, strict=True):
                grammar = work.sequence.sampler.grammar
                self._attach(work, draft if grammar is None else follow_grammar(draft, grammar, limit=work.max_draft))
                if draft or knew:
                    self._asked[name, work.sequence.key] = len(work.sequence.tokens)
        return spent

    def _learn_cost(self, name: str, drafts: Seq[Draft], *, seconds: float) -> None:
        """Learn what the drafts of a step cost."""
        depth, tokens = sum([draft.depth for draft in drafts]), sum([len(draft.tokens) for draft in drafts])
        passes = sum([draft.depth if draft.passes is None else draft.passes for draft in drafts])
        self._governor.cost.observe_draft(name, tokens=tokens, depth=depth, passes=passes, seconds=seconds)

    def _is_in_step(self, name: str, sequence: Sequence) -> bool:
        """Return True if the drafter had few new tokens to read; only then the draft's time is typical and learnt."""
        last = self._asked.get((name, sequence.key))
        return last is not None and len(sequence.tokens) - last <= PASSING_TOKENS

    def _attach(self, work: Work, draft: Draft) -> None:
        work.draft, work.drafted, work.depth = draft, len(draft.tokens), draft.depth
        work.drafted_from = len(work.sequence.tokens)
        work.predicted = not work.forced and work.sequence.predicts(draft.tokens, by=work.drafter)
        self._lanes.write(work.sequence.lane, len(work.sequence.tokens), draft.tokens)

    def _verify(self, plan: StepPlan) -> Output:
        shares, first_out, first_row = [], 0, 0
        for work in plan.works:
            sampler, outs = work.sequence.sampler, work.outs
            # The pass itself draws only for the coupled rule: other rules may accept a path that it did not draw.
            work.drawn = sampler.is_simple and rule_of(work) is COUPLED
            inverse_temperature = sampler.inverse_temperature if work.drawn else 0.0
            share = Share(
                work.sequence.lane, work.start, work.count, work.draft, outs, sampler.seed, inverse_temperature
            )
            shares.append(share)
            work.first_row, first_row = first_row, first_row + work.rows
            work.first_out, work.root = first_out, first_out + outs - 1
            first_out += outs + len(work.draft.tokens)
        features = any(self._drafters.reads(work.sequence) for work in plan.works)
        states = any(work.sequence.pool is not None for work in plan.works)
        return self._forward(build_batch(self._lanes, shares, features=features, states=states))

    def _accept(self, plan: StepPlan, output: Output) -> None:
        works = plan.works if plan.decodes else [work for work in plan.works if work.samples]
        verdicts = judge(works, output, self._forward.pick)
        for work in works:
            work.verdict = verdicts[work.sequence.key]
            if work.sequence.request.sampling.logprobs is not None:
                _score(work, work.verdict, output)
        for work in plan.works:
            if work.sequence.needs_prompt_rows:
                _keep_prompt(work, output)


def _score(work: Work, verdict: Verdict, output: Output) -> None:
    """Set the log-probabilities of the new tokens of a request that asks for them."""
    rows = [work.root, *(work.root + 1 + node for node in verdict.path)]
    tokens = [*map(work.draft.tokens.__getitem__, verdict.path), verdict.token]
    work.scores = logprobs_of(output.logits[rows], tokens, work.sequence.request.sampling.logprobs or 0)


def _keep_prompt(work: Work, output: Output) -> None:
    """Set the log-probabilities of prompt tokens, and the hidden states for a pool."""
    sequence = work.sequence
    if work.scored:
        logits = output.logits[work.first_out : work.first_out + work.scored]
        tokens = sequence.tokens[work.start + 1 : work.start + 1 + work.scored]
        work.prompt_scores = logprobs_of(logits, tokens, sequence.request.sampling.prompt_logprobs or 0)
    if sequence.pool is not None and output.states is not None:
        work.states = output.states[work.first_row : work.first_row + work.count]
