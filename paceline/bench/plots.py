"""Charts as data, drawn as SVG, and by matplotlib as PNG if it is installed.

An SVG is self-contained: no script, no font, no reference. Lines and text have the colour of the page around it, so
that it can be read on light and dark pages.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

WIDTH, HEIGHT = 720, 320  # pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 64  # margins, in pixels
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
LETTER_WIDTH, ROW_HEIGHT = 6.2, 14  # pixels, of legend text


@dataclass(frozen=True, slots=True)
class Series:
    """Bars, one value for each name of the chart (None: no bar), or the points of a line."""

    name: str
    ys: Sequence[float | None]
    xs: Sequence[float] = ()
    bounds: Sequence[tuple[float, float] | None] = ()  # intervals, of bars


@dataclass(frozen=True, slots=True)
class Chart:
    file: str  # without a suffix
    title: str
    y: str
    series: Sequence[Series]
    kind: Literal["bars", "lines"] = "bars"
    names: Sequence[str] = field(default=())  # labels below groups of bars
    x: str = ""

    @property
    def top(self) -> float:
        heights = [y for s in self.series for y in s.ys if y is not None]
        heights += [bound[1] for s in self.series for bound in s.bounds if bound is not None]
        return max(heights, default=1.0) or 1.0

    @property
    def right(self) -> float:
        return max((x for s in self.series for x in s.xs), default=1.0) or 1.0


def svg(chart: Chart) -> str:
    parts = [_axes(chart), _legend(chart), _bars(chart) if chart.kind == "bars" else _lines(chart)]
    height = HEIGHT + _slant(chart) + ROW_HEIGHT * (len(_legend_rows(chart)) - 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        f"<title>{escape(chart.title)}</title>"
        f'<text x="{LEFT}" y="14" font-size="13" font-weight="600">{escape(chart.title)}</text>{"".join(parts)}</svg>'
    )


def ticks(top: float) -> list[float]:
    """About five tick values, from 0 to the first round number at or above `top`."""
    rough = top / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return [round(i * step, 10) for i in range(math.ceil(top / step - 1e-9) + 1)]


def _height(value: float, chart: Chart) -> float:
    """Vertical position of a value, in pixels from the top."""
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / ticks(chart.top)[-1]


def _across(value: float, chart: Chart) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / ticks(chart.right)[-1]


def _axes(chart: Chart) -> str:
    parts = [f'<text x="4" y="{TOP - 8}" opacity=".75">{escape(chart.y)}</text>']
    for value in ticks(chart.top):
        y = _height(value, chart)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="currentColor" opacity=".15"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    if chart.kind == "lines":
        for value in ticks(chart.right):
            x = _across(value, chart)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    if chart.x:
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 34}" text-anchor="end">{escape(chart.x)}</text>')
    return "".join(parts)


def _legend(chart: Chart) -> str:
    parts = []
    for r, row in enumerate(_legend_rows(chart)):
        x, y = float(LEFT), HEIGHT - 12 + _slant(chart) + ROW_HEIGHT * r
        for i, name in row:
            parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{_colour(i)}"/>')
            parts.append(f'<text x="{x + 14:.0f}" y="{y}">{escape(name)}</text>')
            x += _legend_width(name)
    return "".join(parts)


def _legend_rows(chart: Chart) -> list[list[tuple[int, str]]]:
    """Rows of the legend: indices and names of series, as many in a row as fit."""
    rows: list[list[tuple[int, str]]] = [[]]
    for i, series in enumerate(chart.series):
        taken = sum(_legend_width(name) for _, name in rows[-1])
        if rows[-1] and taken + _legend_width(series.name) > WIDTH - LEFT:
            rows.append([])
        rows[-1].append((i, series.name))
    return rows


def _legend_width(name: str) -> float:
    return 30 + LETTER_WIDTH * len(name)


def _group(chart: Chart) -> float:
    return (WIDTH - LEFT - RIGHT) / max(len(chart.names), 1)


def _slant(chart: Chart) -> int:
    """Pixels that slanted labels need below the axis; 0 if they fit side by side."""
    longest = max(map(len, chart.names), default=0)
    return 0 if LETTER_WIDTH * longest < _group(chart) else min(90, int(0.42 * LETTER_WIDTH * longest))


def _bars(chart: Chart) -> str:
    group = _group(chart)
    width = min(44.0, 0.8 * group / max(len(chart.series), 1))
    parts = []
    for g, name in enumerate(chart.names):
        middle = LEFT + group * (g + 0.5)
        place = f'x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}"'
        turned = f' transform="rotate(-25 {middle:.1f} {HEIGHT - BOTTOM + 16})"' if _slant(chart) else ""
        parts.append(f'<text {place} text-anchor="{"end" if turned else "middle"}"{turned}>{escape(name)}</text>')
        for i, series in enumerate(chart.series):
            x = middle + width * (i - len(chart.series) / 2)
            parts.append(_bar(chart, series, g, x=x, width=width, colour=_colour(i), label=f"{series.name}, {name}"))
    return "".join(parts)


def _bar(chart: Chart, series: Series, g: int, *, x: float, width: float, colour: str, label: str) -> str:
    value = series.ys[g]
    if value is None:
        return ""
    y, zero = _height(value, chart), HEIGHT - BOTTOM
    drawn = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{zero - y:.1f}" fill="{colour}">'
        f"<title>{escape(label)}: {value:.4g}</title></rect>"
    )
    bound = series.bounds[g] if series.bounds else None
    if bound is None:
        return drawn
    low, high, middle = _height(bound[0], chart), _height(bound[1], chart), x + width / 2 - 1
    return f'{drawn}<path d="M{middle:.1f} {low:.1f}V{high:.1f}" stroke="currentColor" stroke-width="2"/>'


def _lines(chart: Chart) -> str:
    parts = []
    for i, series in enumerate(chart.series):
        points = [(_across(x, chart), _height(y, chart), x, y) for x, y in _points(series)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(i)}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_colour(i)}">'
            f"<title>{escape(series.name)}: {a:.4g}, {b:.4g}</title></circle>"
            for x, y, a, b in points
        ]
    return "".join(parts)


def _points(series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None]


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def write_plots(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write an SVG of each chart, and a PNG if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        written.append(folder / f"{chart.file}.svg")
        written[-1].write_text(svg(chart).replace('fill="currentColor">', 'fill="#000" color="#000">', 1), "utf-8")
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return written
    matplotlib.use("agg")
    return written + [_png(chart, folder / f"{chart.file}.png") for chart in charts]


def _png(chart: Chart, path: Path) -> Path:
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(WIDTH / 90, HEIGHT / 90))
    for i, series in enumerate(chart.series):
        if chart.kind == "lines":
            points = _points(series)
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=series.name, color=_colour(i))
        else:
            width = 0.8 / len(chart.series)
            places = [g + width * (i - (len(chart.series) - 1) / 2) for g in range(len(chart.names))]
            axes.bar(places, [y or 0 for y in series.ys], width, label=series.name, color=_colour(i))
            for place, bound in zip(places, series.bounds, strict=False):
                if bound is not None:
                    axes.vlines(place, *bound, color="black")
    if chart.kind == "bars":
        axes.set_xticks(range(len(chart.names)), chart.names, rotation=20, ha="right")
    axes.set(title=chart.title, ylabel=chart.y, xlabel=chart.x)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return path
