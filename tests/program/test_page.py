"""The trace of runs: every call, whole and escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest, StorageError
from paceline.llm import LLM
from paceline.program import State, gen, program, save_traces, select

VOID = {"meta", "br"}


class Tree(HTMLParser):
    """Checks that tags close in order, and collects rows and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tr" in self.open:
            self.rows[-1][-1] += data


@program
def tree(s: State, fails: bool) -> None:
    s += "a text for a page"
    s += gen("root<b>", choices=["<i>"])
    for fork in s.fork(2):
        fork += gen("leaf", max_tokens=3)
        [deep] = fork.fork(1)
        deep += select("pick", ["x", "y"])
    if fails:
        raise ValueError("<script>")


def test_a_trace(llm: LLM, tmp_path: Path) -> None:
    states = tree.run_batch([(False,), (True,)], on=llm, seed=1)
    save_traces(states, tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    rows = Tree(page).rows
    names = [row[0].strip() for row in rows[1:8]]
    deep = ["fork 1", "leaf gen", "fork 1", "pick select"]
    assert names[0] == "root<b> gen"
    assert names[1:5] == deep
    assert rows[1][1].startswith("test_page.py:")
    assert rows[1][2] == states[0]["root<b>"]
    assert int(rows[1][3]) == len("a text for a page")
    assert "<script>" not in page
    assert '<td class="text">&lt;i&gt;</td>' in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "nothing comes from elsewhere"
    assert f"seed {states[1].seed}" in page


def test_a_trace_of_one_run(llm: LLM, tmp_path: Path) -> None:
    state = tree.run(False, on=llm)
    state.save_trace(tmp_path / "one.html")
    assert "<details open>" in (tmp_path / "one.html").read_text(encoding="utf-8")
    with pytest.raises(StorageError, match="cannot be written"):
        state.save_trace(tmp_path / "no" / "place.html")
    with pytest.raises(InvalidRequest, match="a trace is of runs that have ended"):
        save_traces([], tmp_path / "none.html")


def test_a_run_that_goes_on_has_no_trace(llm: LLM, tmp_path: Path) -> None:
    @program
    def tries(s: State) -> None:
        s.save_trace(tmp_path / "early.html")

    assert "have ended" in str(tries.run_batch([()], on=llm)[0].error)
