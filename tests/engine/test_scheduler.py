"""Who gets how many rows of a step: everybody moves on, long prompts stall nobody, drafts keep within their limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.engine.governor import fair_split
from paceline.kernels.base import Batch, Output
from paceline.types import OFF, Finish, Request, SamplingParams, Speculation
from tests.odd_drafters import Silent
from tests.rig import build
from tests.rig_drafters import RIGS, always
from tests.runs import Run, prompt, run
from tests.toy import ToyForward


@hypothesis.given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 200))
def test_fair_split(wishes: list[int], total: int) -> None:
    shares = fair_split(wishes, total)
    assert sum(shares) == min(total, sum(wishes)), "nothing is left over while somebody wants it"
    for i, (wish, share) in enumerate(zip(wishes, shares, strict=True)):
        assert 0 <= share <= wish
        for other in range(len(wishes)):
            if share < wish:
                assert shares[other] <= share + 1, "somebody went short while another got more"
            if wishes[other] <= wishes[i]:
                assert shares[other] <= max(share, 0) or wishes[other] == wishes[i]


class Watched(ToyForward):
    """Remembers the number of rows of every pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: list[int] = []

    def __call__(self, batch: Batch) -> Output:
        self.rows.append(len(batch.tokens))
        return super().__call__(batch)


def ask(name: str, length: int = 5, *, tokens: int = 20, seed: int = 0, **speculation: Any) -> Request:
    return Request(
        id=name,
        prompt=prompt(length, seed=seed),
        sampling=SamplingParams(temperature=0, max_tokens=tokens),
        speculation=Speculation(**speculation),
    )


def spoke(going: Run) -> set[str]:
    """Who says something in the next step."""
    return {event.request_id for event in going.step() if event.tokens}


@pytest.mark.parametrize("drafters", [{}, {"good": RIGS["model"]["good"]}], ids=["plain", "good"])
def test_a_long_prompt_stalls_nobody(drafters: dict[str, Any]) -> None:
    """Decoding sequences get a token in every step while a long prompt is computed beside them."""
    going = Run(build("toy", drafters, max_step_tokens=12, max_draft=2))
    going.submit(ask(name, tokens=140, seed=i) for i, name in enumerate("abc"))
    while not all(going.told[name, 0].tokens for name in "abc"):
        going.step()
    going.submit([ask("long", 130)])
    steps = 0
    while "long" not in (heard := spoke(going)):
        steps += 1
        assert heard == {"a", "b", "c"}
    assert steps >= 130 // 12
    going.finish()


def test_drafts_do_not_stall_a_prompt() -> None:
    """Drafts would take every row there is; a prompt that waits is still computed."""
    rig = build("toy", {"good": RIGS["model"]["good"]}, max_step_tokens=12, max_draft=16, max_context=400)
    going = Run(rig)
    going.submit(ask(name, tokens=300, seed=i) for i, name in enumerate("abc"))
    for _ in range(4):
        going.step()
    going.submit([ask("late", 40, tokens=2)])
    for _ in range(14):
        going.step()
    assert going.told["late", 0].finish is Finish.LENGTH
    assert all(going.told[name, 0].finish is None for name in "abc")


def test_decoding_does_not_stall_a_prompt() -> None:
    """More sequences decode than a step has rows: one row is still kept for prompts."""
    going = Run(build("toy", max_step_tokens=4, max_sequences=8))
    going.submit(ask(str(i), 1, tokens=100, seed=i) for i in range(6))
    going.step()
    going.submit([ask("late", 8, tokens=1)])
    for _ in range(10):
        going.step()
    assert going.told["late", 0].finish is Finish.LENGTH


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    going = Run(build("toy", max_step_tokens=16))
    going.submit([ask("long", 120), ask("short", 7)])
    assert spoke(going) == {"short"}


def test_sequences_take_turns_when_rows_are_short() -> None:
    going = Run(build("toy", max_step_tokens=3, max_sequences=8))
    going.submit(ask(str(i), 1, tokens=50, seed=i) for i in range(8))
    counts: Counter[str] = Counter()
    for step in range(1, 40):
        heard = spoke(going)
        assert len(heard) == 3
        counts.update(heard)
        if step % 8 == 0:
            assert max(counts.values()) - min(counts.values()) <= 1


def test_a_step_keeps_within_its_rows() -> None:
    forward = Watched(num_pages=160)
    rig = build("toy", {"good": RIGS["model"]["good"]}, forward=forward, max_step_tokens=17, max_draft=16)
    run(rig, [ask(str(i), 1 + 13 * i % 60, tokens=30, seed=i) for i in range(8)])
    assert max(forward.rows) == 17
    assert rig.engine.stats.rows == sum(forward.rows)


def test_first_come_first_served() -> None:
    going = Run(build("toy", max_sequences=2))
    going.submit(ask(str(i), 3 + i, tokens=4, seed=i) for i in range(6))
    heard: list[str] = []
    while going.rig.engine.has_work:
        heard += [event.request_id for event in going.step() if event.finish]
    assert heard == sorted(heard)


def test_the_latest_yields_when_pages_run_out() -> None:
    rig = build("toy", num_pages=11, max_context=160)
    requests = [ask(str(i), 30, tokens=60, seed=i) for i in range(4)]
    told = run(rig, requests)
    assert told["0", 0].stats.preemptions == 0
    assert rig.engine.stats.preemptions == sum(each.stats.preemptions for each in told.values()) > 0
    assert all(each.finish is Finish.LENGTH for each in told.values())


