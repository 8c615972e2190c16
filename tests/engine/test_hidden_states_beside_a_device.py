"""Drafters on the host that read hidden states, beside a device: the states come with the landing, and nobody waits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask, FeatureDrafter, Seen
from paceline.types import Off, OffKind, Request, Speculation
from tests.laws import under_law
from tests.odd_drafters import Scripted
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, always
from tests.runs import Key, Told, plain, run, tokens_of
from tests.tiny_models import TARGET

COUNT = 9
TAPS = (0, 1, 2)  # of the target: more than the drafter reads, and in another order


class Reader(Scripted, FeatureDrafter):
    """Knows the answers, and notes whether it was fed the states of every position but the last before it is asked."""

    name = "reader"
    taps = (2, 0)

    def __init__(self, law: str, *, knows: bool = False, wrong: float = 0.2) -> None:
        requests = {request.id: request for request in under_law.device_requests(law, count=COUNT)}
        answers = under_law.plain_device_answers("toy", law, COUNT)
        super().__init__([[*requests[id].prompt, *told.tokens] for (id, _), told in answers.items()], wrong=wrong)
        self.fed: dict[int, dict[int, Tensor]] = {}  # sequence → position → states
        self.counts: Counter[bool] = Counter()  # feeds, by `crowded`
        self.right: list[bool] = []  # by ask
        self._knows = knows
        self._forward = TARGET.forward("toy", num_pages=1, taps=self.taps)

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self.fed[key] = {}

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        self.counts[crowded] += 1
        for key, start, rows in seen:
            self.fed[key] |= {start + i: features[row].clone() for i, row in enumerate(rows)}
        return {}

    def knows(self, page: int) -> bool:
        return self._knows

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.right += [self.has_all_before(ask) for ask in asks]
        return super().propose(asks)

    def has_all_before(self, ask: Ask) -> bool:
        fed, last = self.fed[ask.key], len(ask.tokens) - 1
        first = min(fed, default=last if self._knows else 0)
        if [*fed] != [*range(first, last)] or (first and not self._knows):
            return False
        places = np.arange(first, last)
        expected = self._forward.features_of(ask.tokens[places], places)
        return all(map(torch.equal, fed.values(), expected))


def engine(reader: Reader, *, on_device: Any = {}, **options: Any) -> Rig:  # noqa: B006 - never changed
    forward = TARGET.forward("toy", num_pages=options.pop("num_pages", 160), taps=TAPS)
    return build("toy", {"reader": always(reader)}, forward=forward, on_device=on_device, **options)


def asked(law: str, *names: str) -> list[Request]:
    """Requests with these drafters in turn."""
    made = under_law.device_requests(law, count=COUNT)
    return [
        replace(each, speculation=replace(each.speculation, drafter=names[i % len(names)]))
        for i, each in enumerate(made)
    ]


def check(rig: Rig, law: str, told: dict[Key, Told]) -> None:
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", law, COUNT))
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.rounds.most_in_flight == 2


def tapped(rig: Rig) -> list[set[int]]:
    """Lanes whose states went to the host, by launch."""
    steps = zip(rig.rounds.seats, rig.rounds.chunks, strict=True)
    return [{part.lane for part in (*seats, *chunks) if part.tapped} for seats, chunks in steps]


PRESSURE: dict[str, dict[str, Any]] = {
    "usual": {},
    "few rows": {"max_step_tokens": 7},
    "few pages": {"num_pages": 14},
    "few lanes": {"max_sequences": 2},
    "crowded": {"max_draft_batch": 3},
    "no cache": {"prefix_cache": False},
}


LAWS = [("sampled", pressure) for pressure in PRESSURE] + [("greedy", "usual"), ("greedy", "few pages")]


@pytest.mark.unwatched
@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
@pytest.mark.parametrize(("law", "pressure"), LAWS)
def test_states_are_those_of_the_positions(law: str, pressure: str, inline: bool) -> None:
    reader = Reader(law)
    reader.inline = inline
    rig = engine(reader, **PRESSURE[pressure])
    check(rig, law, run(rig, asked(law, "reader"), every=2))
    assert rig.engine.drafters["reader"].out is None
    assert len(reader.right) > 5
    assert all(reader.right)
    assert inline is False or rig.engine.stats.accepted > 10
    assert reader.counts[True] > 0 or pressure != "crowded"
    assert rig.engine.stats.preemptions > 0 or pressure != "few pages"


def test_states_are_those_of_steps_on_the_host() -> None:
    readers = Reader("sampled"), Reader("sampled")
    run(engine(readers[0], on_device=None), asked("sampled", "reader"))
    run(engine(readers[1]), asked("sampled", "reader"))
    host, device = (reader.fed for reader in readers)
    assert host.keys() == device.keys()
    for key, states in host.items():
        common = states.keys() & device[key].keys()
        assert len(common) > 5
        assert all(torch.equal(states[position], device[key][position]) for position in common)


def test_pages_that_the_drafter_knows_are_not_fed_again() -> None:
    reader = Reader("greedy", knows=True)
    rig = engine(reader)
    check(rig, "greedy", run(rig, asked("greedy", "reader")))
    again = run(rig, [replace(each, id=f"again {each.id}") for each in asked("greedy", "reader")])
    assert sum(told.stats.cached_tokens for told in again.values()) > 0
    assert rig.engine.drafters["reader"].out is None
    assert any(min(fed) > 0 for fed in reader.fed.values() if fed)
    assert all(reader.right)


def test_beside_heads_and_models_of_the_device() -> None:
    """Only the sequences of the reader send states, and drafts of all are accepted."""
    reader = Reader("greedy", wrong=0.0)
    rig = engine(reader, on_device={"eagle": DEVICE_RIGS["eagle"], "good": TARGET})
    told = run(rig, asked("greedy", "reader", "eagle", "good"))
    check(rig, "greedy", told)
    assert rig.engine.drafters["reader"].out is None
    assert told["0", 0].stats.accepted == told["0", 0].stats.drafted > 0
    assert sum(told[str(i), 0].stats.drafted for i in range(COUNT) if i % 3 == 1) > 0
    assert any(lanes and len(seats) > len(lanes) for lanes, seats in zip(tapped(rig), rig.rounds.seats, strict=True))
    assert max(map(len, tapped(rig))) <= 3


def test_one_that_raises_is_out_and_nobody_else_notices() -> None:
    class Raising(Reader):
        def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
            raise RuntimeError("a drafter of bad character")

        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            raise RuntimeError("a drafter of bad character")

    rig = engine(Raising("sampled"), on_device={"good": TARGET})
    told = run(rig, asked("sampled", "reader", "good"))
    check(rig, "sampled", told)
    reason = rig.engine.drafters["reader"].out
    assert reason is not None
    assert "raised RuntimeError: a drafter of bad character" in reason
    assert told["0", 0].stats.off_reason == reason
    assert told["1", 0].stats.accepted > 0
    assert not any(tapped(rig)[8:]), "states still travel"


@pytest.mark.parametrize("method", ["feed", "propose"])
def test_nobody_waits_for_one_that_hangs(method: str) -> None:
    """Its time limit is a minute, and the answers are there long before."""
    released = threading.Event()
    reader = Reader("sampled")
    reader.inline = False
    setattr(reader, method, lambda *arguments, **options: released.wait())
    rig = engine(reader)
    check(rig, "sampled", run(rig, asked("sampled", "reader")))
    released.set()


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
def test_one_that_gives_a_sequence_up(inline: bool) -> None:
    """That sequence decodes plainly and sends no more states; the others go on."""

    class Forgetful(Reader):
        def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
            super().feed(features, seen, crowded=crowded)
            first = min(self.fed)
            done = first in {each.key for each in seen} and len(self.fed[first]) > 4
            return {first: Off(OffKind.NO_HIDDEN_STATES, "forgotten")} if done else {}

    reader = Forgetful("greedy")
    reader.inline = inline
    rig = engine(reader)
    told = run(rig, [replace(each, speculation=Speculation()) for each in asked("greedy", "reader")])
    check(rig, "greedy", told)
    assert rig.engine.drafters["reader"].out is None
    assert all(reader.right)
    assert told["0", 0].stats.off_reason == "forgotten"
    assert told["1", 0].stats.off_reason != "forgotten"
    sent = sum(bool(0 in lanes) for lanes in tapped(rig)[: told["0", 0].stats.steps])
    assert inline is False or sent < 8 < told["0", 0].stats.steps
    assert inline is False or told["1", 0].stats.accepted > 5


def test_without_such_a_drafter_no_states_travel() -> None:
    rig = engine(Reader("greedy"), on_device={"eagle": DEVICE_RIGS["eagle"]})
    run(rig, plain(asked("greedy", "reader")))
    run(rig, [replace(each, id=f"{each.id} again") for each in asked("greedy", "eagle")])
    assert not any(tapped(rig))
