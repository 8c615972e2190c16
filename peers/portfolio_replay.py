"""Portfolios by replay: recorded answers, drafted again with any members and rules, in modelled time.

The first command records what a head drafts at every position of plain answers. The second drafts these answers again:
with the head alone, with suffix and ngram alone, with the portfolio, and with ngram or a useless member added to it.
Drafters are the real ones, but for the head, which repeats its recorded drafts. Times are modelled: one sequence of
SmolLM2 on two cores. So the outcome is the same on a busy machine, and a change of the portfolio is seen within
seconds.

    python -m peers.portfolio_replay record code.json --prompts code_edit --count 16 --data DIRECTORY
    python -m peers.portfolio_replay replay code.json chat.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter, Ended, FeatureDrafter, Seen
from paceline.drafters.guard import Guard
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.portfolio import PortfolioDrafter
from paceline.drafters.recipe import BuildContext, Recipe
from paceline.drafters.registry import recipe, register
from paceline.drafters.suffix import SuffixDrafter
from paceline.kernels.cpu.build import load_library
from paceline.llm import LLM
from paceline.models.weights import Progress
from paceline.prompts.files import read_prompts, spread
from paceline.runner.loading.models import ReadyModel
from paceline.sampling.sampler import Sampler
from paceline.types import Off, SamplingParams

# Modelled milliseconds: a pass by its rows, of which each block of four begins with a dear one; and what else a round
# takes.
ROWS_MS = (2.6, 2.75, 2.85, 3.0, 3.3, 3.45, 3.6, 3.9, 4.05, 4.15, 4.3, 4.6, 4.75, 4.9, 5.05, 5.35, 5.5)
HEAD_MS, LEVEL_MS, READ_MS, HOST_MS = 0.45, 0.22, 0.02, 0.15
# Of the host, between two passes, which leave its caches cold: docs/experiments.md, "What a portfolio costs, and
# whom it asks".
LOOKUP_MS, PORTFOLIO_MS = 0.04, 0.07
ROW_MS = 0.15  # usual price of a row
RECORDED_PRICES = (0.09, 0.06, 0.09, 0.18, 0.09, 0.09, 0.18, 0.09)  # at 0.6 tokens a millisecond
MAX_DRAFT = len(ROWS_MS) - 1
VOCAB = 49_152  # of SmolLM2
RATE_DECAY = 0.95  # weight of the past at each round, for tokens a millisecond


# ── recording ──


class Recorder(FeatureDrafter):
    """Asks a head at every position, and drafts nothing itself."""

    name = "recorder"
    ends_drafts = True

    def __init__(self, head: Drafter) -> None:
        assert isinstance(head, FeatureDrafter)
        self.taps, self.max_draft, self._head = head.taps, head.max_draft, head
        self.drafts: dict[int, Any] = {}  # length of the text → its draft

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self.drafts = {}
        self._head.start(key, lane, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        for ask in asks:
            priced = replace(ask, price=0.23, row_price=0.1, row_prices=RECORDED_PRICES)
            [made] = self._head.propose([priced])
            self.drafts[len(ask.tokens)] = made.tokens, made.parents, made.confidence, made.passes
        return [EMPTY] * len(asks)

    def stop(self, key: int) -> None:
        self._head.stop(key)

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        return self._head.feed(features, seen, crowded=crowded)

    def knows(self, page: int) -> bool:
        return self._head.knows(page)


def recording(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    made = recipe(f"eagle:{options}", target, progress=progress)

    def build(context: BuildContext) -> Drafter:
        head = made.build(context)
        assert head is not None
        return Recorder(head)

    return replace(made, name=Recorder.name, build=build)


def record(args: argparse.Namespace) -> None:
    register(Recorder.name, recording)
    # A recorder drafts nothing, so that the measured speed-up would soon forbid it to be asked.
    llm = LLM("smollm2", drafter=f"{Recorder.name}:smollm2", device="cpu", threads=1, measure_speedup=False)
    recorder = llm.engine.drafters[Recorder.name]._drafter
    assert isinstance(recorder, Recorder)
    found = []
    for temperature in args.temperature:
        for seed, prompt in enumerate(spread(read_prompts(args.prompts, data=args.data), count=args.count)):
            tokens = llm.encode_chat(prompt.messages)
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=args.tokens)
            [answer] = llm.generate([tokens], params)
            text, drafts = [*tokens, *answer.tokens], dict(recorder.drafts)
            found.append({"temperature": temperature, "prompt": len(tokens), "tokens": text, "drafts": drafts})
    Path(args.file).write_text(json.dumps(found), encoding="utf-8")


# ── replaying ──


class Clock:
    """Modelled seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, milliseconds: float) -> None:
        self.now += milliseconds / 1000


