"""Find names and files that a text mentions and that the repository does not have.

In backticks, in documents, docstrings and comments:

    `draft_lengths`   `Batch`   `check()`                      a plain name
    `paceline.kv.cache`   `engine.cost`   `Span.committed`     a module, something in it, or a member of a class
    `kernels/cuda`   `runner/cuda*.py`                         a path in the repository or in the package

Without backticks, in docstrings and comments: `attend.c`, `runner/batch.py`, `docs/audit.md#a-run`. Other spans
(commands, options, formulas) are not looked at.

Names come from the code itself: definitions, uses, parameters, and strings without spaces (fields, metrics, tensors).
Nothing is imported, and no name is listed here but those of other projects. A document may mention any name of the
repository. A docstring or comment may mention names near it: of its module and room (`paceline/engine`), of modules
that it imports or that import it, and any class. So a method that is gone is noticed even if another room has a
function of that name.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
FENCE = re.compile(r"^ *```.*?^ *```", flags=re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
WORD = re.compile(r"[A-Za-z_]\w*")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
PATH = re.compile(r"[a-z_][\w.*-]*(/[\w.*-]*)+|[\w*-]+\.(py|c|h|md)")
FILE = re.compile(r"(?<![\w./`-])([\w/*-]+\.(?:py|c|h|md))(#[\w-]+)?\b(?![\w(])")
COMMENT = re.compile(r"(?:(?:^|(?<=\s))# [^\n]*(?:\n\s*(?=# ))?)+", flags=re.MULTILINE)  # all lines of one comment
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", flags=re.DOTALL)
VARIABLE = "PACELINE_"  # prefix of a setting in the environment: PACELINE_MAX_WAITING
LANGUAGE = {*keyword.kwlist, *dir(builtins), *sys.stdlib_module_names}
FOREIGN = {
    *("speculators", "torchrun", "traceparent", "mcp"),  # other projects and their protocols
    *("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "index_copy_", "memcheck", "racecheck"),
    *("weight_scale", "weight_minimum", "p99_tpot_ms"),  # assembled at run time
    *(
        "ich",
        "icht",
        "WHAT",
        "NAME",
        "OUT",
        "tok/s",
        "tok/round",
        "ms/step",
    ),  # tokens of an answer, placeholders, units
}


@dataclass(slots=True)
class Source:
    """Names and prose of one file of code."""

    path: Path
    words: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)  # of each class
    bases: dict[str, set[str]] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    prose: list[str] = field(default_factory=list)  # docstrings and comments

    @property
    def name(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        return ".".join(self.name.split(".")[:2])


def python_source(text: str, path: Path) -> Source:
    source, tree = Source(path), ast.parse(text)
    nodes = list(ast.walk(tree))
    docstrings = {id(found): str(found.value) for node in nodes if (found := _docstring(node))}
    source.prose = [*docstrings.values(), *COMMENT.findall(text)]
    for node in nodes:
        if id(node) not in docstrings:
            source.words |= _words(node)
        if isinstance(node, ast.ClassDef):
            source.members.setdefault(node.name, set()).update(_members(node))
            source.bases.setdefault(node.name, set()).update(_words(base).pop() for base in node.bases if _words(base))
        elif isinstance(node, ast.ImportFrom) and node.module:
            source.imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return source


def c_source(text: str, path: Path) -> Source:
    return Source(path, words=set(WORD.findall(C_COMMENT.sub("", text))), prose=C_COMMENT.findall(text))


def _docstring(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return None
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value
    return None


def _words(node: ast.AST) -> set[str]:
    """Return the identifiers that one node contributes. A string without spaces gives itself and its words."""
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        return set() if re.search(r"\s", text) else {text, *WORD.findall(text)}
    if isinstance(node, ast.alias):
        return {*node.name.split("."), node.asname or node.name.split(".")[0]}
    named = (getattr(node, part, None) for part in ("name", "id", "attr", "arg"))
    return {name for name in named if isinstance(name, str)}


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Yield methods, fields, constants and what methods set on `self`."""
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (word for target in targets for word in _words(target))
        else:
            yield from _words(statement)
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr


@cache
def sources() -> dict[str, Source]:
    """Return every Python and C file of the repository by its dotted name; a C file's ends in its suffix."""
    python = (python_source(path.read_text(encoding="utf-8"), path) for path in _files("*.py"))
    c = (c_source(path.read_text(encoding="utf-8"), path) for path in _files("*.[ch]"))
    return {source.name: source for source in python} | {f"{source.name}{source.path.suffix}": source for source in c}


