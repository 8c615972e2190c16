"""Results of a study as tables, charts and one self-contained page. Text from files and command lines is escaped."""

from __future__ import annotations

from html import escape
from typing import Any

from paceline.bench.html import document, pictures, section, table
from paceline.bench.plots import Chart, Series
from paceline.bench.serve_text import number
from paceline.bench.serve_text import table as text_table
from paceline.tune import pairs
from paceline.tune.ways import PLAIN

Record = dict[str, Any]
HEADER = ("batch", "way", "predicted tok/s", "predicted", "tok/s", "ratio", "TTFT ms", "TPOT ms", "accepted", "")


def text(found: Record) -> str:
    machine = found["machine"]
    facts = f"{machine.get('gpu') or machine['cpu']} · paceline {machine['paceline']} ({machine['commit']})"
    told = [line for pair in found["pairs"] for line in pairs.lines(pair)]
    parts = [f"{found['target']} · {', '.join(found['sources'])} · {facts}", text_table([HEADER, *rows(found)])]
    parts += [found["definition"], "\n".join(told), "\n".join(found["words"]), found["conclusion"]]
    return "\n\n".join(filter(None, parts))


def rows(found: Record) -> list[tuple[str, ...]]:
    """Return a row for each way and batch size, what was measured first."""
    predicted = {(each["batch"], each["way"]): each for each in found["predictions"]}
    lines = [_row(cell, predicted.pop((cell["batch"], cell["way"]), None)) for cell in found["cells"]]
    rest = sorted(predicted.values(), key=lambda each: (each["batch"], -float(each["ratio"])))
    return [*lines, *(_row(None, each) for each in rest)]


def _row(cell: Record | None, made: Record | None) -> tuple[str, ...]:
    """Return the row of a way: `cell`, what was measured; `made`, what was predicted."""
    at, measured, predicted = cell or made or {}, cell or {}, made or {}
    ttft = measured.get("ttft")
    return (
        str(at["batch"]),
        at["way"],
        number(predicted.get("tok_s"), ".1f"),
        _ratio(predicted),
        number(measured.get("tok_s"), ".1f"),
        _ratio(measured),
        number(None if ttft is None else 1e3 * ttft, ".0f"),
        number(1e3 * at["tpot"], ".2f"),
        number(predicted.get("acceptance"), ".0%"),
        "loops" if measured.get("void") else "",
    )


def _ratio(found: Record) -> str:
    return f"{found['ratio']:.2f}{pairs.spoken(found['interval'])}" if found else ""


def page(found: Record) -> str:
    """Render the results as one self-contained HTML file."""
    told = [*found["words"], *(line for pair in found["pairs"] for line in pairs.lines(pair))]
    sections = [
        section("In words", "".join(f"<p>{escape(line)}</p>" for line in told)),
        section("Ways to decode", table(HEADER, rows(found), words=2)),
        section("Speed against latency", pictures(charts(found))),
    ]
    return document(found, title=f"Tuning of {found['target']}", sections=sections)


def charts(found: Record) -> list[Chart]:
    """Draw the front of speed against latency: a line for each way over the batch sizes, and bars of the ratios."""
    ways = list(dict.fromkeys(cell["way"] for cell in found["cells"]))
    series = []
    for way in ways:
        mine = sorted((cell for cell in found["cells"] if cell["way"] == way), key=lambda cell: int(cell["batch"]))
        series.append(Series(way, [1e3 * cell["tpot"] for cell in mine], xs=[cell["tok_s"] for cell in mine]))
    cells = [cell for cell in found["cells"] if cell["drafter"] != PLAIN]
    bars = Series("ratio", [cell["ratio"] for cell in cells], bounds=[cell["interval"] for cell in cells])
    names = [f"{cell['way']} b{cell['batch']}" for cell in cells]
    front = Chart("front", "Throughput and latency", "TPOT ms", series, kind="lines", x="tokens a second")
    return [front, Chart("ratio", "Speed by plain, with 95 % intervals", "×", [bars], names=names)]
