"""The budget of a chat template, and safe versions of the operations that could spend too much at once.

Each rendering has one `Budget`: steps for loop turns, calls and filters, and size for the strings and lists that are
made. The functions below replace Jinja's own where a small expression can make something large; each asks the budget
before it makes anything. chat/sandbox.py gives them the names that templates use.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import Environment, Undefined, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.filters import do_indent, do_round, make_attrgetter

MAX_STEPS = 500_000  # loop turns, calls and filters of a rendering
MAX_SECONDS = 0.5  # CPU time of this thread, so that a rendering does not fail because the machine is busy
MAX_SIZE = 16_000_000  # characters and list entries that a rendering makes, beside MAX_GROWTH
MAX_GROWTH = 64  # characters and list entries that it makes for each character of the input
ENTRY = 16  # price of a list's entry, in characters: visiting it takes as long as writing that many
_MAX_BITS = 256  # bits of an integer
_MAX_INDENT = 16  # characters


class TooExpensive(Exception):
    """The template did more work than any honest one does."""


class Budget:
    __slots__ = ("deadline", "size", "steps")

    def __init__(self, input_size: int) -> None:
        self.steps = MAX_STEPS
        self.size = MAX_SIZE + MAX_GROWTH * input_size
        self.deadline = time.thread_time() + MAX_SECONDS

    def spend(self, size: int, *, steps: int = 1) -> None:
        self.steps -= steps
        self.size -= size
        if self.steps < 0:
            raise TooExpensive(f"it takes more than {MAX_STEPS} steps")
        if self.size < 0:
            raise TooExpensive("it makes too much text")
        if not self.steps % 16 and time.thread_time() > self.deadline:  # the clock costs more than a step
            raise TooExpensive(f"it runs longer than {MAX_SECONDS:g} seconds")

    def afford(self, size: int) -> None:
        """Raise TooExpensive if something of this size would exceed the budget; nothing is spent yet."""
        if size > self.size:
            raise TooExpensive("it makes too much text")


budget: ContextVar[Budget] = ContextVar("template_budget")


# ── sizes of values ──


def weigh(value: object, *, indent: int = 0) -> int:
    """Compute the price of a value's text: its characters, and ENTRY for each other value at any depth."""
    afford = budget.get().afford
    entry = ENTRY + 8 * indent  # allows for an indentation of eight levels
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        total += len(item) if isinstance(item, str) else entry
        afford(total)
        if isinstance(item, dict):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
    return total


def bounded_text(value: object) -> str:
    """Return str(value) for types whose text has a bounded size. Raises SecurityError for other types."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple | dict):
        budget.get().spend(weigh(value))
        return str(value)
    if value is None or isinstance(value, bool | int | float | Undefined):
        return str(value)
    raise SecurityError(f"a chat template cannot print a {type(value).__name__}")


def made(value: Any) -> Any:
    """Charge for a value that was just made, and return it."""
    budget.get().spend(len(value) if isinstance(value, str | list | tuple | dict | range) else 0)
    return value


class Paced:
    """The iterable of a loop: every turn costs a step and the text that the loop's body writes."""

    def __init__(self, iterable: Iterable[Any], size: int) -> None:
        self._iterable = iterable
        self._size = size

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # the template gets the TypeError of one without

    def __iter__(self) -> Iterator[Any]:
        spend, size = budget.get().spend, self._size
        for item in self._iterable:
            spend(size)
            yield item


# ── operations that can make much out of little ──


def replace(text: object, old: str, new: str, count: int = -1) -> str:
    source, old, new = bounded_text(text), bounded_text(old), bounded_text(new)
    budget.get().afford(len(source) + source.count(old) * len(new))
    return source.replace(old, new, -1 if count is None else count)


@pass_environment
def join(environment: Environment, items: Iterable[Any], separator: str = "", attribute: Any = None) -> str:
    return joined(separator, items if attribute is None else map(make_attrgetter(environment, attribute), items))


def joined(separator: str, items: Iterable[Any]) -> str:
    parts: list[str] = []
    size = 0
    for item in items:
        parts.append(bounded_text(item))
        size += len(parts[-1]) + len(separator)
        budget.get().afford(size)
    return separator.join(parts)


def indent(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (width if isinstance(width, int) else len(width)) > _MAX_INDENT:
        raise SecurityError(f"a chat template may indent by at most {_MAX_INDENT}, not {width!r:.40}")
    return do_indent(bounded_text(text), width, first, blank)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and (not isinstance(indent, int) or indent > _MAX_INDENT):
        raise SecurityError(f"a chat template may indent by at most {_MAX_INDENT}, not {indent!r:.40}")
    budget.get().spend(weigh(value, indent=indent or 0))
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub(r"[^\x00-\x7f]", _escape, text) if ensure_ascii else text


def _escape(character: re.Match[str]) -> str:
    """Escape a character as JSON does, except the private ones by which chat/shield.py marks users' text."""
    return character[0] if character[0] >= "\U0010ff00" else json.dumps(character[0])[1:-1]


@pass_environment
def total(environment: Environment, items: Iterable[Any], attribute: Any = None, start: float = 0) -> float:
    """Sum numbers only: summing lists takes quadratic time."""
    values = items if attribute is None else map(make_attrgetter(environment, attribute), items)
    return sum((+value for value in values), +start)


def rounded(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 32:
        raise SecurityError(f"a chat template may round to at most 32 digits, not {precision}")
    return do_round(value, precision, method)


def multiply(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            budget.get().afford(weigh(value) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise TooExpensive("it computes huge numbers")
    return left * right


def power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise TooExpensive("it computes huge numbers")
    return left**right


def remainder(left: Any, right: Any) -> Any:
    if not isinstance(left, str):
        return left % right
    if re.search(r"%(?![sd%])", left):
        raise SecurityError(f"chat templates may format by %s and %d only, not by {left!r:.60}")
    values = right if isinstance(right, tuple) else (right,)
    return left % tuple(value if isinstance(value, int | float) else bounded_text(value) for value in values)


def format_text(text: str, *args: Any, **kwargs: Any) -> str:
    """str.format with plain fields; widths, attributes and conversions raise SecurityError."""
    if re.search(r"\{(?![A-Za-z0-9_]*\}|\{)", text.replace("{{", "")):
        raise SecurityError(f"chat templates may format by plain {{fields}} only, not by {text!r:.60}")
    texts = [bounded_text(value) for value in (*args, *kwargs.values())]
    budget.get().afford(len(text) + text.count("{") * max(map(len, texts), default=0))
    return text.format(*texts[: len(args)], **dict(zip(kwargs, texts[len(args) :], strict=True)))