class RecordedHead(Drafter):
    """Drafts what a head drafted here when it was recorded."""

    name, max_draft, ends_drafts = "head", 7, True

    def __init__(self, clock: Clock, *, name: str = "head", shift: int = 0) -> None:
        """`shift`: added to each token, which makes all of them wrong."""
        self.name, self._clock, self._shift = name, clock, shift
        self.drafts: Mapping[int, Any] = {}
        self._read: dict[int, int] = {}

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._read[key] = len(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        length, most = len(ask.tokens), ask.max_draft
        tokens, parents, confidence, passes = self.drafts.get(length, ((), (), (), 0))
        if not tokens:
            return EMPTY
        self._clock.spend(HEAD_MS + LEVEL_MS * passes + READ_MS * max(0, length - self._read[ask.key] - 1))
        self._read[ask.key] = length
        drafted = tuple((token + self._shift) % VOCAB for token in tokens[:most])
        return Draft(drafted, tuple(parents[:most]), passes=passes, confidence=tuple(confidence[:most]))


class TimedSuffix(SuffixDrafter):
    def __init__(self, clock: Clock) -> None:
        super().__init__(load_library())
        self._clock = clock

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self._clock.spend(LOOKUP_MS)
        return super().propose(asks)


def portfolio(clock: Clock, *members: Drafter) -> PortfolioDrafter:
    return PortfolioDrafter([Guard(each, vocab_size=VOCAB, timeout=60.0) for each in members], clock=clock)


Arm = Callable[[Clock, RecordedHead, RecordedHead], Drafter]  # (clock, the head, a useless one) → what drafts
ARMS: Mapping[str, Arm] = {
    "head": lambda clock, head, useless: head,
    "ngram": lambda clock, head, useless: NgramDrafter(),
    "suffix": lambda clock, head, useless: TimedSuffix(clock),
    "suffix+head": lambda clock, head, useless: portfolio(clock, TimedSuffix(clock), head),
    "and ngram": lambda clock, head, useless: portfolio(clock, TimedSuffix(clock), NgramDrafter(), head),
    "and a useless one": lambda clock, head, useless: portfolio(clock, TimedSuffix(clock), head, useless),
}


class Replay:
    """One arm over all answers, one after another."""

    def __init__(self, arm: str, *, past: bool = False) -> None:
        """`past`: answers know those before them."""
        self.clock = Clock()
        self._past = past
        self._heads = RecordedHead(self.clock), RecordedHead(self.clock, name="useless", shift=7)
        self._drafter = ARMS[arm](self.clock, *self._heads)
        self._host = HOST_MS + (PORTFOLIO_MS if isinstance(self._drafter, PortfolioDrafter) else 0.0)
        self.tokens = self.steps = 0
        self._made, self._spent = 12.0, 20.0  # recent tokens and milliseconds

    def answer(self, key: int, one: Mapping[str, Any]) -> None:
        text = np.array(one["tokens"], dtype=np.int32)
        sampler = Sampler(SamplingParams(temperature=one["temperature"]), seed=0, vocab_size=VOCAB, eos_ids=())
        for head in self._heads:
            head.drafts = {int(length): draft for length, draft in one["drafts"].items()}
        length, pace = one["prompt"] + 1, 4
        self._drafter.start(key, 0, text[:length])
        while length < len(text):
            most = min(MAX_DRAFT, self._drafter.max_draft, len(text) - length - 1)
            most = most if self._drafter.ends_drafts else min(most, pace)
            new = self._round(key, text, length, most, sampler)
            pace = min(2 * max(pace, most), 16) if new > most else new + 1
            length += new
        self._drafter.learn(Ended(text, one["prompt"], self._salt(key)))
        self._drafter.stop(key)

    def _round(self, key: int, text: np.ndarray, length: int, most: int, sampler: Sampler) -> int:
        """Draft, verify and accept; return the number of new tokens."""
        began, draft = self.clock.now, EMPTY
        self.clock.spend(self._host)
        if most > 0:
            [draft] = self._drafter.propose([self._ask(key, text[:length], most, sampler)])
        self.clock.spend(ROWS_MS[len(draft.tokens)])
        new = 1 + _accepted(draft, text[length:].tolist())
        if draft.tokens and length + new < len(text):
            self._drafter.observe(key, text[: length + new], new - 1)
        self.tokens, self.steps = self.tokens + new, self.steps + 1
        self._made = RATE_DECAY * self._made + new
        self._spent = RATE_DECAY * self._spent + 1000 * (self.clock.now - began)
        return new

    def _salt(self, key: int) -> str:
        return "" if self._past else str(key)

    def _ask(self, key: int, tokens: np.ndarray, most: int, sampler: Sampler) -> Ask:
        speed = self._made / self._spent
        rows = tuple((after - before) * speed for before, after in pairwise(ROWS_MS[:9]))
        return Ask(
            key,
            0,
            tokens,
            most,
            sampler,
            price=(ROW_MS + LEVEL_MS) * speed,
            row_price=ROW_MS * speed,
            row_prices=rows,
            salt=self._salt(key),
            plain_speed=1000 / (ROWS_MS[0] + HOST_MS),
        )


def _accepted(draft: Draft, said: Sequence[int]) -> int:
    """Count the tokens of a draft that the target says; the last one of the answer is never drafted."""
    right = {path for path in draft.paths if path == tuple(said[: len(path)])}
    return min(max((len(path) for path in right), default=0), len(said) - 1)


def replay(args: argparse.Namespace) -> None:
    for file in args.files:
        answers = json.loads(Path(file).read_text(encoding="utf-8"))
        for temperature in sorted({one["temperature"] for one in answers}):
            for arm in ARMS:
                run = Replay(arm, past=args.past)
                for key, one in enumerate(each for each in answers if each["temperature"] == temperature):
                    run.answer(key, one)
                per_step, per_second = run.tokens / run.steps, run.tokens / run.clock.now
                print(f"{file} {temperature:g} {arm:18} {per_step:.2f} tokens/step {per_second:6.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("record")
    made.add_argument("file")
    made.add_argument("--prompts", default="mt_bench")
    made.add_argument("--count", type=int, default=16)
    made.add_argument("--tokens", type=int, default=200)
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    made.add_argument("--data", type=Path)
    made.set_defaults(run=record)
    again = commands.add_parser("replay")
    again.add_argument("files", nargs="+")
    again.add_argument("--past", action="store_true", help="answers look up those before them, too")
    again.set_defaults(run=replay)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
