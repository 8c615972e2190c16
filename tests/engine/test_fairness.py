"""Tenants that wait are served alike: virtual token counters, over what preemption, aborts and idle time do to them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest

from paceline.engine.fair_queue import READ, WRITTEN, FairQueue, Tenant
from paceline.types import OFF, Finish, Request, SamplingParams, Speculation
from tests.rig import build
from tests.rig_drafters import RIGS
from tests.runs import SAMPLED, Run, mixed_requests, prompt, run, tokens_of


def ask(name: str, length: int = 5, *, tokens: int = 8, **more: Any) -> Request:
    """A request of the tenant that its name begins with; no two prompts have a beginning in common."""
    drawn = prompt(length, seed=crc32(name.encode()))
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)
    return Request(id=name, prompt=drawn, sampling=sampling, speculation=OFF, tenant=name.split("-")[0])


def flood(tenant: str, count: int, **options: Any) -> list[Request]:
    return [ask(f"{tenant}-{i}", **options) for i in range(count)]


class Watched(Run):
    """A run that knows the order of admission, and what each tenant was served."""

    def __init__(self, *requests: Request, **options: Any) -> None:
        super().__init__(build("toy", **options))
        self.order: list[str] = []  # requests by their first admission
        self.starts: list[str] = []  # by every admission
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.queue = self.rig.engine._scheduler.waiting
        start = self.queue.start

        def noting(sequence: Any, *, read: int) -> None:
            if not sequence.paid:
                self.order.append(sequence.request.id)
            self.starts.append(sequence.request.id)
            start(sequence, read=read)

        self.queue.start = noting  # type: ignore[method-assign]
        self.submit(requests)

    def step(self) -> list[Any]:
        events = super().step()
        check(self.queue, self.rig)
        return events

    def steps_until(self, admitted: int) -> None:
        while len(self.order) < admitted:
            self.step()

    def tenant(self, name: str) -> Tenant:
        return self.queue._tenants[name]

    @property
    def running(self) -> list[Any]:
        return self.rig.engine._scheduler.running

    def served(self) -> Counter[str]:
        """Weighted tokens by tenant, from what came out."""
        found: Counter[str] = Counter()
        for name in self.order:
            [told] = [each for (id, _), each in self.told.items() if id == name]
            found[name.split("-")[0]] += READ * len(self.prompts[name]) + WRITTEN * len(told.tokens)
        return found

    def submit(self, requests: Iterable[Request]) -> None:
        given = list(requests)
        self.prompts |= {each.id: each.prompt for each in given}
        super().submit(given)


def check(queue: FairQueue, rig: Any) -> None:
    """The queue agrees with the scheduler, and remembers only whom it needs."""
    running, tenants = rig.engine._scheduler.running, queue._tenants
    assert queue.count == len({each.key for each in queue.sequences()})
    assert {each.key for tenant in tenants.values() for each in tenant.running} == {each.key for each in running}
    assert sum(tenant.open for tenant in tenants.values()) == queue.count + len(running)
    if not rig.engine.has_work:
        assert not tenants


@pytest.mark.parametrize("lanes", [1, 2])
def test_one_request_beside_a_flood_is_next(lanes: int) -> None:
    """Also with one lane, where both have been served the same when it comes."""
    going = Watched(*flood("flood", 100), max_sequences=lanes)
    going.steps_until(10)
    while len(going.running) == lanes:
        going.step()
    going.submit([ask("one")])
    going.steps_until(11)
    assert going.order[10] == "one"
    going.finish()
    assert [name for name in going.order if name != "one"] == [f"flood-{i}" for i in range(100)]


def test_tenants_of_one_moment_take_turns() -> None:
    """The first comes first; of those that were served the same, who had a turn the longest time ago."""
    going = Watched(*flood("a", 6), *flood("b", 6), *flood("c", 6), max_sequences=1)
    going.finish()
    assert going.order == [f"{tenant}-{i}" for i in range(6) for tenant in "abc"]


@pytest.mark.parametrize("lanes", [1, 4])
def test_shares_of_tenants_that_flood_are_equal(lanes: int) -> None:
    """Requests differ: few long ones, many short ones, long prompts with short answers."""
    going = Watched(
        *flood("long", 60, tokens=60), *flood("short", 300, tokens=4), *flood("prompts", 100, length=60, tokens=2),
        max_sequences=lanes, max_step_tokens=64,
    )  # fmt: skip
    while len(going.queue._tenants) == 3 and all(tenant.waiting for tenant in going.queue._tenants.values()):
        going.step()
    served = going.served()
    assert min(served.values()) > 3000
    assert max(served.values()) / min(served.values()) < (1.08 if lanes > 1 else 1.04)
    largest = READ * 60 + WRITTEN * 60
    assert max(served.values()) - min(served.values()) <= 2 * lanes * largest  # the paper's bound


def test_time_without_requests_is_no_credit() -> None:
    """A tenant that comes back shares from then on, and does not catch up on what the other had in the meantime."""
    going = Watched(ask("back-first"), *flood("busy", 120, tokens=20), max_sequences=2)
    going.steps_until(60)
    before = going.served()
    going.submit(flood("back", 60, tokens=20))
    assert before["busy"] > 10 * before["back"]
    going.steps_until(100)
    later = Counter(name.split("-")[0] for name in going.order[60:])
    assert abs(later["back"] - later["busy"]) <= 2


def test_a_tenant_that_only_runs_keeps_nobody_s_counter_down() -> None:
    """One long answer is served little. That is no measure for who comes back, and no credit for its own tenant."""
    going = Watched(ask("calm-long", tokens=150), *flood("busy", 150, tokens=6), max_sequences=3)
    going.steps_until(80)
    going.submit([*flood("back", 40, tokens=6), *flood("calm", 40, tokens=6)])
    assert going.queue.loads()["busy"].counter > 2 * WRITTEN * len(going.told["calm-long", 0].tokens)
    going.steps_until(110)
    later = Counter(name.split("-")[0] for name in going.order[80:])
    assert max(later.values()) - min(later.values()) <= 3, later


def test_who_begins_to_wait_starts_where_those_are_who_wait() -> None:
    """Not where somebody is who was served little because he asked for little. What is generated counts at once."""
    going = Watched(ask("calm", tokens=150), *flood("busy", 10, tokens=100), max_sequences=3)
    for _ in range(60):
        going.step()
    going.submit([ask("back")])
    counter, loads = going.tenant("back").counter, going.queue.loads()
    assert counter == loads["busy"].counter == READ * 10 + WRITTEN * 120
    assert loads["calm"].counter == READ * 5 + WRITTEN * 60
    assert (loads["busy"].waiting, loads["busy"].running, loads["back"].waiting) == (8, 2, 1)
    going.finish()


def test_who_comes_when_nobody_waits_starts_no_lower_than_the_latest_admission() -> None:
    going = Watched(ask("calm", tokens=150), *(ask(f"busy-{n}", tokens=n) for n in (60, 100, 61)), max_sequences=3)
    going.steps_until(4)
    assert not going.queue.count
    at_admission = READ * 10 + WRITTEN * 120
    going.submit([ask("back")])
    assert going.tenant("back").counter == at_admission
    going.finish()


def test_who_owes_is_remembered_until_the_others_have_had_as_much() -> None:
    going = Watched(*flood("busy", 3, tokens=60), *flood("calm", 60, tokens=2), max_sequences=4)
    while going.tenant("busy").open:
        going.step()
    owed = going.tenant("busy").counter
    assert owed == 3 * (READ * 5 + WRITTEN * 60) > going.tenant("calm").counter
    while going.tenant("calm").counter <= owed:
        assert going.tenant("busy").counter == owed
        going.step()
    going.step()
    assert going.queue.loads().keys() == {"calm"}
    going.finish()


def test_generated_tokens_count_before_a_request_ends() -> None:
    """One tenant has a long answer that still runs. In the other lane it gets 5 of 18 places: 9 x = 4 + 9 (1 - x)."""
    going = Watched(ask("a-long", tokens=100), *flood("a", 20, tokens=2), *flood("b", 20, tokens=2), max_sequences=2)
    going.steps_until(19)
    assert going.told["a-long", 0].finish is None
    counts = Counter(name.split("-")[0] for name in going.order[1:])
    assert 12 <= counts["b"] <= 14, going.order


def test_generated_tokens_count_when_nobody_of_the_tenant_ended() -> None:
    """When one of two long answers ends, both have generated as much, and the other one had the longer prompt."""
    going = Watched(ask("a-long", 9, tokens=100), ask("b-long", tokens=50), ask("a-0"), ask("b-0"), max_sequences=2)
    going.finish()
    assert going.order == ["a-long", "b-long", "b-0", "a-0"]


def test_what_the_prefix_cache_has_is_not_paid_for() -> None:
    going = Watched(ask("a-0", 64, tokens=2), max_sequences=2, max_step_tokens=64)
    while going.told["a-0", 0].finish is None:
        going.step()
    going.submit([replace(ask("b-0", tokens=4), prompt=going.prompts["a-0"])])
    going.step()
    cached = going.rig.engine._scheduler.running[0].counters.cached_tokens
    assert cached >= 32
    tenant = going.tenant("b")
    going.finish()
    assert tenant.counter == READ * (64 - cached) + WRITTEN * 4


def short_of_pages(*requests: Request) -> Watched:
    return Watched(*requests, num_pages=11, max_context=160)


def test_a_preempted_request_pays_once() -> None:
    requests = [ask(f"{'ab'[i % 2]}-{i}", 30, tokens=60) for i in range(8)]
    going = short_of_pages(*requests)
    tenants = {name: going.tenant(name) for name in "ab"}
    told = going.finish()
    assert going.rig.engine.stats.preemptions > 0
    assert all(each.finish is Finish.LENGTH for each in told.values())
    assert {name: each.counter for name, each in tenants.items()} == going.served()


def test_preempted_requests_come_before_fairness() -> None:
    """Who was served more is preempted, and goes on before the request of a tenant that was served nothing."""
    going = short_of_pages(*flood("a", 2, length=30, tokens=60))
    while not going.rig.engine.stats.preemptions:
        going.step()
    assert [sequence.request.id for sequence in going.queue.sequences()] == ["a-1"]
    going.submit([ask("b-new", 30, tokens=60)])
    going.finish()
    assert going.starts == ["a-0", "a-1", "a-1", "b-new"]


def test_aborted_requests_pay_for_what_they_had() -> None:
    going = Watched(*flood("a", 6, tokens=50), *flood("b", 3, tokens=50), max_sequences=2)
    tenants = {name: going.tenant(name) for name in "ab"}
    for _ in range(4):
        going.step()
    for name in ("a-4", "a-5", "b-2", "a-0"):  # three wait, one runs
        going.rig.engine.abort(name)
    going.step()
    assert "a-0" in going.order
    assert not {"a-4", "b-2"} & set(going.order)
    going.finish()
    assert {name: each.counter for name, each in tenants.items()} == going.served()
    assert not {"a-4", "a-5", "b-2"} & set(going.order)


def test_an_aborted_flood_leaves_nothing_behind() -> None:
    going = Watched(*flood("a", 50), *flood("b", 2), max_sequences=2)
    going.step()
    for i in range(50):
        going.rig.engine.abort(f"a-{i}")
    going.finish()
    assert going.queue._floor == 0


@pytest.mark.parametrize("other", ["a-later", "b"])
def test_samples_that_wait_for_the_first_hold_up_no_other_request(other: str) -> None:
    going = Watched(ask("a", 60, n=4, prompt_logprobs=1), max_sequences=4, max_step_tokens=8)
    going.step()
    going.submit([ask(other)])
    going.step()
    assert going.order == ["a", other]
    going.finish()


def test_tenants_are_forgotten() -> None:
    """Hundreds of tenants of one request each, while one is always there."""
    going = Watched(ask("always", tokens=180), max_sequences=4, max_context=300)
    for i in range(200):
        going.submit([ask(f"t{i}-0", tokens=1), ask(f"u{i}-0", tokens=2)])
        going.step()
        assert len(going.queue._tenants) <= 12, "three run beside the one, and some of those that ended still owe"
    assert len(going.order) > 200
    going.finish()
    assert not going.queue._tenants


@pytest.mark.parametrize("seed", range(4))
def test_nobody_starves_whatever_happens(seed: int) -> None:
    """Random arrivals, lengths, aborts and preemptions: every request ends, whole unless it was aborted."""
    draw = random.Random(seed)
    going = Watched(num_pages=24, max_context=160, max_sequences=4)
    names, aborted = list[str](), set[str]()
    for _ in range(60):
        for _ in range(draw.randrange(3)):
            name = f"{draw.choice('abc')}-{len(names)}"
            names.append(name)
            going.submit([ask(name, draw.randrange(1, 50), tokens=draw.randrange(1, 60), n=draw.randrange(1, 3))])
        if names and draw.random() < 0.2:
            aborted.add(name := draw.choice(names))
            going.rig.engine.abort(name)
        going.step()
    told = going.finish()
    assert all(each.finish is Finish.LENGTH or name in aborted for (name, _), each in told.items())


@pytest.mark.parametrize("drafter", ["plain", "ngram"])
def test_texts_are_the_same_whoever_asks(drafter: str) -> None:
    """Tenants change the order of admission alone."""
    drafters = {} if drafter == "plain" else {"ngram": RIGS["ngram"]["ngram"]}
    params = [SamplingParams(temperature=0), *SAMPLED]
    asked = mixed_requests(params, [OFF if drafter == "plain" else Speculation()], count=14)
    tenants = [replace(each, tenant=f"t{i % 3}") for i, each in enumerate(reversed(asked))]
    told = [tokens_of(run(build("toy", drafters, max_sequences=2), each)) for each in (asked, tenants)]
    assert told[0] == told[1]


def test_an_engine_that_dies_ends_every_tenant_s_requests() -> None:
    going = Watched(*flood("a", 4), *flood("b", 4), max_sequences=2)
    going.step()
    going.rig.engine.die(RuntimeError("planted"))
    events: Sequence[Any] = going.rig.engine.step()
    assert len(events) == 8
    assert not going.queue._tenants
