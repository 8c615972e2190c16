"""The acceptance code with something changed: loads its modules anew from changed sources, beside the originals."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

MODULES = (  # each before those that import it
    "paceline.accept.rows",
    "paceline.accept.coupled",
    "paceline.accept.rejection",
    "paceline.accept.block",
    "paceline.accept.lossy",
    "paceline.accept.outside",
    "paceline.accept.registry",
    "paceline.engine.judge",
)
SOURCES = {name: inspect.getsource(importlib.import_module(name)) for name in MODULES}
NAMES = (
    "Rows",
    "Outcome",
    "walk",
    "accept_coupled",
    "accept_rejection",
    "accept_block",
    "accept_likely",
    "problem_of",
    "in_use",
    "register",
    "judge",
)
PATIENCE = 100_000  # turns of all loops of a module

NEGATED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SHIFTED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}


class Endless(Exception):
    """A loop of a mutant does not end."""


def load(changed: Mapping[str, str]) -> SimpleNamespace:
    """The names of the acceptance code, with the sources of some modules replaced."""
    found: dict[str, object] = {}
    with _beside_the_originals():
        for name in MODULES:
            module = ModuleType(name)
            sys.modules[name] = module
            module.__dict__["_tick"] = _patience()
            exec(compile(_watched(changed.get(name, SOURCES[name])), name, "exec"), module.__dict__)
            found |= {key: value for key, value in vars(module).items() if key in NAMES}
    return SimpleNamespace(**found)


def mutants(name: str) -> Iterator[tuple[str, str]]:
    """What was changed, and the whole source with it, for each comparison and each way to turn it."""
    source = SOURCES[name]
    count = sum(len(node.ops) for node in _comparisons(ast.parse(source)))
    for table in (NEGATED, SHIFTED):
        for which in range(count):
            tree = ast.parse(source)
            places = [(node, i) for node in _comparisons(tree) for i in range(len(node.ops))]
            node, i = places[which]
            if type(node.ops[i]) in table:
                before = ast.unparse(node)
                node.ops[i] = table[type(node.ops[i])]()
                yield f"{before}  →  {ast.unparse(node)}", ast.unparse(tree)


def _comparisons(tree: ast.AST) -> list[ast.Compare]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]


def _watched(source: str) -> ast.Module:
    """The same code, where a loop that never ends raises Endless."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            node.body.insert(0, ast.parse("_tick()").body[0])
    return ast.fix_missing_locations(tree)


def _patience() -> Callable[[], None]:
    turns = iter(range(PATIENCE))

    def tick() -> None:
        if next(turns, None) is None:
            raise Endless

    return tick


@contextmanager
def _beside_the_originals() -> Iterator[None]:
    originals = {name: sys.modules[name] for name in MODULES}
    try:
        yield
    finally:
        sys.modules.update(originals)