class Greedy(Silent):
    """Drafts as long as it may and writes down what it was allowed."""

    def __init__(self, length: int = 16) -> None:
        self.max_draft = length
        self.asked: list[list[tuple[int, int]]] = []  # tokens so far, longest draft

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asked.append([(len(ask.tokens), ask.max_draft) for ask in asks])
        return super().propose(asks)


def allowed(requests: Sequence[Request], drafter: Greedy | None = None, **options: Any) -> list[list[tuple[int, int]]]:
    drafter = drafter or Greedy()
    run(build("toy", {"odd": always(drafter)}, min_acceptance=0.0, **options), requests)
    return drafter.asked


def longest(asked: list[list[tuple[int, int]]]) -> int:
    return max(length for step in asked for _, length in step)


@pytest.mark.parametrize(
    ("limit", "options"),
    [
        (3, {"max_draft": 3}),
        (2, {}),
    ],
)
def test_the_longest_draft(limit: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine, by the request, by the drafter."""
    monkeypatch.setattr("paceline.engine.pace.FIRST_DRAFT", 16)
    request = ask("a")
    if options:
        assert longest(allowed([request], **options)) == limit
    else:
        assert longest(allowed([replace(request, speculation=Speculation(max_draft=limit))])) == limit
        assert longest(allowed([request], Greedy(limit))) == limit


def test_no_draft_reaches_beyond_the_last_token() -> None:
    """A round gives one token more than it accepts."""
    for length, most in [step for asked in allowed([ask("a", 5, tokens=6)]) for step in [asked[0]]]:
        assert length + most + 1 <= 5 + 6


def test_drafted_tokens_a_step() -> None:
    asked = allowed([ask(str(i), seed=i) for i in range(5)], max_draft_tokens=7)
    totals = [sum(length for _, length in step) for step in asked]
    assert max(totals) == 7
    shares = [[length for _, length in step] for step in asked if len(step) == 5]
    assert shares
    assert all(max(each) - min(each) <= 1 for each in shares)


def stats_of(requests: Sequence[Request], **options: Any) -> dict[str, Any]:
    told = run(build("toy", {"good": RIGS["model"]["good"]}, **options), requests)
    return {key[0]: each.stats for key, each in told.items()}


def test_no_speculation_above_a_batch_size() -> None:
    """Three run, two may draft; once one has ended the others do."""
    requests = [ask("a", tokens=6), ask("b", tokens=40, seed=1), ask("c", tokens=40, seed=2)]
    stats = stats_of(requests, max_draft_batch=2)
    assert stats["a"].drafted == 0
    assert stats["a"].off_reason == "3 sequences run, more than max_draft_batch 2"
    assert stats["b"].drafted > 0
    assert stats["b"].off_reason is None


def test_no_speculation_beyond_a_context() -> None:
    stats = stats_of([ask("a", 10, tokens=40)], max_draft_context=30)["a"]
    assert 0 < stats.drafted < 25
    assert stats.off_reason is not None
    assert stats.off_reason.endswith("tokens of context, more than max_draft_context 30")
    asked = allowed([ask("a", 10, tokens=40)], Greedy(1), max_draft_context=30)
    assert [length for ((length, _),) in asked] == list(range(11, 31))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_draft_tokens": 0}, "no room: 0 drafted tokens in a step of 1 decoding sequences"),
        ({"max_step_tokens": 1}, "no room: 0 drafted tokens in a step of 1 decoding sequences"),
        ({"max_draft_batch": 0}, "1 sequences run, more than max_draft_batch 0"),
        ({"max_draft_context": 0}, "tokens of context, more than max_draft_context 0"),
    ],
)
def test_a_limit_of_nothing_says_so(options: dict[str, int], reason: str) -> None:
    stats = stats_of([ask("a", 5)], **options)["a"]
    assert stats.drafted == 0
    assert stats.off_reason is not None
    assert stats.off_reason.endswith(reason)


def test_reasons_of_the_request() -> None:
    assert run(build("toy"), [ask("a")])["a", 0].stats.off_reason == "no drafter"
    off = replace(ask("a"), speculation=OFF)
    assert stats_of([off])["a"].off_reason == "off by request"
    assert stats_of([off])["a"].drafter is None


def test_no_page_for_a_draft() -> None:
    """The draft is dropped before anybody has to yield."""
    rig = build("toy", {"good": RIGS["model"]["good"]}, num_pages=3, max_context=40, prefix_cache=False)
    told = run(rig, [ask("a", 20, tokens=20), ask("b", 10, tokens=6, seed=1)])
    assert told["a", 0].stats.preemptions == 0
    assert rig.engine.stats.preemptions == 0
    reasons = {each.stats.off_reason for each in told.values()}
    assert reasons <= {None, "no page was free for a draft"}


def test_lanes_start_without_pages() -> None:
    """What a former sequence left in a lane is not taken for pages of the next."""
    rig = build("toy", max_sequences=1)
    run(rig, [ask("a", 60)])
    going = Run(rig)
    going.submit([ask("b", 100, seed=1)])
    going.step()
    pages = rig.lanes.pages_np[0]
    assert np.array_equal(pages[2:], np.full(len(pages) - 2, -1))
    going.finish()
