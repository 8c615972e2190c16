"""An SVG of a training: loss, and held-out tokens per round, over the steps, in two panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, GAP = 760, 200, 64, 24, 28, 52  # pixels
GRID_INTERVALS = 4

Record = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    points: Sequence[tuple[float, float]]
    colour: str


def curves(curve: Sequence[Record], history: Sequence[Record]) -> bytes:
    panels = [
        Panel("distance from the target at the first drafted token, nats", _points(curve, "loss"), "#c0392b"),
        Panel("held-out tokens per round", _points(history, "held_out"), "#2471a3"),
    ]
    last = max([1.0, *(x for panel in panels for x, _ in panel.points)])
    height = TOP + len(panels) * (PANEL_HEIGHT + GAP)
    body = [_panel(panel, top=TOP + i * (PANEL_HEIGHT + GAP), last=last) for i, panel in enumerate(panels)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *body, "</svg>", ""]).encode()


def _points(records: Sequence[Record], name: str) -> list[tuple[float, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def _panel(panel: Panel, *, top: int, last: float) -> str:
    values = [y for _, y in panel.points] or [0.0]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    right = WIDTH - RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * x / last, top + PANEL_HEIGHT * (high - y) / (high - low)

    parts = [f'<text x="{LEFT}" y="{top - 10}" font-weight="bold">{escape(panel.title)}</text>']
    for i in range(GRID_INTERVALS + 1):
        value = low + (high - low) * i / GRID_INTERVALS
        _, y = place(0, value)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        step = last * i / GRID_INTERVALS
        x, _ = place(step, low)
        parts.append(f'<text x="{x:.1f}" y="{top + PANEL_HEIGHT + 18}" text-anchor="middle">{step:.0f}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in panel.points))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{panel.colour}" stroke-width="2"/>')
    return "\n".join(parts)
