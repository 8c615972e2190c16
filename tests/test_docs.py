"""What the documents say is there and runs."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path

import pytest

from paceline.cli.main import build_parsers
from paceline.drafters.registry import REGISTRY
from tests import mentions

ROOT = Path(__file__).parent.parent
FOREIGN = {"--save-detailed"}  # an option of `vllm bench serve`
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]  # a changelog speaks of what was
COLUMNS = 120
PARSER = build_parsers()[0]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


of_each = pytest.mark.parametrize("path", DOCUMENTS, ids=_id)
of_each_page = pytest.mark.parametrize("path", PAGES, ids=_id)
of_each_decision = pytest.mark.parametrize("path", DECISIONS, ids=_id)


@of_each
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8"))
    missing = [(to, at) for to, at in links if "://" not in to and not _is_there(path.parent / to if to else path, at)]
    assert not missing


def _is_there(path: Path, heading: str) -> bool:
    if not path.exists() or not heading:
        return path.exists()
    return heading in mentions.anchors(path.read_text(encoding="utf-8"))


def test_commands_parse() -> None:
    commands = [command for path in DOCUMENTS for command in _commands(path.read_text(encoding="utf-8"))]
    assert len(commands) > 20
    for command in commands:
        PARSER.parse_args(shlex.split(command, comments=True))


def _commands(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^paceline (.+)$", "\n".join(blocks), flags=re.MULTILINE)


@of_each
def test_options_that_are_named_exist(path: Path) -> None:
    """Those of commands, and of the scripts beside them."""
    scripts = "".join(
        file.read_text(encoding="utf-8") for part in ("peers", "clients") for file in ROOT.glob(f"{part}/*.py")
    )
    named = set(re.findall(r"`(--[a-z][a-z-]+)", path.read_text(encoding="utf-8")))
    unknown = named - _options(PARSER) - FOREIGN
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


def test_nothing_says_to_install_from_an_index() -> None:
    """The name paceline on a package index is not this project's."""
    files = [*PAGES, *ROOT.glob("paceline/**/*.py"), *ROOT.glob("deploy/**/*"), ROOT / "Makefile"]
    pattern = re.compile(r"\b(pip|pipx|uv|tool) (install|add)( -\S+)* ['\"]?paceline\b")
    assert pattern.search("pip install -U 'paceline[serve]'")
    assert not [_id(path) for path in files if path.is_file() and pattern.search(path.read_text(encoding="utf-8"))]


def test_every_kind_of_drafter_is_described() -> None:
    text = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`", text, flags=re.MULTILINE) == list(REGISTRY)


@of_each_page
def test_lines_fit_the_columns(path: Path) -> None:
    """Tables, code and addresses may be longer."""
    text = mentions.FENCE.sub(lambda found: "\n" * found[0].count("\n"), path.read_text(encoding="utf-8"))
    lines = enumerate(text.splitlines(), 1)
    long = [number for number, line in lines if len(re.sub(r"\S+://\S+", "", line)) > COLUMNS and line[0] != "|"]
    assert not long


@of_each_page
@pytest.mark.unwatched(wholly=True)
def test_names_in_documents_exist(path: Path) -> None:
    unknown = mentions.unknown_names(path.read_text(encoding="utf-8"), mentions.everywhere(), beside=path)
    assert not unknown


@pytest.mark.unwatched(wholly=True)
def test_names_in_docstrings_and_comments_exist() -> None:
    sources = [each for each in mentions.sources().values() if each.path.is_relative_to(mentions.PACKAGE)]
    assert sum(len(source.prose) for source in sources) > 1000
    unknown = [f"{_id(source.path)}: {mention}" for source in sources for mention in _unknown(source)]
    assert not unknown


def _unknown(source: mentions.Source) -> list[str]:
    words, found = mentions.near(source), []
    for text in source.prose:
        found += mentions.unknown_names(text, words, beside=source.path)
        found += mentions.unknown_files(text, beside=source.path)
    return found


def test_what_does_not_exist_is_found() -> None:
    name, member = next((name, min(members)) for name, members in mentions.classes().items() if members)
    code = f'''"""Reads `rows`, `gone_name`, `{name}.{member}`, `{name}.gone()`, `paceline.gone`, `kv/gone.py`, gone.c.

    See `paceline`, docs/adr/README.md#decisions, docs/adr/README.md#gone, `a - b` and `PACELINE_GONE`."""

rows = 1  # as many as `cached_rows`; see mentions.py
'''
    source = mentions.python_source(code, mentions.PACKAGE / "new.py")
    names = [mentions.unknown_names(text, source.words, beside=source.path) for text in source.prose]
    gone = ["gone_name", f"{name}.gone()", "paceline.gone", "kv/gone.py", "PACELINE_GONE"]
    assert names == [gone, ["cached_rows"]]
    files = [mentions.unknown_files(text, beside=source.path) for text in source.prose]
    assert files == [["gone.c", "docs/adr/README.md#gone"], []]


@pytest.mark.unwatched(wholly=True)
def test_a_name_of_another_room_is_no_name_here() -> None:
    """A function of another room must not hide that a method of this one is gone."""
    here, *others = (each for each in mentions.sources().values() if each.path.is_relative_to(mentions.PACKAGE))
    words = mentions.near(here)
    far = [other.words - words for other in others if other.room != here.room]
    assert any(far)
    assert all(only_there <= mentions.everywhere() for only_there in far)


@of_each_decision
def test_decisions_keep_the_template(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    title = re.match(rf"# {path.name[:4]} (.+)\n", text)
    assert title
    assert f"- [{path.name[:4]}]({path.name}) {title[1]}\n" in (path.parent / "README.md").read_text(encoding="utf-8")
    parts = re.findall(r"^\*\*(.+?)\.\*\*", text, flags=re.MULTILINE)
    assert parts == ["Decision", "Why", "Cost", "What would change it"]
    assert text.count("\n") <= 45


def test_experiments_keep_the_template() -> None:
    text = mentions.FENCE.sub("", (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8"))
    entries = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 50
    for entry in entries:
        parts = re.findall(r"^\*\*(.+?)\.\*\*", entry, flags=re.MULTILINE)
        assert parts == ["Tried", "Setup", "Result", "Verdict"], entry.splitlines()[0]
