"""Every snippet of docs/programs.md runs, one after the other, on the embedded model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "programs.md"


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(snippets) == 8
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, "programs.md", "exec"), names)
    assert "Paris" in capsys.readouterr().out
    assert "<table>" in (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert names["state"].error is None
