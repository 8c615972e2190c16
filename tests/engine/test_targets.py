"""Latency targets: what a late request is granted beside others, and what it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.engine.governor import Governor, Terms
from paceline.engine.pace import Pace
from paceline.engine.targets import (
    GRANTED_TOKENS,
    MAX_WORTH,
    MEASURED_TOKENS,
    NO_GRANTS,
    Grants,
    grants_of,
    lateness,
)
from paceline.types import OFF, Off, OffKind, Request, SamplingParams, SequenceStats, Speculation
from tests.engine.test_copies import BATCH, REQUESTS, Copier, machine, scripts
from tests.engine.test_drafting_batches import measure
from tests.odd_drafters import Scripted
from tests.runs import Run, plain, run, tokens_of

NEVER, ALWAYS = 1e-9, 600.0  # targets in seconds that no answer and every answer keeps to


def beside(*latenesses: float) -> Any:
    """Return sequences that are so late, in the order of their keys."""
    return [SimpleNamespace(key=key, lateness=late) for key, late in enumerate(latenesses)]


def granted(sequences: Any, *, guarded: bool = True, slower: float = 0.0) -> Any:
    return grants_of(sequences, guarded=guarded, slower=lambda drafting: slower * drafting)


# ── what is granted ──


def test_a_late_request_is_worth_as_many_times_more_as_it_is_late() -> None:
    assert granted(beside(0.0, 1.5, 0.9, 0.0)).worth == {1: 1.5}
    assert granted(beside(0.0, 99.0, *[0.0] * 9)).worth == {1: MAX_WORTH}


def test_nobody_is_worth_more_than_its_share_of_the_batch() -> None:
    """Alone, a request is served best by the prices as they are; so are requests that are all late."""
    assert granted(beside(3.0)) == NO_GRANTS
    assert granted(beside(3.0, 2.0, 5.0)) == NO_GRANTS
    assert granted(beside(3.0, 0.0)).worth == {0: 2.0}
    assert granted(beside(3.0, 0.0, 3.0)).worth == {0: 1.5, 2: 1.5}


@pytest.mark.parametrize(
    ("latenesses", "guarded", "free"),
    [
        ((3.0, 0.0), True, {0}),
        ((3.0, 0.0), False, set()),
        ((3.0, 0.0, 1.2, 0.5), True, set()),
        ((3.0, 0.0, 1.2, 0.5, 0.0, 0.0, 0.0, 0.0), True, {0, 2}),
        ((3.0, 3.0, 0.0, 0.0, 0.0), True, set()),
    ],
)
def test_late_requests_pass_the_guard_of_a_batch_if_they_are_few(
    latenesses: Sequence[float], guarded: bool, free: set[int]
) -> None:
    assert set(granted(beside(*latenesses), guarded=guarded).unguarded) == free


@pytest.mark.parametrize(("slower", "grants"), [(0.1, True), (0.3, False)])
def test_nothing_is_granted_that_makes_another_request_late(slower: float, grants: bool) -> None:
    assert bool(granted(beside(2.0, 0.8, 0.0), slower=slower).worth) is grants


def test_requests_within_their_targets_are_as_any_other() -> None:
    assert granted(beside(1.0, 0.5, 0.0)) == NO_GRANTS


def test_the_time_per_token_counts_from_the_first_token_on() -> None:
    sequence: Any = SimpleNamespace(
        counters=SimpleNamespace(first_token=10.0), tokens=[0] * (5 + MEASURED_TOKENS + 1), prompt_length=5
    )
    assert lateness(sequence, target=0.5, now=10.0 + MEASURED_TOKENS) == 2.0
    sequence.tokens.pop()
    assert lateness(sequence, target=0.5, now=99.0) == 0.0, "too few tokens to tell"
    sequence.counters.first_token = None
    assert lateness(sequence, target=0.5, now=99.0) == 0.0


# ── in an engine ──


class Head(Scripted):
    """Knows the answers, and drafts as much of them as it may. Not a lookup: a batch that must not draft has none."""

    name = "head"
    ends_drafts = True

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(texts, wrong=0.0)
        self.asks: list[Ask] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asks += asks
        return [Draft(tuple(self._next(ask.tokens)[: ask.max_draft])) for ask in asks]


class Together(Copier):
    """Remembers which asks came in one call."""

    def __init__(self, texts: Sequence[Sequence[int]], *, confidence: float) -> None:
        super().__init__(texts, confidence=confidence)
        self.calls: list[Sequence[Ask]] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls.append(asks)
        return super().propose(asks)


def targets(*seconds: float | None) -> list[Request]:
    """Return four requests with these targets."""
    return [
        replace(request, speculation=Speculation(target_tpot=target))
        for request, target in zip(REQUESTS, seconds, strict=True)
    ]


def drafted(requests: Sequence[Request], **options: Any) -> list[int]:
    """Run the requests at once in a batch that must not draft, and return how many tokens each drafted."""
    head = Head(scripts())
    rig = machine(head, **options)
    measure(rig)
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(run(machine(), plain(REQUESTS)))
    return [told[request.id, 0].stats.drafted for request in requests]


@pytest.mark.parametrize("measured", [True, False], ids=["measured speed-up", "not measured"])
def test_a_late_request_drafts_where_its_batch_must_not(measured: bool) -> None:
    counts = drafted(targets(NEVER, None, None, ALWAYS), measure_speedup=measured)
    assert counts[0] > 8
    assert counts[1:] == [0, 0, 0]


@pytest.mark.parametrize("seconds", [(None,) * 4, (ALWAYS,) * 4, (NEVER,) * 4, (NEVER, NEVER, NEVER, None)])
def test_without_a_late_one_or_with_too_many_the_batch_stays_plain(seconds: Sequence[float | None]) -> None:
    assert sum(drafted(targets(*seconds))[:2]) == 0


def test_limits_of_the_user_hold_for_late_requests() -> None:
    late = targets(NEVER, None, None, None)
    assert drafted(late, max_draft_batch=BATCH - 1)[1:] == [0, 0, 0]
    assert drafted(late, max_draft_batch=BATCH - 1)[0] < drafted(late)[0]
    assert drafted([replace(late[0], speculation=replace(OFF, target_tpot=NEVER)), *late[1:]])[0] == 0
    short = replace(late[0], speculation=replace(late[0].speculation, max_draft=1))
    assert 0 < drafted([short, *late[1:]])[0] < drafted(late)[0]


def test_a_drafter_that_is_out_stays_out() -> None:
    head = Head(scripts())
    rig = machine(head)
    rig.engine.drafters["head"].out = "broken"
    measure(rig)
    told = run(rig, targets(NEVER, None, None, None))
    assert told["0", 0].stats.drafted == 0
    assert told["0", 0].stats.off_reason == "broken"


def test_the_steps_of_a_late_request_count_on_no_side_of_the_measured_speed_up() -> None:
    rig = machine(Copier(scripts()), measure_speedup=True)
    measure(rig)
    governor, sides, going = rig.engine._governor, {True: [], False: []}, Run(rig)
    going.submit(targets(NEVER, None, None, None))
    while rig.engine.has_work:
        going.step()
        if governor.batch == BATCH:
            sides[bool(governor.grants.unguarded)].append(governor.truth.side)
    assert sides[True]
    assert set(sides[True]) == {None}
    assert any(side is not None for side in sides[False])


def test_a_drafter_hears_what_the_target_said_while_a_late_request_drafts() -> None:
    """In other steps of a batch that must not draft it hears nothing: nobody is going to ask it."""
    head = Head(scripts())
    head.hears_logits, heard = True, []
    head.hear = lambda verified: heard.append(rig.engine._governor.grants.unguarded)  # type: ignore[method-assign]
    rig = machine(head)
    measure(rig)
    run(rig, targets(NEVER, None, None, None))
    assert any(heard)


def test_drafts_of_a_late_request_are_short_and_priced_beside_all_rows_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, priced = Head(scripts()), []

    def row_prices(self: Governor, sequences: int) -> tuple[float, ...]:
        priced.append((sequences, self.batch))
        return self.cost.row_prices(sequences)

    rig = machine(head, max_draft=16, measure_speedup=True)  # else a batch may copy, and prices are of that
    measure(rig)
    monkeypatch.setattr(Governor, "row_prices", row_prices)
    governor, beside, going = rig.engine._governor, [], Run(rig)
    going.submit(targets(NEVER, None, None, None))
    while rig.engine.has_work:
        asked = len(head.asks)
        going.step()
        beside += [(ask, governor.cost.row_prices(BATCH)) for ask in head.asks[asked:] if governor.grants.unguarded]
    asks = [ask for ask, _ in beside]
    assert max(ask.max_draft for ask in asks) == GRANTED_TOKENS
    worth, prices = min(MAX_WORTH, BATCH), next(prices for _, prices in beside if prices)
    first = next(ask for ask in asks if ask.row_prices)
    assert first.row_prices[0] * worth == pytest.approx(prices[0], rel=0.2)
    assert (BATCH, BATCH) in priced
    assert all(sequences == batch for sequences, batch in priced)


def test_both_prices_of_a_late_request_are_divided() -> None:
    governor = machine(Head(scripts())).engine._governor
    governor.grants = Grants({7: 2.5}, ())
    terms = governor._granted(Terms(None, 16, True, entry=0.5, price=0.25), Pace(), key=7)
    assert (terms.entry, terms.price, terms.longest) == (0.2, 0.1, 16)
    governor.grants = Grants({7: 2.5}, {7})
    assert governor._granted(Terms(None, 16, True), Pace(), key=7).longest == GRANTED_TOKENS


def test_copies_beside_a_late_request_are_asked_for_apart_and_at_other_prices() -> None:
    copier = Together(scripts(), confidence=1.0)
    rig = machine(copier)
    measure(rig)
    run(rig, targets(NEVER, None, None, None))
    assert all(len({ask.copies_only for ask in asks}) == 1 for asks in copier.calls)
    late = [ask for ask in copier.asks if not ask.copies_only and ask.row_prices and ask.left > 6]
    others = [ask for ask in copier.asks if ask.copies_only]
    assert late
    assert {ask.key for ask in late}.isdisjoint({ask.key for ask in others[BATCH * MEASURED_TOKENS :]})
    ratios = [others[-1].row_price / ask.row_price for ask in late]
    assert max(ratios) == pytest.approx(MAX_WORTH, rel=0.5)


# ── what an answer tells ──


@pytest.mark.parametrize(("target", "met"), [(NEVER, False), (ALWAYS, True), (None, None)])
def test_an_answer_says_whether_its_target_was_met(target: float | None, met: bool | None) -> None:
    request = replace(REQUESTS[0], speculation=Speculation(target_tpot=target))
    stats = run(machine(Head(scripts())), [request])["0", 0].stats
    assert (stats.target_tpot, stats.target_met) == (target, met)
    assert stats.time_per_token == (stats.time_total - stats.time_to_first) / (stats.output_tokens - 1)


def test_one_token_has_no_time_per_token() -> None:
    stats = SequenceStats(output_tokens=1, time_total=3.0, target_tpot=1.0)
    assert (stats.time_per_token, stats.target_met) == (None, None)


def test_a_pause_for_cost_ends_when_the_request_is_late() -> None:
    """Beside others a drafted token does not pay; by the prices of a late request it does."""
    rig = machine(Head(scripts()), measure_speedup=False)
    governor = rig.engine._governor
    going = Run(rig)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    going.submit([replace(each, sampling=sampling) for each in targets(NEVER, None, None, None)])
    for _ in range(3):
        going.step()
    sequence = rig.engine._scheduler.running[0]
    pace = sequence.pace
    for _ in range(3):
        governor.learn(sequence, drafter="head", drafted=1, accepted=1)
    governor._pause(sequence, Off(OffKind.WOULD_NOT_PAY, "dear"))
    assert pace.paused(len(sequence.tokens) - sequence.prompt_length)
    before = sequence.counters.drafted
    for _ in range(MEASURED_TOKENS + 2):
        going.step()
    assert sequence.counters.drafted > before
    going.finish()
