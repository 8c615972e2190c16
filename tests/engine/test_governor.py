"""Draft lengths where a device knows how long its rounds take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.engine.rests import PLAIN, PROBE_SHARE, Chance, Rests, rest_after, speeds
from paceline.runner.rounds.protocol import DraftingRound
from paceline.types import Request, SamplingParams, Speculation
from tests.odd_drafters import AgainOnDevice
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, DeviceRig, Itself
from tests.runs import Told, prompt, run
from tests.tiny_models import TARGET
from tests.watched_rounds import WatchedRounds


class Nothing:
    """Implements DeviceDrafter: it finds nothing."""

    reader, finds_fewer = None, True

    def draft(self, round: DraftingRound) -> None:
        round.found.zero_()


class Chain(Nothing):
    """It ends drafts itself, before the first token."""

    ends_drafts = True


class Tree(Chain):
    """Its drafts have two tokens on a level."""

    def levels(self, count: int) -> int:
        return (count + 1) // 2


Seconds = Callable[[int, int, str], float | None]  # of (batch, draft, drafter)


def draft_on_device(
    seconds: Seconds, by: DeviceRig = TARGET, *, count: int = 2, **options: Any
) -> tuple[list[int], Rig, Told]:
    """All draft lengths that were asked for; the engine; and what became of the first sequence."""
    rig = build(
        "toy", on_device={"model": by}, clock=lambda: 0.0, **{"measure_cost": True, "max_draft_tokens": 256, **options}
    )
    assert rig.rounds is not None
    rig.rounds.round_seconds = seconds
    sampling = SamplingParams(temperature=0, max_tokens=80)
    requests = [Request(id=str(i), prompt=prompt(9, seed=i), sampling=sampling) for i in range(count)]
    told = run(rig, requests)
    assert [each.tokens for each in told.values()] == [each.tokens for each in run(build("toy"), requests).values()]
    return lengths(rig.rounds), rig, told["0", 0]


def lengths(rounds: WatchedRounds) -> list[int]:
    return [seat.max_draft for seats in rounds.seats for seat in seats]


def test_drafts_are_as_long_as_they_are_cheap() -> None:
    """Up to four tokens a round costs next to nothing, and then a lot."""
    asked, rig, _ = draft_on_device(
        lambda batch, draft, drafter: 0.001 * (1 + 0.05 * min(draft, 4) + max(draft - 4, 0))
    )
    assert max(asked) == 4
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 50


def test_synthetic_acceptance_teaches_as_real_does() -> None:
    """The drafter is wrong, but a coin calls most of its tokens right. The fourth takes longer than it brings."""
    options = {"measure_cost": True, "max_draft": 4, "max_draft_tokens": 256, "synthetic_acceptance": 0.8}
    rig = build("toy", on_device={"bad": DEVICE_RIGS["bad"]}, clock=lambda: 0.0, **options)
    assert rig.rounds is not None
    rig.rounds.round_seconds = lambda batch, draft, drafter: 0.001 * (1 + 0.1 * draft + (draft > 3))
    sampling = SamplingParams(temperature=0, max_tokens=80)
    run(rig, [Request(id=str(i), prompt=prompt(9, seed=i), sampling=replace(sampling, seed=i)) for i in range(4)])
    assert max(lengths(rig.rounds)[16:]) == 3
    assert rig.engine.stats.accepted > rig.engine.stats.drafted / 2


def test_a_tree_is_worth_its_levels_and_not_its_tokens() -> None:
    """A chain of eight tokens is too long, with the same chances on each of its levels."""
    chain, _, _ = draft_on_device(lambda batch, draft, drafter: 0.001 * (1 + 0.06 * draft), Chain(), count=1)
    tree, _, _ = draft_on_device(lambda batch, draft, drafter: 0.001 * (1 + 0.06 * draft), Tree(), count=1)
    assert (chain[0], tree[0]) == (5, 8)


@pytest.mark.parametrize(("longest", "whole"), [(8, {0, 1, 4, 7, 8}), (6, {0, 1, 4, 6}), (2, {0, 1, 2})])
def test_only_the_longest_draft_of_as_many_levels_counts(longest: int, whole: set[int]) -> None:
    seconds, levels = [1 + 0.01 * n for n in range(9)], [0, 1, 2, 2, 2, 3, 3, 3, 4]
    speed = speeds([Chance(1.0, 0.7, longest), Chance(0.5, 0.7, 1), PLAIN], seconds, levels)
    assert {n for n, tokens in enumerate(speed) if tokens} == whole
    assert speed[1] == (3 + 0.7 + 0.35) / 1.01


def test_no_draft_where_plain_rounds_are_faster_than_any() -> None:
    asked, _, told = draft_on_device(lambda batch, draft, drafter: 0.001 * (1 + 2 * draft))
    assert not any(asked)
    assert told.stats.pauses == 1, "there is nothing to probe"
    assert told.stats.off_reason == "paused: plain rounds make more tokens a second"


def test_where_drafts_are_not_good_enough_there_are_probes() -> None:
    """After each rest one, for things may have changed, so that all of them take a two-hundredth of the time."""
    asked, rig, told = draft_on_device(
        lambda batch, draft, drafter: 0.001 * (1 + 0.1 * draft), AgainOnDevice(), count=1, min_acceptance=0.0
    )
    assert rig.engine.stats.accepted == 0, "a probe with luck would end a rest"
    first = asked.index(0)
    probes = [i for i, length in enumerate(asked) if length and i > first]
    assert len(probes) >= 3
    assert {asked[i] for i in probes} == {1}, "a probe is no longer than it must be"
    rests = {after - before - 1 for before, after in itertools.pairwise([first - 1, *probes])}
    assert rests == {0.1 / PROBE_SHARE}
    assert told.stats.pauses == 1 + len(probes)
    assert told.stats.off_reason is not None


def test_all_sequences_rest_and_probe_together() -> None:
    """A round that drafts takes longer for all of them, whoever drafts."""
    _, rig, _ = draft_on_device(
        lambda batch, draft, drafter: 0.001 * (1 + 0.1 * draft), Itself(noise=9.0), count=4, min_acceptance=0.0
    )
    rounds = [{seat.max_draft for seat in seats} for seats in rig.rounds.seats[24:-4] if len(seats) == 4]
    assert {0} in rounds
    assert any(0 not in each for each in rounds)
    assert all(0 not in each or each == {0} for each in rounds)


def test_a_batch_that_shrinks_and_grows_brings_no_probe_forward() -> None:
    """Requests that end and come compute anew what pays, once a change; the rest goes on if it is still nothing."""
    rests = Rests()
    rests.begin("stub", batch=16, rounds=40)
    sizes = [16] * 10 + [11] * 10 + [16] * 10 + [15] * 11
    resting = [rests.count_down("stub", batch=size) for size in sizes]
    assert [i for i, rested in enumerate(resting) if not rested] == [10, 20, 40]
    assert "stub" not in rests, "its rounds are over"


@pytest.mark.parametrize("dearer", [0.1, 2.0, 9.4, 20.0])
def test_a_probe_however_dear_keeps_to_its_share_of_the_time(dearer: float) -> None:
    assert dearer / rest_after(dearer) == pytest.approx(PROBE_SHARE, rel=0.05)


def test_a_probe_that_goes_well_ends_the_rest() -> None:
    """What is assumed of a new sequence does not pay; what the probe shows does."""
    asked, rig, _ = draft_on_device(lambda batch, draft, drafter: 0.001 * (1 + 0.75 * draft), count=1)
    assert asked[:2] == [1, 0], "the second round is planned before the probe has landed"
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 30


def test_a_drafter_that_finds_nothing_rests() -> None:
    """Lookups cost little, but in every round; the text has nothing to find."""
    _, rig, told = draft_on_device(
        lambda batch, draft, drafter: 0.001 * (1.04 if draft else 1), Nothing(), count=2, min_acceptance=0.0
    )
    assert rig.engine.stats.drafted == 0
    drafting = [any(seat.max_draft for seat in seats) for seats in rig.rounds.seats]
    assert any(drafting[:8])
    assert sum(drafting[30:]) <= len(drafting[30:]) / 8 + 1
    assert told.stats.off_reason == "paused: plain rounds make more tokens a second"


def test_the_size_of_the_batch_matters() -> None:
    def seconds(batch: int, draft: int, drafter: str) -> float:
        return 0.001 * (1 + draft * (3.0 if batch > 2 else 0.01))

    many, _, _ = draft_on_device(seconds, count=6, max_sequences=6)
    few, _, _ = draft_on_device(seconds, count=2)
    assert sum(few) / len(few) > 3 > sum(many) / len(many)


def test_bad_drafts_get_shorter() -> None:
    def seconds(batch: int, draft: int, drafter: str) -> float:
        return 0.001 * (1 + 0.3 * draft)

    good, _, _ = draft_on_device(seconds)
    bad, _, _ = draft_on_device(seconds, DEVICE_RIGS["bad"], min_acceptance=0.0)
    assert max(good[20:]) > 4
    assert sum(bad[20:]) < sum(good[20:]) / 2


@pytest.mark.parametrize("known", [(), (0,), (4,)])
def test_too_little_is_known(known: tuple[int, ...]) -> None:
    """Then what steps took decides, as on the host."""
    asked, rig, _ = draft_on_device(lambda batch, draft, drafter: 0.001 if draft in known else None)
    assert any(asked)
    assert rig.engine._accounting._governor.cost._step_seconds > 0


def test_between_what_was_measured_there_is_a_line() -> None:
    table = {0: 0.001, 2: 0.0011, 6: 0.01}
    asked, _, _ = draft_on_device(lambda batch, draft, drafter: table.get(draft))
    assert max(asked[4:]) == 2


def test_no_line_promises_rounds_for_nothing() -> None:
    """Two noisy measurements that fall: longer rounds are taken for half of the least, not for less than no time."""
    asked, _, _ = draft_on_device(lambda batch, draft, drafter: {0: 0.002, 1: 0.001}.get(draft))
    assert max(asked) == 8


def test_fixed_drafts_ask_nobody() -> None:
    def seconds(batch: int, draft: int, drafter: str) -> float:
        raise AssertionError("nobody asks")

    asked, _, _ = draft_on_device(seconds, DEVICE_RIGS["bad"], fixed_draft=True)
    assert set(asked[:-20]) == {8}


def test_each_drafter_has_seconds_of_its_own() -> None:
    """Where one costs next to nothing and the other more than it brings, one drafts and the other pauses."""
    cheap, dear = {"drafter": "cheap"}, {"drafter": "dear"}
    rig = build("toy", on_device={"cheap": TARGET, "dear": TARGET}, measure_cost=True, clock=lambda: 0.0)
    assert rig.rounds is not None
    rig.rounds.round_seconds = lambda batch, draft, drafter: 0.001 * (1 + draft * (0.01 if drafter == "cheap" else 2))
    sampling = SamplingParams(temperature=0, max_tokens=60)
    requests = [
        Request(id=words["drafter"], prompt=prompt(9, seed=i), sampling=sampling, speculation=Speculation(**words))
        for i, words in enumerate((cheap, dear))
    ]
    told = run(rig, requests)
    assert told["cheap", 0].stats.accepted > 30
    assert told["dear", 0].stats.drafted == 0
    assert told["dear", 0].stats.off_reason == "paused: plain rounds make more tokens a second"


def test_a_drafter_that_nothing_is_known_of_goes_by_what_steps_took() -> None:
    asked: set[str] = set()

    def seconds(batch: int, draft: int, drafter: str) -> float | None:
        asked.add(drafter)
        return 0.001 * (1 + 2 * draft) if drafter == "known" else None

    rig = build("toy", on_device={"known": TARGET, "new": TARGET}, measure_cost=True, clock=lambda: 0.0)
    assert rig.rounds is not None
    rig.rounds.round_seconds = seconds
    sampling = SamplingParams(temperature=0, max_tokens=40)
    requests = [
        Request(id=name, prompt=prompt(9, seed=i), sampling=sampling, speculation=Speculation(drafter=name))
        for i, name in enumerate(("known", "new"))
    ]
    told = run(rig, requests)
    assert asked == {"known", "new"}
    assert told["known", 0].stats.drafted == 0
    assert told["new", 0].stats.accepted > 10
