"""The error tree: the docstring of `paceline.errors` lists every error of the package, with its status and parent."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from paceline import errors
from paceline.errors import PacelineError

ROOT = Path(inspect.getfile(errors)).parent
LINE = re.compile(r"^    (?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+) +(?P<status>\d+|any)", re.MULTILINE)


def listed() -> dict[str, tuple[str | None, str]]:
    """The errors that the docstring draws: name → (parent, status)."""
    found: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for line in LINE.finditer(errors.__doc__ or ""):
        depth = len(line["branch"]) // 4
        found[line["name"]] = (path[depth - 1] if depth else None, line["status"])
        path[depth:] = [line["name"]]
    return found


def defined() -> dict[str, type[PacelineError]]:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return {each.__name__: each for each in classes if issubclass(each, PacelineError)}


def test_the_tree_is_what_the_module_defines() -> None:
    tree = listed()
    assert tree.keys() == defined().keys()
    for name, (parent, status) in tree.items():
        error = defined()[name]
        assert parent is None or error.__bases__[0].__name__ == parent
        assert status in ("any", str(error.status)), name


@pytest.mark.unwatched(wholly=True)
def test_no_error_is_defined_elsewhere() -> None:
    """By source, so that modules count which cannot be imported on this machine."""
    known = set(defined())
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert not bases & known, f"{node.name} of {path} belongs into paceline/errors.py"


def test_a_parameter_is_named_where_it_is_known() -> None:
    assert errors.InvalidRequest("no", param="top_p").param == "top_p"
    assert errors.UnknownOption("rule", "luck", ["coupled"], param="rule").param == "rule"
    assert errors.ContextTooLong("no").param is None
