"""Tuning from the plain run to the record: score every candidate, predict, and measure the best.

`tune.study` has the parts. This is their order, and what a user sees of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.errors import PacelineError
from paceline.tune import pairs, report
from paceline.tune.candidates import reason
from paceline.tune.choice import Slo
from paceline.tune.predictions import Prediction
from paceline.tune.study import Study
from paceline.tune.ways import Arm

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wishes of a user for a tuning."""

    best: int | None = 3  # ways that are measured at each batch size; None: all
    slos: Sequence[Slo] = ()
    advises: bool = False  # say of every candidate whether the pair will help


def tune(study: Study, wanted: Wanted, facts: Mapping[str, Any]) -> Record:
    """Do what is left of a study, and return its record. Ctrl-C ends it early, with what is known by then."""
    interrupted = False
    advice: list[Record] = []
    checks: list[Record] = []
    try:
        score(study)
        if wanted.advises:
            advice = [made for number in range(len(study.groups)) for made in advise(study, number)]
        checks = study.check(best(study, wanted.best))
    except KeyboardInterrupt:
        interrupted = True
    return report.record(
        study.predictions(),
        report.measured_of(checks),
        slos=wanted.slos,
        titles=[group.title for group in study.groups],
        pairs=advice,
        failed=study.failed,
        left_out=study.left_out,
        facts={**facts, "interrupted": interrupted, "seconds": study.seconds},
    )


def score(study: Study) -> None:
    study.answers()
    for number in range(len(study.groups)):
        study.score(number)


def best(study: Study, count: int | None) -> dict[int, list[Arm]]:
    """Choose the ways to measure at each batch size, by their predictions."""
    holder = {words: number for number, group in enumerate(study.groups) for words in group.scored}
    found = {}
    for batch in study.asking.batches:
        mine = sorted((each for each in study.predictions() if each.batch == batch), key=lambda each: -each.ratio)
        found[batch] = [Arm(holder[each.drafter], each.drafter, each.draft) for each in mine[:count]]
    return found


def advise(study: Study, number: int) -> list[Record]:
    """Return what is known of the pairs of one engine, a record for each drafter."""
    found = []
    made = study.predictions()
    for words in study.groups[number].scored:
        if study.groups[number].title in study.failed:
            continue
        try:
            accepted = study.part(f"acceptance of {words}", partial(_acceptance, study, number, words))
        except PacelineError as error:
            study.failed[words] = reason(error)
            continue
        found.append(pair_record(words, study.known[f"lengths of {words}"], accepted, made))
    return found


def _acceptance(study: Study, number: int, words: str) -> Record:
    return pairs.acceptance(study.engines.of(study.groups[number]), words, study.asking).record()


def pair_record(words: str, facts: Record, accepted: Record, predictions: Sequence[Prediction]) -> Record:
    mine = [each for each in predictions if each.drafter == words]
    kept = {name: facts[name] for name in ("vocabulary", "weight_bytes", "kv_bytes_per_token")}
    shares = {name: accepted[name] for name in ("overlap", "coupled", "temperature")}
    return {"drafter": words, "verdict": pairs.verdict(words, mine), **kept, **shares}
