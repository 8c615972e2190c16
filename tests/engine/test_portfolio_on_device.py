"""A portfolio in rounds on a device, seen from the engine: who drafts for whom, and what each of them has read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.kernels.base import PAGE_SIZE, Batch, Output
from paceline.runner.heads.torch import TorchHead
from paceline.runner.rounds.protocol import Seat
from paceline.types import Request, Rule, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, EagleMade, PortfolioRig
from tests.runs import Run, plain, run, tokens_of
from tests.tiny_models import NOISY, Model

FEW = Model(vocab_size=5)  # its texts end in loops
LONG = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
HEAD = EagleMade(vocab_size=5, draft_vocab=5)


def requests(count: int, drafter: Callable[[int], str | None] = lambda i: None, **speculation: Any) -> list[Request]:
    prompts = [tuple((i * i + step * (i + 1)) % 5 for step in range(9)) for i in range(count)]
    return [
        Request(str(i), prompt, LONG, Speculation(drafter=drafter(i), **speculation))
        for i, prompt in enumerate(prompts)
    ]


def rig_of(made: Any, **options: Any) -> Rig:
    forward = FEW.forward("eager", num_pages=160, taps=(0, 1))
    drafters = made if isinstance(made, dict) else {"portfolio": made}
    return build("eager", forward=forward, on_device=drafters, **{"max_draft": 16, "prefix_cache": False, **options})


def seats_of(rig: Rig) -> list[Seat]:
    return [seat for seats in rig.rounds.seats for seat in seats]


@pytest.mark.parametrize("made", [HEAD, replace(HEAD, branches=None), Model(seed=3, vocab_size=5)], ids=str)
def test_copies_and_drafts_leave_the_text_as_it_is(made: Any) -> None:
    asked = requests(3)
    told = run(rig := rig_of(PortfolioRig(made)), asked)
    assert tokens_of(told) == tokens_of(run(rig_of({}), plain(asked)))
    members = {name: sum(each.stats.by_member.get(name, (0, 0))[1] for each in told.values()) for name in ("ngram",)}
    assert members["ngram"] > 150, "texts in loops are copied"
    steps = rig.engine.stats.steps
    assert steps < 60


def test_where_all_texts_repeat_the_head_rests_and_has_read_all_of_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without the head copy up to 16 tokens at a time, hold states for it meanwhile, and are not charged to it.
    It loses none of the states."""
    rig = rig_of(PortfolioRig(HEAD))
    read, charged = set[int](), list[int]()
    governor = rig.engine._stepper._in_rounds  # type: ignore[attr-defined]
    monkeypatch.setattr(governor, "charge", lambda drafter, *, batch, seconds: charged.append(batch))
    head = rig.rounds.drafters["portfolio"].head
    head.__class__ = spy(read)
    going, places = Run(rig), dict[int, tuple[list[int], int]]()
    going.submit(requests(2))
    while rig.engine.has_work:
        going.step()
        for sequence in rig.engine._scheduler.running:
            assert sequence.span is not None
            places[sequence.key] = list(sequence.span.pages), len(sequence.tokens)
    alone = [seat for seat in seats_of(rig) if seat.max_copy and not seat.max_draft]
    assert len(alone) > 3
    assert max(seat.max_copy for seat in alone) > 8
    for pages, length in places.values():
        heard = range(length - rig.rounds._states._held["portfolio"].capacity)
        missed = [at for at in heard if pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE not in read]
        assert len(heard) > 50
        assert not missed, "the head has not read what was copied"
    assert len(charged) == sum(any(seat.max_draft for seat in seats) for seats in rig.rounds.seats)


def spy(read: set[int]) -> type[TorchHead]:
    """A head that notes the slots whose states it reads."""

    class Spy(TorchHead):
        def __call__(self, batch: Batch, *, features: torch.Tensor | None = None, carry: Any = ()) -> Output:
            if features is not None:
                read.update(batch.slots.tolist())
            return super().__call__(batch, features=features, carry=carry)

    return Spy


def test_a_model_reads_what_is_copied() -> None:
    """No copy is longer than its own drafts, and every round runs it: it has keys and values of its own to fill."""
    rig = rig_of(PortfolioRig(Model(seed=3, vocab_size=5)))
    run(rig, requests(2))
    looking = [seat for seat in seats_of(rig) if seat.max_copy]
    assert len(looking) > 10
    assert all(seat.max_copy <= seat.max_draft for seat in looking)
    extra = [chunk for chunks in rig.rounds.chunks for chunk in chunks if not chunk.target]
    assert not extra, "it never had to catch up"


