"""Steps in flight: launched one ahead, landed one late, and no hindrance to other sequences.

`WatchedRounds` fails a test when a lane is rewritten or a page changes hands under a step in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.kernels.base import PAGE_SIZE
from paceline.rules import BUILT_IN
from paceline.types import OFF, Finish, Origin, Request, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS
from tests.runs import Key, Run, Told, plain, prompt, run, tokens_of
from tests.tiny_models import TARGET
from tests.watched_rounds import WatchedRounds

GOOD = {"good": TARGET}


def ask(id: str = "a", length: int = 9, *, tokens: int = 24, text: int = 3, **changes: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": tokens, **changes})
    return Request(id=id, prompt=prompt(length, seed=text), sampling=sampling)


def rounds_of(rig: Rig) -> WatchedRounds:
    assert rig.rounds is not None
    return rig.rounds


def test_one_step_runs_while_the_next_is_planned() -> None:
    rig = build("toy", on_device={})
    going = Run(rig)
    going.submit([ask(tokens=5)])
    counts = []
    while rig.engine.has_work:
        counts.append(sum(len(event.tokens) for event in going.step()))
    assert counts == [0, 1, 1, 1, 1, 1]
    assert rounds_of(rig).most_in_flight == 2
    assert rounds_of(rig).launches == rig.engine.stats.steps == 5
    assert rig.engine.stats.wasted == 0
    going.check_over()


@pytest.mark.parametrize("on_device", [None, {}, GOOD], ids=["host", "plain", "good"])
def test_a_prompt_may_be_computed_alone(on_device: Mapping[str, Any] | None) -> None:
    """With max_tokens 0, also if it has one token, and beside sequences that go on."""
    rig = build("toy", RIGS["ngram"] if on_device is None else {}, on_device=on_device, max_step_tokens=12)
    alone = [ask(f"{length}", length, tokens=0, text=length) for length in (1, 9, 40)]
    told = run(rig, [*alone, ask()])
    for request in alone:
        assert (told[request.id, 0].tokens, told[request.id, 0].finish) == ([], Finish.LENGTH)
    assert told["a", 0].tokens == run(build("toy"), [ask()])["a", 0].tokens


@pytest.mark.parametrize("on_device", [{}, GOOD, {"noisy": DEVICE_RIGS["noisy"]}], ids=["plain", "good", "noisy"])
def test_an_end_costs_at_most_one_step(on_device: Mapping[str, Any]) -> None:
    """By a stop nobody could foresee, and by a length that a draft reached early."""
    whole = run(build("toy"), [ask()])["a", 0].tokens
    for stop in whole[3:12]:
        rig = build("toy", on_device=on_device)
        told = run(rig, [ask(stop_ids=(stop,))])["a", 0]
        assert (told.finish, told.tokens) == (Finish.STOP, whole[: whole.index(stop) + 1])
        assert rig.engine.stats.wasted <= 1
        assert rounds_of(rig).launches == rig.engine.stats.steps
        assert told.stats.steps == rig.engine.stats.steps - rig.engine.stats.wasted
    rig = build("toy", on_device=on_device)
    run(rig, [ask(str(i), 5 + i, tokens=9 + i, text=i) for i in range(8)])
    assert rig.engine.stats.wasted <= 8 * bool(on_device)  # without drafts a length is foreseen


def test_statistics_of_a_flight() -> None:
    rig = build("toy", on_device=GOOD)
    told = run(rig, [ask(str(i), text=i) for i in range(3)])
    engine = rig.engine.stats
    for each in told.values():
        assert 0 < each.origins.count(Origin.ACCEPTED) <= each.stats.accepted  # the last round may go beyond the end
        assert each.stats.accepted == sum(each.stats.accepted_by_position)
        assert each.stats.drafter == "good"
    assert engine.drafted == sum(each.stats.drafted for each in told.values())
    assert engine.output_tokens == 3 * 24
    for name in ("time_plan", "time_draft", "time_verify", "time_accept", "time_emit", "time_host", "time_wait"):
        assert getattr(engine, name) > 0
    assert engine.time_host == pytest.approx(engine.time_plan + engine.time_emit)
    shared = sum(each.stats.time_verify for each in told.values())
    assert 0 < shared < engine.time_verify * 1.000001  # the rest went into steps that were wasted


OTHERS = ask("other", 20, text=1), ask("late", 30, text=2)


@functools.cache
def others() -> dict[Key, list[int]]:
    return tokens_of(run(build("toy"), OTHERS))


@pytest.mark.unwatched
@pytest.mark.parametrize("when", range(1, 12))
@pytest.mark.parametrize("on_device", [{}, GOOD], ids=["plain", "good"])
def test_abort_in_flight(when: int, on_device: Mapping[str, Any]) -> None:
    """Abort at any moment: dropped outcomes are never emitted, and the lane waits until the last step lands."""
    rig = build("toy", on_device=on_device, max_sequences=2, max_step_tokens=12)
    going = Run(rig)
    going.submit([OTHERS[0], ask("a", 40, tokens=60), OTHERS[1]])
    for _ in range(when):
        going.step()
    said = len(going.told["a", 0].tokens)
    rig.engine.abort("a")
    rig.engine.abort("a")
    told = going.finish()
    assert (told["a", 0].finish, len(told["a", 0].tokens)) == (Finish.ABORT, said)
    assert {key: told[key].tokens for key in others()} == others()


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_in_the_air() -> None:
    clock = Clock()
    rig = build("toy", on_device=GOOD, clock=clock)
    going = Run(rig)
    going.submit([replace(ask(), deadline=5.0), ask("other", text=1)])
    for _ in range(3):
        going.step()
    assert rig.engine._stepper.in_flight == 1
    clock.now = 6.0
    assert Finish.DEADLINE in [event.finish for event in going.step() if event.request_id == "a"]
    told = going.finish()
    assert told["other", 0].tokens == run(build("toy"), [ask("other", text=1)])["other", 0].tokens
    assert 1 <= rig.engine.stats.wasted <= 2


def test_pages_wait_for_the_last_flight() -> None:
    """An aborted sequence's pages are wanted by the next at once, and are still in flight."""
    rig = build("toy", on_device=GOOD, num_pages=6, max_context=64, prefix_cache=False)
    going = Run(rig)
    going.submit([ask("a", 60, tokens=4), ask("b", 60, tokens=4, text=1)])
    for _ in range(4):
        going.step()
    rig.engine.abort("a")
    assert rig.engine._scheduler.leaving
    assert rig.cache.pool.held > 0
    going.step()
    told = going.finish()
    assert told["b", 0].tokens == run(build("toy"), [ask("b", 60, tokens=4, text=1)])["b", 0].tokens


