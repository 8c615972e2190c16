"""Law 8: a drafter that raises, hangs or returns nonsense costs speed, never correctness or the request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.types import Request, Rule, Speculation
from tests.laws import under_law
from tests.odd_drafters import METHODS, NONSENSE, Nonsense, Silent, hanging, raising
from tests.rig import Rig, build
from tests.rig_drafters import RIGS, always
from tests.runs import Run, run, tokens_of
from tests.tiny_models import TARGET

LAW, COUNT = "sampled", 4


def check(rig: Rig, *, out: str | None) -> None:
    """The text is the plain one, and the reason why nobody drafts is where it belongs."""
    requests = under_law.requests(LAW, under_law.LOSSLESS, count=COUNT)
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(under_law.plain_answers("toy", LAW, COUNT))
    reason = rig.engine.drafters["odd"].out
    if out is None:
        assert reason is None
        return
    assert reason is not None
    assert reason.startswith("drafter odd is out: it ")
    assert out in reason
    speculating = [request.id for request in requests if request.speculation.enabled]
    assert all(told[i, 0].stats.off_reason == reason for i in speculating)
    assert any(told[i, 0].stats.drafter == "odd" for i in speculating)


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense(kind: str) -> None:
    out = "raised ValueError" if kind == "writes into the tokens" else "returned "
    check(build("toy", {"odd": always(Nonsense(NONSENSE[kind]))}), out=out)


@pytest.mark.parametrize("method", ["start", "propose"])
def test_raising(method: str) -> None:
    check(build("toy", {"odd": always(raising(method))}), out="raised RuntimeError: a drafter of bad character")


@pytest.mark.parametrize("method", ["observe", "stop"])
def test_raising_where_the_draft_was_sound(method: str) -> None:
    """Failures in a row make it out; whether there are, between sound drafts, depends on who ends when."""
    rig = build("toy", {"odd": always(raising(method))})
    told = run(rig, under_law.requests(LAW, (Rule.COUPLED,), count=COUNT))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("toy", LAW, COUNT))


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("method", METHODS)
def test_hanging(method: str, released: threading.Event) -> None:
    rig = build("toy", {"odd": always(hanging(method, released))}, drafter_timeout=0.02)
    if method in ("start", "propose"):
        check(rig, out="did not answer within 0.02 s")
        return
    told = run(rig, under_law.requests(LAW, (Rule.COUPLED,), count=COUNT))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("toy", LAW, COUNT))
    assert "did not answer within 0.02 s" in (rig.engine.drafters["odd"].out or "")


def test_foreign_but_sound() -> None:
    """On a thread of its own, always wrong, never out."""
    drafter = Silent()
    drafter.inline = False
    rig = build("toy", {"odd": always(drafter)})
    check(rig, out=None)
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_a_bad_drafter_leaves_the_others_alone(backend: str) -> None:
    count = 10
    rig = build(backend, {"odd": always(raising("propose")), "good": RIGS["model"]["good"]})
    requests = [
        Request(
            id=request.id,
            prompt=request.prompt,
            sampling=request.sampling,
            speculation=Speculation(drafter=("odd", "good")[i % 2]),
        )
        for i, request in enumerate(under_law.requests(LAW, (Rule.COUPLED,), count=count))
    ]
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(under_law.plain_answers(backend, LAW, count))
    assert rig.engine.drafters["odd"].out
    assert rig.engine.drafters["good"].out is None
    assert told["1", 0].stats.accepted > 0


def check_beside_a_device(rig: Rig, *, out: str | None) -> None:
    """The text is the plain one, no step waits on the host, and the reason is where it belongs."""
    requests = under_law.device_requests(LAW, count=COUNT)
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", LAW, COUNT))
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.rounds.most_in_flight == 2
    reason = rig.engine.drafters["odd"].out
    assert (reason is None) if out is None else (reason is not None and out in reason)
    speculating = [request.id for request in requests if request.speculation.enabled]
    assert out is None or all(told[i, 0].stats.off_reason == reason for i in speculating)


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_beside_a_device(kind: str) -> None:
    out = "raised ValueError" if kind == "writes into the tokens" else "returned "
    check_beside_a_device(build("toy", {"odd": always(Nonsense(NONSENSE[kind]))}, on_device={}), out=out)


@pytest.mark.parametrize("method", ["start", "propose"])
def test_raising_beside_a_device(method: str) -> None:
    rig = build("toy", {"odd": always(raising(method))}, on_device={})
    check_beside_a_device(rig, out="raised RuntimeError: a drafter of bad character")


def test_a_foreign_drafter_beside_a_device() -> None:
    """On a thread of its own, and always wrong."""
    drafter = Silent()
    drafter.inline = False
    check_beside_a_device(build("toy", {"odd": always(drafter)}, on_device={}), out=None)


@pytest.mark.parametrize("method", METHODS)
def test_nobody_waits_for_a_hanging_drafter_beside_a_device(method: str, released: threading.Event) -> None:
    """Its time limit is a minute, and the answers are there long before."""
    rig = build("toy", {"odd": always(hanging(method, released))}, on_device={}, drafter_timeout=60.0)
    check_beside_a_device(rig, out=None)


@pytest.mark.parametrize("method", ["start", "propose"])
def test_hanging_beside_a_device(method: str, released: threading.Event) -> None:
    """Once its time is over, it is out: here the call hangs before the first answer is complete."""
    rig = build("toy", {"odd": always(hanging(method, released))}, on_device={}, drafter_timeout=1e-9)
    going = Run(rig)
    going.submit([replace(under_law.device_requests(LAW)[0], id="first", speculation=Speculation())])
    thread = rig.engine.drafters["odd"]._thread
    assert thread is not None
    while not thread.hangs:
        going.step() if going.steps < 4 else time.sleep(0.001)
    going.finish()
    check_beside_a_device(rig, out="did not answer within 1e-09 s")


def test_a_bad_drafter_of_the_host_beside_one_of_the_device() -> None:
    rig = build("toy", {"odd": always(raising("propose"))}, on_device={"good": TARGET})
    requests = [
        replace(request, speculation=Speculation(drafter=("odd", "good")[i % 2]))
        for i, request in enumerate(under_law.device_requests(LAW))
    ]
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", LAW))
    assert rig.engine.drafters["odd"].out
    assert told["0", 0].stats.off_reason == rig.engine.drafters["odd"].out
    assert told["1", 0].stats.accepted > 0
    assert rig.rounds.launches == rig.engine.stats.steps
