from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.bench.charts import charts
from paceline.bench.html import page, table
from paceline.bench.plots import Chart, Series, svg, ticks, write_plots

BARS = Chart(
    "b", "Bars <&>", "ms", [Series("one", [1, None]), Series("two", [3, 4], bounds=[(2, 5), None])], names=["x", "y"]
)
LINES = Chart("l", "Lines", "ms", [Series("<line>", [1, 2, None], xs=[10, 20, 30])], kind="lines", x="tok/s")


def elements(chart: Chart, tag: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(svg(chart)).iter() if e.tag.rpartition("}")[2] == tag]


def test_bars() -> None:
    titles = [e.text for e in elements(BARS, "title")]
    assert titles == ["Bars <&>", "one, x: 1", "two, x: 3", "two, y: 4"]
    heights = [float(e.attrib["height"]) for e in elements(BARS, "rect") if e.attrib["height"] != "10"]
    assert heights == pytest.approx([heights[0], 3 * heights[0], 4 * heights[0]], rel=0.01)
    assert len([e for e in elements(BARS, "path") if "stroke-width" in e.attrib]) == 1  # one interval


def test_lines() -> None:
    assert len(elements(LINES, "circle")) == 2
    assert [e.text for e in elements(LINES, "text") if e.text and "line" in e.text] == ["<line>"]


def test_long_legends_and_names_have_room() -> None:
    series = [Series(f"a rather long name {i}", [1.0] * 8) for i in range(12)]
    crowded = Chart("c", "t", "u", series, names=[f"a long name of a group {i}" for i in range(8)])
    box = ElementTree.fromstring(svg(crowded)).attrib["viewBox"].split()
    lowest = max(float(e.attrib["y"]) for e in elements(crowded, "text"))
    assert lowest < float(box[3])
    assert float(box[3]) > float(ElementTree.fromstring(svg(BARS)).attrib["viewBox"].split()[3])


@pytest.mark.parametrize(("top", "last"), [(1, 1), (0.037, 0.04), (97, 100), (1200, 1250), (1e-9, 1e-9)])
def test_ticks_end_at_a_round_number(top: float, last: float) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert found[-1] == pytest.approx(last) or found[-1] >= top
    assert 4 <= len(found) <= 8


def run(**more: Any) -> dict[str, Any]:
    return {"arm": "on", "temperature": 0.0, "max_concurrency": 1, "completed": 3, "output_throughput": 10.0,
            "request_throughput": 1.0} | more  # fmt: skip  # a field a line would hide what belongs together


def test_a_load_gives_its_charts() -> None:
    runs = [
        run(
            max_concurrency=c,
            median_tpot_ms=5.0 * c,
            output_throughput=10.0 * c,
            spec_decode_per_position_acceptance_rates=[0.5, 0.25],
            tokens_per_chunk_counts={"1": 3, "10": 1},
            categories={"chat": {"acceptance_rate": 40.0}},
        )
        for c in (1, 8)
    ]
    found = {chart.file: chart for chart in charts({"runs": runs})}
    assert set(found) == {"speed", "tpot", "curve", "positions", "category", "chunks"}  # nothing of what is not there
    assert found["curve"].series[0].xs == [10, 80]
    assert found["curve"].series[0].ys == [5, 40]
    assert found["chunks"].names == ["1", "10"]
    assert found["chunks"].series[0].ys == [75, 25]
    assert found["positions"].series[0].ys == [50, 25]


def test_what_others_wrote_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    found = page(
        {"runs": [run(arm=evil, errors=[evil], model_id=evil)], "command": evil, "definition": evil}, title=evil
    )
    assert "<script" not in found
    assert "&lt;script&gt;" in found


def test_the_table_of_loads_and_temperatures() -> None:
    runs = [
        run(max_concurrency=c, temperature=t, arm=arm, output_throughput=c + t)
        for c in (1, 100)
        for t in (0.0, 1.0)
        for arm in ("on", "off")
    ]
    pair = {"arm": "on", "against": "off", "max_concurrency": 100, "temperature": 1.0, "pairs": 1, "identical_texts": 1,
            "ratios": {"output_throughput": {"ratio": 1.5, "interval": None, "units": 1}}}  # fmt: skip  # as one record
    found = page({"runs": runs, "comparisons": [pair]}, title="t")
    row = next(line for line in found.split("<tr>") if line.startswith("<td class=word>c100</td><td>"))
    assert row.startswith("<td class=word>c100</td><td>100.0</td><td>100.0</td><td>101.0 (×1.50)</td><td>101.0</td>")


def test_a_column_that_nobody_filled_is_left_out() -> None:
    assert table(["a", "b", "c"], [["", "", "1"], ["", "", ""]], words=1).count("<th") == 2
    assert "<th>b" not in table(["a", "b", "c"], [["", "", "1"]], words=1)


def test_pngs_where_matplotlib_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    class Figure:
        def savefig(self, path: Path, **options: Any) -> None:
            drawn.append(path.name)

    axes = SimpleNamespace(
        **{name: lambda *a, **k: None for name in ("plot", "bar", "vlines", "set_xticks", "set", "legend")}
    )
    pyplot = SimpleNamespace(subplots=lambda **k: (Figure(), axes), close=lambda figure: None)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=lambda backend: None))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    write_plots([BARS, LINES], tmp_path)
    assert drawn == ["b.png", "l.png"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert [path.name for path in write_plots([BARS, LINES], tmp_path)] == ["b.svg", "l.svg"]
