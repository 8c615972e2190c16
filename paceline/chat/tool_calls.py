"""Find tool calls in the text of an answer as it grows. Nothing here depends on HTTP, tokens or templates.

Models write calls in a few ways:

    Hermes, Qwen    <tool_call>{"name": …, "arguments": {…}}</tool_call>, among other text, any number of times
    Llama, Mistral  {"name": …, "parameters": {…}} or a list of such, as the whole answer, several with ; between them
    forced          as Llama; a grammar allows nothing else

Where a grammar allows calls beside text or a form (`chat.tools`), it allows one of these ways. Only that one is read.

Invariants: Text and calls do not depend on how the answer was cut into pieces. A marker, or text that may become
one, is never shown as text. Text that turns out to be no call is shown to the last character.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BARE = ('{"name":"', '[{"name":"', '{"type":"function","name":"')  # beginnings of a bare call, without white space
_FIELDS = frozenset({"name", "arguments", "parameters", "type", "id"})  # other JSON with a name has other fields
_SPACE = " \t\r\n"
_NAMED = re.compile(r'\s*\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_NAME_END = 512  # characters of an answer within which the name of a bare call ends
_PARTIAL = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)', re.DOTALL)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=_new_id, compare=False)
    plain: bool = field(default=True, compare=False)  # written with the fields of a call and no others

    @property
    def function(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(frozen=True, slots=True)
class Said:
    """New text and calls of an answer, found since the last `push` or `flush`."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def content_or_none(self) -> str | None:
        """The text; None if there are calls and no text."""
        return self.content or (None if self.calls else "")


