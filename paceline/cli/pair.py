"""The pairs of `paceline inspect --pair`: whether the drafters will help the target, by a short study of each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.cli.tune import study_of
from paceline.progress import progress_bar

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
    """Return what is known of each drafter that is named, or of the target's usual ones."""
    from paceline.tune.tuning import advise, score

    study = study_of(Namespace(**{**vars(args), **asked}))
    with progress_bar("judging", unit="parts") as progress:
        study.begin = lambda name: progress.phase(name, unit="parts", done=len(study.known), total=study.planned)
        score(study)
        found = [pair for number in range(len(study.groups)) for pair in advise(study, number)]
    return [pair for pair in found if not args.drafter or pair["drafter"] in args.drafter]


def pair_lines(pair: Record) -> Sequence[str]:
    from paceline.tune.pairs import lines

    return lines(pair)