@pytest.mark.parametrize("pages", [8, 10, 12])
def test_who_must_yield_lands_first(pages: int) -> None:
    rig = build("toy", on_device={"noisy": DEVICE_RIGS["noisy"]}, num_pages=pages, max_context=100)
    requests = [ask(str(i), 20 + 5 * i, tokens=40, text=i) for i in range(5)]
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(run(build("toy"), requests))
    assert rig.engine.stats.preemptions > 0


PARAMETERS: Mapping[str, SamplingParams] = {
    "penalties": SamplingParams(temperature=0, presence_penalty=0.5),
    "bias": SamplingParams(temperature=0, logit_bias={5: 3.0}),
    "allowed": SamplingParams(temperature=0, allowed_tokens=tuple(range(40))),
    "min_tokens": SamplingParams(temperature=0, min_tokens=4, stop_ids=(3, 4, 5)),
    "logprobs": SamplingParams(temperature=0, logprobs=2),
    "prompt_logprobs": SamplingParams(temperature=0, prompt_logprobs=1),
}


@pytest.mark.unwatched
@pytest.mark.parametrize("kind", PARAMETERS)
def test_no_parameter_disturbs_the_others(kind: str) -> None:
    """It comes while others run on the device, and leaves before they end."""
    rig = build("toy", {"good": RIGS["model"]["good"]}, on_device=GOOD)
    going = Run(rig)
    others = [ask(str(i), 12 + i, tokens=60, text=i, temperature=i, seed=9) for i in (0, 1)]
    odd = Request(id="odd", prompt=prompt(20, seed=8), sampling=replace(PARAMETERS[kind], max_tokens=12))
    going.submit(others)
    for _ in range(4):
        going.step()
    going.submit([odd])
    told = going.finish()
    assert rounds_of(rig).launches == rig.engine.stats.steps
    expected = run(build("toy"), plain([*others, odd]))
    assert tokens_of(told) == tokens_of(expected)
    assert told["odd", 0].logprobs == expected["odd", 0].logprobs
    assert told["odd", 0].prompt_logprobs == expected["odd", 0].prompt_logprobs
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 0


