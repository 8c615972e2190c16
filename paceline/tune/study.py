"""A study: the plain run, the drafts of every candidate over it, costs of steps, predictions, a check of the best.

Each part has a name and is done once: a part that a file already has is taken from there. A part says nothing before it
is complete, so a study that was killed loses one part at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.bench.grid import Asked, Budget, Kind, Place, measure_place
from paceline.bench.statistics import MIN_UNITS
from paceline.bench.workloads import BenchPrompt
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.tune.candidates import Engines, Group, is_lookup, memory_of, name_in, reason, vocabulary_share
from paceline.tune.costs import StepCosts, Table, read, stored
from paceline.tune.lookups import replay_lookup
from paceline.tune.predictions import Prediction, predict
from paceline.tune.redrafts import redraft
from paceline.tune.step_timing import COST_STEPS, Answers, Samples, ladder, time_steps, timed_lengths
from paceline.tune.traces import Recorded, Round, Trace, recorded, trace
from paceline.tune.ways import DEFAULT, PLAIN, Arm, Asking
from paceline.types import Request, SamplingParams, Speculation

Record = dict[str, Any]
KIND = Kind("tune", "tune")  # of the places that are measured
PLAIN_PART, CHECK = "plain answers", "check of "  # name of a part, and how those of checks begin
PLAIN_SHARE, DRAFT_SHARE = 4.0, 2.0  # times as long as another part that the plain run and drafts may take


@dataclass(slots=True)
class Study:
    groups: Sequence[Group]
    engines: Engines
    asking: Asking
    known: dict[str, Record] = field(default_factory=dict)  # parts that are done, by name
    keep: Callable[[Record], None] = lambda record: None
    begin: Callable[[str], None] = lambda name: None  # called with the name of a part before it is done
    budget: Budget = field(default_factory=lambda: Budget(None))
    failed: dict[str, str] = field(default_factory=dict)  # group → why it cannot be used
    left_out: list[str] = field(default_factory=list)  # parts that the budget had no time for

    def part(self, name: str, make: Callable[[], Record]) -> Record:
        if name not in self.known:
            self.begin(name)
            began = self.budget.clock()
            record = {"name": name, **make(), "took": self.budget.clock() - began}
            self.keep(record)
            self.known[name] = record
        return self.known[name]

    @property
    def planned(self) -> int:
        """Number of all parts, about: checks may need fewer engines."""
        drafters = sum(len(group.scored) for group in self.groups)
        steps = len(self.groups) * len(ladder(max(self.asking.batches)))
        return 1 + 2 * drafters + steps + len(self.asking.batches) * len(self.groups)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that predictions took, and checks, over all runs of this study."""
        took: dict[str, float] = {"predictions": 0.0, "checks": 0.0}
        for name, part in self.known.items():
            samples = part.get("samples", {"seconds": 0.0})["seconds"]  # beside a check, for predictions
            took["checks" if name.startswith(CHECK) else "predictions"] += part["took"] - samples
            took["predictions"] += samples
        return took

    # ── the plain run ──

    def answers(self) -> list[Recorded]:
        """Return the plain answers, which every candidate is compared with."""
        part = self.part(PLAIN_PART, self._record_plain)
        asked = zip(self.asking.prompts, self.asking.tokens, part["answers"], strict=False)  # time may have been over
        return [
            Recorded(tokens, tuple(answer["tokens"]), prompt.max_tokens, answer["stopped"])
            for prompt, tokens, answer in asked
        ]

    def _record_plain(self) -> Record:
        found: list[Recorded] = []
        began, most = self.budget.clock(), max(self.asking.batches)
        for batch, tokens, traced in self._traces(0, Arm(0, PLAIN), size=most):
            found += [recorded(*each) for each in zip(batch, tokens, traced.answers, strict=True)]
            if len(found) >= max(MIN_UNITS, most) and self._is_long(began, PLAIN_SHARE):
                break
        return {"answers": [{"tokens": each.answer, "stopped": each.stopped} for each in found]}

    def _traces(
        self, number: int, arm: Arm, *, size: int
    ) -> Iterator[tuple[Sequence[BenchPrompt], Sequence[tuple[int, ...]], Trace]]:
        """Decode all prompts, `size` at once."""
        llm, asking = self.engines.of(self.groups[number]), self.asking
        cell = arm.cell(llm, size, asking.temperature)
        known = self.known.get(PLAIN_PART, {"answers": asking.prompts})["answers"]
        for start in range(0, len(known), size):
            end = min(start + size, len(known))
            prompts, tokens = asking.prompts[start:end], asking.tokens[start:end]
            yield prompts, tokens, trace(llm.engine, cell, prompts, tokens, ignore_eos=asking.ignore_eos)

    # ── drafts and costs ──

    def score(self, number: int) -> None:
        """Score all drafters of a group at all lengths, and measure what their steps cost.

        A group that cannot be loaded is noted with its reason."""
        group = self.groups[number]
        try:
            for words in group.scored:
                self._lengths(number, words)
                self._within_time(f"drafts of {words}", partial(self._drafts, number, words))
            for batch in ladder(max(self.asking.batches)):
                self._within_time(_steps_part(group, batch), partial(self._costs, number, batch))
        except PacelineError as error:
            if number == 0:
                raise  # without the target itself nothing can be compared
            self.failed[group.title] = reason(error)

    def _within_time(self, name: str, make: Callable[[], Record]) -> None:
        if name in self.known or not self.budget.spent:
            self.part(name, make)
        else:
            self.left_out.append(name)

    def _lengths(self, number: int, words: str) -> list[int]:
        """Return the draft lengths to compare, none longer than the drafter's own limit."""
        return list(self.part(f"lengths of {words}", partial(self._find_lengths, number, words))["drafts"])

    def _find_lengths(self, number: int, words: str) -> Record:
        llm = self.engines.of(self.groups[number])
        guard = llm.engine.drafters.get(name_in(llm, words))
        most = llm.engine.max_draft if guard is None else min(guard.max_draft, llm.engine.max_draft)
        made = llm.parts.drafters[name_in(llm, words)]
        drafts = sorted({min(draft, most) for draft in self.asking.drafts})
        facts = {"loaded_as": made.name, "vocabulary": vocabulary_share(made, llm.parts.target), **memory_of(made)}
        return {"drafts": drafts, **facts}

    def _drafts(self, number: int, words: str) -> Record:
        """Return the rounds of every answer by draft length and batch size; "all" where they are the same for all."""
        llm, lengths = self.engines.of(self.groups[number]), self._lengths(number, words)
        if is_lookup(llm, words):
            looked_up = partial(self._looked_up, llm, words)
            return {"rounds": {str(k): {str(b): looked_up(k, b) for b in self.asking.batches} for k in lengths}}
        if llm.parts.target.decoder is None and not llm.engine.drafters[name_in(llm, words)].hears_logits:
            found = self._redrafted(llm, words, lengths)
        else:  # a device drafts within its rounds alone, and logits are those of steps
            found = [self._decoded(number, Arm(number, words, k), DRAFT_SHARE / len(lengths)) for k in lengths]
        return {"rounds": {str(k): {"all": rounds} for k, rounds in zip(lengths, found, strict=True)}}

    def _redrafted(self, llm: LLM, words: str, lengths: Sequence[int]) -> list[list[list[Round]]]:
        """Return the rounds of every answer, by length, from drafts behind each token of the plain answers."""
        guard, answers, began = llm.engine.drafters[name_in(llm, words)], self.answers(), self.budget.clock()
        samplers = [_sampler(llm, self.asking, i) for i in range(len(answers))]
        found: list[list[list[Round]]] = []
        at_once = max(self.asking.batches)
        for made in redraft(guard, llm.engine.probes, answers, samplers, lengths=lengths, at_once=at_once):
            found.append(made)
            if len(found) >= MIN_UNITS and len(found) % at_once == 0 and self._is_long(began, DRAFT_SHARE):
                break
        return [[made[place] for made in found] for place in range(len(lengths))]

    def _decoded(self, number: int, arm: Arm, share: float) -> list[list[Round]]:
        """Return the rounds of every answer, decoded with these drafts."""
        rounds: list[list[Round]] = []
        began = self.budget.clock()
        for _, _, traced in self._traces(number, arm, size=max(self.asking.batches)):
            rounds += traced.rounds
            if len(rounds) >= MIN_UNITS and self._is_long(began, share):
                break
        return rounds

    def _looked_up(self, llm: LLM, words: str, draft: int, batch: int) -> list[list[Round]]:
        guard, answers = llm.engine.drafters[name_in(llm, words)], self.answers()
        salt = f"tune {words} {draft} {batch}"
        samplers = [_sampler(llm, self.asking, i) for i in range(len(answers))]
        rounds = replay_lookup(guard, answers, samplers, draft=draft, batch=batch, salt=salt)
        if guard.out is not None:
            raise PacelineError(guard.out)
        return rounds

    def _costs(self, number: int, batch: int) -> Record:
        """Time steps of plain decoding and of every drafter at several of its lengths."""
        llm, paces = self.engines.of(self.groups[number]), self._paces(number, batch)
        middle = Answers.middling(self.asking, self.answers(), batch)
        found = time_steps(llm, paces, middle, seconds=self._part_seconds, clock=self.budget.clock)
        return {
            "tables": {name: _stored(each.tables) for name, each in found.items()},
            "reading": {name: each.reading for name, each in found.items()},
            "steps": max(each.steps for each in found.values()),
        }

    def _paces(self, number: int, batch: int) -> dict[Arm, float]:
        """Return the tokens a step of the ways to decode whose steps are timed."""
        found = {Arm(number, PLAIN): 1.0}
        for words in self.groups[number].scored:
            scored = {draft: rounds for draft, _, rounds in self._scored(words)}
            for draft in timed_lengths(self._lengths(number, words), batch):
                each = [made.tokens for answer in scored.get(draft, ()) for made in answer]
                found[Arm(number, words, draft)] = sum(each) / len(each) if each else 1.0
        return found

    # ── time ──

    @property
    def _part_seconds(self) -> float:
        """Seconds that a part may take before the check: all of them get half of the time."""
        minutes = self.budget.minutes
        return math.inf if minutes is None else 60 * minutes / 2 / self.planned

    def _is_long(self, began: float, share: float = 1.0) -> bool:
        """Return whether a part that `began` then has had its time, or `share` times it."""
        return self.budget.clock() - began >= share * self._part_seconds

    # ── predictions ──

    def predictions(self) -> list[Prediction]:
        """Predict every drafter at every length and batch size that was scored, in the order of groups."""
        found = []
        prompts = [len(tokens) for tokens in self.asking.tokens]
        for number, group in enumerate(self.groups):
            costs = self._known_costs(number)
            if group.title in self.failed or PLAIN not in costs:
                continue
            for words in group.scored:
                for draft, batch, rounds in self._scored(words):
                    if words in costs:
                        both = {"mine": costs[words], "plain": costs[PLAIN]}
                        made = predict(words, draft, batch, rounds, prompts[: len(rounds)], **both)
                        found += [] if made is None else [made]
        return found

    def _known_costs(self, number: int) -> dict[str, StepCosts]:
        """Return the costs of the steps of a group's drafters, and of plain ones."""
        tables: dict[str, dict[int, Table]] = {}
        reading: dict[str, dict[int, float]] = {}
        for batch in ladder(max(self.asking.batches)):
            part = self.known.get(_steps_part(self.groups[number], batch), {"tables": {}})
            for name, sizes in (part["tables"] | self._sampled(number, batch)).items():
                mine = tables.setdefault(name, {})  # a size that was timed by itself counts, not the end of a batch
                mine |= {int(size): read(pairs) for size, pairs in sizes.items() if int(size) not in mine}
                reading.setdefault(name, {})[batch] = part.get("reading", {}).get(name, 0.0)
        return {name: StepCosts(table, reading[name]) for name, table in tables.items()}

    def _sampled(self, number: int, batch: int) -> Record:
        """Return the tables of steps that were timed beside a check of a group."""
        checks = (part for name, part in self.known.items() if name.startswith(CHECK) and "samples" in part)
        mine = (part["samples"]["tables"] for part in checks if (part["group"], part["batch"]) == (number, batch))
        return dict(next(mine, {}))

    def _scored(self, words: str) -> Iterator[tuple[int, int, list[list[Round]]]]:
        scored = self.known.get(f"drafts of {words}", {"rounds": {}})["rounds"]
        for draft, rounds in scored.items():
            for batch in self.asking.batches:
                mine = rounds.get(str(batch), rounds.get("all"))
                if mine:
                    yield int(draft), batch, [[Round(*each) for each in answer] for answer in mine]

    # ── the check ──

    def check(self, arms: Mapping[int, Sequence[Arm]]) -> list[Record]:
        """Measure arms beside plain decoding and their engine's default, in turns. `arms`: by batch size."""
        places = [(b, n) for b, chosen in arms.items() for n in sorted({0, *(arm.group for arm in chosen)})]
        found = []
        for i, (batch, number) in enumerate(places):
            mine = [arm for arm in arms[batch] if arm.group == number]
            titles = ", ".join(f"{arm.drafter} ={arm.draft}" for arm in mine)
            name = f"{CHECK}{titles or DEFAULT}, {batch} at once"
            self._within_time(name, partial(self._measured, batch, number, mine, left=len(places) - i))
            found += [self.known[name]] if name in self.known else []
        return found

    def _measured(self, batch: int, number: int, chosen: Sequence[Arm], *, left: int) -> Record:
        """Measure arms of one engine. `left`: checks that the time is for, with this one."""
        llm, asking, count = self.engines.of(self.groups[number]), self.asking, len(self.answers())
        arms = [Arm(number, PLAIN), Arm(number, DEFAULT), *chosen]
        cells = [arm.cell(llm, batch, asking.temperature) for arm in arms]
        rounds = asking.rounds or self._rounds(number, batch, len(arms), left)
        samples = self._samples(number, batch, rounds)
        made = measure_place(
            llm.engine,
            Place(KIND, batch, asking.temperature),
            cells,
            Asked(asking.prompts[:count], asking.tokens[:count]),
            rounds=rounds,
            ignore_eos=asking.ignore_eos,
            tick=samples.tick,
        )
        named = [[arm.drafter, arm.draft, cell.title] for arm, cell in zip(arms, cells, strict=True)]
        timed = {"tables": {name: _stored(tables) for name, tables in samples.tables.items()}}
        return {"group": number, "named": named, "samples": {**timed, "seconds": samples.seconds}, **made}

    def _samples(self, number: int, batch: int, rounds: int) -> Samples:
        """Prepare to time the steps of a group once more while it is measured."""
        llm, paces = self.engines.of(self.groups[number]), self._paces(number, batch)
        steps = self.known.get(_steps_part(self.groups[number], batch), {}).get("steps", COST_STEPS)
        middle = Answers.middling(self.asking, self.answers(), batch)
        return Samples(llm, paces, middle, rounds=rounds, steps=steps, clock=self.budget.clock)

    def _rounds(self, number: int, batch: int, arms: int, left: int) -> int:
        """Return as many batches as all prompts make, or as fit into the time, but MIN_UNITS at least."""
        answers, minutes = self.answers(), self.budget.minutes
        wanted = -(-len(answers) // batch)
        plain = self._known_costs(number).get(PLAIN)
        if minutes is None or plain is None:
            return wanted
        step = plain.seconds(batch, batch)
        turn = step * sum(len(each.answer) for each in answers) / len(answers)  # seconds of a plain batch
        rest = (self.budget.began + 60 * minutes - self.budget.clock()) / left
        return max(MIN_UNITS, min(wanted, int(rest / (arms * turn)) if turn else wanted))


def _steps_part(group: Group, batch: int) -> str:
    """Name the part that times steps of a group."""
    return f"steps of {group.title}, {batch} at once"


def _stored(tables: Mapping[int, Table]) -> Record:
    """Return tables as JSON, which has no integers as keys."""
    return {str(size): stored(table) for size, table in tables.items()}


def _sampler(llm: LLM, asking: Asking, place: int) -> Any:
    prompt = asking.prompts[place]
    params = SamplingParams(temperature=asking.temperature, max_tokens=prompt.max_tokens, seed=prompt.seed)
    request = Request(id="tune", prompt=asking.tokens[place], sampling=params, speculation=Speculation())
    return llm.engine.probes.admission.sequences(request, now=0.0)[0].sampler
