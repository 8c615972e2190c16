"""A simulated engine: times that can be added up by hand, and decisions of the real scheduler, cache and governor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.errors import EngineDead
from paceline.replay.arrivals import Arrival, Schedule
from paceline.replay.drafts import given_acceptance
from paceline.replay.paper import DrafterTraits, PaperClock, script
from paceline.replay.report import recorded_outcomes
from paceline.replay.simulate import Run, Setting, simulate
from paceline.server.record import page_names
from tests.replay.recorded import arrival, setting, times

NGRAM = DrafterTraits("ngram", max_draft=8, ends_drafts=False, weighs_cost=False)


def speculative(rate: float, **options: object) -> Setting:
    fixed = {"fixed_draft": True, **options}
    return setting("ngram", drafter=NGRAM, drafts=given_acceptance(rate, max_draft=8), **fixed)


def ttfts(run: Run) -> list[float]:
    return [outcome.ttft for outcome in run.outcomes]


def test_a_plain_answer_takes_a_pass_for_each_token() -> None:
    run = simulate(setting(known=times(pass_seconds=0.01, host=0.002)), [arrival(1, output=5)])
    [outcome] = run.outcomes
    assert outcome.ttft == pytest.approx(0.012)
    assert outcome.latency == pytest.approx(5 * 0.012)
    assert outcome.tpot == pytest.approx(0.012)
    assert (outcome.output_tokens, outcome.finish, outcome.good) == (5, "length", True)
    assert run.seconds == pytest.approx(0.06)
    assert not run.counters.drafts


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    run = simulate(setting(), [arrival(1), arrival(2, due=100.0)])
    assert ttfts(run) == pytest.approx([0.01, 0.01])
    assert run.seconds == pytest.approx(100.04)
    odd = [arrival(i, due=0.1 * i + 0.0123 * i**2) for i in range(1, 300)]
    governed = speculative(0.5, known=times(row_seconds=0.0007), fixed_draft=False, measure_cost=True)
    assert all(outcome.good for outcome in simulate(governed, odd).outcomes)  # whatever passes were timed before


def test_drafts_that_are_right_save_passes_and_cost_their_drafting() -> None:
    known = times(pass_seconds=0.01, draft_seconds=0.004)
    run = simulate(speculative(1.0, known=known), [arrival(1, output=19)])
    [outcome] = run.outcomes
    # One pass for the prompt, then two rounds of 8 right tokens and the target's own.
    assert outcome.latency == pytest.approx(0.01 + 2 * 0.014)
    assert outcome.chunks == 3
    assert (run.counters.drafts, run.counters.drafted, run.counters.accepted) == (2, 16, 16)
    wrong = simulate(speculative(0.0, known=known), [arrival(1, output=19)])
    # 17 rounds in vain: the last token of an answer is never drafted.
    assert wrong.outcomes[0].latency == pytest.approx(19 * 0.01 + 17 * 0.004)
    assert wrong.counters.accepted == 0


def test_acceptance_is_that_of_the_drafts() -> None:
    run = simulate(speculative(0.6), [arrival(i, output=200, due=10.0 * i) for i in range(1, 9)])
    expected = sum(0.6**i for i in range(1, 9))
    assert run.counters.accepted / run.counters.drafts == pytest.approx(expected, rel=0.1)
    assert run.counters.by_position[0] / run.counters.drafts == pytest.approx(0.6, rel=0.1)


def test_sequences_wait_for_a_lane() -> None:
    both = simulate(setting(max_sequences=2), [arrival(1), arrival(2)])
    assert ttfts(both) == pytest.approx([0.01, 0.01])
    alone = simulate(setting(max_sequences=1), [arrival(1), arrival(2)])
    assert ttfts(alone) == pytest.approx([0.01, 0.05])


def test_a_long_prompt_is_read_in_chunks() -> None:
    run = simulate(setting(max_step_tokens=32), [arrival(1, prompt=100, output=1)])
    assert ttfts(run) == pytest.approx([4 * 0.01])


def test_rows_cost_what_the_table_says() -> None:
    known = times(pass_seconds=0.01, row_seconds=0.001)
    run = simulate(setting(known=known, max_step_tokens=64), [arrival(1, prompt=41, output=2)])
    assert ttfts(run) == pytest.approx([0.01 + 40 * 0.001])
    assert run.outcomes[0].tpot == pytest.approx(0.01)


def prefixed(number: int, due: float, tokens: Sequence[int]) -> Arrival:
    return arrival(number, due=due, prompt=len(tokens), output=1, pages=page_names(tokens))


def test_a_shared_beginning_is_found_in_the_cache() -> None:
    first, same, other = [*range(64)], [*range(64), 7], [*range(1, 65), 7]
    known = times(pass_seconds=0.01, row_seconds=0.001)
    for tokens, rows in ((same, 1), (other, 65)):
        run = simulate(setting(known=known, max_step_tokens=256), [prefixed(1, 0.0, first), prefixed(2, 9.0, tokens)])
        assert ttfts(run)[1] == pytest.approx(0.01 + (rows - 1) * 0.001)
    without = setting(known=known, max_step_tokens=256, prefix_cache=False)
    run = simulate(without, [prefixed(1, 0.0, first), prefixed(2, 9.0, same)])
    assert ttfts(run)[1] == pytest.approx(0.01 + 64 * 0.001)


def test_pages_run_out_and_the_last_sequence_is_computed_again() -> None:
    many = [arrival(i, prompt=40, output=60) for i in range(1, 5)]
    run = simulate(setting(pages=12), many)
    assert run.stats is not None
    assert run.stats.preemptions > 0
    assert [outcome.output_tokens for outcome in run.outcomes] == [60] * 4
    assert all(each.good for each in run.outcomes)
    assert run.seconds > simulate(setting(pages=100), many).seconds


def test_the_governor_decides_as_in_the_engine() -> None:
    governed = {"fixed_draft": False, "measure_cost": True, "max_draft_batch": None}
    many = [arrival(i, output=40) for i in range(1, 5)]
    flat = simulate(speculative(0.9, known=times(row_seconds=0.0), **governed), many)
    steep = simulate(speculative(0.9, known=times(row_seconds=0.01), **governed), many)
    assert flat.counters.drafts > 0
    assert steep.counters.drafts < flat.counters.drafts / 4  # a second row for each would double the pass


def test_tokens_travel_together_within_the_interval() -> None:
    run = simulate(setting(stream_interval=0.025), [arrival(1, output=10)])
    [outcome] = run.outcomes
    assert outcome.ttft == pytest.approx(0.01)
    assert outcome.gaps == pytest.approx([0.03, 0.03, 0.03])
    assert outcome.output_tokens == 10
    assert outcome.latency == pytest.approx(0.1)


def test_the_server_takes_its_time_before_the_first_token() -> None:
    [outcome] = simulate(setting(delivery=0.5), [arrival(1, output=10)]).outcomes
    assert (outcome.ttft, outcome.latency) == pytest.approx((0.51, 0.6))
    assert outcome.gaps == pytest.approx([0.01] * 9)
    served = [arrival(i, time_to_first=0.2, time_first_sent=0.2 + 0.01 * i, time_total=0.9) for i in range(1, 4)]
    assert Schedule(tuple(served), ()).delivery == pytest.approx(0.02)
    assert [(each.ttft, each.latency) for each in recorded_outcomes(Schedule((served[1],), ()))] == [(0.22, 0.92)]
    assert arrival(1, time_to_first=0.2).answer.delivery == arrival(1).answer.delivery == 0.0


def test_a_run_can_be_repeated() -> None:
    many = [arrival(i, due=0.05 * i, output=50) for i in range(1, 9)]
    first, again = (simulate(speculative(0.5, seed=3), many) for _ in range(2))
    assert [each.latency for each in first.outcomes] == [each.latency for each in again.outcomes]
    other = simulate(speculative(0.5, seed=4), many)
    assert [each.latency for each in first.outcomes] != [each.latency for each in other.outcomes]


def test_an_interrupt_keeps_what_is_complete() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    run = simulate(setting(max_sequences=1), [arrival(1), arrival(2), arrival(3, due=50.0)], tick=stop)
    assert run.interrupted
    assert run.not_sent == 1
    assert [outcome.good for outcome in run.outcomes] == [True, False]


def test_an_engine_that_dies_is_said() -> None:
    class Broken:
        source = "broken"

        def draw(self, *args: object, **options: object) -> None:
            return None

    broken = setting("x", drafter=NGRAM, drafts=Broken(), fixed_draft=True)
    assert simulate(broken, [arrival(1)]).outcomes[0].good  # a drafter that raises costs speed alone
    with pytest.raises(EngineDead, match="the simulated engine stopped"):
        simulate(setting(known=replace(times(), host=())), [arrival(1)])


def test_scripts_share_what_pages_share() -> None:
    names = page_names(range(48))
    one, two = (script(arrival(i, prompt=40, output=20, pages=names[: i + 1]), max_draft=4, seed=0) for i in (1, 2))
    assert one.tokens[:32] == two.tokens[:32]
    assert one.tokens[32:] != two.tokens[32:]
    assert len(one.tokens) == 40 + 20 + 4 + 2
    assert len(one.prompt) == 40


def test_time_that_is_owed_passes_after_the_next_reading() -> None:
    clock = PaperClock()
    clock.advance(1.0)
    clock.owe(0.5)
    assert [clock(), clock(), clock()] == [1.0, 1.5, 1.5]
