"""What the documents say is there and runs."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path

import pytest

from paceline.cli.main import build_parsers
from paceline.drafters.registry import REGISTRY

ROOT = Path(__file__).parent.parent
FOREIGN = {"--save-detailed"}  # an option of `vllm bench serve`
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
of_each = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@of_each
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8"))
    missing = [(to, at) for to, at in links if "://" not in to and not _is_there(path.parent / to if to else path, at)]
    assert not missing


def _is_there(path: Path, heading: str) -> bool:
    if not path.exists() or not heading:
        return path.exists()
    return heading in _anchors(path.read_text(encoding="utf-8"))


def _anchors(text: str) -> set[str]:
    """Return every anchor of a page: those of its headings, and explicit ones that keep old links alive."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {*map(_anchor, headings), *re.findall(r'<a id="([^"]+)">', text)}


def _anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_commands_parse() -> None:
    commands = [command for path in DOCUMENTS for command in _commands(path.read_text(encoding="utf-8"))]
    assert len(commands) > 20
    for command in commands:
        build_parsers()[0].parse_args(shlex.split(command, comments=True))


def _commands(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^paceline (.+)$", "\n".join(blocks), flags=re.MULTILINE)


@of_each
def test_options_that_are_named_exist(path: Path) -> None:
    """Those of commands, and of the scripts beside them."""
    scripts = "".join(
        file.read_text(encoding="utf-8") for part in ("bench", "clients") for file in ROOT.glob(f"{part}/*.py")
    )
    named = set(re.findall(r"`(--[a-z][a-z-]+)", path.read_text(encoding="utf-8")))
    unknown = named - _options(build_parsers()[0]) - FOREIGN
    assert not [option for option in unknown if f'"{option}"' not in scripts]


def _options(parser: ArgumentParser) -> set[str]:
    options: set[str] = set()
    for action in parser._actions:
        options |= set(action.option_strings)
        if isinstance(action, _SubParsersAction):
            options = options.union(*map(_options, action.choices.values()))
    return options


def test_the_readme_runs() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


def test_every_kind_of_drafter_is_described() -> None:
    text = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`", text, flags=re.MULTILINE) == list(REGISTRY)
