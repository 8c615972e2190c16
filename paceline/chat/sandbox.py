"""Run an untrusted chat template: without access to Python, and with bounded work.

Jinja's sandbox keeps templates away from attributes and files, but not from time and memory: nested loops, doubling a
string forty times, or lists that hold lists that hold lists. So every way to do work goes through one `Budget`: loop
turns, calls and filters cost steps; strings and lists that are made cost their size. The template's syntax tree is
rewritten for that before it is compiled:

    {% for x in xs %}    →  {% for x in xs | _paced(size of the text inside) %}
    a ~ b                →  a | string + b | string        (`+` is intercepted)
    [a, b], {a: b}       →  [a, b] | _weighed

Rendering always ends, with the text or an exception, after at most MAX_STEPS steps or MAX_SECONDS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, TypeVar

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from paceline.chat import budget as bounded
from paceline.chat.budget import MAX_STEPS, Budget, Paced, TooExpensive, bounded_text, budget, made, weigh

MAX_SOURCE = 1_000_000  # characters of a template
T = TypeVar("T")


class Refused(TemplateError):
    """The template called `raise_exception`: it does not take these messages."""


# ── what a template may call, by name ──

_BOUNDED_METHODS: dict[str, Callable[..., Any]] = {"replace": bounded.replace, "join": bounded.joined}
_REFUSED_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "translate", "encode", "maketrans"})

_BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    "replace": bounded.replace,
    "join": bounded.join,
    "indent": bounded.indent,
    "tojson": bounded.to_json,
    "sum": bounded.total,
    "round": bounded.rounded,
    "string": bounded_text,
}
_TEXT_FILTERS = frozenset(
    {
        "capitalize",
        "e",
        "escape",
        "forceescape",
        "lower",
        "safe",
        "striptags",
        "title",
        "trim",
        "truncate",
        "upper",
        "wordcount",
    }
)
_LIST_FILTERS = frozenset(
    {
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "groupby",
        "int",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "sort",
        "unique",
    }
)


def _metered(function: Callable[..., Any], *, of_text: bool) -> Callable[..., Any]:
    @wraps(function)  # also copies the attributes by which Jinja knows which arguments to pass
    def metered(*args: Any, **kwargs: Any) -> Any:
        if of_text:  # the text is the first argument behind the one that Jinja may pass itself
            at = 1 if hasattr(function, "jinja_pass_arg") else 0
            args = (*args[:at], bounded_text(args[at]), *args[at + 1 :])
        return made(function(*args, **kwargs))

    return metered


# ── the syntax tree ──


class _Instrument(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja calls it by this name
        size = sum(map(_text_size, node.body))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_paced", nodes.Const(size))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja calls it by this name
        self.generic_visit(node)
        first, *rest = [_filtered(part, "string") for part in node.nodes]
        total: nodes.Expr = first
        for part in rest:
            total = nodes.Add(total, part, lineno=node.lineno)
        return total

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802 - Jinja calls it by this name
        self.generic_visit(node)
        return _filtered(node, "_weighed")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802 - Jinja calls it by this name
        self.generic_visit(node)
        return _filtered(node, "_weighed")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802 - Jinja calls it by this name
        self.generic_visit(node)
        return _filtered(node, "_weighed") if node.ctx == "load" else node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:  # noqa: N802 - Jinja calls it by this name
        if node.attr.startswith("_"):
            raise SecurityError(f"a chat template cannot set the attribute {node.attr!r}")
        return node


def _text_size(node: nodes.Node) -> int:
    """Count the characters of text in a loop's body; loops inside it and macros are charged when they run."""
    if isinstance(node, nodes.For | nodes.Macro):
        return 0
    own = len(node.data) if isinstance(node, nodes.TemplateData) else 0
    return own + sum(map(_text_size, node.iter_child_nodes()))


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """{% generation %} marks an assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ── the environment ──


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # so that nothing is computed before there is a budget
            finalize=_finalize,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.globals = {name: self.globals[name] for name in ("namespace", "cycler", "joiner")} | _GLOBALS
        of_text = {name: _metered(self.filters[name], of_text=True) for name in _TEXT_FILTERS}
        of_lists = {name: _metered(self.filters[name], of_text=False) for name in _LIST_FILTERS}
        replaced = {name: _metered(function, of_text=False) for name, function in _BOUNDED_FILTERS.items()}
        self.filters = {**of_text, **of_lists, **replaced, "_paced": Paced, "_weighed": _weighed}
        self.binop_table |= {"*": bounded.multiply, "**": bounded.power, "%": bounded.remainder}

    def compiled(self, source: str) -> Callable[[Mapping[str, Any], int], str]:
        """Compile a template to a function from its variables and their size to its text."""
        token = budget.set(Budget(len(source)))
        try:
            tree = _Instrument().visit(self.parse(source))
            tree.set_environment(self)
            template = self.template_class.from_code(self, self.compile(tree), self.make_globals(None), None)
        finally:
            budget.reset(token)

        def render(variables: Mapping[str, Any], size: int) -> str:
            token = budget.set(Budget(size))
            try:
                return template.render(variables)
            finally:
                budget.reset(token)

        return render

    def literals(self, source: str) -> frozenset[str]:
        """Collect all string constants of a template."""
        constants = self.parse(source).find_all(nodes.Const)
        return frozenset(constant.value for constant in constants if isinstance(constant.value, str))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's own: templates may pass a self
        if isinstance(__obj, LoopContext):  # a recursive loop
            args = (Paced(args[0], 0), *args[1:])
        if isinstance(__obj, BuiltinMethodType):
            __obj = _bounded_method(__obj)
        return made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        return lambda *args, **kwargs: bounded.format_text(value.__self__, *args, **kwargs)


def _bounded_method(method: BuiltinMethodType) -> Callable[..., Any]:
    owner, name = method.__self__, method.__name__
    if not isinstance(owner, str | list | tuple | dict | range) or name in _REFUSED_METHODS:
        raise SecurityError(f"a chat template cannot call {name} of a {type(owner).__name__}")
    if isinstance(owner, str) and (function := _BOUNDED_METHODS.get(name)):
        return lambda *args: function(owner, *args)
    return method


@pass_context
def _finalize(_: Context, value: object) -> str:
    text = bounded_text(value)
    budget.get().spend(len(text), steps=0)
    return text


def _weighed(value: T) -> T:
    budget.get().spend(weigh(value))
    return value


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_STEPS:
        raise TooExpensive(f"it takes more than {MAX_STEPS} steps")
    return numbers


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return _weighed(dict(*args, **kwargs))


def _raise_exception(message: object) -> None:
    raise Refused(bounded_text(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 256 or re.search(r"%[^A-Za-z%]*[0-9]", pattern):
        raise SecurityError(f"a chat template cannot format the date by {pattern!r:.60}")
    return datetime.now().strftime(pattern)


_GLOBALS = {"range": _range, "dict": _dict, "raise_exception": _raise_exception, "strftime_now": _strftime_now}