def test_members_by_name_share_the_network() -> None:
    """Requests of the portfolio and of the head alone take turns, on the states of one table."""
    names = ("portfolio", "eagle")
    drafters = {"portfolio": PortfolioRig(HEAD, of="eagle"), "eagle": HEAD, "ngram": DEVICE_RIGS["ngram"]}
    rig = rig_of(drafters)
    assert len(rig.rounds._state.held) == 1
    asked = requests(4, lambda i: names[i % 2])
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(run(rig_of({}), plain(asked)))
    stats = [told[str(i), 0].stats for i in range(4)]
    assert [each.drafter for each in stats] == [*names, *names]
    assert {name for each in stats[::2] for name in each.by_member} == {"eagle", "ngram"}
    assert all(sum(pair[0] for pair in each.by_member.values()) == each.drafted for each in stats[::2])
    assert all(each.drafted and not each.by_member for each in stats[1::2])


def test_pages_that_the_network_has_read_are_read_for_its_portfolio() -> None:
    drafters = {"portfolio": PortfolioRig(HEAD, of="eagle"), "eagle": HEAD}
    rig = rig_of(drafters, prefix_cache=True)
    [first, second] = requests(2, lambda i: ("eagle", "portfolio")[i])
    first = replace(first, prompt=first.prompt * 5)
    told = run(rig, [first]) | run(rig, [replace(second, prompt=first.prompt)])
    assert told["1", 0].stats.cached_tokens == len(first.prompt) // PAGE_SIZE * PAGE_SIZE
    assert told["0", 0].tokens == told["1", 0].tokens


@pytest.mark.parametrize("drafted", [True, False])
def test_a_copy_does_not_tell_that_the_head_has_read(drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has if it has drafted: after the turn of another drafter it has nothing to read, and copies go on."""
    rig, reached = rig_of(PortfolioRig(HEAD)), list[int]()
    collect = rig.rounds.collect

    def told(ticket: Any) -> Any:
        chunks, landed, times = collect(ticket)
        return chunks, [one._replace(match=one.match and one.match._replace(drafted=drafted)) for one in landed], times

    monkeypatch.setattr(rig.rounds, "collect", told)
    hearing = rig.engine._stepper._hearing  # type: ignore[attr-defined]
    monkeypatch.setattr(hearing, "reach", lambda sequence, end, drafter: reached.append(end))
    rig.engine.submit(requests(1)[0])
    while sum(bool(seats) for seats in rig.rounds.seats) < 5:
        rig.engine.step()
    assert bool(reached) == drafted


def test_all_that_a_portfolio_is_made_of_in_one_batch() -> None:
    drafters = {"portfolio": PortfolioRig(HEAD, of="eagle"), "eagle": HEAD, "ngram": DEVICE_RIGS["ngram"]}
    asked = requests(7, lambda i: [*drafters, None][i % 4])
    rig = rig_of(drafters, max_step_tokens=24)
    told = run(rig, asked, every=2)
    assert tokens_of(told) == tokens_of(run(rig_of({}), plain(asked)))
    assert all(each.stats.drafted for each in told.values())


def test_events_name_the_member_whose_draft_was_verified() -> None:
    rig = rig_of(PortfolioRig(HEAD, of="eagle"))
    rig.engine.submit(requests(1)[0])
    events = [event for _ in iter(lambda: rig.engine.has_work, False) for event in rig.engine.step()]
    named = [event.drafter for event in events if event.drafter is not None]
    assert {*named} == {"eagle", "ngram"}
    assert named[-1] == "ngram", "it ends in a loop"


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.CONFIDENCE])
def test_rules_that_want_more_than_tokens_get_no_copies(rule: Rule) -> None:
    asked = [
        replace(one, sampling=replace(LONG, temperature=0.7, max_tokens=30, seed=1)) for one in requests(2, rule=rule)
    ]
    rig = build(on_device={"portfolio": DEVICE_RIGS["portfolio-model"]})
    run(rig, asked)
    assert any(seat.max_draft for seat in seats_of(rig))
    assert not any(seat.max_copy for seat in seats_of(rig))
    beside = build(on_device={"portfolio": DEVICE_RIGS["portfolio-model"]})
    run(beside, [replace(one, speculation=Speculation()) for one in asked])
    assert any(seat.max_copy for seat in seats_of(beside)), "under the coupled rule they do"


def test_a_short_draft_by_request_bounds_copies() -> None:
    rig = rig_of(PortfolioRig(HEAD))
    run(rig, requests(2, max_draft=3))
    assert max(seat.longest for seat in seats_of(rig)) == 3


def test_noise_is_no_text_to_copy() -> None:
    """Where nothing repeats, the network drafts in every round."""
    rig = build(on_device={"portfolio": PortfolioRig(NOISY)})
    asked = [Request(str(i), (3 + i, 40 + i), replace(LONG, max_tokens=12), Speculation()) for i in range(3)]
    told = run(rig, asked)
    assert all("network" in each.stats.by_member for each in told.values())
