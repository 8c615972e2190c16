"""What past drafts tell a new sequence, alone and in an engine: where it starts, and when it hardly tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.engine.cost import CostModel
from paceline.engine.pace import DOUBTED_STRIKES, FIRST_DRAFT, Pace
from paceline.engine.population import FIRST_RATE, KNOWN_DRAFTS, POSITIONS, Population, Populations
from paceline.types import OffKind, Request, SamplingParams
from paceline.work_kinds import WorkKind
from tests.odd_drafters import Silent
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS, always
from tests.runs import prompt, run

CONFIG = EngineConfig(min_acceptance=0.0)
FIRST_RATES = (FIRST_RATE,) * POSITIONS
ENTRY = 0.3  # chance from which on drafts pay, in all engines here


def past(*drafts: tuple[int, int], times: int = 200, of: Population | None = None) -> Population:
    """Return a population that has seen these drafts (levels, right ones) in turns."""
    population = of or Population()
    for _ in range(times):
        for drafted, accepted in drafts:
            population.learn(drafted, accepted)
    return population


def begun(population: Population) -> Pace:
    pace = Pace()
    pace.begin(population)
    return pace


def learn(pace: Pace, drafted: int, accepted: int) -> None:
    pace.learn(drafted, accepted, output_tokens=0, config=CONFIG)


# ── populations ──


def test_survival_is_counted_by_position() -> None:
    """Half of the drafts fail at once; the others have two levels right of three."""
    first, second, third, *later = past((3, 2), (3, 0)).survival()
    assert first == pytest.approx(0.5, abs=0.05)
    assert second > 0.9
    assert third < 0.1
    assert len({round(each, 3) for each in later}) <= len(later)
    assert max(later) < 0.2, "where no draft came to, the position before counts"


def test_levels_behind_the_last_position_count_at_it() -> None:
    survival = past((40, 30), times=50).survival()
    assert survival[0] > 0.95
    assert survival[-1] == pytest.approx(25 / 26, abs=0.05)


def test_a_new_population_is_hopeful_and_learns_what_comes() -> None:
    fresh = Population()
    assert fresh.survival() == pytest.approx(FIRST_RATES)
    assert (fresh.rate, fresh.found) == (pytest.approx(FIRST_RATE), 1.0)
    wrong = past((4, 0), times=40)
    assert wrong.survival()[0] < 0.1
    assert wrong.rate < 0.1
    assert past((0, 0), times=100).found < 0.01


def test_new_drafts_outweigh_old_ones() -> None:
    changed = past((2, 2), times=150, of=past((2, 0), times=2000))
    assert changed.survival()[0] > 0.7


def test_a_kind_of_work_starts_from_all_kinds_and_goes_its_own_way() -> None:
    known = Populations()
    past((2, 0), times=200, of=known.of("x", WorkKind.CODE))
    story = known.of("x", WorkKind.NARRATIVE)
    assert story.survival()[0] < 0.1
    past((2, 2), times=200, of=story)
    assert story.survival()[0] > 0.9
    assert known.of("x", WorkKind.CODE).survival()[0] < 0.25
    assert 0.5 < known.of("x", None).survival()[0] < 0.95, "all kinds have both, the latest drafts first"
    assert known.of("y", WorkKind.CODE).survival() == pytest.approx(FIRST_RATES), "another drafter"


def test_a_drafter_that_is_gone_is_forgotten() -> None:
    known = Populations()
    for name in ("gone", "stays"):
        past((2, 0), of=known.of(name, WorkKind.CODE))
    known.forget("gone")
    assert known.of("gone", WorkKind.CODE).survival() == pytest.approx(FIRST_RATES)
    assert known.of("gone", None).drafts == 0
    assert known.of("stays", None).drafts > 0


# ── the pace of a sequence ──


def test_before_enough_drafts_are_known_the_first_draft_is_free() -> None:
    assert begun(past((4, 0), times=KNOWN_DRAFTS - 1)).affordable(entry=ENTRY, price=0.1) is None
    assert begun(past((4, 0), times=KNOWN_DRAFTS)).affordable(entry=ENTRY, price=0.1) is not None


def test_where_past_drafts_did_not_pay_one_short_draft_probes_and_a_long_pause_follows() -> None:
    pace = begun(past((12, 0)))
    assert pace.affordable(entry=ENTRY, price=0.1) == FIRST_DRAFT
    assert pace.doubted
    learn(pace, 4, 0)
    assert pace.affordable(entry=ENTRY, price=0.1) == 0
    assert not pace.doubted
    pace.pause(None, output_tokens=2, tokens=9)  # type: ignore[arg-type]
    assert pace.paused(2 + 9 * 2**DOUBTED_STRIKES - 1)
    assert not pace.paused(2 + 9 * 2**DOUBTED_STRIKES)


def test_probes_follow_each_other_as_long_as_they_are_right() -> None:
    pace = begun(past((4, 0)))
    assert pace.affordable(entry=ENTRY, price=0.1) == FIRST_DRAFT
    for _ in range(2):
        learn(pace, 4, 4)
        assert pace.affordable(entry=ENTRY, price=0.1) is None
        assert not pace.doubted
    learn(pace, 4, 0)
    assert pace.affordable(entry=ENTRY, price=0.1) == 0, "two were not enough yet"


def test_a_good_text_soon_drafts_although_all_others_were_bad() -> None:
    pace = begun(past((4, 0)))
    rounds = 0
    while pace.chance(whole=False) < ENTRY:
        learn(pace, 4, 4)
        rounds += 1
    assert rounds <= 5


def test_where_past_drafts_paid_nothing_is_doubted() -> None:
    pace = begun(past((4, 4), (4, 1)))
    length = pace.affordable(entry=ENTRY, price=0.5)
    assert not pace.doubted
    assert length is not None
    assert 1 <= length <= 3
    assert (pace.affordable(entry=ENTRY, price=0.05) or 16) > length


def test_doubts_fade_and_a_bad_drafter_is_doubted_all_the_same() -> None:
    """Every sequence that only probes lets the population forget a part; wrong probes say it again."""
    population = past((4, 0))
    before = population.survival()[0]
    doubted = []
    for number in range(60):
        pace = begun(population)
        pace.affordable(entry=ENTRY, price=0.1)
        pace.affordable(entry=ENTRY, price=0.1)  # asked twice, it forgets once
        doubted.append(pace.doubted)
        population.learn(4, 0)
        if not number:
            assert population.survival()[0] < 1.5 * before
    assert all(doubted)
    assert before < population.survival()[0] < ENTRY


def test_a_drafter_that_became_good_is_found_by_its_probes() -> None:
    population = past((4, 0), times=1000)
    sequences = 0
    while population.survival()[0] < ENTRY:
        pace = begun(population)
        pace.affordable(entry=ENTRY, price=0.1)
        population.learn(4, sequences % 2)  # every other probe is right
        sequences += 1
    assert sequences < 30


def test_a_kind_of_work_forgets_with_all_kinds() -> None:
    known = Populations()
    code = past((4, 0), of=known.of("x", WorkKind.CODE))
    for _ in range(40):
        code.doubt()
    assert code.survival()[0] > 0.4, "much less is known than before"


def test_own_drafts_count_more_and_more() -> None:
    pessimist, optimist = begun(past((2, 0))), begun(past((2, 2)))
    apart = []
    for _ in range(60):
        for pace in (pessimist, optimist):
            learn(pace, 2, 2)
            learn(pace, 2, 0)
        apart.append(optimist.chance(whole=False) - pessimist.chance(whole=False))
    assert apart[0] > 0.6
    assert apart[20] < 0.3
    assert apart[-1] < 0.05
    assert pessimist.chance(whole=False) == pytest.approx(0.5, abs=0.1)


def test_a_draft_is_as_long_as_its_positions_last() -> None:
    """The third token is never right: no draft of three pays, however good the first two are."""
    pace = begun(past((3, 2)))
    assert pace.affordable(entry=ENTRY, price=0.5) == 2
    assert (begun(past((12, 12))).affordable(entry=ENTRY, price=0.5) or 0) > 12, "behind the last position, too"


def test_whole_drafts_must_pay_on_all_their_levels() -> None:
    """The first of four levels is right half of the time, and no other: an eighth of a level."""
    pace = begun(past((4, 1), (4, 0)))
    assert pace.chance(whole=False) == pytest.approx(0.5, abs=0.05)
    assert pace.chance(whole=True) == pytest.approx(0.125, abs=0.05)
    assert pace.affordable(entry=0.3, price=0.1, whole=False) == 1
    assert not pace.doubted
    assert pace.affordable(entry=0.3, price=0.1, whole=True) == FIRST_DRAFT
    assert pace.doubted


# ── in an engine ──


class Counting(Drafter):
    """Drafts tokens that are hardly ever right, and counts those that it was asked for."""

    name = "wrong"

    def __init__(self, *, ends_drafts: bool) -> None:
        self.ends_drafts = ends_drafts
        self.lengths: list[int] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.lengths += [ask.max_draft for ask in asks]
        return [Draft(tokens=(1,) * ask.max_draft) for ask in asks]


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "price", lambda self, drafter: 0.1)
    monkeypatch.setattr(CostModel, "entry", lambda self, drafter: ENTRY)


def engine(drafters: dict[str, Any]) -> Rig:
    return build("toy", drafters, measure_cost=True, measure_speedup=False, min_acceptance=0.0, max_context=200)


def request(number: int, *, kind: WorkKind | None = None) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    return Request(id=str(number), prompt=prompt(5, seed=number), sampling=sampling, kind=kind)


@pytest.mark.usefixtures("prices")
@pytest.mark.parametrize("ends_drafts", [True, False])
def test_after_some_tens_of_wrong_drafts_a_request_spends_one_short_probe(ends_drafts: bool) -> None:
    drafter = Counting(ends_drafts=ends_drafts)
    rig = engine({"wrong": always(drafter)})
    asked = []
    for number in range(20):
        drafter.lengths.clear()
        stats = run(rig, [request(number)])[str(number), 0].stats
        asked.append([*drafter.lengths])
        assert stats.off is not None
        assert stats.off.kind is OffKind.WOULD_NOT_PAY
    assert len(asked[0]) >= 3, "a drafter that was just loaded is tried"
    assert [len(each) for each in asked[14:]] == [1] * 6
    assert max(map(sum, asked[14:])) <= FIRST_DRAFT


@pytest.mark.usefixtures("prices")
def test_requests_with_a_good_drafter_draft_as_before() -> None:
    rig = engine({"good": RIGS["model"]["good"]})
    stats = [run(rig, [request(number)])[str(number), 0].stats for number in range(6)]
    assert all(each.pauses == 0 for each in stats)
    assert all(each.tokens_per_step > 4 for each in stats)


@pytest.mark.usefixtures("prices")
def test_a_drafter_that_is_bad_at_one_kind_drafts_for_another() -> None:
    """All requests here are code; drafts for JSON were right before."""
    rig = engine({"wrong": always(Silent())})
    governor = rig.engine._governor
    past((4, 4), times=60, of=governor._populations.of("wrong", WorkKind.JSON))
    for number in range(80):
        run(rig, [request(number, kind=WorkKind.CODE)])
    code, json = (begun(governor._populations.of("wrong", kind)) for kind in (WorkKind.CODE, WorkKind.JSON))
    assert code.chance(whole=False) < ENTRY < json.chance(whole=False)


@pytest.mark.usefixtures("prices")
def test_an_unloaded_drafter_is_forgotten() -> None:
    drafter = Counting(ends_drafts=True)
    rig = engine({"wrong": always(drafter), "other": always(Silent())})
    for number in range(20):
        run(rig, [request(number)])
    governor = rig.engine._governor
    assert governor._populations.of("wrong", None).drafts >= KNOWN_DRAFTS
    governor.forget("wrong")
    assert governor._populations.of("wrong", None).drafts == 0


def test_a_device_teaches_the_same_populations() -> None:
    rig = build("toy", on_device={"bad": DEVICE_RIGS["bad"]}, clock=lambda: 0.0)
    run(rig, [request(number) for number in range(4)])
    population = rig.engine._governor._populations.of("bad", None)
    assert population.drafts > KNOWN_DRAFTS
    assert population.survival()[0] < 0.5
    pace = begun(population)
    assert pace.recent() == (pytest.approx(population.found), pytest.approx(population.rate))
