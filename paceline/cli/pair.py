"""The pairs of `paceline inspect --pair`: whether the drafters will help the target, by a short study of each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.tune import study_of
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.tune.study import Study

Record = dict[str, Any]
ASKED: Mapping[str, Any] = {  # options of `paceline tune` for a short study
    "prompts": None,
    "data": None,
    "count": 50,
    "max_tokens": 64,
    "input_tokens": 256,
    "seed": 0,
    "raw": False,
    "candidates": None,
    "draft": (1, 2, 4, 8),
    "batch": (1,),
    "temperature": 0.0,
    "rounds": None,
    "ignore_eos": False,
    "minutes": 10.0,
    "save": None,
    "measure_speedup": False,
}


def pairs_of(args: Namespace, *, asked: Mapping[str, Any] = ASKED) -> list[Record]:
    """Return what is known of each drafter that is named, or of the target's usual ones and the candidates. One that
    could not be judged has the reason under `why_not`, and nothing else."""
    from paceline.tune.tuning import score

    study = study_of(Namespace(**{**vars(args), **asked}))
    with progress_bar("judging", unit="parts") as progress:
        study.begin = lambda name: progress.phase(name, unit="parts", done=len(study.known), total=study.planned)
        score(study)
        found = [pair for number in range(len(study.groups)) for pair in _pairs_of_group(study, number)]
    return [pair for pair in found if not args.drafter or pair["drafter"] in args.drafter]


def _pairs_of_group(study: Study, number: int) -> Iterator[Record]:
    """Yield the pairs of one engine, in the order of its drafters."""
    from paceline.tune.tuning import advise

    group = study.groups[number]
    late = [words for words in group.scored if _is_late(study, number, words)]
    judged = {} if len(late) == len(group.scored) else {pair["drafter"]: pair for pair in advise(study, number)}
    for words in group.scored:
        failed = study.failed.get(words) or study.failed.get(group.title)
        if failed is not None:
            yield unjudged(words, failed)
        elif words in late:
            minutes = f"the {study.budget.minutes:g} minutes of the study"
            yield unjudged(words, f"{minutes} were over before; `paceline tune --candidates` takes --minutes")
        else:
            yield judged[words]


def _is_late(study: Study, number: int, words: str) -> bool:
    """Tell whether a part that a verdict needs was left out for lack of time."""
    needed = f"drafts of {words}", f"steps of {study.groups[number].title}, "
    return any(part == needed[0] or part.startswith(needed[1]) for part in study.left_out)


def unjudged(words: str, why: str) -> Record:
    return {"drafter": words, "why_not": why}


def pair_lines(pair: Record) -> Sequence[str]:
    from paceline.tune.pairs import lines

    return [f"{pair['drafter']} is not judged: {pair['why_not']}"] if "why_not" in pair else lines(pair)
