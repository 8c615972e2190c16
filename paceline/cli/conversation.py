"""A conversation on the terminal: questions are typed, answers stream, commands begin with a slash."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.cli.report import Totals, stats_line
from paceline.cli.screen import show
from paceline.cli.style import Style
from paceline.errors import ContextTooLong, InvalidRequest, UnknownOption
from paceline.types import Finish, SamplingParams, SequenceStats, Speculation, TokenEvent

if TYPE_CHECKING:
    from paceline.llm import Sample
    from paceline.text.tokenizer import Tokenizer

BLOCK = '"""'  # begins and ends a message of several lines


class Speaker(Protocol):
    """A model that answers: an `LLM`, or the model of a server in this process."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]: ...

    def stream(
        self, prompt: Sequence[int], sampling: SamplingParams, *, speculation: Speculation
    ) -> Iterator[TokenEvent]: ...


class Conversation:
    """Messages, and the commands that are typed between them."""

    def __init__(
        self, speaker: Speaker, *, sampling: SamplingParams, speculation: Speculation, system: str | None
    ) -> None:
        self._speaker = speaker
        self._sampling = sampling
        self._speculation = speculation
        self._system = system
        self._messages: list[dict[str, str]] = []  # user and assistant alternate
        self._last: SequenceStats | None = None
        self._totals = {"speculative": Totals(), "plain": Totals()}
        self._style = Style(sys.stdout)
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._remark(HELP),
            "/clear": lambda _: self._clear(),
            "/forget": lambda _: self._forget(),
            "/system": self._instruct,
            "/plain": lambda _: self._speculate(False),
            "/spec": lambda _: self._speculate(True),
            "/stats": lambda _: self._stats(),
            "/save": self._save,
        }

    def run(self, greeting: str) -> None:
        """Answer until the input ends. A greeting is for people: it is shown where somebody types."""
        if sys.stdin.isatty():
            self._remark(greeting)
        for text in _messages():
            if text in LEAVE:
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._answer(text)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            self._remark(str(UnknownOption("command", name, [*self._commands, "/exit"])))
        else:
            self._commands[name](rest.strip())

    def _so_far(self) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._speaker.encode_chat(self._so_far())
            events = self._speaker.stream(prompt, self._sampling, speculation=self._speculation)
        except ContextTooLong as error:
            self._messages.pop()
            self._remark(f"not asked: {error}. /forget drops the oldest exchange, /clear all of them")
            return
        except InvalidRequest as error:
            self._messages.pop()
            self._remark(f"not asked: {error}")
            return
        said = self._listen(events)
        self._messages.append({"role": "assistant", "content": said.text})
        self._note(said)

    def _listen(self, events: Iterator[TokenEvent]) -> Sample:
        """Show an answer. Ctrl-C ends it between two steps; what was said stays in the conversation."""
        from paceline.llm import Sample

        said = Sample()
        with closing(cast("Generator[TokenEvent]", events)) as answer, ctrl_c() as pressed:
            show(self._speaker.tokenizer, takewhile(lambda event: not pressed.is_set(), answer), self._style, into=said)
        print(flush=True)
        return said

    def _note(self, said: Sample) -> None:
        if said.finish is None:
            self._remark("stopped")
            return
        self._last = said.stats
        self._totals["speculative" if said.stats.rounds else "plain"].add(said.stats)
        if said.finish is Finish.LENGTH and said.stats.output_tokens != self._sampling.max_tokens:
            self._remark("cut: the context is full. /forget drops the oldest exchange, /clear all of them")
        elif said.finish is Finish.LENGTH:
            self._remark(f"cut at --max-tokens {self._sampling.max_tokens}")

    def _stats(self) -> None:
        if self._last is None:
            self._remark("no answers yet")
            return
        self._remark(f"last answer   {stats_line(self._last)}")
        for name, tally in self._totals.items():
            self._remark(f"{name:<13} {tally.line}")

    def _speculate(self, enabled: bool) -> None:
        self._speculation = replace(self._speculation, enabled=enabled)
        self._remark("speculation on" if enabled else "speculation off: plain decoding")

    def _forget(self) -> None:
        del self._messages[:2]
        self._remark(f"{len(self._messages) // 2} exchanges are left")

    def _clear(self) -> None:
        self._messages.clear()
        self._remark("a new conversation")

    def _instruct(self, text: str) -> None:
        """Change the system message. Without a text the old one goes."""
        self._system = text or None
        self._remark(f"system message: {text}" if text else "no system message")

    def _save(self, place: str) -> None:
        """Write the messages as JSON, as a chat request has them. A file that exists is left alone."""
        if not place:
            self._remark("type /save FILE")
            return
        try:
            with Path(place).expanduser().open("x", encoding="utf-8") as file:
                json.dump(self._so_far(), file, indent=1, ensure_ascii=False)
        except OSError as error:
            self._remark(f"not saved: {error.strerror}; type /save FILE, a file that does not exist yet")
        else:
            self._remark(f"{len(self._so_far())} messages are in {place}")

    def _remark(self, text: str) -> None:
        print(self._style.dim(text), flush=True)


LEAVE = ("/exit", "/quit", "/bye")
HELP = """/clear         begin a new conversation
/forget        drop the oldest exchange
/system TEXT   tell the model how to answer; without TEXT: no longer
/save FILE     write the conversation as JSON
/stats         tokens/step, acceptance and speed of the last answer and of all
/plain, /spec  answer without speculation, or with it
/exit          leave; so does Ctrl-D. Ctrl-C stops an answer
\"\"\"            begins and ends a message of several lines"""


def _messages() -> Iterator[str]:
    """Yield messages and commands as they are typed. Lines between two BLOCK marks are one message."""
    lines = _lines()
    for line in lines:
        if not line.startswith(BLOCK):
            yield line.strip()
            continue
        block = line.removeprefix(BLOCK)
        while BLOCK not in block and (more := next(lines, None)) is not None:
            block += f"\n{more}"
        yield block.partition(BLOCK)[0].strip()


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until the end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
    while True:
        try:
            yield input("> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print(flush=True)  # the shell's prompt begins a line of its own
            raise


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Yield an event that Ctrl-C sets instead of raising: an engine must not be interrupted within a step."""
    pressed = Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
