"""Records of `bench serve`, `bench offline`, `bench compare` and `replay` as one self-contained HTML file, and its
parts.

Text from a file, a server or a command line is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.audit.page import STYLE
from paceline.bench import offline_record, serve_text
from paceline.bench.charts import charts
from paceline.bench.plots import Chart, svg
from paceline.bench.serve_text import FIGURE_NAMES, load_title, ratio_text, runs_of

Record = dict[str, Any]
CHART_STYLE = (
    ".charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr)); gap: 1.5rem }"
    ".charts svg { width: 100%; height: auto } td, th { white-space: nowrap; padding: .25rem .5rem }"
)


def page(record: Record, *, title: str, compared: Sequence[Record] = ()) -> str:
    """Render a record. `compared`: the record of `bench.compare` for two files."""
    offline = record.get("benchmark") == "offline"
    sections = [
        section("Second by first", _compared(compared)) if compared else "",
        section("Cells", _cells(record)) if offline else section("Loads and temperatures", _grid(record)),
        "" if offline else section("Runs", _runs(record)),
        section("Arms in turns", _arms(record["comparisons"])) if record.get("comparisons") else "",
        section("Plots", pictures(charts(record))),
        section("Notes", _notes(record["notes"])) if record.get("notes") else "",
    ]
    return document(record, title=title, sections=sections)


def document(record: Record, *, title: str, sections: Sequence[str]) -> str:
    """Return a whole page: the heading of a record, sections in HTML, and the record's definition."""
    note = f'<p class="note">{escape(record.get("definition", ""))}</p>'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{CHART_STYLE}</style></head>'
        f"<body>{_heading(record, title)}{''.join(sections)}{note}</body></html>\n"
    )


def pictures(drawn: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(map(svg, drawn))}</div>'


def _heading(record: Record, title: str) -> str:
    machine: Mapping[str, Any] = record.get("machine") or record.get("client_machine") or {}
    facts = [machine.get("gpu") or machine.get("cpu"), f"paceline {machine.get('paceline')} ({machine.get('commit')})"]
    shown = " · ".join(str(fact) for fact in facts if fact) if machine else ""
    partial = '<p class="verdict bad">Interrupted: a part of the runs.</p>' if record.get("interrupted") else ""
    return (
        f'<h1>{escape(title)}</h1><p class="facts">{escape(shown)}<br>'
        f"<code>{escape(str(record.get('command', '')))}</code></p>{partial}"
        f'<p class="verdict">{escape(str(record.get("conclusion", "")))}</p>'
    )


def section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}"


def _runs(record: Record) -> str:
    runs = runs_of(record)
    failed = "".join(f'<p class="bad">{escape(line)}</p>' for run in runs for line in serve_text.failures(run))
    return table(serve_text.HEADER, [serve_text.run_row(run) for run in runs], words=3) + failed


def _notes(notes: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _cells(record: Record) -> str:
    found = table(offline_record.HEADER, [offline_record.row(cell) for cell in record["cells"]])
    void = [cell for cell in record["cells"] if cell["claim_is_void"]]
    note = '<p class="bad">Answers loop or repeat themselves: no speed of such text means anything.</p>' if void else ""
    return found + note


def _grid(record: Record) -> str:
    """Tokens per second by load (rows), temperature and arm (columns), with the ratio if arms took turns."""
    runs = runs_of(record)
    loads = list(dict.fromkeys(load_title(run) for run in runs))
    columns = list(dict.fromkeys((run.get("temperature"), str(run.get("arm", ""))) for run in runs))
    speeds = {(load_title(r), r.get("temperature"), str(r.get("arm", ""))): r["output_throughput"] for r in runs}
    ratios = {
        (load_title(c), c["temperature"], c["arm"]): c["ratios"]["output_throughput"]["ratio"]
        for c in record.get("comparisons", ())
        if "output_throughput" in c["ratios"]
    }
    header = ["tokens a second", *(f"T={0 if t is None else t:g} {arm}".strip() for t, arm in columns)]
    rows = [[load, *(_speed(speeds.get((load, *c)), ratios.get((load, *c))) for c in columns)] for load in loads]
    return table(header, rows, words=1)


def _speed(speed: float | None, ratio: float | None) -> str:
    return "" if speed is None else f"{speed:.1f}" + ("" if ratio is None else f" (×{ratio:.2f})")


def _arms(comparisons: Sequence[Record]) -> str:
    header = ["load", "T", "arm", "against", *FIGURE_NAMES.values(), "same texts"]
    rows = [
        [
            load_title(c),
            f"{c['temperature']:g}",
            c["arm"],
            c["against"],
            *(f"× {ratio_text(c['ratios'][name])}" if name in c["ratios"] else "" for name in FIGURE_NAMES),
            f"{c['identical_texts']}/{c['pairs']}",
        ]
        for c in comparisons
    ]
    return table(header, rows, words=4)


def _compared(found: Sequence[Record]) -> str:
    rows = [
        [
            each["run"],
            each["metric"],
            *("" if each[side] is None else f"{each[side]:.2f}" for side in ("first", "second")),
            ratio_text(each),
            each["verdict"],
        ]
        for each in found
    ]
    return table(["run", "", "first", "second", "ratio", "verdict"], rows, words=2)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 0) -> str:
    """An HTML table without empty columns. The first `words` columns are aligned as words, the others as numbers."""
    kept = [i for i, _ in enumerate(header) if i < words or any(row[i] for row in rows)]
    lines = [_line(tag, [row[i] for i in kept], words) for tag, row in (("th", header), *(("td", row) for row in rows))]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _line(tag: str, cells: Sequence[str], words: int) -> str:
    marked = [f"<{tag}{' class=word' if i < words else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)]
    return f"<tr>{''.join(marked)}</tr>"