@pytest.mark.parametrize("first", [PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE + 3])
def test_a_prompt_is_scored_from_a_token_on(first: int) -> None:
    sampling = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=1)
    whole = Request(id="whole", prompt=prompt(40, seed=8), sampling=sampling)
    rig = build("toy", on_device=GOOD)
    expected = run(rig, [whole])["whole", 0].prompt_logprobs
    told = run(rig, [replace(whole, id="part", scores_from=first)])["part", 0]
    assert expected is not None
    assert told.prompt_logprobs == (*(None,) * first, *expected[first:])
    assert told.stats.cached_tokens == (first - 1) // PAGE_SIZE * PAGE_SIZE


def test_the_device_runs_every_step() -> None:
    def check(speculation: Speculation, **changes: Any) -> None:
        drafters = {"good": RIGS["model"]["good"], "reader": RIGS["medusa"]["medusa"]}
        rig = build("toy", drafters, on_device=GOOD)
        run(rig, [replace(ask(**changes), speculation=speculation)])
        assert rounds_of(rig).launches == rig.engine.stats.steps > 0
        assert rounds_of(rig).most_in_flight == 2

    check(Speculation())
    check(Speculation(drafter="reader"))  # it reads hidden states on the host
    for rule in BUILT_IN:
        check(Speculation(rule=rule), temperature=1.0)
        check(replace(OFF, rule=rule), temperature=1.0)


def test_a_drafter_that_only_the_device_has() -> None:
    rig = build("toy", on_device=GOOD)
    told = run(rig, [ask(), ask("b", text=1, presence_penalty=0.3)])
    assert tokens_of(told) == tokens_of(run(build("toy"), [ask(), ask("b", text=1, presence_penalty=0.3)]))
    assert told["b", 0].stats.accepted == told["b", 0].stats.drafted > 0
    with pytest.raises(InvalidRequest, match="unknown drafter"):
        rig.engine.submit(replace(ask("c"), speculation=Speculation(drafter="bad")))


def catching_up(rig: Rig) -> list[int]:
    """Rows that only the drafter read, by launch."""
    return [sum(c.count for c in chunks if not c.target) for chunks in rounds_of(rig).chunks]


def test_the_drafter_reads_prompts_along() -> None:
    rig = build("toy", on_device=GOOD)
    run(rig, [ask(length=70)])
    assert sum(catching_up(rig)) == 0
    read = [(c.start, c.count) for chunks in rounds_of(rig).chunks for c in chunks if c.drafts]
    assert read == [(0, 32), (32, 32), (64, 6)]
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 10


def test_a_drafter_that_fell_behind_catches_up() -> None:
    """Three run, two may draft. When one has ended the others go on with a drafter that has missed something."""
    rig = build("toy", on_device=GOOD, max_draft_batch=2)
    run(rig, [ask("a", tokens=12), ask("b", tokens=50, text=1), ask("c", tokens=50, text=2)])
    behind = [rows for rows in catching_up(rig) if rows]
    assert len(behind) == 1
    assert 12 <= behind[0] <= 2 * 12
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 40


