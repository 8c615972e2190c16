"""Law 5: every request ends once: stop, length, abort, deadline, error, engine death.

`Run` (tests/runs.py) fails on a second ending and on a word after it; these tests bring every kind of ending about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from paceline.errors import EngineDead
from paceline.kernels.base import Batch, Output
from paceline.types import OFF, Finish, Request, SamplingParams, Speculation
from tests.rig import build
from tests.rig_drafters import RIGS
from tests.runs import Run, Told, prompt, run
from tests.tiny_models import CONTEXT, TARGET, tiny_tokenizer
from tests.toy import ToyForward

Way = Mapping[str, Any]  # to build an engine
WAYS: Mapping[str, Way] = {
    "plain": {},
    "good": {"drafters": {"good": RIGS["model"]["good"]}},
    "device": {"on_device": {"good": TARGET}},
    "device plain": {"on_device": {}},
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
every = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def ask(id: str = "a", **changes: Any) -> Request:
    return Request(id=id, prompt=prompt(9, seed=3), sampling=replace(GREEDY, **changes))


def alone(way: Way, request: Request, **options: Any) -> Told:
    return run(build("toy", **way, **options), [request])[request.id, 0]


@every
def test_length(way: Way) -> None:
    for count in (1, 2, 7, 8, 9):
        told = alone(way, ask(max_tokens=count))
        assert (told.finish, len(told.tokens), told.stop) == (Finish.LENGTH, count, None)


@every
def test_the_context_is_full(way: Way) -> None:
    told = alone(way, ask(max_tokens=None), max_context=40)
    assert (told.finish, len(told.tokens)) == (Finish.LENGTH, 40 - 9)
    told = alone(way, Request(id="a", prompt=prompt(39, seed=3), sampling=GREEDY), max_context=40)
    assert (told.finish, len(told.tokens)) == (Finish.LENGTH, 1)


@every
def test_stop_ids_and_the_end_of_sequence(way: Way) -> None:
    whole = alone({}, ask())
    for place in range(12):
        token = whole.tokens[place]
        first = whole.tokens.index(token)
        for request, eos_ids in ((ask(stop_ids=(token,)), ()), (ask(), (token,))):
            told = alone(way, request, eos_ids=eos_ids)
            assert (told.finish, told.stop) == (Finish.STOP, token)
            assert told.tokens == whole.tokens[: first + 1]
        told = alone(way, ask(ignore_eos=True), eos_ids=(token,))
        assert (told.finish, told.tokens) == (Finish.LENGTH, whole.tokens)


@every
def test_stop_strings(way: Way) -> None:
    """Wherever a stop string begins and ends in tokens and drafts, the text is the same, and so is the last token."""
    tokenizer = tiny_tokenizer()
    whole = alone({}, ask(), tokenizer=tokenizer)
    assert whole.text == tokenizer.decode(whole.tokens, continuation=True)
    for start in range(0, len(whole.text) - 3, 3):
        stop = whole.text[start : start + 3]
        if "�" in stop:
            continue
        told = alone(way, ask(stop=(stop, "never said")), tokenizer=tokenizer)
        assert (told.finish, told.stop) == (Finish.STOP, stop)
        assert told.text == whole.text[: whole.text.index(stop)]
        assert told.tokens == whole.tokens[: len(told.tokens)]
        assert stop in tokenizer.decode(told.tokens)
        assert stop not in tokenizer.decode(told.tokens[:-1])


@every
def test_what_stops_a_text_is_part_of_it_only_if_asked_for(way: Way) -> None:
    tokenizer = tiny_tokenizer()
    whole = alone({}, ask(), tokenizer=tokenizer)
    for place in (0, 4, 9):
        ids = (whole.tokens[place],)
        upto = whole.tokens[: whole.tokens.index(ids[0]) + 1]
        for include, shown in ((False, upto[:-1]), (True, upto)):
            told = alone(way, ask(stop_ids=ids, include_stop=include), tokenizer=tokenizer)
            assert (told.tokens, told.text) == (upto, tokenizer.decode(shown, continuation=True))
    stop = whole.text[5:8]
    end = whole.text.index(stop)
    for include in (False, True):
        told = alone(way, ask(stop=stop, include_stop=include), tokenizer=tokenizer)
        assert told.text == whole.text[: end + 3 * include]


@every
@pytest.mark.parametrize("when", ["waiting", "prefilling", "running"])
def test_abort(way: Way, when: str) -> None:
    rig = build("toy", **way, max_sequences=3)
    going = Run(rig)
    others = [ask(f"other{i}", n=1) for i in range(2)]
    victim = Request(id="a", prompt=prompt(90, seed=3), sampling=replace(GREEDY, n=2, temperature=1.0))
    going.submit([*others, victim, ask("late")])
    for _ in range({"waiting": 0, "prefilling": 2, "running": 8}[when]):
        going.step()
    for _ in range(2):  # a second abort says nothing
        rig.engine.abort("a")
    rig.engine.abort("never heard of")
    told = going.finish()
    assert {told["a", 0].finish, told["a", 1].finish} == {Finish.ABORT}
    assert bool(told["a", 0].tokens) == (when == "running")
    assert when == "running" or told["a", 1].tokens == []
    for name in ("other0", "other1", "late"):
        assert told[name, 0].finish is Finish.LENGTH
    rig.engine.abort("other0")
    rig.engine.abort("a")
    assert not rig.engine.has_work
    assert rig.engine.stats.finished == 5


@every
def test_abort_gives_out_what_was_held_back(way: Way) -> None:
    """Text that may have become a stop string belongs to the answer when it ends otherwise."""
    tokenizer = tiny_tokenizer()
    whole = alone({}, ask(), tokenizer=tokenizer)
    rig = build("toy", **way, tokenizer=tokenizer)
    going = Run(rig)
    going.submit([ask(stop=(whole.text + "!",))])
    while not going.told["a", 0].tokens:
        going.step()
    assert going.told["a", 0].text == ""
    rig.engine.abort("a")
    told = going.finish()["a", 0]
    assert told.text == tokenizer.decode(told.tokens, continuation=True)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@every
def test_deadlines(way: Way) -> None:
    """One passes while the request runs, one while it waits, one never."""
    clock = Clock()
    rig = build("toy", **way, max_sequences=2, clock=clock)
    going = Run(rig)
    deadlines = {"running": 5.0, "long": 50.0, "waiting": 5.0, "none": None}
    going.submit(replace(ask(name), deadline=deadline) for name, deadline in deadlines.items())
    going.step()
    going.step()
    clock.now += 5.0
    going.step()
    assert going.told["running", 0].finish is None, "a deadline is over when it has passed, not when it is reached"
    clock.now += 0.5
    going.step()
    assert going.told["running", 0].finish is Finish.DEADLINE
    assert going.told["waiting", 0].finish is Finish.DEADLINE
    assert going.told["waiting", 0].tokens == []
    told = going.finish()
    assert {told[name, 0].finish for name in ("long", "none")} == {Finish.LENGTH}
    assert told["running", 0].stats.time_total == 5.5


class Failing(ToyForward):
    """Raises after so many passes."""

    passes = 4

    def __call__(self, batch: Batch) -> Output:
        self.passes -= 1
        if not self.passes:
            raise ArithmeticError("the machine is on fire")
        return super().__call__(batch)


@every
def test_engine_death(way: Way) -> None:
    """All that runs or waits ends with the error, once; what ended before is left alone; nobody else may come."""
    rig = build("toy", **way, forward=Failing(num_pages=40), max_sequences=3)
    going = Run(rig)
    going.submit([ask("quick", max_tokens=1), ask("many", n=4, temperature=1.0), ask("waiting", n=2)])
    told = going.finish()
    assert told["quick", 0].finish is Finish.LENGTH
    assert told["many", 0].tokens
    for key, each in told.items():
        if key[0] != "quick":
            assert (each.finish, each.error) == (Finish.ERROR, "ArithmeticError: the machine is on fire")
    assert rig.engine.dead == "ArithmeticError: the machine is on fire"
    with pytest.raises(EngineDead, match="the machine is on fire"):
        rig.engine.submit(ask("late"))
    assert rig.engine.step() == []


@every
def test_every_sample_ends(way: Way) -> None:
    """Of n answers each has its own end."""
    request = replace(ask(n=20, temperature=1.0, stop_ids=(3, 4)), speculation=Speculation())
    told = run(build("toy", **way), [request])
    assert len(told) == 20
    assert {each.finish for each in told.values()} == {Finish.STOP, Finish.LENGTH}


def test_nothing_to_do_is_no_trouble() -> None:
    rig = build("toy")
    assert not rig.engine.has_work
    assert rig.engine.step() == []
    rig.engine.check()


@pytest.mark.parametrize("way", ["good", "device"])
def test_the_longest_request_of_all(way: str) -> None:
    """It needs every page there is, beside others that want some."""
    rig = build("toy", **WAYS[way], num_pages=CONTEXT // 16 + 1)
    asked = [replace(ask(name, max_tokens=None), speculation=OFF if name == "b" else Speculation()) for name in "abc"]
    told = run(rig, asked)
    assert {len(each.tokens) for each in told.values()} == {CONTEXT - 9}
    assert told["a", 0].tokens == told["b", 0].tokens == told["c", 0].tokens
    assert rig.engine.stats.preemptions > 0
