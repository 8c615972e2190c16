"""Results of a ramp: each window of the default settings beside the same one of plain decoding, and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.ramp import Pair, Ramp, Window
from paceline.bench.serve_text import number, table

Record = dict[str, Any]
USUAL_RATIO, USUAL_SHARE = 0.97, 0.95  # speed by plain speed that this share of all windows must have
MIN_RATIO = 0.90  # that every window must have
MAX_BACK_SECONDS = 2.0  # from the fall of the load to the first draft
DEFINITION = (
    "ratio: tokens a second with the default settings by those without drafters, in the same window of each engine's "
    "own seconds, prompts included; back_seconds: from the moment one request was left to the first drafted token"
)


def record(pairs: Sequence[Pair], ramp: Ramp, facts: Mapping[str, Any]) -> Record:
    windows = [_window(pairs, ramp, place) for place in range(ramp.windows)]
    ratios = [ratio for window in windows for ratio in window["ratios"]]
    found = {
        "benchmark": "ramp",
        "definition": DEFINITION,
        **facts,
        "most": ramp.most,
        "seconds": ramp.seconds,
        "window": ramp.window,
        "windows": windows,
        "back_seconds": [pair.back_seconds for pair in pairs],
        "overall": _overall(pairs),
        "lowest": min(ratios, default=None),
        "usual_share": sum(ratio >= USUAL_RATIO for ratio in ratios) / len(ratios) if ratios else None,
    }
    return found | {"verdicts": _verdicts(found)}


def _window(pairs: Sequence[Pair], ramp: Ramp, place: int) -> Record:
    both = [(pair.plain[place], pair.speculative[place]) for pair in pairs]
    timed = [(plain, default) for plain, default in both if plain.speed and default.speed]
    ratios = [default.speed / plain.speed for plain, default in timed]
    seconds = sum(plain.seconds for plain, _ in both)
    return {
        "from": place * ramp.window,
        "sequences": sum(plain.sequence_seconds for plain, _ in both) / seconds if seconds else 0.0,
        "plain_tok_s": statistics.median([plain.speed for plain, _ in timed]) if timed else None,
        "speculative_tok_s": statistics.median([default.speed for _, default in timed]) if timed else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratios": ratios,
    }


def _overall(pairs: Sequence[Pair]) -> float | None:
    """Tokens a second over all windows, by those of plain decoding."""
    plain, default = _speed([pair.plain for pair in pairs]), _speed([pair.speculative for pair in pairs])
    return default / plain if plain and default else None


def _speed(runs: Sequence[Sequence[Window]]) -> float | None:
    windows = [window for run in runs for window in run]
    seconds = sum(window.seconds for window in windows)
    return sum(window.tokens for window in windows) / seconds if seconds else None


def _verdicts(found: Record) -> list[Record]:
    share, lowest, back = found["usual_share"], found["lowest"], found["back_seconds"]
    known = [seconds for seconds in back if seconds is not None]
    return [
        {
            "what": f"windows at {USUAL_RATIO:g} of plain speed or more",
            "found": None if share is None else f"{share:.1%}",
            "holds": share is not None and share >= USUAL_SHARE,
        },
        {
            "what": f"lowest window, at least {MIN_RATIO:g}",
            "found": None if lowest is None else f"{lowest:.3f}",
            "holds": lowest is not None and lowest >= MIN_RATIO,
        },
        {
            "what": f"first draft after the load falls, within {MAX_BACK_SECONDS:g} s",
            "found": f"{max(known):.2f} s" if known else None,
            "holds": len(known) == len(back) > 0 and max(known) <= MAX_BACK_SECONDS,
        },
    ]


def text(found: Record) -> str:
    rows = [["from s", "requests", "plain tok/s", "default tok/s", "ratio", "lowest"]]
    rows += [
        [
            f"{window['from']:g}",
            f"{window['sequences']:.0f}",
            number(window["plain_tok_s"], ",.0f"),
            number(window["speculative_tok_s"], ",.0f"),
            number(window["ratio"], ".2f"),
            number(min(window["ratios"], default=None), ".2f"),
        ]
        for window in found["windows"]
    ]
    lines = [table(rows), ""]
    lines.append(f"overall: {number(found['overall'], '.3f') or 'unknown, nothing was timed;'} of plain speed")
    lines += [f"{'holds' if v['holds'] else 'FAILS'}: {v['what']}: {v['found'] or 'none'}" for v in found["verdicts"]]
    return "\n".join(lines)
