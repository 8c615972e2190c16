"""A head inside of rounds drafts what it drafts on the host, and the states it needs survive whatever steps come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.eagle.head_drafter import HeadDrafter
from paceline.drafters.eagle.on_device import TREE_SEATS, EagleOnDevice, drafter_of_head
from paceline.engine.governor import PRIOR_ROW_PRICE
from paceline.engine.scheduler import Work
from paceline.errors import InvalidRequest
from paceline.runner.rounds.protocol import Seat
from paceline.runner.rounds.traits import added_by, drafter_of, drafts_trees, longest_draft
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import BlockMade, EagleMade
from tests.runs import plain, prompt, run, tokens_of
from tests.tiny_models import TARGET

SEEDED = {"temperature": 0.9, "seed": 3}
FIXED = {"fixed_draft": True, "max_draft": 5, "max_draft_batch": 8}
Drafts = dict[tuple[int, ...], tuple[int, ...]]  # committed tokens → the draft after them


def ask(id: str = "a", length: int = 40, *, tokens: int = 30, **params: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params})
    return Request(id=id, prompt=prompt(length, seed=len(id)), sampling=sampling)


def host_drafts(
    monkeypatch: pytest.MonkeyPatch, made: EagleMade | BlockMade, asked: Sequence[Request], **options: Any
) -> Drafts:
    found: Drafts = {}
    propose = HeadDrafter.propose

    def told(self: HeadDrafter, asks: Sequence[Ask]) -> list[Draft]:
        drafts = propose(self, asks)
        found.update({tuple(one.tokens.tolist()): draft.tokens for one, draft in zip(asks, drafts, strict=True)})
        return drafts

    with monkeypatch.context() as changed:
        changed.setattr(HeadDrafter, "propose", told)
        run(build("toy", {made.name: made}, **{**FIXED, **options}), asked)
    return found


def device_drafts(rig: Rig, asked: Sequence[Request]) -> Drafts:
    found: Drafts = {}
    settle = rig.engine._stepper._settle

    def told(work: Work, landed: Any) -> None:
        settle(work, landed)
        if landed is not None and work.max_draft:
            found[tuple(work.sequence.tokens)] = landed.drafted

    rig.engine._stepper._settle = told
    run(rig, asked)
    return found


@pytest.mark.unwatched
@pytest.mark.parametrize("params", [{}, SEEDED, {"temperature": 1.0, "seed": 5, "top_k": 20}])
@pytest.mark.parametrize("made", [EagleMade(draft_vocab=40), EagleMade(min_confidence=0.05)], ids=["fixed", "ending"])
def test_drafts_are_those_of_the_host(made: EagleMade, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in several chunks, and sequences come and go."""
    asked = [ask("a", **params), ask("bb", 70, tokens=24, **params), ask("ccc", 7, tokens=18, **params)]
    ends = {len(one.prompt) + (one.sampling.max_tokens or 0) for one in asked}
    wanted = host_drafts(monkeypatch, made, asked)
    got = device_drafts(build("toy", on_device={"eagle": made}, **FIXED), asked)
    both = {key for key in wanted.keys() & got.keys() if min(end - len(key) for end in ends if end >= len(key)) > 8}
    assert len(both) >= 25
    assert {key: got[key] for key in both} == {key: wanted[key] for key in both}
    if made.min_confidence:
        assert {len(draft) for draft in got.values()} > {1}  # they end at several lengths


def test_states_of_plain_steps_are_read_before_they_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """While two sequences run, nothing is drafted: for more steps than states are held, and then not for some."""
    made, crowd = EagleMade(draft_vocab=40), {"max_draft_batch": 1}
    asked = [ask("a", 20, tokens=110), ask("bb", 10, tokens=75)]
    wanted = host_drafts(monkeypatch, made, asked, **crowd)
    rig = build("toy", on_device={"eagle": made}, **{**FIXED, **crowd})
    got = device_drafts(rig, asked)
    both = {key for key in wanted.keys() & got.keys() if len(key) < 20 + 110 - 8}
    assert len(both) > 8
    assert {key: got[key] for key in both} == {key: wanted[key] for key in both}
    late = [len(chunks) for chunks in rig.rounds.chunks if any(not chunk.target for chunk in chunks)]
    assert late in ([2, 2, 1], [2, 2])  # all at once, before the oldest are lost; then one before its draft


