"""Traces of runs as one self-contained HTML file: no script, no font, no picture from elsewhere.

A run is a tree: its calls in order, and those of each fork below it. Text from a model or a program is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.audit.page import STYLE
from paceline.errors import InvalidRequest, StorageError
from paceline.program.call import Call
from paceline.program.expressions import Gen
from paceline.program.run import Run

if TYPE_CHECKING:
    from paceline.program.state import State

MAX_TEXT = 600  # characters of a call's text that are shown
OPEN_RUNS = 3  # runs whose calls are unfolded
HEADER = (
    "call",
    "line",
    "text",
    "prompt",
    "cached",
    "output",
    "drafted",
    "accepted",
    "s",
    "from the beginning of the run",
)
WORDS = 3  # columns at the left that hold words
TRACE_STYLE = """
.lane { position: relative; height: .9em; width: 16rem; background: #8882 }
.lane i { position: absolute; top: 0; bottom: 0; min-width: 2px; background: #1f77b4 }
.lane i.wait { background: #8885 }
summary { cursor: pointer; font-size: 1.1rem; margin-top: 1.2rem } tr.fork td { font-weight: 600 }
"""


def save_traces(states: Sequence[State], path: str | Path) -> None:
    """Write the traces of finished runs as one HTML file."""
    runs = [state.run for state in states]
    if not runs or not all(run.done for run in runs):
        raise InvalidRequest("a trace is of runs that have ended: wait for them first")
    try:
        Path(path).write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); choose another place") from error


def page(runs: Sequence[Run]) -> str:
    title = f"Trace of {escape(runs[0].program)}"
    sections = [f"<h1>{title}</h1>", _tiles(runs), *(_run(run, opened=i < OPEN_RUNS) for i, run in enumerate(runs))]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{TRACE_STYLE}</style></head>'
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _tiles(runs: Sequence[Run]) -> str:
    usages = [call.usage for run in runs for call in run.calls]
    prompts, drafted = sum(u.prompt_tokens for u in usages), sum(u.drafted for u in usages)
    cached, accepted = sum(u.cached_tokens for u in usages), sum(u.accepted for u in usages)
    seconds = max(run.ended_at for run in runs) - min(run.began_at for run in runs)
    tiles = {
        "runs": str(len(runs)),
        "failed": str(sum(run.error is not None for run in runs)),
        "calls": str(len(usages)),
        "seconds": f"{seconds:.2f}",
        "output tokens": str(sum(u.output_tokens for u in usages)),
        "prompt tokens cached": _share(cached, prompts),
        "drafted tokens accepted": _share(accepted, drafted),
    }
    shown = "".join(f'<div class="tile"><b>{value}</b>{name}</div>' for name, value in tiles.items())
    return f'<div class="tiles">{shown}</div>'


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")


def _run(run: Run, *, opened: bool) -> str:
    error = "" if run.error is None else f'<p class="bad">{escape(str(run.error))}</p>'
    facts = f"{run.program}: {len(run.calls)} calls, {run.ended_at - run.began_at:.2f} s, seed {run.seed}"
    header = "".join(f"<th{' class=word' if i < WORDS else ''}>{name}</th>" for i, name in enumerate(HEADER))
    rows = "".join(_rows(run))
    return (
        f"<details{' open' if opened else ''}><summary>{escape(facts)}</summary>{error}"
        f'<div class="wide"><table><tr>{header}</tr>{rows}</table></div></details>'
    )


def _rows(run: Run) -> Iterator[str]:
    """Yield the rows of the tree, with one before the calls of each fork."""
    shown = {""}
    for call in sorted(run.calls, key=lambda call: [int(number) for number in re.findall(r"\d+", call.path)]):
        place = call.path.rpartition("/")[0]
        for end in (found.end() for found in re.finditer(r"/\d+\.\d+", place)):
            if place[:end] not in shown:
                shown.add(place[:end])
                yield _fork_row(place[:end])
        yield _row(run, call, depth=place.count("."))


def _fork_row(place: str) -> str:
    number = int(place.rpartition(".")[2]) + 1
    indent = f"padding-left: {0.7 + 1.4 * (place.count('.') - 1):.1f}rem"
    return f'<tr class="fork"><td class="word" style="{indent}" colspan="{len(HEADER)}">fork {number}</td></tr>'


def _row(run: Run, call: Call, *, depth: int) -> str:
    kind = "gen" if isinstance(call.ask, Gen) else "select"
    place = f"{call.site.file}:{call.site.line}"
    text = "".join(call.pieces) if call.error is None else f"{type(call.error).__name__}: {call.error}"
    shown = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    usage, ended = call.usage, call.ended_at or run.ended_at
    seconds = "" if call.begun_at is None else f"{ended - call.begun_at:.3f}"
    numbers = (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.drafted, usage.accepted)
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    mood = "" if call.error is None else " bad"
    indent = f"padding-left: {0.7 + 1.4 * depth:.1f}rem"
    return (
        f'<tr><td class="word" style="{indent}">{escape(call.name)} <small>{kind}</small>'
        f'</td><td class="word"><small>{escape(place)}</small></td><td class="text{mood}">{escape(shown)}</td>'
        f"{cells}<td>{seconds}</td><td>{_lane(run, call, ended)}</td></tr>"
    )


def _lane(run: Run, call: Call, ended: float) -> str:
    """Draw when a call was made, when it began and when it ended."""
    whole = max(run.ended_at - run.began_at, 1e-9)
    made, begun, end = (
        100 * (moment - run.began_at) / whole for moment in (call.made_at, call.begun_at or ended, ended)
    )
    bars = (("wait", made, begun), ("", begun, end))
    drawn = "".join(
        f'<i class="{kind}" style="left: {a:.2f}%; width: {max(b - a, 0):.2f}%"></i>' for kind, a, b in bars
    )
    return f'<div class="lane">{drawn}</div>'