class ToolCallParser:
    """Splits an answer into text and tool calls: `push` text as it comes, `flush` at the end.

    `names` are the tools, by which a bare call is told from other JSON. `forced`: the answer is nothing but a bare
    call. `marked`: the one way in which a grammar lets calls be written, between markers or bare; None: no grammar.
    `form`: an answer that does not begin with a call is of a form as a whole, which may hold the markers as text.
    A call that a grammar has begun may break off."""

    def __init__(
        self, names: Collection[str], *, forced: bool = False, marked: bool | None = None, form: bool = False
    ) -> None:
        self.calls = 0  # calls found so far
        self._names = frozenset(names)
        self._forced = forced
        self._constrained = forced or marked is not None
        self._beginnings = (*(() if marked else BARE), *((OPEN,) if form and marked else ()))
        self._marks = marked is not False  # marked calls are read
        self._form = form
        self._held = ""  # text that may be part of a call
        self._said = False  # True: there was text since the beginning or the last call
        self._state = self._at_beginning
        self._scan = _Scan()
        self._content: list[str] = []
        self._found: list[ToolCall] = []

    def read(self, text: str, *, ends: bool) -> Said:
        """`push` text, and `flush` if the answer ends with it."""
        first = self.push(text)
        if not ends:
            return first
        last = self.flush()
        return Said(first.content + last.content, first.calls + last.calls)

    def push(self, text: str) -> Said:
        self._held += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> Said:
        """End the answer. Held text that is no complete call becomes text, but a forced call may be cut short."""
        if self._state not in (self._after_call, self._between):
            self._break_off()
            self._say(len(self._held))
        return self._take()

    def _break_off(self) -> None:
        """Take held text as a call without its end, if a grammar has begun one."""
        begun = self._constrained and self._state in (self._in_bare_call, self._in_marked_call)
        partial = _PARTIAL.search(self._held) if begun else None
        if partial is not None and (name := _unquoted(partial[1])) in self._names:
            self._found.append(ToolCall(name, partial[2]))
            self._held = ""

    def _take(self) -> Said:
        parsed = Said("".join(self._content), tuple(self._found))
        self.calls += len(self._found)
        self._content, self._found = [], []
        return parsed

    # Each state is a method that looks at the held text, and returns True if the next state may have more to do.

    def _at_beginning(self) -> bool:
        """State: at the beginning of the answer, or after a bare call, where another one may follow."""
        start = "".join(self._held.split())
        fitting = [begin for begin in self._beginnings if begin.startswith(start) or start.startswith(begin)]
        if start.startswith(OPEN) and OPEN in fitting:
            self._state = self._in_text
            return True
        if self._forced or any(start.startswith(begin) for begin in fitting):
            self._enter(self._in_bare_call)
            return True
        if not fitting:
            self._state = self._in_form if self._form else self._in_text
        return not fitting

    def _in_form(self) -> bool:
        self._say(len(self._held))
        return False

    def _in_text(self) -> bool:
        if not self._marks:
            self._say(len(self._held))
            return False
        at = self._held.find(OPEN)
        sure = len(self._held) - _overlap(self._held, OPEN) if at < 0 else at
        if self._said or self._held[:sure].strip(_SPACE):
            self._say(sure)
        elif at >= 0:  # nothing but white space before a call is no text
            self._held = self._held[at:]
        if at < 0:
            return False
        self._said = False
        self._enter(self._in_marked_call)
        return True

    def _in_marked_call(self) -> bool:
        """State: the held text begins with OPEN."""
        end = self._scan.end(self._held, len(OPEN))
        if end is None:
            return False
        calls = _calls(self._held[len(OPEN) : end]) if end >= 0 else None
        if calls is None:
            self._say(len(OPEN) if end < 0 else end)
            self._state = self._in_text
        else:
            self._found += calls
            self._held = self._held[end:]
            self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        rest = self._held.lstrip(_SPACE)
        if CLOSE.startswith(rest) and rest != CLOSE:  # CLOSE may still be coming
            return False
        self._held = rest.removeprefix(CLOSE)
        self._state = self._between
        return True

    def _between(self) -> bool:
        """State: after a marked call. White space here is no text."""
        self._held = self._held.lstrip(_SPACE)
        if self._held:
            self._state = self._in_text
        return bool(self._held)

    def _in_bare_call(self) -> bool:
        end = self._scan.end(self._held, 0)
        if end is None and not self._names_another():
            return False
        calls = _calls(self._held[:end]) if end is not None and end >= 0 else None
        if calls is None or not all(call.name in self._names and call.plain for call in calls):
            self._state = self._in_form if self._form else self._in_text
            return True
        self._found += calls
        self._held = self._held[end:]
        self._state = self._after_bare_call
        return True

    def _names_another(self) -> bool:
        """True if the held text has a complete name that no tool has: it is other JSON, and need not be held."""
        named = _NAMED.match(self._held, 0, _NAME_END)
        return named is not None and _unquoted(named[1]) not in self._names

    def _after_bare_call(self) -> bool:
        """State: after a bare call; another one may follow, with or without a semicolon."""
        rest = self._held.lstrip(_SPACE + ";")
        self._held = rest
        if rest:
            self._state = self._at_beginning
        return bool(rest)

    def _enter(self, state: Any) -> None:
        self._state = state
        self._scan = _Scan()

    def _say(self, length: int) -> None:
        if length > 0:
            self._said = True
            self._content.append(self._held[:length])
            self._held = self._held[length:]


class _Scan:
    """Finds the end of a JSON object or list in a text that grows, looking at each character once."""

    def __init__(self) -> None:
        self._at: int | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int) -> int | None:
        """Find the end of the value that begins at `start`, after white space. None: not there yet; -1: no value."""
        at = start if self._at is None else self._at
        while at < len(text):
            character = text[at]
            at += 1
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"' and self._depth:
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return at
            elif not self._depth and character not in _SPACE:
                return -1
        self._at = at
        return None


def _calls(text: str) -> list[ToolCall] | None:
    """Read the calls in a JSON text. None: the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    each = [_call(one) for one in (value if isinstance(value, list) else [value])]
    calls = [call for call in each if call is not None]
    return calls if calls and len(calls) == len(each) else None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    return ToolCall(value["name"], arguments, plain=_FIELDS.issuperset(value))


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _overlap(text: str, marker: str) -> int:
    """Count the characters at the end of `text` that may begin `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
