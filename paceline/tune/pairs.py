"""Pairs of a target and a drafter: how often the drafter is right, and whether it will help, before anybody uses it.

Two acceptances of a first drafted token are measured. By rejection sampling it is the overlap of both distributions,
Σ min(p, q), in the mean: the most that any rule can accept. By the coupled rule, the default, it can be lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.bench.conclusion import Outcome
from paceline.bench.offline import Cell
from paceline.llm import LLM
from paceline.sizes import format_size
from paceline.tune.candidates import name_in
from paceline.tune.predictions import Prediction
from paceline.tune.traces import trace
from paceline.tune.ways import Asking
from paceline.types import Rule, Speculation

PROMPTS, TOKENS = 50, 32  # answers over which acceptance is taken, and tokens of each at most
USUAL_TEMPERATURE = 1.0  # at which distributions are compared if answers are greedy


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of first drafted tokens that are accepted."""

    overlap: float | None  # by rejection sampling; None: nothing was drafted
    coupled: float | None
    temperature: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


def acceptance(llm: LLM, words: str, asking: Asking) -> Acceptance:
    """Decode some prompts with drafts of one token, by both rules."""
    temperature = asking.temperature or USUAL_TEMPERATURE
    overlap, coupled = (_accepted(llm, words, asking, rule, temperature) for rule in (Rule.REJECTION, Rule.COUPLED))
    return Acceptance(overlap=overlap, coupled=coupled, temperature=temperature)


def _accepted(llm: LLM, words: str, asking: Asking, rule: Rule, temperature: float) -> float | None:
    name, size = name_in(llm, words), max(asking.batches)
    cell = Cell(size, temperature, Speculation(drafter=name, max_draft=1, rule=rule), f"{name} {rule}", fixed=True)
    prompts = [replace(each, max_tokens=min(each.max_tokens, TOKENS)) for each in asking.prompts[:PROMPTS]]
    drafted = accepted = 0
    for start in range(0, len(prompts), size):
        some = prompts[start : start + size], asking.tokens[start : start + size][: len(prompts) - start]
        for answer in trace(llm.engine, cell, *some, ignore_eos=asking.ignore_eos).answers:
            drafted, accepted = drafted + answer.stats.drafted, accepted + answer.stats.accepted
    return accepted / drafted if drafted else None


def verdict(words: str, predictions: Sequence[Prediction]) -> str:
    """Say in one sentence whether a drafter will help, by its best length for the smallest batch."""
    smallest = min((each.batch for each in predictions), default=0)
    mine = [each for each in predictions if each.batch == smallest]
    if not mine:
        return f"{words}: its drafts cannot be judged, because no answer has a second token."
    best = max(mine, key=lambda each: each.ratio)
    outcome = Outcome(words, best.ratio, best.interval)
    speed = f"{best.ratio:.2f} times plain speed{spoken(best.interval)} with drafts of {best.draft}"
    return {
        "faster": f"{words} helps: {speed}.",
        "slower": f"{words} does not help: {speed} at best.",
        "same": f"{words} makes no clear difference: {speed}.",
        "unknown": f"{words}: {speed}, by too few answers for an interval.",
    }[outcome.verdict]


def spoken(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"


def lines(pair: dict[str, Any]) -> list[str]:
    """Describe the record of a pair in plain words."""
    shares = [
        f"{name} {pair[key]:.0%}"
        for name, key in (("overlap Σ min(p, q)", "overlap"), ("coupled", "coupled"))
        if pair[key] is not None
    ]
    said = f"accepts a first token: {', '.join(shares)}, at temperature {pair['temperature']:g}"
    return [
        pair["verdict"],
        f"  {pair['vocabulary']:.0%} of the target's vocabulary · weights {format_size(pair['weight_bytes'])} · "
        f"{pair['kv_bytes_per_token']} bytes of KV a token",
        f"  {said if shares else 'drafted nothing'}",
    ]
