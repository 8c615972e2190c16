"""The text of a state, and the prompt of a call in it.

A text is a chain of nodes, each behind the one before it. A fork begins with the last node of its parent, so forks
share everything before them, also calls that have not ended yet. Nodes never change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import InvalidRequest
from paceline.program.expressions import Begin, End, Role

if TYPE_CHECKING:
    from paceline.program.call import Call


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A text, a call that gives one, or the edge of a message, behind `before`."""

    part: str | Call | Begin | End
    before: Node | None
    call: Call | None  # the last call up to here, this node included


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages of a chat and the beginning of the assistant's answer, or without messages a plain text."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()

    def followed_by(self, text: str) -> Prompt:
        return Prompt(self.text + text, self.messages)


@dataclass(slots=True)
class Text:
    """The growing end of a chain. `path` names it in a run: seeds come from it."""

    path: str = ""
    end: Node | None = None
    role: Role | None = None  # role of the last message; None: there is none yet
    is_open: bool = True  # text may follow
    children: int = field(default=0)  # calls and forks so far

    def next_path(self) -> str:
        self.children += 1
        return f"{self.path}/{self.children - 1}"

    def fork(self, path: str) -> Text:
        return Text(path, self.end, self.role, self.is_open)

    def add(self, part: str | Call | Begin | End) -> None:
        """Add a part. Raises InvalidRequest for text that belongs to no message of a chat."""
        if isinstance(part, Begin):
            if self.role is None and self.end is not None:
                raise InvalidRequest(
                    "a message after plain text: begin the program with a message, or use none: a chat template has "
                    "no place for text outside of messages"
                )
            self.role, self.is_open = part.role, True
        elif isinstance(part, End):
            self.is_open = False
        else:
            self.check_open()
        before = self.end
        call = part if not isinstance(part, str | Begin | End) else None if before is None else before.call
        self.end = Node(part, before, call)

    def check_open(self) -> None:
        """Raise InvalidRequest where text belongs to no message of a chat."""
        if not self.is_open:
            raise InvalidRequest(
                f"text or a generation after {self.role}() belongs to no message: wrap it in assistant() or user()"
            )


def prompt_of(end: Node | None) -> Prompt:
    """Read a chain whose calls have all ended. The assistant's last message, if it is open, becomes the text."""
    text, messages, written = "", list[dict[str, str]](), True
    for part in _parts(end):
        if isinstance(part, Begin):
            messages.append({"role": part.role, "content": ""})
            written = part.role == "assistant"
        elif isinstance(part, End):
            written = False
        else:
            piece = part if isinstance(part, str) else part.value
            if messages:
                messages[-1]["content"] += piece
            else:
                text += piece
    if messages and written:
        text = messages.pop()["content"]
        if not messages:
            raise InvalidRequest("assistant() is the first message: begin with system() or user()")
    return Prompt(text, tuple(messages))


def _parts(end: Node | None) -> list[str | Call | Begin | End]:
    parts = []
    while end is not None:
        parts.append(end.part)
        end = end.before
    return parts[::-1]
