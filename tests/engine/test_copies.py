"""Copies in batches that must not draft: drafters that look tokens up still draft what surely pays for its row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask
from paceline.engine.cost import CostModel
from paceline.engine.group import FIRST_REST, RUN, TRIAL_GAP
from paceline.engine.pace import MAX_SKIPS, Pace
from paceline.engine.truth import Truth
from paceline.types import Off, OffKind, Request, SamplingParams
from tests.engine.test_drafting_batches import WAITS, measure
from tests.engine.test_hidden_states_beside_a_device import COUNT, Reader, asked, engine
from tests.engine.test_truth import Machine
from tests.laws import under_law
from tests.odd_drafters import Scripted
from tests.rig import Rig, build
from tests.rig_drafters import always
from tests.runs import plain, prompt, run, tokens_of
from tests.tiny_models import TARGET

BATCH = 4
REQUESTS = [
    Request(id=str(i), prompt=prompt(5, seed=i), sampling=SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for i in range(BATCH)
]
# A plain step of four sequences takes 3 s, one more row half a second: a token for 0.5 s where 0.75 s are usual.
SECONDS = {"pass": 1.0, "row": 0.5}
PRICE = SECONDS["row"] * BATCH / (SECONDS["pass"] + BATCH * SECONDS["row"])


class Copier(Scripted):
    """Knows the answers, and drafts one token of them where its confidence pays for the row."""

    name = "copier"
    ends_drafts = weighs_cost = copies = True

    def __init__(self, scripts: Sequence[Sequence[int]], *, confidence: float = 1.0) -> None:
        super().__init__(scripts, wrong=0.0)
        self.asks: list[Ask] = []
        self._confidence = confidence

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asks += asks
        paying = [self._confidence > (ask.row_prices or (0.0,))[0] for ask in asks]
        drafts = super().propose(asks)
        return [Draft(draft.tokens[:1]) if pays else EMPTY for draft, pays in zip(drafts, paying, strict=True)]


def machine(*drafters: Any, **options: Any) -> Rig:
    """Return an engine whose passes take `SECONDS`, by a clock of its own."""
    now = [0.0]
    forward = TARGET.forward("compiled", num_pages=160)
    inner = type(forward).__call__

    class Charged(type(forward)):  # type: ignore[misc]
        def __call__(self, batch: Any) -> Any:
            now[0] += SECONDS["pass"] + SECONDS["row"] * len(batch.tokens)
            return inner(self, batch)

    forward.__class__ = Charged
    made = {drafter.name: always(drafter) for drafter in drafters}
    return build("compiled", made, forward=forward, clock=lambda: now[0], measure_cost=True, **options)


def scripts() -> list[list[int]]:
    told = run(machine(), plain(REQUESTS))
    return [[*REQUESTS[int(id)].prompt, *each.tokens] for (id, _), each in told.items()]


@pytest.mark.parametrize("measured", [True, False], ids=["measured speed-up", "not measured"])
@pytest.mark.parametrize(("confidence", "copies"), [(1.0, True), (PRICE - 0.1, False)])
def test_a_batch_that_must_not_draft_copies_what_is_sure(confidence: float, copies: bool, measured: bool) -> None:
    copier = Copier(scripts(), confidence=confidence)
    rig = machine(copier, measure_speedup=measured)
    measure(rig)
    told = run(rig, REQUESTS)
    assert tokens_of(told) == tokens_of(run(machine(), plain(REQUESTS)))
    drafted = [each.stats.drafted for each in told.values()]
    assert all(count > 5 for count in drafted) if copies else not any(drafted)
    assert copier.asks
    assert all(ask.copies_only for ask in copier.asks)


def test_drafters_that_do_not_copy_are_not_asked() -> None:
    copier = Copier(scripts())
    copier.copies = False
    rig = machine(copier)
    measure(rig)
    told = run(rig, REQUESTS)
    assert not any(each.stats.drafted for each in told.values())
    assert not any(len(ask.row_prices) and ask.copies_only for ask in copier.asks)
    assert all("a second row for each" in each.stats.off_reason for each in told.values())


def test_rows_are_priced_beside_those_of_all_sequences() -> None:
    """Also where one of four is asked, its row comes on top of four."""
    copier = Copier(scripts(), confidence=0.0)
    rig = machine(copier)
    measure(rig)
    run(rig, REQUESTS)
    steps = [ask.row_prices[0] for ask in copier.asks if len(ask.row_prices)]
    assert steps[:BATCH] == [pytest.approx(PRICE, rel=0.02)] * BATCH
    assert all(price == pytest.approx(PRICE, rel=0.05) for price in steps[: len(steps) // 2])


def test_a_users_limit_forbids_copies() -> None:
    copier = Copier(scripts())
    rig = machine(copier, max_draft_batch=BATCH - 1)
    measure(rig)
    told = run(rig, REQUESTS)
    assert not any(ask.copies_only for ask in copier.asks)
    assert sum(each.stats.drafted for each in told.values()) < 24  # the last one that runs drafts alone


class Lookup(Scripted):
    name = "lookup"
    copies = True


@pytest.mark.parametrize(("wrong", "copies"), [(0.0, True), (1.0, False)])
def test_lookups_without_confidence_copy_by_past_acceptance(wrong: float, copies: bool) -> None:
    """An n-gram drafter has no confidence: what it may draft follows from how often it was right."""
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = [Request(id=str(i), prompt=prompt(5, seed=i), sampling=sampling) for i in range(BATCH)]
    answers = run(machine(), plain(requests))
    texts = [[*requests[int(id)].prompt, *each.tokens] for (id, _), each in answers.items()]
    rig = machine(Lookup(texts, wrong=wrong))
    measure(rig)
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(answers)
    for each in told.values():
        assert each.stats.accepted > 15 if copies else each.stats.drafted < 10
        assert copies or each.stats.pauses > 0


def test_where_nothing_is_found_asks_become_rare() -> None:
    copier = Copier([])
    rig = machine(copier)
    measure(rig)
    run(rig, REQUESTS)
    first = [len(ask.tokens) for ask in copier.asks if ask.key == copier.asks[0].key and ask.copies_only]
    gaps = [after - before for before, after in itertools.pairwise(first)]
    assert gaps[:4] == [2, 3, 4, 5]


def test_asks_are_left_out_up_to_a_limit_and_come_back_at_once() -> None:
    pace, config = Pace(), EngineConfig()
    for _ in range(3 * MAX_SKIPS):
        pace.learn(0, 0, output_tokens=1, config=config)
    assert [pace.skips() for _ in range(MAX_SKIPS + 1)] == [True] * MAX_SKIPS + [False]
    pace.learn(1, 1, output_tokens=1, config=config)
    assert not pace.skips()


# ── measured ──


@pytest.mark.parametrize(("ratio", "stays"), [(1.3, True), (0.8, False)])
def test_copies_have_a_guard_of_their_own(ratio: float, stays: bool) -> None:
    simulated = Machine(ratio, tokens=1.5, batch=BATCH, noise=0.05)
    simulated.truth = Truth(guards=True, prior=lambda sequences: WAITS, copies=lambda drafter: True)
    truth = simulated.truth
    copied = 0
    for _ in range(FIRST_REST - 1):
        drawn = truth.draws(simulated._sequences, alone=True)
        plain_step = drawn or not truth.copies_only
        copied += truth.copies_only
        if truth.side is not None:
            seconds = 0.005 * (ratio / 1.5 if plain_step else 1.0)
            accepted = 0 if plain_step else BATCH // 2
            truth.side.add(sequences=BATCH, accepted=accepted, drafted=BATCH, seconds=seconds)
    waiting, copies = truth.measurement().groups
    assert waiting.off == WAITS.detail
    assert copies.drafter == "head (copies)"
    assert (copies.off is None) is stays
    assert (copied > FIRST_REST - 2) if stays else (copied < 20 * (TRIAL_GAP + RUN))


def test_a_drafter_that_cannot_copy_has_no_such_group() -> None:
    truth = Truth(guards=True, prior=lambda sequences: WAITS)
    truth.draws(Machine(1.0, batch=BATCH)._sequences, alone=True)
    assert not truth.copies_only
    assert len(truth.measurement().groups) == 1


def test_passes_that_were_timed_price_rows_before_any_step_has() -> None:
    cost = CostModel()
    assert not cost.prices_rows
    for rows in (BATCH, 2 * BATCH):
        cost.observe_rows(rows, SECONDS["pass"] + SECONDS["row"] * rows)
    assert not cost.prices_rows
    seconds = SECONDS["pass"] + SECONDS["row"] * BATCH
    cost.observe(sequences=BATCH, rows=BATCH, tokens=BATCH, pass_seconds=seconds, step_seconds=seconds)
    assert cost.row_prices(BATCH)[0] == pytest.approx(PRICE)


# ── hidden states ──


class CopyingReader(Reader):
    """Reads hidden states, and copies."""

    ends_drafts = weighs_cost = copies = True


def test_states_of_accepted_copies_are_kept_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.governor.Governor.weighs_rows", True)
    monkeypatch.setattr(
        "paceline.engine.governor.Governor._prior",
        lambda self, sequences: Off(OffKind.WOULD_NOT_PAY, "dear") if sequences > 1 else None,
    )
    monkeypatch.setattr("paceline.engine.cost.CostModel.prices_rows", True)
    monkeypatch.setattr("paceline.engine.cost.CostModel.row_prices", lambda self, sequences: (0.1,))
    reader = CopyingReader("sampled")
    rig = engine(reader, on_device=None, measure_cost=True)
    told = run(rig, asked("sampled", "reader")[:4])
    expected = tokens_of(under_law.plain_device_answers("toy", "sampled", COUNT))
    assert tokens_of(told) == {key: expected[key] for key in told}
    assert rig.engine.stats.accepted > 20
    assert 0 < reader.counts[True] < rig.engine.stats.steps * 2 / 3  # sequences that start and end settle, too
    assert reader.right
    assert all(reader.right)
