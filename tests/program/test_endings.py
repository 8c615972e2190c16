"""How runs end: errors with their line, limits, interrupts. Whatever happens, nothing is left behind (see conftest)."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import EngineDead, InvalidRequest, ProgramError, UnknownOption
from paceline.llm import LLM
from paceline.program import Remote, State, assistant, gen, program, run, select, system, user
from paceline.program.prefixes import Prefixes
from paceline.types import Finish, TokenEvent

LONG = 200


def here(mark: str) -> int:
    """The line of this file that ends with a comment `mark`."""
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


def failing(llm: LLM, body: Any, **options: Any) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        program(body).run(on=llm, **options)
    return caught.value


def test_an_error_of_python_has_its_line(llm: LLM) -> None:
    def divides(s: State) -> None:
        s += "abc" + gen("a", max_tokens=3)
        1 / len(s["a"][:0])  # divides

    error = failing(llm, divides)
    assert str(error) == (
        f"program divides, line {here('divides')} of test_endings.py: ZeroDivisionError: division by zero"
    )
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (error.program, error.line) == ("divides", here("divides"))


def test_an_error_of_a_call_has_the_line_of_the_call(llm: LLM) -> None:
    """Not of the line that waits for it; and calls behind it do not run."""

    def too_long(s: State) -> None:
        s += "abc" * 100
        s += gen("a", max_tokens=3)  # too long
        s += gen("b", max_tokens=3)
        s += gen("c", max_tokens=3)
        s["c"]

    error = failing(llm, too_long)
    assert error.line == here("too long")
    assert "the prompt has 300 tokens, the context holds 256" in str(error)


def test_an_error_that_nobody_waits_for_is_raised(llm: LLM) -> None:
    def forgets(s: State) -> None:
        for fork in s.fork(3):
            fork += "abc" * 100 + gen("a", max_tokens=3)  # forgotten

    assert failing(llm, forgets).line == here("forgotten")


def test_a_program_may_handle_the_error_of_a_call(llm: LLM) -> None:
    """The run fails all the same if the text holds a call that failed; a fork that failed can be left."""

    @program
    def careful(s: State) -> None:
        s += "abc"
        [fork] = s.fork(1)
        fork += "abc" * 100 + gen("a", max_tokens=3)
        try:
            fork["a"]
        except ProgramError:
            s += gen("b", max_tokens=2)

    state = careful.run(on=llm)
    assert len(state.sample("b").tokens) == 2


def test_ten_nested_programs_with_errors(llm: LLM) -> None:
    """Inline, as runs of their own, with calls open all around: the deepest line is told, and everything ends."""

    @program
    def nested(s: State, depth: int, inline: bool) -> None:
        s += f"{depth}abc"
        for fork in s.fork(2):
            fork += gen("open", max_tokens=LONG)
        if depth == 0:
            raise KeyError("deepest")  # deepest
        if inline:
            nested(s, depth - 1, inline)
        else:
            nested.run(depth - 1, inline)

    for inline in (True, False):
        error = None
        try:
            nested.run(9, inline, on=llm)
        except ProgramError as raised:
            error = raised
        assert error is not None
        assert error.line == here("deepest")
        assert "KeyError: 'deepest'" in str(error)
    assert str(error).startswith("program nested, line")
    states = nested.run_batch([(3, True), (3, False), (9, False)], on=llm)
    assert all("deepest" in str(state.error) for state in states)


def test_the_callers_of_a_program_are_told(llm: LLM) -> None:
    @program
    def inner(s: State) -> None:
        s["missing"]

    def outer(s: State) -> None:
        inner(s)

    assert str(failing(llm, outer)).startswith("program inner (called by outer), line ")


def test_runs_that_run_themselves_for_ever(llm: LLM) -> None:
    @program
    def again(s: State) -> None:
        again.run()

    with pytest.raises(ProgramError, match="nested deeper than 32"):
        again.run(on=llm)

    @program
    def inline(s: State) -> None:
        inline(s)

    with pytest.raises(ProgramError, match="RecursionError"):
        inline.run(on=llm)


def test_max_calls(llm: LLM) -> None:
    """Also for a program that swallows every error."""

    def stubborn(s: State) -> None:
        for i in range(1000):
            with contextlib.suppress(Exception):
                s.fork(1)[0].__iadd__("abc" + gen(f"a{i}", max_tokens=LONG))

    error = failing(llm, stubborn, max_calls=5)
    assert "it made 5 calls, as many as max_calls allows" in str(error)


def test_timeout_while_a_call_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(s: State) -> None:
        s += "abc" + gen("a", max_tokens=LONG)
        s["a"]

    step, ends = llm.engine.step, list[Finish]()

    def slower() -> list[TokenEvent]:
        time.sleep(0.01)
        events = step()
        ends.extend(event.finish for event in events if event.finish is not None)
        return events

    monkeypatch.setattr(llm.engine, "step", slower)
    assert "did not end within its timeout of 0.1 s" in str(failing(llm, slow, timeout=0.1))
    assert ends == [Finish.ABORT]


def test_a_stopped_run_stops_those_inside_it(llm: LLM) -> None:
    inside = []

    @program
    def endless(s: State) -> None:
        inside.append(s)
        while True:
            [fork] = s.fork(1)
            fork += "abc" + gen("a", max_tokens=LONG)
            fork["a"]

    def outer(s: State) -> None:
        endless.run(max_calls=10**6)

    assert str(failing(llm, outer, timeout=0.2)).endswith("it did not end within its timeout of 0.2 s")
    assert "the program outer that runs it was stopped" in str(inside[0].error)


def test_timeout_of_a_body_that_computes_for_ever(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.5)

    def spins(s: State) -> None:
        s += "abc" + gen("a", max_tokens=LONG)
        while True:
            pass

    assert "timeout of 0.05 s" in str(failing(llm, spins, timeout=0.05))


def test_a_body_that_does_not_return_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.05)

    def sleeps(s: State) -> None:
        time.sleep(0.6)

    error = failing(llm, sleeps, timeout=0.05)
    assert "its thread still runs: code of it does not return" in str(error)


@pytest.fixture
def listens() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, also in tests that a shell runs in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["run", "batch", "with"])
def test_an_interrupt_ends_everything(llm: LLM, how: str, listens: None) -> None:
    """By Ctrl-C, which raises KeyboardInterrupt in the main thread."""
    went_on: list[State] = []
    interrupts = threading.Semaphore(1)  # a second Ctrl-C would end the waiting for the end

    @program
    def endless(s: State) -> None:
        went_on.append(s)
        s += "abc" + gen("a", max_tokens=3)
        if len(went_on) == (1 if how != "batch" else 3) and interrupts.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while True:
            [fork] = s.fork(1)
            fork += gen("b", max_tokens=LONG)
            fork["b"]

    def streams() -> None:
        with endless.start(on=llm) as state:
            list(state.stream("never"))

    ways = {
        "run": lambda: endless.run(on=llm),
        "batch": lambda: endless.run_batch([()] * 5, on=llm, at_once=3),
        "with": streams,
    }
    with pytest.raises(KeyboardInterrupt):
        ways[how]()
    assert all(state.done for state in went_on)
    assert all("interrupted" in str(state.error) or "stopped" in str(state.error) for state in went_on)


def test_a_dead_engine_fails_every_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    @program
    def forks(s: State) -> None:
        s += "abc"
        for fork in s.fork(3):
            fork += gen("a", max_tokens=LONG)

    def breaks() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(llm.engine, "_step", breaks)
    try:
        with pytest.raises(ProgramError, match="the engine stopped after an error") as caught:
            forks.run(on=llm)
        assert isinstance(caught.value.__cause__, EngineDead)
        with pytest.raises(ProgramError, match="engine stopped"):
            forks.run(on=llm)
    finally:
        llm.engine.dead = None


def test_a_thread_that_breaks_fails_every_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call waits for ever, also where the cause is a fault of this package."""

    @program
    def forks(s: State) -> None:
        s += "A text that is long enough for a page."
        for fork in s.fork(3):
            fork += gen("a", max_tokens=4)

    def breaks(*given: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(Prefixes, "reads", breaks)
    with pytest.raises(ProgramError, match="planted"):
        forks.run(on=llm)
    for _ in range(400):  # what the broken thread left in the engine
        if not llm.engine.has_work:
            break
        llm.engine.step()


WRONG: dict[str, tuple[Any, str]] = {
    "unknown variable": (lambda s: s["x"], "unknown variable 'x'; nothing is generated yet"),
    "misspelt variable": (lambda s: (s.__iadd__("a" + gen("name", max_tokens=1)), s["nmae"]), "did you mean 'name'"),
    "twice": (
        lambda s: s.__iadd__("a" + gen("x", max_tokens=1) + gen("x", max_tokens=1)),
        "the variable 'x' is generated twice",
    ),
    "two forms": (lambda s: gen("x", regex="a", choices=["b"]), "gen has regex and choices; an answer has one form"),
    "a bad regex": (lambda s: s.__iadd__("a" + gen("x", regex="(")), "regex"),
    "fork(0)": (lambda s: s.fork(0), "the number of forks must be between 1 and 1024, not 0"),
    "join of a foreign state": (lambda s: s.join(s.fork(1)[0].fork(1)), "item 0 of join is no fork of this state"),
    "join of no state": (lambda s: s.join(["a"]), "item 0 of join is no fork of this state"),
    "join of nothing": (lambda s: s.join([]), "join takes a list of forks, each once"),
    "join of a fork twice": (lambda s: s.join(s.fork(1) * 2), "each once"),
    "no text": (lambda s: s.__iadd__(3), "a state takes texts, gen, select and messages, not int"),
    "nothing before a gen": (lambda s: s.__iadd__(gen("a")), "the prompt is empty"),
    "nothing before a select": (lambda s: s.__iadd__(select("a", ["x"])), "select needs text before it"),
    "a message after text": (lambda s: s.__iadd__("abc" + user("x")), "a message after plain text"),
    "text outside": (lambda s: s.__iadd__(user("x") + "abc"), "after user() belongs to no message"),
    "gen outside": (lambda s: s.__iadd__(system("x") + gen("a")), "after system() belongs to no message"),
    "assistant first": (lambda s: s.__iadd__(assistant(gen("a"))), "assistant() is the first message"),
    "a state that is no text": (lambda s: s.__iadd__(s), "not State"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes(llm: LLM, what: str) -> None:
    body, message = WRONG[what]

    def wrong(s: State) -> None:
        body(s)

    error = failing(llm, wrong)
    assert message in str(error)
    assert error.file == "test_endings.py"


def test_joined_forks_and_ended_runs_are_read_only(llm: LLM) -> None:
    @program
    def joins(s: State) -> State:
        s += "abc"
        forks = s.fork(2)
        forks[0] += gen("a", max_tokens=1)
        s.join(forks)
        for again in (lambda: s.join(forks), lambda: forks[0].__iadd__("x"), lambda: forks[1].fork(1)):
            with pytest.raises(InvalidRequest, match="joined"):
                again()
        return forks[0]

    state = joins.run(on=llm)
    assert state.value["a"] == state["a"][0]
    for late in (lambda: state.__iadd__("x"), lambda: state.fork(2), lambda: state.join([])):
        with pytest.raises(
            InvalidRequest, match="the program joins has ended: its state can be read, but not extended"
        ):
            late()
    with pytest.raises(UnknownOption, match="unknown variable 'b'"):
        state["b"]
    state.stop()
    assert state.error is None, "a run that has ended cannot be stopped"


def test_a_run_that_is_stopped_aborts_what_runs_and_what_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More calls than the engine runs at once, and some that wait for another's prefix: none decodes to its end."""
    aborted, abort, validate, encoded = set[str](), llm.engine.abort, llm.engine.validate, list[str]()
    monkeypatch.setattr(llm.engine, "abort", lambda name: (aborted.add(name), abort(name)))
    monkeypatch.setattr(llm.engine, "validate", lambda each: (validate(each), encoded.append(each.id)))
    step, count = llm.engine.step, llm.engine.max_sequences + 3
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.02), step())[1])  # no call ends before the stop

    @program
    def crowd(s: State) -> None:
        s += "abc" * 20
        for fork in s.fork(count):
            fork += gen("open", max_tokens=LONG)

    state = crowd.start(on=llm)
    deadline = time.monotonic() + 20
    while len(encoded) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    state.stop()
    assert isinstance(state.error, ProgramError)
    assert count - 1 <= len(aborted) <= len(encoded) == count, "every call of the run, but one that is on its way"


