"""Several drafters on one request: who is asked, what is drafted of it all, and what becomes of bad members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, FeatureDrafter, Seen
from paceline.drafters.guard import FAILURES, Guard
from paceline.drafters.portfolio import PortfolioDrafter
from paceline.drafters.portfolio.drafter import trusted
from paceline.drafters.portfolio.tree import Union
from paceline.sampling.sampler import Sampler
from paceline.types import Off, OffKind, SamplingParams

VOCAB = 60
SAMPLER = Sampler(SamplingParams(temperature=0), seed=0, vocab_size=VOCAB, eos_ids=())
TEXT = [1, 2, 3]
PLAIN_SPEED = 400.0  # tokens a second
SECONDS = 0.001  # of a draft that is computed: 0.4 tokens


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Known(FeatureDrafter):
    """Drafts what it is told to, and takes its time."""

    def __init__(
        self, name: str, draft: Draft = EMPTY, *, clock: Clock | None = None, taps: Sequence[int] = ()
    ) -> None:
        self.name, self.draft, self.taps = name, draft, taps
        self.calls = 0
        self.told: list[tuple[list[int], int]] = []
        self.lost: dict[int, Off] = {}
        self._clock = clock

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.calls += 1
        if self._clock is not None:
            self._clock.now += SECONDS
        return [self.draft for _ in asks]

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        self.told.append((tokens.tolist(), accepted))

    def feed(self, features: torch.Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        return self.lost

    def knows(self, page: int) -> bool:
        return page == 7


class Copying(Known):
    copies = True


class Raising(Known):
    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        raise RuntimeError("no")


def portfolio(*members: Known, clock: Clock | None = None) -> PortfolioDrafter:
    guards = [Guard(each, vocab_size=VOCAB, timeout=60.0) for each in members]
    made = PortfolioDrafter(guards, clock=clock or Clock())
    made.start(0, 0, np.array(TEXT, dtype=np.int32))
    return made


def ask(tokens: Sequence[int] = TEXT, **options: float) -> Ask:
    return Ask(0, 0, np.array(tokens, dtype=np.int32), 8, SAMPLER, **options)


def said(drafter: PortfolioDrafter, tokens: Sequence[int]) -> None:
    """Let the target say these tokens, the last of which is its own."""
    drafter.observe(0, np.array([*TEXT, *tokens], dtype=np.int32), len(tokens) - 1)


# ── the union of drafts ──


def union_of(*drafts: Draft) -> Union:
    union = Union()
    for place, draft in enumerate(drafts):
        union.add(draft, draft.confidence, f"m{place}")
    return union


def chosen(union: Union, prices: Sequence[float], *, limit: int = 8, floor: float = 0.0) -> Draft:
    union.choose(prices, limit=limit, floor=floor)
    return union.draft()


def test_a_token_that_both_draft_is_surer_and_one_that_is_opposed_less_sure() -> None:
    union = union_of(Draft((5, 6, 9), confidence=(0.8, 0.4, 0.3)), Draft((5, 7), (-1, 0), confidence=(0.5, 0.4)))
    by_path = dict(zip(zip(union.parents, union.tokens, strict=True), union.confidence, strict=True))
    assert by_path[-1, 5] == pytest.approx(0.9)
    assert by_path[0, 7] == pytest.approx(0.9 * 0.8)
    assert by_path[0, 6] == pytest.approx(0.9 * 0.5**2.2)  # 1 + 1.5 · 0.8: the other is sure of its own token
    assert by_path[1, 9] == pytest.approx(by_path[0, 6] * 0.75)


def test_the_likeliest_nodes_are_drafted_as_long_as_they_pay() -> None:
    union = union_of(Draft((5, 6), confidence=(0.5, 0.2)), Draft((8, 9), confidence=(0.6, 0.5)))
    draft = chosen(union, (0.1, 0.45, 0.1))
    assert draft.problem(vocab_size=VOCAB, max_length=8) is None
    assert draft.paths[:2] == [(8,), (8, 9)]
    assert (draft.by, draft.passes) == ("m1+m0", 0)
    assert len(chosen(union, (0.1, 0.9))) == 1
    assert chosen(union, (0.0,), limit=1).tokens == (8,)
    assert not chosen(union, (0.0,), floor=0.7)


def test_a_draft_without_confidence_has_that_of_past_ones() -> None:
    assert trusted(Draft((1, 2, 3), (-1, 0, -1)), 0.5) == [0.5, 0.25, 0.5]
    drafter = portfolio(Known("lookup", Draft((5, 6, 7))))
    assert len(drafter.propose([ask(row_price=0.3)])[0]) == 3
    for _ in range(20):
        drafter.propose([ask()])
        said(drafter, [9])
    assert len(drafter.propose([ask(row_price=0.3)])[0]) == 1


# ── who is asked ──


@pytest.mark.parametrize(("confidence", "asked"), [((0.9, 0.8), False), ((0.9, 0.05), True)])
def test_nothing_is_computed_where_a_lookup_has_found_enough(confidence: tuple[float, float], asked: bool) -> None:
    clock = Clock()
    head = Known("head", Draft((8, 9), passes=2, confidence=(0.8, 0.6)), clock=clock)
    drafter = portfolio(Known("lookup", Draft((5, 6), passes=0, confidence=confidence)), head, clock=clock)
    for _ in range(20):
        draft = drafter.propose([ask(plain_speed=PLAIN_SPEED)])[0]
    calls = head.calls
    draft = drafter.propose([ask(plain_speed=PLAIN_SPEED)])[0]
    assert (head.calls > calls) == asked
    assert draft.passes == (2 if asked else 0)


@pytest.mark.parametrize(("usual", "asked"), [((0.95, 0.9, 0.9), True), ((0.6, 0.5, 0.4), False)])
def test_a_head_whose_drafts_gain_more_than_the_lookup_s_is_asked(usual: tuple[float, ...], asked: bool) -> None:
    clock = Clock()
    lookup = Known("lookup")
    head = Known("head", Draft((7, 8, 9), passes=3, confidence=usual), clock=clock)
    drafter = portfolio(lookup, head, clock=clock)
    for _ in range(40):
        drafter.propose([ask(plain_speed=PLAIN_SPEED)])
    lookup.draft = Draft((5, 6), passes=0, confidence=(0.8, 0.6))
    calls = head.calls
    drafter.propose([ask(plain_speed=PLAIN_SPEED)])
    assert (head.calls > calls) == asked, "the lookup gains 1.4 tokens; the head usually 2.75 or 1.5, and it costs 0.4"


@pytest.mark.parametrize(("confidence", "rests"), [((0.3,), True), ((0.9, 0.8), False)])
def test_a_lookup_rests_in_a_sampled_text_where_its_drafts_are_not_used(
    confidence: tuple[float, ...], rests: bool
) -> None:
    clock = Clock()
    lookup = Known("lookup", Draft((5, 6)[: len(confidence)], passes=0, confidence=confidence), clock=clock)
    drafter = portfolio(lookup, Known("head", Draft((8,), passes=1, confidence=(0.9,)), clock=clock), clock=clock)
    sampled = Sampler(SamplingParams(temperature=1), seed=0, vocab_size=VOCAB, eos_ids=())
    for _ in range(200):
        clock.now += 1 / PLAIN_SPEED
        drafter.propose([replace(ask(plain_speed=PLAIN_SPEED), sampler=sampled)])
    assert (lookup.calls < 60) == rests


def test_a_useless_last_member_does_not_take_the_place_of_a_good_one_in_a_sampled_text() -> None:
    """Both are as sure of themselves, and only the first is right."""
    clock = Clock()
    good = Known("good", Draft((5,), passes=1, confidence=(0.6,)), clock=clock)
    bad = Known("bad", Draft((8, 9), passes=2, confidence=(0.6, 0.4)), clock=clock)
    drafter = portfolio(good, bad, clock=clock)
    sampled = Sampler(SamplingParams(temperature=1), seed=0, vocab_size=VOCAB, eos_ids=())
    drafted = []
    for turn in range(300):
        clock.now += 1 / PLAIN_SPEED
        drafted.append(drafter.propose([replace(ask(plain_speed=PLAIN_SPEED), sampler=sampled)])[0].tokens)
        said(drafter, [5, 1] if turn % 5 < 3 else [1])
    assert drafted[0] == (8, 9)
    assert drafted[40:].count((8, 9)) <= 2
    assert drafted[40:].count((5,)) >= 200


def test_a_useless_member_is_asked_more_and_more_seldom() -> None:
    """Though it is sure of itself each time."""
    clock = Clock()
    bad = Known("bad", Draft((8, 9), passes=2, confidence=(0.9, 0.8)), clock=clock)
    drafter = portfolio(bad, clock=clock)
    calls = []
    for _ in range(600):
        clock.now += 1 / PLAIN_SPEED
        if drafter.propose([ask(plain_speed=PLAIN_SPEED, row_price=0.05)])[0]:
            said(drafter, [5])
        calls.append(bad.calls)
    assert calls[-1] - calls[200] <= 20  # of 400 rounds, each a quarter of a plain one: 1.2 % of the time
    assert calls[-1] > calls[-200]  # but it is


def test_a_draft_after_a_gap_says_nothing_of_the_usual_time() -> None:
    """A head that rested has hidden states to read: if that counted as its usual time, it would rest again."""
    clock = Clock()
    head = Known("head", Draft((8,), passes=1, confidence=(0.9,)), clock=clock)
    drafter = portfolio(head, clock=clock)
    for length in range(20):
        drafter.propose([ask([1] * (3 + length), plain_speed=PLAIN_SPEED)])
    (member,) = drafter.members
    usual = member.seconds[1]
    head._clock = None  # the next draft takes no time
    drafter.propose([ask([1] * 200, plain_speed=PLAIN_SPEED)])
    assert member.seconds[1] == usual == pytest.approx(SECONDS)
    drafter.propose([ask([1] * 201, plain_speed=PLAIN_SPEED)])
    assert member.seconds[1] < usual, "one token later its time counts"


def test_what_a_member_gains_in_greedy_texts_says_nothing_of_sampled_ones() -> None:
    """A greedy and a sampled request take turns. The head pays for one alone, and is asked for that one alone."""
    clock = Clock()
    head = Known("head", clock=clock)
    drafter = portfolio(head, clock=clock)
    drafter.start(1, 1, np.array(TEXT, dtype=np.int32))
    sampled = Sampler(SamplingParams(temperature=1), seed=0, vocab_size=VOCAB, eos_ids=())
    asked = {0: 0, 1: 0}
    for turn in range(400):
        clock.now += 1 / PLAIN_SPEED
        for key, sampler, sure in ((0, SAMPLER, 0.9), (1, sampled, 0.2)):
            head.draft, calls = Draft((8, 9), passes=2, confidence=(sure, sure * sure)), head.calls
            drafter.propose([replace(ask(plain_speed=PLAIN_SPEED), key=key, sampler=sampler)])
            asked[key] += (head.calls - calls) * (turn >= 200)
    assert asked[0] == 200
    assert 0 < asked[1] <= 20  # trials


@pytest.mark.parametrize(("left", "reads"), [(400, True), (20, False)])
def test_a_head_reads_a_prompt_only_for_an_answer_that_makes_up_for_it(left: int, reads: bool) -> None:
    """It gains 0.31 tokens a round, and takes the time of 16 plain tokens to read a prompt of 400."""
    clock = Clock()

    class Reading(Known):
        read = 0

        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            clock.now += 0.0001 * (len(asks[0].tokens) - self.read)
            self.read = len(asks[0].tokens)
            return super().propose(asks)

    head = Reading("head", Draft((8,), passes=1, confidence=(0.75,)), clock=clock)
    drafter = portfolio(head, clock=clock)
    for length in (*range(3, 40), 400):  # learns what drafts and reading take
        drafter.propose([ask([1] * length, plain_speed=PLAIN_SPEED)])
    head.read = 0
    drafter.start(1, 1, np.array(TEXT, dtype=np.int32))
    calls = head.calls
    drafter.propose([replace(ask([1] * 400, plain_speed=PLAIN_SPEED, row_price=0.0), key=1, left=left)])
    assert (head.calls > calls) == reads


def test_whether_a_member_pays_is_a_question_of_plain_speed() -> None:
    """Rows are priced at the speed with drafts; where that is twice the plain one, a row costs half as much."""
    gains = []
    for share in (1.0, 0.5):
        drafter = portfolio(Known("head", Draft((8, 9), passes=2, confidence=(0.8, 0.6))))
        drafter.propose([ask(row_price=0.4, plain_share=share)])
        gains.append(drafter._texts[0].with_members[0].gains.gained)
    assert gains == [pytest.approx(1.4 - 0.8), pytest.approx(1.4 - 0.4)]


def test_a_sampled_request_gets_the_draft_of_the_last_that_was_asked() -> None:
    lookup, head = Draft((5,), passes=0, confidence=(0.3,)), Draft((8,), passes=1, confidence=(0.4,))
    drafter = portfolio(Known("lookup", lookup), Known("head", head))
    sampled = Sampler(SamplingParams(temperature=1), seed=0, vocab_size=VOCAB, eos_ids=())
    assert {*drafter.propose([ask(row_price=0.05)])[0].tokens} == {5, 8}
    assert drafter.propose([replace(ask(row_price=0.05), sampler=sampled)])[0].tokens == (8,)


def test_without_measured_speed_all_are_asked() -> None:
    clock = Clock()
    head = Known("head", Draft((8,), passes=1, confidence=(0.8,)), clock=clock)
    drafter = portfolio(Known("lookup", Draft((5,), confidence=(0.99,))), head, clock=clock)
    for _ in range(20):
        drafter.propose([ask()])
    assert head.calls == 20


def test_drawn_tokens_go_alone_whatever_they_are() -> None:
    """Chosen by their values they would have another distribution than the one that they were drawn from."""
    drawn = Draft((8,), probs=torch.full((1, VOCAB), 1 / VOCAB))
    other = Known("other", Draft((7,)))
    drafter = portfolio(Known("lookup", Draft((5, 6), confidence=(0.9, 0.9))), Known("head", drawn), other)
    [draft] = drafter.propose([ask()])
    assert other.calls == 0
    assert (draft.tokens, draft.by) == ((8,), "head")
    assert draft.probs is drawn.probs


# ── what members hear ──


def test_members_hear_how_far_their_own_draft_was_right() -> None:
    one, other = (
        Known("one", Draft((5, 6), confidence=(0.9, 0.8))),
        Known("other", Draft((5, 9), confidence=(0.5, 0.4))),
    )
    drafter = portfolio(one, other)
    drafter.propose([ask()])
    said(drafter, [5, 6, 4])
    assert one.told == [([*TEXT, 5, 6, 4], 2)]
    assert other.told == [([*TEXT, 5, 6], 1)]


def test_a_member_that_loses_a_sequence_is_not_asked_for_it_any_more() -> None:
    head, lookup = Known("head", Draft((8,)), taps=(1, 2)), Known("lookup", Draft((5,)))
    drafter = portfolio(lookup, head)
    assert (drafter.taps, drafter.knows(7), drafter.knows(6)) == ([1, 2], True, False)
    head.lost = {0: Off(OffKind.NO_HIDDEN_STATES, "no room")}
    assert drafter.feed(torch.zeros(1, 4), [Seen(0, 0, [0])], crowded=False) == {}
    assert drafter.propose([ask()])[0].by == "lookup"
    assert head.calls == 0


# ── members that fail ──


def test_a_member_that_fails_drops_out_alone() -> None:
    drafter = portfolio(Raising("bad"), Known("nonsense", Draft((VOCAB,))), Known("good", Draft((5,))))
    for _ in range(FAILURES + 1):
        assert drafter.propose([ask()])[0].by == "good"
    bad, nonsense, good = (member.guard.out for member in drafter.members)
    assert None not in (bad, nonsense)
    assert good is None


def test_the_portfolio_fails_with_its_last_member() -> None:
    drafter = portfolio(Raising("bad"))
    for _ in range(FAILURES):
        assert not drafter.propose([ask()])[0]
    with pytest.raises(RuntimeError, match="drafter bad is out: it raised RuntimeError: no"):
        drafter.propose([ask()])


def test_two_sequences_may_differ_in_whom_they_ask() -> None:
    clock = Clock()
    lookup, head = Known("lookup"), Known("head", Draft((8,), passes=1, confidence=(0.8,)), clock=clock)
    found = [EMPTY, Draft((5, 6), passes=0, confidence=(0.9, 0.8))]
    lookup.propose = lambda asks: [found[each.key] for each in asks]  # type: ignore[method-assign]
    drafter = portfolio(lookup, head, clock=clock)
    drafter.start(1, 1, np.array(TEXT, dtype=np.int32))
    asks = [ask(plain_speed=PLAIN_SPEED), replace(ask(plain_speed=PLAIN_SPEED), key=1)]
    for _ in range(20):
        drafts = drafter.propose(asks)
    assert [draft.by for draft in drafts] == ["head", "lookup"]


def test_drafts_for_several_sequences_cost_what_they_take_together() -> None:
    """The head takes as long for four as for one: too long for one of them, and little for each of four."""
    clock = Clock()
    head = Known("head", Draft((8,), passes=1, confidence=(0.3,)), clock=clock)
    drafter = portfolio(head, clock=clock)
    for key in (1, 2, 3):
        drafter.start(key, key, np.array(TEXT, dtype=np.int32))
    four = [replace(ask(plain_speed=PLAIN_SPEED), key=key) for key in range(4)]
    for _ in range(40):
        drafter.propose(four)
    calls = head.calls
    for _ in range(10):
        drafter.propose(four)
    assert head.calls == calls + 10
    for _ in range(60):
        drafter.propose(four[:1])
    calls = head.calls
    for _ in range(10):
        drafter.propose(four[:1])
    assert head.calls < calls + 10


# ── copies alone ──


def test_only_members_that_copy_are_asked_where_nothing_else_may_be_drafted() -> None:
    copying, computing = (
        Copying("suffix", Draft((5,), confidence=(0.9,))),
        Known("head", Draft((6,), confidence=(0.9,))),
    )
    both = portfolio(copying, computing)
    assert both.copies
    (draft,) = both.propose([ask(row_price=0.4, copies_only=True)])
    assert (draft.tokens, copying.calls, computing.calls) == ((5,), 1, 0)
    assert not portfolio(computing).copies


@pytest.mark.parametrize(("price", "tokens"), [(0.79, (5,)), (0.81, ())])
def test_copies_that_gain_little_are_left_out(price: float, tokens: tuple[int, ...]) -> None:
    drafter = portfolio(Copying("suffix", Draft((5,), confidence=(0.9,))))
    (draft,) = drafter.propose([ask(row_price=price, copies_only=True)])
    assert draft.tokens == tokens
    (draft,) = drafter.propose([ask(row_price=price)])
    assert draft.tokens == (5,)
