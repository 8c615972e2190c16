"""What the documents say is there and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.cli.main import build_parsers
from paceline.drafters.registry import REGISTRY

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_the_readme_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


def test_commands_of_the_readme_parse() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^paceline (.+)$", text, flags=re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]
        build_parsers()[0].parse_args(words)


def test_every_kind_of_drafter_is_described() -> None:
    text = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`", text, flags=re.MULTILINE) == list(REGISTRY)
