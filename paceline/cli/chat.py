"""Chat: talk with a model; what its drafter guessed right is in colour.

paceline chat
paceline chat ./model.gguf --system "Answer in one sentence."
paceline chat ./qwen2.5-1.5b --drafter ./qwen2.5-0.5b --temperature 0

Ctrl-C stops an answer, Ctrl-D leaves. /help lists what else can be typed.
"""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from threading import Event
from typing import TYPE_CHECKING, cast

from paceline.cli.options import add_answer_options, add_model_options, load, sampling_of, speculation_of
from paceline.cli.report import Totals, stats_line
from paceline.cli.screen import show
from paceline.cli.style import Style
from paceline.errors import ContextTooLong, InvalidRequest, UnknownOption
from paceline.types import Finish, SamplingParams, SequenceStats, Speculation, TokenEvent

if TYPE_CHECKING:
    from paceline.llm import LLM, Sample


MAX_TOKENS = 1024  # default for an answer: a small model may never stop by itself


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser, default_target="smollm2")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_answer_options(parser, max_tokens=MAX_TOKENS)


def run(args: Namespace) -> int:
    llm = load(args)
    if llm.tokenizer.chat_template is None:
        raise InvalidRequest(f"{args.target} has no chat template: it continues text; use `paceline generate`")
    sampling = sampling_of(args, llm.default_sampling)
    if sampling.n > 1:
        raise InvalidRequest("a conversation goes on from one answer; leave --n at 1")
    Chat(llm, sampling=sampling, speculation=speculation_of(args), system=args.system).run()
    return 0


class Chat:
    """A conversation and its commands."""

    def __init__(self, llm: LLM, *, sampling: SamplingParams, speculation: Speculation, system: str | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._speculation = speculation
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []  # user and assistant alternate
        self._last: SequenceStats | None = None
        self._totals = {"speculative": Totals(), "plain": Totals()}
        self._style = Style(sys.stdout)
        self._commands: dict[str, Callable[[], None]] = {
            "/stats": self._stats,
            "/plain": lambda: self._speculate(False),
            "/spec": lambda: self._speculate(True),
            "/forget": self._forget,
            "/reset": self._reset,
            "/help": self._help,
        }

    def run(self) -> None:
        for line in _lines():
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        if line in self._commands:
            self._commands[line]()
        else:
            self._remark(str(UnknownOption("command", line, [*self._commands, "/exit"])))

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            prompt = self._llm.encode_chat([*self._system, *self._messages])
            events = self._llm.stream(prompt, self._sampling, speculation=self._speculation)
        except ContextTooLong as error:
            self._messages.pop()
            self._remark(f"not asked: {error}. /forget drops the oldest exchange, /reset all of them")
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
            show(self._llm, takewhile(lambda event: not pressed.is_set(), answer), self._style, into=said)
        print(flush=True)
        return said

    def _note(self, said: Sample) -> None:
        if said.finish is None:
            self._remark("stopped")
            return
        self._last = said.stats
        self._totals["speculative" if said.stats.rounds else "plain"].add(said.stats)
        if said.finish is Finish.LENGTH and said.stats.output_tokens != self._sampling.max_tokens:
            self._remark("cut: the context is full. /forget drops the oldest exchange, /reset all of them")
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

    def _reset(self) -> None:
        self._messages.clear()
        self._remark("a new conversation")

    def _help(self) -> None:
        self._remark(HELP)

    def _remark(self, text: str) -> None:
        print(self._style.dim(text), flush=True)


HELP = """/stats    tokens/step, acceptance and speed of the last answer and of all
/plain    answer without speculation
/spec     answer with it
/forget   drop the oldest exchange
/reset    begin a new conversation
/exit     leave; so does Ctrl-D. Ctrl-C stops an answer"""


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until the end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
    while True:
        try:
            yield input("> " if terminal else "").strip()
        except EOFError:
            return


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Yield an event that Ctrl-C sets instead of raising: an engine must not be interrupted within a step."""
    pressed = Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
