"""Demo: a real model answers with and without speculation; the same text, sooner.

paceline demo
paceline demo ./model.gguf --drafter ngram

The prompt asks for a text to be corrected, so that the answer repeats much of it: that is where looking up n-grams
helps. Greedy and sampled answers are shown as they come, then both ways are timed by turns on a warm model.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.cli.options import add_model_options, count, load
from paceline.cli.report import decode_speed
from paceline.cli.screen import show
from paceline.cli.style import Style
from paceline.types import OFF, Origin, SamplingParams, Speculation

if TYPE_CHECKING:
    from paceline.llm import LLM, Sample

PROMPT = """Correct the mistakes in this text:

Honey bees live in colonys of up to 60,000 bees. Each colony has one queen, who lays as many as 1,500 eggs a day, \
a few hundred drones, and thousands of workers. The workers gather nectar and pollen, feed the young, guard the hive \
and keep it warm in winter. A worker that has found flowers tell the others with a dance: the direction of the dance \
shows the way, and its length show the distance."""

CASES = {"greedy": SamplingParams(temperature=0), "sampled": SamplingParams(temperature=0.7, seed=3)}
MAX_SECONDS, MIN_ROUNDS = 4.0, 3  # a case is timed no longer than this, but this many times at least
WAYS = {"plain": OFF, "speculative": Speculation()}


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one case."""

    plain_tok_s: float
    speculative_tok_s: float
    tokens_per_step: float
    identical: bool

    @property
    def record(self) -> dict[str, float | bool]:
        return asdict(self) | {"tokens_per_round": self.tokens_per_step}  # the older name

    @property
    def row(self) -> str:
        speedup = self.speculative_tok_s / self.plain_tok_s if self.plain_tok_s else 0.0
        speeds = f"{self.plain_tok_s:6.0f} tok/s {self.speculative_tok_s:9.0f} tok/s {speedup:7.2f}×"
        return f"{speeds} {self.tokens_per_step:14.2f} {'yes' if self.identical else 'NO':>11}"


HEADER = f"{'':<9} {'plain':>12} {'speculative':>15} {'':>8} {'tokens/step':>14} {'same text':>11}"


@dataclass(slots=True)
class Trial:
    """All answers to the prompt in one case, by way of decoding."""

    answers: dict[str, list[Sample]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def result(self) -> Result:
        texts = {(tuple(sample.tokens), sample.text) for samples in self.answers.values() for sample in samples}
        speeds = {way: round(median(map(_speed, samples)), 1) for way, samples in self.answers.items()}
        return Result(
            plain_tok_s=speeds["plain"],
            speculative_tok_s=speeds["speculative"],
            tokens_per_step=round(self.answers["speculative"][-1].stats.tokens_per_step, 2),
            identical=len(texts) == 1,
        )


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser, default_target="smollm2")
    parser.set_defaults(measure_speedup=False)  # the demo compares with plain decoding itself
    parser.add_argument("--max-tokens", type=count, default=128, metavar="N", help="longest answer (default: 128)")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="most timings of each way (default: 5)")
    parser.add_argument("--json", action="store_true", help="nothing but one line of JSON")


def run(args: Namespace) -> int:
    llm = load(args)
    prompt = _encode(llm)
    stage = Stage(llm, prompt, quiet=args.json)
    stage.introduce(args)
    results = {}
    for name, sampling in CASES.items():
        results[name] = stage.play(name, replace(sampling, max_tokens=args.max_tokens), rounds=args.rounds)
    stage.conclude(results)
    if args.json:
        print(json.dumps({name: result.record for name, result in results.items()}))
    return 0 if all(result.identical for result in results.values()) else 1


class Stage:
    """The run of the demo: it shows answers, unless quiet, and times them."""

    def __init__(self, llm: LLM, prompt: Sequence[int], *, quiet: bool) -> None:
        self._llm = llm
        self._prompt = prompt
        self._quiet = quiet
        self._style = Style(sys.stdout)

    def introduce(self, args: Namespace) -> None:
        drafters = " and ".join(self._llm.parts.drafters)
        self._say(f"{self._style.bold(args.target)}, {self._llm.parts.target.why}, drafter {drafters}")
        self._say(f"\n{self._style.dim(PROMPT)}")
        self._say(f"\n{self._style.token('like this', Origin.ACCEPTED)}: drafted, and the target agreed")

    def play(self, name: str, sampling: SamplingParams, *, rounds: int) -> Result:
        trial = Trial()
        for way, speculation in WAYS.items():
            self._show(f"{name}, {way}", sampling, speculation)  # and warm up
        start = perf_counter()
        for done in range(rounds):  # in turns, so that a busy moment of the machine affects both
            if done >= MIN_ROUNDS and perf_counter() - start > MAX_SECONDS:
                break
            for way, speculation in WAYS.items():
                answer = self._llm.generate([self._prompt], sampling, speculation=speculation)[0]
                trial.answers[way].append(answer.samples[0])
        return trial.result()

    def conclude(self, results: dict[str, Result]) -> None:
        self._say(f"\n{self._style.bold(HEADER)}")
        for name, result in results.items():
            self._say(f"{name:<9} {result.row}")
        if all(result.identical for result in results.values()):
            self._say("\nsame text: yes")
        else:
            alarm = Style(sys.stderr).alarm("SAME TEXT: NO. Speculation changed an answer")
            hint = "expected only of a model that is not bitwise: see `paceline inspect`"
            print(f"{alarm}; {hint}", file=sys.stderr)

    def _show(self, title: str, sampling: SamplingParams, speculation: Speculation) -> None:
        from paceline.llm import Sample

        if self._quiet:
            self._llm.generate([self._prompt], sampling, speculation=speculation)
            return
        print(f"\n{self._style.bold(title)}")
        events = self._llm.stream(self._prompt, sampling, speculation=speculation)
        show(self._llm.tokenizer, events, self._style, into=Sample())
        print(flush=True)

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


def _encode(llm: LLM) -> tuple[int, ...]:
    if llm.tokenizer.chat_template is None:
        return llm.encode(PROMPT)
    return llm.encode_chat([{"role": "user", "content": PROMPT}])


def _speed(sample: Sample) -> float:
    return decode_speed(sample.stats)
