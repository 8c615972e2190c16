"""The state of a program: its text so far and its variables.

Adding to a state never waits. Reading a variable waits for the call that gives it, and so does the text. A fork begins
with the text and the variables of its parent; what it adds is its own. After the run a state can only be read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Self

from paceline.checks import check_integer
from paceline.errors import InvalidRequest, ProgramError, UnknownOption
from paceline.llm import Sample
from paceline.program.call import Call
from paceline.program.expressions import Gen, Select, parts_of
from paceline.program.pieces import Pieces, telling
from paceline.program.prompt import Text, prompt_of
from paceline.program.run import Run
from paceline.program.sites import failing_site

MAX_FORKS = 1024  # of one state at once
Value = str | list[str | None]


class State:
    def __init__(self, run: Run, text: Text, *, program: str, parent: State | None = None) -> None:
        """`program`: name of the program that adds to it. `parent`: the state that it is a fork of."""
        self.value: Any = None  # what a program that was called with this state returned
        self._run, self._text, self._program, self._parent = run, text, program, parent
        self._names: dict[str, Call | list[str | None]] = {} if parent is None else dict(parent._names)
        self._inherited = frozenset(self._names)
        self._joined = False

    # Adding.

    def __iadd__(self, given: Any) -> Self:
        self._check_open()
        for part in parts_of(given):
            if isinstance(part, Gen | Select):
                self._check_new(part.name)
                self._text.check_open()  # before the call begins
                call = self._run.call(part, self._text, program=self._program)
                self._text.add(call)
                self._declare(part.name, call)
            else:
                self._text.add(part)
        return self

    def fork(self, count: int) -> list[State]:
        """Make `count` states that go on from here, each with seeds of its own."""
        self._check_open()
        check_integer("the number of forks", count, 1, MAX_FORKS)
        path = self._text.next_path()
        return [
            State(self._run, self._text.fork(f"{path}.{i}"), program=self._program, parent=self) for i in range(count)
        ]

    def join(self, forks: Sequence[State]) -> None:
        """Wait for forks of this state. What they generated becomes lists, one value for each fork: `s["answer"][0]`.

        A fork without a variable that another has gives None. The text of forks stays theirs."""
        self._check_open()
        each = [self._checked_fork(fork, i) for i, fork in enumerate(forks)]
        if not each or len({id(fork) for fork in each}) < len(each):
            raise InvalidRequest("join takes a list of forks, each once")
        names = dict.fromkeys(name for fork in each for name in fork._names if name not in fork._inherited)
        for name in names:
            self._check_new(name)
        for fork in each:
            fork._settle()
        gathered = {name: [fork._own_value(name) for fork in each] for name in names}
        for fork in each:
            fork._joined = True
        for name, values in gathered.items():
            self._declare(name, values)

    def inside(self, name: str, body: Callable[[State], Any], *, file: str) -> State:
        """Run the body of another program, whose source is in `file`, on this text. It has variables of its own."""
        self._check_open()
        inner = State(self._run, self._text, program=f"{name} (called by {self._program})")
        try:
            inner.value = body(inner)
        except Exception as error:
            raise failing_site(error, program=inner._program, file=file) from error
        return inner

    # Reading.

    def __getitem__(self, name: str) -> Any:
        """Return the text of a variable, once it is there; after a join, the list of the forks' texts."""
        found = self._find(name)
        return found.wait() if isinstance(found, Call) else found

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def variables(self) -> dict[str, Any]:
        """All variables so far, by name."""
        return {name: self[name] for name in [*self._names]}

    @property
    def text(self) -> str:
        """The whole text; of a chat, one paragraph for each message."""
        self._settle()
        prompt = prompt_of(self._text.end)
        if not prompt.messages:
            return prompt.text
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)

    def __str__(self) -> str:
        return self.text

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a chat."""
        self._settle()
        prompt = prompt_of(self._text.end)
        last = [{"role": "assistant", "content": prompt.text}] if self._text.role == "assistant" else []
        return [*prompt.messages, *last]

    def sample(self, name: str) -> Sample:
        """Return all that is known of a generation: tokens, log-probabilities, the reason of its end, statistics."""
        call = self._find_call(name)
        call.wait()
        if call.sample is None:
            raise InvalidRequest(f"{name!r} comes from select and has no sample: see scores({name!r})")
        return call.sample

    def scores(self, name: str) -> dict[str, float]:
        """Return the score of each option of a select: a log-probability."""
        call = self._find_call(name)
        call.wait()
        if not call.scores:
            raise InvalidRequest(f"{name!r} comes from gen and has no options: see sample({name!r})")
        return dict(call.scores)

    def stream(self, name: str) -> Pieces:
        """Iterate over the text of a variable while it is written, by `for` or `async for`."""
        return Pieces(lambda: self._find_call(name))

    # Of a whole run.

    @property
    def error(self) -> ProgramError | None:
        """Why the run failed; None: it did not, or has not yet."""
        return self._run.error

    @property
    def seed(self) -> int:
        """The seed of the run: with it and the same arguments, the program gives the same texts again."""
        return self._run.seed

    @property
    def done(self) -> bool:
        return self._run.done

    @property
    def run(self) -> Run:
        return self._run

    def wait(self) -> Self:
        """Wait for the end of the run. Raises its error."""
        self._run.wait()
        if self._run.error is not None:
            raise self._run.error
        return self

    def stop(self) -> None:
        """Stop the run, abort what it has open, and wait for its end."""
        self._run.stop("it was stopped")
        self._run.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the end of the run; stop it if the block is left by an error, such as Ctrl-C."""
        if kind is None:
            self.wait()
        else:
            self.stop()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._wait_async().__await__()

    def save_trace(self, path: str | Path) -> None:
        """Write the trace of the run as one HTML file."""
        from paceline.program.page import save_traces

        save_traces([self], path)

    async def _wait_async(self) -> Self:
        ended = asyncio.Event()
        self._run.when_done(telling(asyncio.get_running_loop(), ended.set))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self._run.stop("it was cancelled")
            await ended.wait()
            raise
        return self.wait()

    def _check_open(self) -> None:
        self._run.check_going()
        if self._joined:
            raise InvalidRequest("this fork was joined: its state can be read, but not extended")

    def _check_new(self, name: str) -> None:
        if name in self._names:
            raise InvalidRequest(f"the variable {name!r} is generated twice: give each a name, such as '{name}2'")

    def _declare(self, name: str, value: Call | list[str | None]) -> None:
        with self._run.changed:
            self._names[name] = value
            self._run.changed.notify_all()

    def _find(self, name: str) -> Call | list[str | None]:
        """Find a variable. Other threads than the program's wait until it is declared, or the run is over."""
        if threading.current_thread() is not self._run.thread:
            with self._run.changed:
                self._run.changed.wait_for(lambda: name in self._names or self._run.done)
        if name not in self._names:
            if self._run.error is not None:
                raise self._run.error
            raise (
                UnknownOption("variable", name, self._names)
                if self._names
                else InvalidRequest(f"unknown variable {name!r}; nothing is generated yet")
            )
        return self._names[name]

    def _find_call(self, name: str) -> Call:
        found = self._find(name)
        if not isinstance(found, Call):
            raise InvalidRequest(f"{name!r} comes from a join: ask its fork")
        return found

    def _settle(self) -> None:
        """Wait for the calls of the text."""
        end = self._text.end
        if end is not None and end.call is not None:
            end.call.wait()

    def _checked_fork(self, fork: object, index: int) -> State:
        if not isinstance(fork, State) or fork._parent is not self:
            raise InvalidRequest(f"item {index} of join is no fork of this state: join what fork() returned")
        if fork._joined:
            raise InvalidRequest(f"item {index} of join was joined before")
        return fork

    def _own_value(self, name: str) -> Any:
        return self[name] if name in self._names and name not in self._inherited else None