def test_catching_up_takes_several_steps_where_there_is_much_to_read() -> None:
    """The text was said without a drafter, and is now the beginning of a prompt."""
    rig = build("toy", on_device=GOOD, max_step_tokens=10)
    request = ask("a", 80, tokens=3)
    run(rig, [replace(request, speculation=OFF)])
    told = run(rig, [replace(request, id="b", sampling=replace(request.sampling, max_tokens=40))])["b", 0]
    assert told.stats.cached_tokens == 4 * PAGE_SIZE
    rows = [count for count in catching_up(rig) if count]
    assert max(rows) == 10
    assert sum(rows) >= 64
    assert told.stats.accepted == told.stats.drafted > 10
    assert told.tokens == run(build("toy"), [ask("b", 80, tokens=40)])["b", 0].tokens


def test_pages_that_the_drafter_has_read_are_not_read_again() -> None:
    rig = build("toy", on_device=GOOD)
    run(rig, [ask("a", 80)])
    before = len(rounds_of(rig).chunks)
    told = run(rig, [ask("b", 80)])["b", 0]
    assert told.stats.cached_tokens == 4 * PAGE_SIZE
    assert sum(catching_up(rig)) == 0
    read = [(c.start, c.count) for chunks in rounds_of(rig).chunks[before:] for c in chunks if c.drafts]
    assert read == [(64, 16)]
    assert told.stats.accepted == told.stats.drafted > 10


def test_drafters_take_turns() -> None:
    rig = build("toy", on_device={"good": TARGET, "ngram": DEVICE_RIGS["ngram"]})
    requests = [
        replace(ask(name, 30, tokens=40, text=i), speculation=Speculation(drafter=name))
        for i, name in enumerate(("good", "ngram"))
    ]
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(run(build("toy"), plain(requests)))
    good = told["good", 0].stats
    assert good.accepted == good.drafted > 10
    assert told["ngram", 0].stats.drafted > 0
    assert good.rounds < good.steps - 2, "it never went plain"


def test_what_is_measured_is_decoding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither prompts, nor chunks that a drafter catches up with, nor a step that somebody left."""
    rig = build("toy", on_device=GOOD, max_draft_batch=2)
    stepper, landings = rig.engine._stepper, []
    land = stepper.land
    monkeypatch.setattr(stepper, "land", lambda: landings.append(land()) or landings[-1])
    run(rig, [ask(str(i), tokens=tokens, text=i) for i, tokens in enumerate((5, 30, 30))])
    chunks = rounds_of(rig).chunks
    assert any(not chunk.target for each in chunks for chunk in each), "no drafter had anything to catch up with"
    assert any(landing.wasted for landing in landings)
    decoding = [not each and not landing.wasted for each, landing in zip(chunks, landings, strict=True)]
    assert [landing.decodes for landing in landings] == decoding


def test_a_prompt_beside_a_wasted_seat_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk that counts and one seat that does not are as many as one seat, and still no step of decoding."""
    rig = build("toy", on_device={}, max_step_tokens=8)
    stepper, landings = rig.engine._stepper, []
    land = stepper.land
    monkeypatch.setattr(stepper, "land", lambda: landings.append(land()) or landings[-1])
    going = Run(rig)
    going.submit([ask("a", tokens=40)])
    for _ in range(4):
        going.step()
    going.submit([ask("b", 60, text=1)])
    going.step()
    rig.engine.abort("a")
    going.finish()
    [wasted] = [landing for landing in landings if landing.wasted and landing.works]
    assert [work.samples for work in wasted.works] == [False]
    assert not wasted.decodes


def test_catching_up_keeps_to_the_rows_of_a_step() -> None:
    """Two sequences whose drafter is behind share them; the one that must wait drafts later."""
    rig = build("toy", on_device=GOOD, max_draft_batch=2, max_step_tokens=12)
    told = run(rig, [ask("a", tokens=20), ask("b", tokens=60, text=1), ask("c", tokens=60, text=2)])
    caught = [[chunk.count for chunk in each if not chunk.target] for each in rounds_of(rig).chunks]
    assert any(len(each) == 2 for each in caught)
    assert max(map(sum, caught)) <= 12
    assert all(told[name, 0].stats.accepted > 0 for name in ("b", "c"))


