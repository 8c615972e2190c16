"""The record of an audit as one self-contained HTML file: no script, no font, no picture from elsewhere.

Text from a model or a prompt file is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from paceline.audit.text import HEADER, WORD_COLUMNS, case_row, degenerate_line, loss_line, test_line

Record = dict[str, Any]
MAX_ROWS = 500  # differences, and degenerate answers, shown at most; the JSON has all

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; --doubt: #b26a00 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.facts, .note { opacity: .75 }
.verdict { font-size: 1.15rem; font-weight: 600; padding: .7rem 1rem; border-radius: .4rem }
.good { color: var(--good) } .bad { color: var(--bad) } .doubt { color: var(--doubt) }
.verdict.good, .verdict.bad, .verdict.doubt { border: 1px solid currentColor }
.tiles { display: flex; gap: 1rem; flex-wrap: wrap } .tile { border: 1px solid var(--line); border-radius: .4rem;
padding: .5rem 1rem; min-width: 6rem } .tile b { display: block; font-size: 1.5rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top }
th.word, td.word, th.text { text-align: left } td.text { text-align: left; max-width: 26rem; white-space: pre-wrap;
font-family: ui-monospace, monospace; font-size: .85em; overflow-wrap: anywhere }
mark { background: #ffd54f; color: #000 }
"""


def page(found: Record) -> str:
    """Render the record, with `target`, `command` and `machine` beside the findings."""
    sections = [
        _heading(found),
        _tiles(found),
        _section("Cases", _cases(found), found["near_tie_bound"]),
        _section("Lossy rules", _losses(found["cases"]), "") if found["lossy"] else "",
        _section("Distribution tests", _tests(found["distribution"]), "") if found["distribution"] else "",
        _section("Differences", _differences(found["differences"]), "") if found["differences"] else "",
        _degenerate(found) if found["degenerate_answers"] else "",
    ]
    title = f"Audit of {escape(str(found['target']))}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _heading(found: Record) -> str:
    machine = found["machine"]
    doubt = not found["drafted"] or found["near_tie"] or found["lossy"] or found["interrupted"]
    mood = "bad" if not found["passed"] else "doubt" if doubt else "good"
    facts = f"{machine.get('gpu') or machine['cpu']} · paceline {machine['paceline']} ({machine['commit']})"
    return (
        f"<h1>Audit of {escape(str(found['target']))}</h1>"
        f'<p class="facts">{escape(facts)}<br><code>{escape(found["command"])}</code></p>'
        f'<p class="verdict {mood}">{escape(found["verdict"])}</p>'
        f'<p class="note">{escape(found["not_audited"] or "")}</p>'
    )


def _tiles(found: Record) -> str:
    names = ("prompts", "identical", "near_tie", "structural", "degenerate", "drafted", "accepted")
    tiles = [f'<div class="tile"><b>{found[name]}</b>{name.replace("_", "-")}</div>' for name in names]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _section(title: str, body: str, note: str) -> str:
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<h2>{title}</h2>{said}{body}"


def _cases(found: Record) -> str:
    return _table(HEADER, (tuple(map(escape, case_row(case))) for case in found["cases"]), words=WORD_COLUMNS)


def _losses(cases: Sequence[Record]) -> str:
    return "".join(f'<p class="doubt">{escape(loss_line(case))}</p>' for case in cases if case["loss"])


def _tests(tests: Sequence[Record]) -> str:
    marked = [(("bad" if t["failed"] else "good" if t["proves"] else "doubt"), test_line(t)) for t in tests]
    return "".join(f'<p class="{mood}">{escape(line)}</p>' for mood, line in marked)


def _differences(differences: Sequence[Record]) -> str:
    header = ("kind", "prompt", "how", "sampling", "token", "step", "gap", "bound", "plain", "replayed", "asked anew")
    rows = (_difference(found) for found in differences[:MAX_ROWS])
    return _table(header, rows, words=4, texts=3) + _left_out(len(differences))


def _difference(found: Record) -> tuple[str, ...]:
    how = f"{found['drafter'] or 'plain'} {found['rule'] or ''}, {found['at_once']} at once"
    mood = "bad" if found["kind"] == "structural" else "doubt"
    before = escape(found["before"])
    shown = [
        "(ended)" if found[f"{which}_text"] is None else f"<mark>{escape(found[f'{which}_text'])}</mark> {found[which]}"
        for which in ("plain", "replayed", "expected")
    ]
    return (
        f'<span class="{mood}">{found["kind"].replace("_", "-")}</span>',
        escape(f"{found['prompt_number']} ({found['prompt']})"),
        escape(how),
        escape(found["sampling"]),
        str(found["position"] + 1),
        f"{found['step']}.{found['place'] + 1}",
        "" if found["gap"] is None else f"{found['gap']:.4g}",
        f"{found['bound']:.2g}",
        f"{before}{shown[0]}",
        shown[1],
        shown[2],
    )


def _degenerate(found: Record) -> str:
    header = ("sign", "prompt", "how", "sampling", "tokens", "its end")
    rows = (
        (
            escape(each["sign"]),
            escape(f"{each['prompt_number']} ({each['prompt']})"),
            escape(f"{each['drafter'] or 'plain'} {each['rule'] or ''}, {each['at_once']} at once"),
            escape(each["sampling"]),
            str(each["tokens"]),
            escape(each["end"]),
        )
        for each in found["degenerate_answers"][:MAX_ROWS]
    )
    body = _table(header, rows, words=4, texts=1) + _left_out(len(found["degenerate_answers"]))
    return _section("Degenerate answers", body, degenerate_line(found))


def _left_out(count: int) -> str:
    return f"<p>… and {count - MAX_ROWS} more: see --json</p>" if count > MAX_ROWS else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int, texts: int = 0) -> str:
    """A table of cells that are HTML already. The first `words` columns are words, the last `texts` text of a model."""
    kinds = ["word"] * words + [""] * (len(header) - words - texts) + ["text"] * texts
    lines = [_line("th", header, kinds), *(_line("td", row, kinds) for row in rows)]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _line(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    marked = [f'<{tag} class="{kind}">{cell}</{tag}>' for cell, kind in zip(cells, kinds, strict=True)]
    return f"<tr>{''.join(marked)}</tr>"
