"""Fit the constants of `paceline.plan` to the H200's records in docs/results, and say how far each step is from them.

    python -m peers.plan_fit                  all records, as for `paceline/plan/gpus.py`
    python -m peers.plan_fit --only llama-3.1-8b
                                              fit to one target; the others then show how well constants carry over

A random search from the constants in use, with a fixed seed: each turn scales some of them. The loss is the sum of
squared errors, and more for each error above LARGE, so that no figure is far off. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.plan import gpus
from paceline.plan.against import Cell, cells

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TURNS = 3000
LARGE = 0.07  # error from which a figure weighs more
WEIGHT = 20.0  # of an error above LARGE
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TARGET", help="fit to the records of one target")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of the search (default: {TURNS})")
    args = parser.parse_args()
    paths = [*RESULTS.glob("engine-*.json"), *RESULTS.glob("reading-*.json")]
    records = [json.loads(path.read_text()) for path in sorted(paths)]
    fitted = [record for record in records if args.only in (None, record["setup"]["target"])]
    if not fitted:
        parser.error(f"no record of {args.only}; there are {sorted({r['setup']['target'] for r in records})}")
    print(f"before: {_said(records)}")
    fit(fitted, turns=args.turns)
    print(f"after: {_said(records)}")
    for name, value in asdict(gpus.MEASURED).items():
        print(f"  {name:16} {value:.3g}")
    if args.only:
        others = [record for record in records if record not in fitted]
        for cell in sorted(_all(others), key=lambda cell: -abs(cell.error)):
            print(f"  {cell.error:+6.1%}  {cell.name}")


def fit(records: Sequence[Any], *, turns: int) -> None:
    """Search for constants, and leave the best ones in `paceline.plan.gpus`."""
    random = np.random.default_rng(SEED)
    best, least, scale = gpus.MEASURED, _loss(records), 0.2
    for _ in range(turns):
        values = asdict(best)
        moves = np.exp(scale * random.normal(size=len(values)) * (random.random(len(values)) < 0.4))
        gpus.MEASURED = replace(
            best, **{name: float(values[name] * move) for name, move in zip(values, moves, strict=True)}
        )
        loss = _loss(records)
        if loss < least:
            best, least, scale = gpus.MEASURED, loss, min(0.3, 1.2 * scale)
        else:
            scale = max(0.01, 0.997 * scale)
    gpus.MEASURED = best


def _loss(records: Sequence[Any]) -> float:
    errors = np.abs([cell.error for cell in _all(records)])
    return float((errors**2).sum() + WEIGHT * np.clip(errors - LARGE, 0, None).sum())


def _all(records: Sequence[Any]) -> list[Cell]:
    return [cell for record in records for cell in cells(record)]


def _said(records: Sequence[Any]) -> str:
    errors = np.abs([cell.error for cell in _all(records)])
    return f"{len(errors)} figures, mean error {errors.mean():.1%}, largest {errors.max():.1%}"


if __name__ == "__main__":
    main()