def test_a_step_without_states_costs_one_draft() -> None:
    """Another drafter's turn holds no states for the head: in its next step it drafts nothing, then it goes on."""
    on_device = {"eagle": EagleMade(), "good": TARGET}
    rig = build("toy", on_device=on_device, fixed_draft=True)
    told = run(rig, [ask("a"), ask("bb")])
    assert tokens_of(told) == tokens_of(run(build("toy"), [ask("a"), ask("bb")]))
    assert rig.engine.stats.drafted > 0


@pytest.mark.unwatched
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.BLOCK, Rule.TYPICAL, Rule.CONFIDENCE])
def test_penalties_and_rules_see_the_whole_vocabulary(rule: Rule) -> None:
    """Drafts of a head whose vocabulary is smaller are edited, and judged by their distributions."""
    penalty = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3}
    asked = [
        replace(ask(id, **params), speculation=Speculation(rule=rule)) for id, params in (("a", penalty), ("bb", {}))
    ]
    rig = build("toy", on_device={"eagle": EagleMade(draft_vocab=40)}, **FIXED)
    told = run(rig, asked)
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.stats.drafted > 50
    if rule is Rule.COUPLED:
        assert tokens_of(told) == tokens_of(run(build("toy"), plain(asked)))


def test_pages_that_the_head_has_not_read_are_computed_again() -> None:
    rig = build("toy", on_device={"eagle": EagleMade()}, **FIXED)
    plain = Request(id="plain", prompt=prompt(64, seed=1), sampling=SamplingParams(max_tokens=4), speculation=OFF)
    spoken = Request(id="spoken", prompt=prompt(64, seed=1), sampling=SamplingParams(max_tokens=20, temperature=0))
    again = Request(id="again", prompt=prompt(64, seed=1), sampling=SamplingParams(max_tokens=20, temperature=0))
    run(rig, [plain])
    told = run(rig, [spoken])
    assert told["spoken", 0].stats.cached_tokens == 0  # the head has read none of them
    assert run(rig, [again])["again", 0].stats.cached_tokens >= 48


def test_seats_carry_the_price_of_a_row_and_the_wish_of_the_request() -> None:
    rig = build("toy", on_device={"eagle": EagleMade(min_confidence=None)}, measure_cost=True, clock=None)
    wish = replace(ask(), speculation=Speculation(p_min=0.4))
    run(rig, [wish])
    seats = [seat for seats in rig.rounds.seats for seat in seats if seat.max_draft]
    assert seats
    assert {seat.p_min for seat in seats} == {0.4}
    assert seats[0].price == PRIOR_ROW_PRICE
    rig = build("toy", on_device={"eagle": EagleMade()}, **FIXED)
    run(rig, [ask()])
    assert {seat.price for seats in rig.rounds.seats for seat in seats} == {0.0}


def test_the_request_or_the_drafter_or_the_price_ends_drafts() -> None:
    head: Any = SimpleNamespace(mask=None)
    by_price, own = EagleOnDevice(head, taps=(0,)), EagleOnDevice(head, taps=(0,), min_confidence=0.3)
    assert by_price.threshold(Seat(0, 4, price=0.1)) == pytest.approx(0.2)
    assert own.threshold(Seat(0, 4, price=0.1)) == 0.3
    assert own.threshold(Seat(0, 4, price=0.1, p_min=0.7)) == 0.7


@pytest.mark.parametrize("options", [{"max_draft": 0}, {"min_confidence": 1.5}])
def test_impossible_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be at least 1"):
        EagleOnDevice(np.zeros(1), taps=(0,), **options)  # type: ignore[arg-type]


def first_path(draft: Draft) -> tuple[int, ...]:
    """The tokens of the first child of the root, of its first child, and so on."""
    tokens, at = [], -1
    while at in draft.parents:
        at = draft.parents.index(at)
        tokens.append(draft.tokens[at])
    return tuple(tokens)


