"""Laws of the simulated cluster: conservation, Little's law, bounds, and queues whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.cluster.affinity import Affinity, Busy, Wish
from paceline.plan.cluster import Outcome, simulate
from paceline.plan.cluster_report import _tokens_by
from paceline.plan.passes import prompt_seconds
from paceline.plan.routing import ROUTINGS, routed
from paceline.plan.service import service_of
from paceline.plan.workload import Requests, Workload, draw
from tests.plan.plans import plan, service


def some(rate: float = 40, **more: object) -> Requests:
    options: dict[str, object] = {"seconds": 20.0, "prompt_tokens": 40, "output_tokens": 20, "seed": 3}
    return draw(Workload(rate=rate, **(options | more)), longest=2000)  # type: ignore[arg-type]


def one(due: list[float], prompts: list[int], outputs: list[int]) -> Requests:
    return Requests(due=due, prompts=prompts, outputs=outputs, prefixes=[-1] * len(due), prefix_tokens=0)


def check_laws(outcome: Outcome) -> None:
    requests = outcome.requests
    left, first, finish = map(np.asarray, (outcome.left, outcome.first, outcome.finish))
    assert np.isfinite(finish).all(), "every request ends"
    assert (first > left).all()
    assert (finish >= first).all()
    assert ((finish > first) == (np.asarray(requests.outputs) > 1)).all()
    assert outcome.open_seconds == pytest.approx((finish - left).sum()), "Little: L·T = Σ W"
    assert max(outcome.busy) <= outcome.seconds * (1 + 1e-9)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("replicas", [1, 3, 17])
def test_every_request_ends_once_and_littles_law_holds(routing: str, replicas: int) -> None:
    requests = some(prefixes=9, prefix_tokens=20)
    check_laws(simulate(service(), requests, replicas=replicas, routing=routing, router_rate=100))


def test_ends_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.plan.replica import Replica

    ended: list[int] = []
    release = Replica._release

    def heard(self: Replica, request: int, now: float) -> None:
        ended.append(request)
        release(self, request, now)

    monkeypatch.setattr(Replica, "_release", heard)
    requests = some()
    simulate(service(), requests, replicas=3, routing="random")
    assert sorted(ended) == list(range(len(requests.due)))


def test_a_replica_of_a_real_plan_keeps_the_laws() -> None:
    planned = plan(drafter="llama-3.2-1b", acceptance=0.7, max_sequences=32)
    requests = draw(Workload(rate=60, seconds=5, prompt_tokens=3000), longest=100_000)
    outcomes = [
        simulate(service_of(planned, speculation=drafts), requests, replicas=2, routing="least-waiting")
        for drafts in (False, True)
    ]
    for outcome in outcomes:
        check_laws(outcome)
    plain, drafted = (np.asarray(outcome.finish).mean() for outcome in outcomes)
    assert drafted < plain


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_replica_with_one_seat_is_an_m_d_1_queue(load: float) -> None:
    service_seconds = 0.1  # 100 tokens of a prompt, and the first token is the last
    workload = Workload(
        rate=load / service_seconds, seconds=20_000, prompt_tokens=100, output_tokens=1, lengths="fixed", seed=1
    )
    outcome = simulate(service(most=1), draw(workload, longest=1000), replicas=1, routing="random")
    waits = np.asarray(outcome.finish) - np.asarray(outcome.left) - service_seconds
    assert waits.mean() == pytest.approx(load * service_seconds / (2 * (1 - load)), rel=0.05)
    assert sum(outcome.busy) / outcome.seconds == pytest.approx(load, rel=0.02)


def test_the_router_is_an_m_d_1_queue() -> None:
    workload = Workload(rate=800, seconds=200, seed=2)
    due = np.asarray(draw(workload, longest=4000).due)
    waits = np.asarray(routed(due.tolist(), 1000)) - due - 1e-3
    assert waits.mean() == pytest.approx(0.8 * 1e-3 / (2 * 0.2), rel=0.05)
    assert waits.min() >= -1e-9


def test_without_a_router_requests_reach_replicas_at_once() -> None:
    assert routed([0.5, 0.7], None) == [0.5, 0.7]


def test_the_router_is_the_limit() -> None:
    requests = some(rate=500, seconds=4)
    few, many = (
        simulate(service(), requests, replicas=count, routing="random", router_rate=100).seconds for count in (64, 512)
    )
    assert few >= 20  # 2,000 requests at 100 a second
    assert many == pytest.approx(few, rel=0.05)


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    outcome = simulate(service(), one([1.0], [100], [11]), replicas=1, routing="random")
    assert outcome.first == [pytest.approx(1.1)]
    assert outcome.finish == [pytest.approx(1.2)]


def test_several_tokens_a_step_need_fewer_steps() -> None:
    outcome = simulate(service(tokens=2.5), one([0.0], [100], [11]), replicas=1, routing="random")
    assert outcome.finish == [pytest.approx(0.1 + 4 * 0.01)]


def test_an_arrival_joins_at_the_end_of_the_step_that_runs() -> None:
    outcome = simulate(service(), one([0.0, 0.115], [100, 10], [101, 2]), replicas=1, routing="random")
    assert outcome.first[1] == pytest.approx(0.12 + 0.01 + 0.01)  # a step with its prompt beside it
    assert outcome.finish[1] == pytest.approx(0.15)
    assert outcome.finish[0] == pytest.approx(0.1 + 100 * 0.01 + 0.01)  # and the first waits for that prompt


def test_long_prompts_are_read_in_parts_beside_decoding_sequences() -> None:
    outcome = simulate(service(), one([0.0, 0.0], [10, 640], [50, 2]), replicas=1, routing="random")
    alone = simulate(service(), one([0.0], [640], [2]), replicas=1, routing="random")
    assert alone.first == [pytest.approx(0.64)]
    assert outcome.first[1] == pytest.approx(0.01 + 10 * (0.064 + 0.01))  # ten parts of 64 rows, each with a step


def test_requests_wait_for_seats_and_for_room() -> None:
    due, prompts, outputs = [0.0] * 3, [10] * 3, [11] * 3
    seats = simulate(service(most=1), one(due, prompts, outputs), replicas=1, routing="random")
    assert seats.first == [pytest.approx(0.01 + 0.11 * turn) for turn in range(3)]
    room = simulate(service(kv_tokens=21), one(due, prompts, outputs), replicas=1, routing="random")
    assert room.first == seats.first
    both = simulate(service(kv_tokens=42), one(due, prompts, outputs), replicas=1, routing="random")
    assert both.first[1] < room.first[1]


def test_context_makes_steps_longer() -> None:
    slow = replace(service(), slopes=(0.0, *[1e-5] * 4))
    outcome = simulate(slow, one([0.0], [100], [3]), replicas=1, routing="random")
    assert outcome.finish[0] - outcome.first[0] == pytest.approx(0.02 + 1e-5 * (100 + 101))


def test_an_answer_that_has_ended_has_no_context() -> None:
    slow = replace(service(), slopes=(0.0, *[1e-5] * 4))
    outcome = simulate(slow, one([0.0, 10.0], [100, 100], [9, 9]), replicas=1, routing="random")
    assert outcome.finish[1] == pytest.approx(10 + outcome.finish[0])


def test_tables_of_a_replica_are_those_of_the_plan() -> None:
    planned = plan(drafter="ngram", acceptance=0.6, max_sequences=16)
    plain, drafted = (service_of(planned, speculation=drafts) for drafts in (False, True))
    for count in (1, 16):
        seconds = plain.steps[count] + plain.slopes[count] * count * 700
        assert seconds == pytest.approx(planned.machine.step_seconds(count, 700, 0))
    assert plain.tokens[1:] == (1.0,) * 16
    assert min(drafted.tokens[1:]) > 2
    assert 64 <= plain.rows_beside < plain.rows_alone == 8192
    assert plain.reading(plain.rows_beside) <= 0.05 < plain.reading(plain.rows_beside + 128)
    whole = plain.reading(4096) + plain.attention * 4096 * 4097 / 2
    assert whole == pytest.approx(prompt_seconds(planned.machine.target, planned.machine.place, 4096))


def test_a_prompt_contains_its_prefix() -> None:
    drawn = draw(Workload(rate=50, prefixes=3, prefix_tokens=200, lengths="fixed"), longest=4000)
    assert set(drawn.prompts) == {512}
    assert set(drawn.prefixes) == {0, 1, 2}
    varied = draw(Workload(rate=50, prefixes=3, prefix_tokens=200), longest=100_000)
    assert np.mean(varied.prompts) == pytest.approx(512, rel=0.05)
    assert min(varied.prompts) > 200


def test_tokens_after_the_last_arrival_do_not_count() -> None:
    first, finish, outputs = np.array([0.0, 1.0, 5.0]), np.array([2.0, 3.0, 9.0]), np.array([11, 11, 11])
    assert _tokens_by(2.0, first, finish, outputs).tolist() == [11, 6, 0]


def test_a_prefix_that_is_there_is_not_read_again() -> None:
    requests = Requests([0.0, 10.0, 20.0], [100] * 3, [1] * 3, [4, 4, 5], prefix_tokens=60)
    outcome = simulate(service(), requests, replicas=1, routing="random")
    assert [first - due for first, due in zip(outcome.first, requests.due, strict=True)] == [
        pytest.approx(seconds) for seconds in (0.1, 0.04, 0.1)
    ]
    assert outcome.hits == 1


def test_prefixes_give_way_to_requests() -> None:
    requests = Requests([0.0, 10.0, 20.0], [100] * 3, [1] * 3, [4, 5, 4], prefix_tokens=60)
    assert simulate(service(kv_tokens=161), requests, replicas=1, routing="random").hits == 1
    assert simulate(service(kv_tokens=160), requests, replicas=1, routing="random").hits == 0


def test_least_waiting_is_fairer_than_random() -> None:
    requests = some(rate=90)
    tails = {
        routing: np.percentile(np.asarray(outcome.first) - requests.due, 99)
        for routing in ("random", "least-waiting")
        for outcome in [simulate(service(), requests, replicas=8, routing=routing)]
    }
    assert tails["least-waiting"] < 0.5 * tails["random"]


def test_routing_by_prefix_finds_prefixes_and_spreads_the_load() -> None:
    requests = some(rate=60, prefixes=64, prefix_tokens=30)
    found = {routing: simulate(service(), requests, replicas=16, routing=routing) for routing in ("random", "prefix")}
    assert found["prefix"].hits > 1.2 * found["random"].hits
    hot = simulate(service(), replace(requests, prefixes=[0] * len(requests.due)), replicas=16, routing="prefix")
    assert sum(seconds > 0 for seconds in hot.busy) > 4, "one prefix for all, and several replicas take it"
    alone = simulate(service(), replace(requests, prefixes=[0] * len(requests.due)), replicas=1, routing="prefix")
    assert hot.seconds < 0.5 * alone.seconds


@pytest.mark.parametrize("routing", ["least-waiting", "prefix"])
def test_the_simulation_asks_the_router_of_the_product(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wish] = []
    ranks = Affinity.ranks

    def heard(self: Affinity, wish: Wish, busy: Busy) -> list[list[str]]:
        asked.append(wish)
        return ranks(self, wish, busy)

    monkeypatch.setattr(Affinity, "ranks", heard)
    requests = some(prefixes=9, prefix_tokens=20)
    simulate(service(), requests, replicas=3, routing=routing)
    assert len(asked) == len(requests.due)
    assert len({wish.beginnings for wish in asked}) == (9 if routing == "prefix" else 1)


def test_the_same_seed_gives_the_same_figures() -> None:
    runs = [simulate(service(), some(), replicas=5, routing="random", seed=seed).finish for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_progress_is_told() -> None:
    told: list[int] = []
    simulate(service(), some(), replicas=1, routing="random", tick=told.append)
    assert told == [0]