def test_how_a_program_is_not_run(llm: LLM) -> None:
    @program
    def asks(s: State, question: str) -> None:
        s += question

    with pytest.raises(InvalidRequest, match=r"asks is a program: type asks\.run\(…, on=llm\)"):
        asks("why")
    with pytest.raises(InvalidRequest, match=r"runs on an LLM or a Remote, not on nothing"):
        asks.run("why")
    with pytest.raises(InvalidRequest, match="not on str"):
        asks.run("why", on="smollm2")
    with pytest.raises(InvalidRequest, match="the arguments of asks do not fit: missing a required argument"):
        asks.run(on=llm)
    with pytest.raises(InvalidRequest, match="do not fit: got an unexpected keyword argument 'sed'"):
        asks.run("why", on=llm, sed=1)
    with pytest.raises(InvalidRequest, match="item 1 of run_batch must be a dict of keyword arguments or a tuple"):
        asks.run_batch([("why",), "why"], on=llm)
    for wrong in ({"seed": "x"}, {"max_calls": 0}, {"timeout": 0}, {"timeout": float("nan")}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            asks.run("why", on=llm, **wrong)
    with pytest.raises(InvalidRequest, match="at_once must be between"):
        asks.run_batch([("why",)], on=llm, at_once=0)
    with pytest.raises(InvalidRequest, match="an address such as"):
        Remote("localhost")


def test_what_is_no_program() -> None:
    async def later(s: State) -> None: ...

    def takes_seed(s: State, seed: int) -> None: ...

    for body, message in (
        (later, "a plain function"),
        (takes_seed, "the parameter seed is an option of every run"),
        (lambda: None, "it has no parameter"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            program(body)
