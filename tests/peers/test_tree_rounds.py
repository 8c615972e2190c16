"""Shapes of drafts take turns on a device; what is said of time is not judged."""

from __future__ import annotations

import pytest

from paceline.runner.rounds.portable import PortableRounds
from peers.tree_rounds import ACCEPTANCE, EACH, SHAPES, FixedShape, Shapes, compared, measure
from tests.tiny_models import TARGET, VOCAB


class Watched(PortableRounds):
    def collect(self, ticket):  # type: ignore[no-untyped-def]  # as the method it extends
        out = super().collect(ticket)
        self.landed = [*getattr(self, "landed", []), *out[1]]
        return out


def test_every_shape_is_verified_from_the_same_context() -> None:
    forward = TARGET.forward("toy", num_pages=12)
    drafters = {shape: FixedShape(parents, "cpu") for shape, parents in SHAPES.items()}
    rounds = Watched(forward, lanes=2, max_context=64, max_draft=8, drafters=drafters)
    rounds.synthetic_acceptance = ACCEPTANCE
    shapes = Shapes(rounds, lanes=2, context=40, vocab_size=VOCAB)
    shapes.read()
    found = measure(shapes, 2, turns=2)
    assert list(found) == list(SHAPES)
    assert found["chain"]["median_ratio"] == 1.0
    assert all(each["ms"] > 0 for each in found.values())
    assert len(rounds.landed) == 2 * 2 * EACH * len(SHAPES)
    assert {len(one.drafted) for one in rounds.landed} == {8}
    assert {one.parents for one in rounds.landed} == {(), SHAPES["tree"], SHAPES["wide tree"]}
    for lane in range(2):
        chains = [one.accepted for one in rounds.landed[lane::2] if not one.parents]
        assert len({*chains}) == 1, "a round began with another context"


def test_ratios_are_those_of_turns() -> None:
    slow = compared([2.0, 4.4, 6.6, 8.0], [2.0, 4.0, 6.0, 8.0])
    assert slow["median_ratio"] == pytest.approx(1.05)
    assert slow["ratio"]["ratio"] == pytest.approx(1.05)
    low, high = slow["ratio"]["interval"]
    assert 1.0 <= low < 1.05 < high < 1.11
