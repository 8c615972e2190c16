"""Programs: functions that write a text with a target, part by part, and what runs them.

    @program
    def greet(s, name):
        s += f"A greeting for {name}: "
        s += gen("greeting", max_tokens=12, stop="\\n")

    greet.run("Ada", on=llm)["greeting"]

A program is run, or called inside another with that one's state. Calling it in any other way is an error.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.checks import check_integer, check_number, check_text
from paceline.errors import InvalidRequest
from paceline.llm import LLM
from paceline.program.embedded import Embedded
from paceline.program.prompt import Text
from paceline.program.remote import Remote
from paceline.program.run import Backend, Run, current, derived_seed
from paceline.program.state import State
from paceline.progress import progress_bar

MAX_CALLS = 1000  # calls of a run, where it gives no max_calls
AT_ONCE = 64  # runs of a batch at the same time, where it gives no at_once
OPTIONS = ("on", "seed", "max_calls", "timeout", "cache_salt")  # keywords of every run, which no program may have


class Program:
    """A function whose first parameter is a state. Made by `program`."""

    def __init__(self, body: Callable[..., Any]) -> None:
        if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
            raise InvalidRequest(f"{body.__name__}: a program is a plain function, without async or yield")
        parameters = [*inspect.signature(body).parameters]
        taken = [name for name in parameters if name in OPTIONS]
        if not parameters or taken:
            problem = f"the parameter {taken[0]} is an option of every run" if taken else "it has no parameter"
            raise InvalidRequest(f"{body.__name__}: {problem}; a program takes a state first, then its own arguments")
        functools.update_wrapper(self, body)
        self._body = body
        self.name = body.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> State:
        """Run inside another program: its text goes on with this one's, whose variables are the result's."""
        if not args or not isinstance(args[0], State):
            raise InvalidRequest(
                f"{self.name} is a program: type {self.name}.run(…, on=llm), or inside another program "
                f"{self.name}(s, …) with its state"
            )
        outer: State = args[0]
        return outer.inside(self.name, lambda inner: self._body(inner, *args[1:], **kwargs), file=self._file)

    def start(self, *args: Any, **options: Any) -> State:
        """Begin a run, and return its state at once: read variables, stream them, or `wait`. See `run`."""
        state, body = self._made(*args, **options)
        state.run.start(body)
        return state

    def _made(
        self,
        *args: Any,
        on: LLM | Remote | None = None,
        seed: int | None = None,
        max_calls: int = MAX_CALLS,
        timeout: float | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> tuple[State, Callable[[], None]]:
        """Make a state and the body of its run, which has not begun."""
        self._check_arguments(args, kwargs)
        limits: dict[str, Any] = {"max_calls": max_calls, "timeout": timeout, "cache_salt": cache_salt}
        _check_options(seed=seed, **limits)
        run = Run(self.name, _backend(on), file=self._file, seed=seed, **limits)
        state = State(run, Text(), program=self.name)

        def body() -> None:
            state.value = self._body(state, *args, **kwargs)

        return state, body

    def run(self, *args: Any, **options: Any) -> State:
        """Run to the end, and return the state. Raises the error of a run that fails.

        `on`: an LLM, or a Remote server; inside another program, by default its own. `seed`: same seed, same texts; by
        default drawn, see `State.seed`. `max_calls` and `timeout` (seconds) end a run that does not end by itself.
        `cache_salt`: runs share cached prefixes only if their salts are equal; inside a program, by default its own."""
        state, body = self._made(*args, **options)
        with state.run.stopped_by_errors():
            state.run.start(body)
            return state.wait()

    async def run_async(self, *args: Any, **options: Any) -> State:
        """Run to the end beside an event loop. Cancelling the task stops the run. See `run`."""
        return await self.start(*args, **options)

    def run_batch(
        self,
        items: Sequence[Mapping[str, Any] | tuple[Any, ...]],
        *,
        on: LLM | Remote | None = None,
        seed: int | None = None,
        max_calls: int = MAX_CALLS,
        timeout: float | None = None,
        cache_salt: str | None = None,
        at_once: int = AT_ONCE,
        progress: bool = False,
    ) -> list[State]:
        """Run once for each item: a dict of keyword arguments, or a tuple of positional ones.

        A run that fails leaves the others alone: see `State.error`. Each run has a seed of its own, made from `seed`.
        `max_calls` and `timeout` are those of one run; `at_once` runs go on at the same time."""
        check_integer("at_once", at_once, 1, 4096)
        limits: dict[str, Any] = {"max_calls": max_calls, "timeout": timeout, "cache_salt": cache_salt}
        _check_options(seed=seed, **limits)
        each = [_arguments(item, i) for i, item in enumerate(items)]
        for args, kwargs in each:
            self._check_arguments(args, kwargs)
        backend, states, free = _backend(on), list[State](), threading.Semaphore(at_once)
        with _bar(self.name, len(each), shown=progress) as count, _held(backend), _stopped_together(states):
            for i, (args, kwargs) in enumerate(each):
                free.acquire()
                own = None if seed is None else derived_seed(seed, f"#{i}")
                state, body = self._made(*args, on=on, seed=own, **limits, **kwargs)
                states.append(state)
                state.run.when_done(free.release)
                state.run.when_done(count)
                state.run.start(body)
            for state in states:
                state.run.wait()
        return states

    @property
    def _file(self) -> str:
        return self._body.__code__.co_filename

    def _check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            inspect.signature(self._body).bind(None, *args, **kwargs)
        except TypeError as error:
            raise InvalidRequest(f"the arguments of {self.name} do not fit: {error}") from None


def program(body: Callable[..., Any]) -> Program:
    """Make a program of a function whose first parameter is a state."""
    return Program(body)


def _backend(on: LLM | Remote | None) -> Backend:
    if isinstance(on, LLM):
        return Embedded(on)
    if isinstance(on, Remote):
        return on
    if on is None and (outer := current.get()) is not None:
        return outer.backend
    given = "nothing" if on is None else type(on).__name__
    raise InvalidRequest(f"a program runs on an LLM or a Remote, not on {given}: give on=LLM(…) or on=Remote(url)")


def _check_options(*, seed: int | None, max_calls: int, timeout: float | None, cache_salt: str | None) -> None:
    if cache_salt is not None:
        check_text(cache_salt, "cache_salt", param="cache_salt")
    if seed is not None:
        check_integer("seed", seed, -(2**63), 2**64 - 1)
    check_integer("max_calls", max_calls, 1, 10**9)
    if timeout is not None:
        check_number("timeout", timeout, 0, threading.TIMEOUT_MAX, open_low=True)


def _arguments(item: Any, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(item, Mapping):
        return (), dict(item)
    if isinstance(item, tuple):
        return item, {}
    raise InvalidRequest(
        f"item {index} of run_batch must be a dict of keyword arguments or a tuple, not {type(item).__name__}"
    )


@contextmanager
def _held(backend: Backend) -> Iterator[None]:
    """Keep a backend open from the first run to the last."""
    backend.open()
    try:
        yield
    finally:
        backend.close()


@contextmanager
def _stopped_together(states: Sequence[State]) -> Iterator[None]:
    """Stop all runs if the block is left by an error, such as Ctrl-C, and wait for their ends."""
    try:
        yield
    except BaseException:
        for state in states:
            state.run.stop("its batch was interrupted")
        for state in states:
            state.run.wait()
        raise


@contextmanager
def _bar(name: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield what counts a run that has ended, and show the count if that is wanted."""
    if not shown:
        yield lambda: None
        return
    with progress_bar(name, unit="runs") as bar:
        bar.phase(name, unit="runs", total=total)
        yield bar.count