@pytest.mark.unwatched
@pytest.mark.parametrize("draft", [1, 3, 8])
def test_a_draft_beyond_the_context_stays_inside_its_lane(draft: int) -> None:
    """A step in flight may bring more than was foreseen: then the next goes beyond the end, but not far."""
    expected = run(build("toy"), [ask(tokens=43)])["a", 0].tokens
    for context in range(36, 44):
        options: dict[str, Any] = {"fixed_draft": True, "max_draft": draft, "max_context": context}
        rig = build("toy", on_device=GOOD, **options)
        told: Told = run(rig, [ask(tokens=100)])["a", 0]
        assert (told.finish, len(told.tokens)) == (Finish.LENGTH, context - 9)
        assert told.tokens == expected[: context - 9]
        assert rig.engine.stats.wasted <= 1
        state = rounds_of(rig)._state
        assert int(state.lengths.max()) <= context + draft + 2 == state.tokens.shape[1]
        asked = [seat.max_draft for seats in rounds_of(rig).seats for seat in seats]
        assert set(asked[:-2]) == {draft}, "drafts got shorter before the end"


def test_fixed_drafts() -> None:
    """Neither pace nor pauses: always as long as allowed, however wrong."""
    rig = build("toy", on_device={"bad": DEVICE_RIGS["bad"]}, fixed_draft=True, max_draft=5)
    told = run(rig, [ask(tokens=40)])["a", 0]
    asked = [seat.max_draft for seats in rounds_of(rig).seats for seat in seats]
    assert set(asked[:-6]) == {5}
    assert told.stats.pauses == 0
    assert told.tokens == run(build("toy"), [ask(tokens=40)])["a", 0].tokens


@pytest.mark.parametrize("chance", [0.5, 1.0])
def test_synthetic_acceptance(chance: float) -> None:
    options = {"fixed_draft": True, "max_draft": 4, "synthetic_acceptance": chance}
    rig = build("toy", on_device={"bad": DEVICE_RIGS["bad"]}, **options)
    run(rig, [ask(str(i), tokens=60, seed=i) for i in range(4)])
    assert rig.engine.stats.synthetic_acceptance == chance
    share = rig.engine.stats.accepted / rig.engine.stats.drafted
    assert share == 1.0 if chance == 1 else 0.1 < share < 0.4  # 0.5 + 0.25 + … of four
    with pytest.raises(InvalidRequest, match="synthetic_acceptance needs a device"):
        build("toy", {"bad": RIGS["model"]["bad"]}, synthetic_acceptance=chance)


def test_a_device_that_fails() -> None:
    """In the launch or when its outcome is wanted: everybody hears of it, and nothing is held."""
    for method in ("launch", "collect"):
        rig = build("toy", on_device=GOOD)
        going = Run(rig)
        going.submit([ask(), ask("b", text=1)])
        for _ in range(3):
            going.step()
        rig.engine.abort("b")

        def fail(*args: Any, **options: Any) -> None:
            raise RuntimeError("lost the device")

        setattr(rig.rounds, method, fail)
        told = going.finish()
        assert (told["a", 0].finish, told["a", 0].error) == (Finish.ERROR, "RuntimeError: lost the device")
        assert told["b", 0].finish is Finish.ABORT


def test_only_a_moment_without_work_improves_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording needs the device for itself."""
    rig, calls = build("toy", on_device={}), []
    monkeypatch.setattr(rounds_of(rig), "improve", lambda: bool(calls.append(1)) or len(calls) < 2)
    going = Run(rig)
    going.submit([ask(tokens=5)])
    while rig.engine.has_work:
        assert not rig.engine.improve()
        going.step()
    assert not calls
    assert [rig.engine.improve() for _ in range(2)] == [True, False]
    rig.engine.dead = "a test"
    assert not rig.engine.improve()
    assert not build("toy").engine.improve(), "the host has nothing to improve"
