"""A block drafter inside of rounds drafts what it drafts on the host, as long as it is not in doubt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.drafters.block.on_device import BlockOnDevice
from paceline.errors import InvalidRequest
from paceline.runner.rounds.protocol import Seat
from tests.drafters.eagle.test_on_device import FIXED, SEEDED, ask, device_drafts, host_drafts
from tests.rig import build
from tests.rig_drafters import BlockMade
from tests.runs import prompt, run, tokens_of


@pytest.mark.unwatched
@pytest.mark.parametrize("params", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("network", ["DFlash", "DSpark"])
def test_drafts_are_those_of_the_host(network: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in several chunks, and sequences come and go."""
    made = BlockMade(network, min_confidence=0.0)
    asked = [ask("a", **params), ask("bb", 70, tokens=24, **params), ask("ccc", 7, tokens=18, **params)]
    ends = {len(one.prompt) + (one.sampling.max_tokens or 0) for one in asked}
    wanted = host_drafts(monkeypatch, made, asked)
    got = device_drafts(build("toy", on_device={"block": made}, **FIXED), asked)
    both = {key for key in wanted.keys() & got.keys() if min(end - len(key) for end in ends if end >= len(key)) > 8}
    assert len(both) >= 25
    assert {key: got[key] for key in both} == {key: wanted[key] for key in both}
    assert max(map(len, got.values())) == made.head.config.longest


def test_drafts_end_in_doubt() -> None:
    rig = build("toy", on_device={"block": BlockMade(min_confidence=0.02)}, **FIXED)
    lengths = {len(draft) for draft in device_drafts(rig, [ask("a"), ask("bb")]).values()}
    assert len(lengths) > 2


def test_pages_that_a_block_drafter_has_read_are_shared() -> None:
    rig = build("toy", on_device={"block": BlockMade()}, **FIXED)
    alike = [ask("a", 64, tokens=20), ask("b", 64, tokens=20)]  # the same prompt
    assert alike[0].prompt == prompt(64, seed=1)
    first, second = (run(rig, [one]) for one in alike)
    assert second["b", 0].stats.cached_tokens >= 48
    assert tokens_of(first)["a", 0] == tokens_of(second)["b", 0]
    assert first["a", 0].stats.drafted == second["b", 0].stats.drafted


def test_the_request_or_the_drafter_or_the_price_ends_drafts() -> None:
    head: Any = SimpleNamespace()
    by_price, own = (BlockOnDevice(head, taps=(0,), max_draft=4, min_confidence=least) for least in (None, 0.3))
    assert by_price.threshold(Seat(0, 4, price=0.1)) == pytest.approx(0.2)
    assert own.threshold(Seat(0, 4, price=0.1)) == 0.3
    assert own.threshold(Seat(0, 4, price=0.1, p_min=0.7)) == 0.7


def test_an_impossible_confidence() -> None:
    with pytest.raises(InvalidRequest, match=r"min_confidence 1.5 must be in \[0, 1\]"):
        BlockOnDevice(SimpleNamespace(), taps=(0,), max_draft=4, min_confidence=1.5)  # type: ignore[arg-type]