@cache
def _files(pattern: str) -> tuple[Path, ...]:
    rooms = [room for room in sorted(ROOT.iterdir()) if room.is_dir() and not room.name.startswith(".")]
    return tuple(path for room in rooms for path in sorted(room.rglob(pattern)) if "node_modules" not in path.parts)


@cache
def classes() -> dict[str, set[str]]:
    """Return the members of every class of the package, inherited ones included; equal names share one set."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for source in sources().values():
        if source.path.is_relative_to(PACKAGE):
            for name, members in source.members.items():
                own.setdefault(name, set()).update(members)
                bases.setdefault(name, set()).update(source.bases[name])

    def with_bases(name: str, seen: frozenset[str]) -> set[str]:
        above = (bases[name] & own.keys()) - seen
        return own[name].union(*(with_bases(base, seen | above) for base in above))

    return {name: with_bases(name, frozenset({name})) for name in own}


@cache
def everywhere() -> frozenset[str]:
    """Return all words that a document may mention."""
    other = [path for kind in ("*.js", "*.html", "*.y*ml", "Dockerfile") for path in _files(kind)]
    texts = (path.read_text(encoding="utf-8") for path in (*other, ROOT / "Makefile", ROOT / "pyproject.toml"))
    words = (*(source.words for source in sources().values()), *(WORD.findall(text) for text in texts))
    return frozenset().union(*words, LANGUAGE, FOREIGN)


def near(source: Source) -> set[str]:
    """Return all words that a docstring or comment of `source` may mention."""
    imported = (sources()[name] for name in source.imports & sources().keys())
    own = source.name
    friends = (*imported, *(other for other in sources().values() if own in other.imports))
    words = (friend.words for friend in friends)
    return source.words.union(*words, _words_of_room(source.room), classes(), LANGUAGE, FOREIGN)


@cache
def _words_of_room(room: str) -> frozenset[str]:
    return frozenset().union(*(source.words for source in sources().values() if source.room == room))


def unknown_names(text: str, words: Set[str], *, beside: Path) -> list[str]:
    """Return the names and paths that `text`, a text of the file `beside`, has in backticks and that do not exist."""
    spans = [re.sub(r"\s+", " ", span) for span in SPAN.findall(FENCE.sub("", text))]
    return [
        span
        for span in spans
        if (PATH.fullmatch(span) and not _is_a_path(span, beside) and span not in words)
        or (NAME.fullmatch(span) and not PATH.fullmatch(span) and not _is_a_name(span.removesuffix("()"), words))
    ]


def unknown_files(text: str, *, beside: Path) -> list[str]:
    """Return the files that `text` names without backticks and that do not exist; an anchor is one of a page."""
    return [
        name + at
        for name, at in FILE.findall(text)
        if not _is_a_path(name, beside) or (at and at.removeprefix("#") not in _anchors_of(name))
    ]


def anchors(text: str) -> set[str]:
    """Return every anchor of a page: those of its headings, and explicit ones that keep old links alive."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {*(heading.replace(" ", "-") for heading in plain), *re.findall(r'<a id="([^"]+)">', text)}


def _anchors_of(page: str) -> set[str]:
    pages = [path for path in (ROOT / page, ROOT / "docs" / page) if path.is_file()]
    return anchors(pages[0].read_text(encoding="utf-8")) if pages else set()


@cache
def _is_a_path(mention: str, beside: Path) -> bool:
    places = (ROOT, PACKAGE, *filter(Path.is_dir, PACKAGE.iterdir()), *(ROOT / "docs", beside.parent))
    if any(next(place.glob(mention.rstrip("/")), None) for place in places):
        return True
    return "/" not in mention and bool(_files(mention))


def _is_a_name(mention: str, words: Set[str]) -> bool:
    first, *rest = mention.split(".")
    if mention in words or (mention.startswith(VARIABLE) and mention.removeprefix(VARIABLE).lower() in words):
        return True
    if rest and first in classes():
        return set(rest) <= classes()[first] | LANGUAGE
    if _is_in_a_module(mention):
        return True
    return first not in _packages() and words >= {first, *rest}


@cache
def _packages() -> frozenset[str]:
    return frozenset(path.parent.name for path in _files("__init__.py"))


@cache
def _is_in_a_module(mention: str) -> bool:
    """Return whether a dotted name is a module, written from any of its parents on, or something in one."""
    parts = mention.split(".")
    return any(
        f".{name}".endswith("." + ".".join(parts[:cut])) and source.words.issuperset(parts[cut:])
        for cut in range(len(parts), 0, -1)
        for name, source in sources().items()
    )