@pytest.mark.unwatched
@pytest.mark.parametrize(
    ("branches", "params", "backend"),
    [(2, {}, "toy"), (3, SEEDED, "toy"), (3, {}, "compiled"), (2, SEEDED, "compiled")],
)
def test_the_best_path_of_a_tree_is_the_chain(branches: int, params: dict[str, Any], backend: str) -> None:
    """So rows of a tree see what rows of a chain see. Other nodes are other children of the same rows."""
    asked = [ask("a", **params), ask("bb", 70, tokens=24, **params), ask("ccc", 7, tokens=18, **params)]
    options = {**FIXED, "max_draft": 8}
    chains = device_drafts(build(backend, on_device={"eagle": EagleMade()}, **options), asked)
    rig = build(backend, on_device={"eagle": EagleMade(branches=branches)}, **options)
    trees: dict[tuple[int, ...], Draft] = {}
    settle = rig.engine._stepper._settle

    def told(work: Work, landed: Any) -> None:
        settle(work, landed)
        if landed is not None and landed.drafted:
            trees[tuple(work.sequence.tokens)] = Draft(landed.drafted, landed.parents)

    rig.engine._stepper._settle = told
    run(rig, asked)
    shared = [key for key in chains.keys() & trees.keys() if chains[key]]
    assert len(shared) >= 20
    depths = set()
    for key in shared:
        path = first_path(trees[key])
        length = min(len(path), len(chains[key]))
        assert path[:length] == chains[key][:length]
        depths.add(length)
    assert max(depths) >= 3
    assert any(not draft.is_chain for draft in trees.values())


@pytest.mark.unwatched
@pytest.mark.parametrize("params", [{}, SEEDED])
def test_few_sequences_get_trees_and_more_of_them_chains(params: dict[str, Any]) -> None:
    """Six sequences end one after the other. Drafts of other shapes follow each other, and texts stay the same."""
    asked = [ask("abcdef"[: i + 1], 12 + 5 * i, tokens=14 + 9 * i, **params) for i in range(6)]
    rig = build("toy", on_device={"eagle": EagleMade(branches=None)}, fixed_draft=True)
    shapes: dict[bool, set[int]] = {True: set(), False: set()}  # whether drafts are trees → seats of their rounds
    settle, longest = rig.engine._stepper._settle, []

    def told(work: Work, landed: Any) -> None:
        settle(work, landed)
        if landed.drafted:
            shapes[bool(landed.parents)].add(len(rig.rounds.seats[-1 - rig.engine._stepper.in_flight]))
            longest.append((bool(landed.parents), len(landed.drafted)))

    rig.engine._stepper._settle = told
    assert tokens_of(run(rig, asked)) == tokens_of(run(build("toy"), plain(asked)))
    assert shapes == {True: {*range(1, TREE_SEATS + 1)}, False: {*range(TREE_SEATS + 1, 7)}}
    assert {count for tree, count in longest if not tree} <= {1, 2, 3, 4, 5}
    assert max(count for tree, count in longest if tree) == 8


def test_the_user_chooses_the_drafts_of_a_head() -> None:
    """Without a choice they depend on the number of sequences, but trees that cannot have all nodes are chains."""
    head: Any = SimpleNamespace(mask=None)
    usual = drafter_of_head(head, (0,), {"min_confidence": 0.1})
    shapes = [drafter_of(usual, seats, 16) for seats in (TREE_SEATS, TREE_SEATS + 1)]
    assert [(drafts_trees(by), longest_draft(by, 16)) for by in shapes if by] == [(True, 8), (False, 5)]
    assert not drafts_trees(drafter_of(usual, 1, 7))
    assert added_by(usual, 16) == 6, "a chain can be accepted as a whole, and a tree is less deep"
    for options, tree in (({"branches": 1}, False), ({"branches": 2}, True), ({"max_draft": 12}, False)):
        by = drafter_of_head(head, (0,), options)
        assert [drafts_trees(drafter_of(by, seats, 16)) for seats in (1, 64)] == [tree, tree]
