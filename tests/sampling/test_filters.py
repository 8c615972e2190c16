"""The floor of the filters: to the last bit that of a device, whose oracle sorts everything and sums every mass."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels import round_reference
from paceline.runner.rounds.device_state import DeviceState
from paceline.sampling import filters
from paceline.sampling.filters import CANDIDATES, MASS_BITS, ROUGH_ERROR, filter_floor, mass

SPREADS = (1e-4, 0.3, 1.0, 2.5, 8.0, 40.0)


def logits(seed: int, spread: float, *, rows: int = 4, vocab: int = 3000) -> Tensor:
    return spread * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


def floor_of_a_device(scaled: Tensor, *, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    state = DeviceState(lanes=1, width=16, scratch_page=0, device="cpu")
    state.min_p[0], state.top_k[0], state.top_p[0] = min_p, top_k, top_p
    lanes = torch.zeros(len(scaled), dtype=torch.int64)
    return round_reference.filter_floor(scaled, state, lanes).numpy()


def same(scaled: Tensor, *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The floor, after a comparison of what it leaves."""
    asked = {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    mine, other = filter_floor(scaled, **asked), floor_of_a_device(scaled, **asked)
    lowest = scaled.amin(-1, keepdim=True).numpy()  # below it one floor is as good as another
    assert np.array_equal(np.maximum(mine, lowest), np.maximum(other, lowest)), asked
    return mine


@hypothesis.given(
    st.integers(0, 2**31),
    st.sampled_from(SPREADS),
    st.sampled_from([0, 0, 1, 2, 40, 255, 256, 257, 1000, 2999, 3000, 5000]),
    st.one_of(st.just(1.0), st.floats(1e-7, 1.0)),
    st.one_of(st.just(0.0), st.floats(1e-12, 1.0)),
)
@hypothesis.settings(max_examples=150)
def test_host_and_device_agree(seed: int, spread: float, top_k: int, top_p: float, min_p: float) -> None:
    scaled = logits(seed, spread)
    scaled[1] = scaled[1].round(decimals=1)  # ties
    scaled[2, 7:] = -torch.inf
    scaled[3, seed % 3000] = 30.0
    same(scaled, min_p=min_p, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("unit", [-1, 0, 1])
def test_at_the_very_edge(spread: float, unit: int) -> None:
    """Where what is wanted is the mass of so many tokens exactly, or a unit more or less."""
    scaled = logits(11, spread, rows=1)
    ordered = scaled.sort(dim=-1, descending=True).values.numpy()
    reached = mass(ordered - ordered[:, :1]).cumsum(-1)[0]
    for count in (1, 2, 17, 255, 256, 257, 900):
        share = float((reached[count - 1] + unit) / reached[-1])
        rounded = float(np.float32(share))
        if rounded < 1:
            floor = same(scaled, top_p=share)
            kept = int((scaled.numpy() >= floor).sum())
            assert int(reached[kept - 1]) >= int(rounded * float(reached[-1]))


def test_rough_masses_decide_only_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds so wide that most rows are looked at twice, the floors stay the same."""
    scaled = logits(5, 2.5, rows=6)
    scaled[:, :9] += 12
    narrow = same(scaled, top_p=0.8)
    exact = []
    measure = filters._mass_from
    monkeypatch.setattr(filters, "_mass_from", lambda *row: exact.append(row) or measure(*row))
    assert np.array_equal(filter_floor(scaled, min_p=0, top_k=0, top_p=0.8), narrow)
    assert not exact
    monkeypatch.setattr(filters, "ROUGH_ERROR", 0.1)
    assert np.array_equal(filter_floor(scaled, min_p=0, top_k=0, top_p=0.8), narrow)
    assert len(exact) >= 3


@pytest.mark.parametrize("spread", [*SPREADS, 0.0])
@pytest.mark.parametrize("vocab", [300, 2**18])
def test_rough_masses_are_near_enough(spread: float, vocab: int) -> None:
    """By less than a third of what they are taken for."""
    scaled = logits(2, spread, rows=1, vocab=vocab)
    best = scaled.amax(-1, keepdim=True).numpy()
    for floor in (np.full_like(best, -np.inf), best - np.float32(3.0)):
        exact = float(filters._mass_from(scaled[0], best[0], floor[0]))
        assert float(filters._rough_mass_from(scaled, best, floor)[0, 0]) == pytest.approx(exact, rel=ROUGH_ERROR / 3)


def test_wide_nuclei_are_found_in_the_whole_vocabulary() -> None:
    for vocab in (CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 8 * CANDIDATES, 8 * CANDIDATES + 1):
        scaled = logits(vocab, 0.01, vocab=vocab)
        for top_p in (0.05, 0.5, 0.99):
            kept = (scaled.numpy() >= same(scaled, top_p=top_p)).mean()
            assert kept == pytest.approx(top_p, abs=0.02)


@pytest.mark.filterwarnings("error")  # no infinity minus infinity on the way
def test_rows_of_nothing() -> None:
    nothing, infinite = torch.full((2, 2000), -torch.inf), logits(1, 1.0)
    infinite[0, 3] = torch.inf
    for asked in ({"top_p": 0.5}, {"top_k": 7, "top_p": 0.5}, {"min_p": 0.1, "top_p": 0.5}, {"min_p": 0.1}):
        assert (same(nothing, **asked) == -np.inf).all()
        assert same(infinite, **asked)[0, 0] == np.inf


@pytest.mark.parametrize(
    ("given", "off"),
    [({"top_p": 1 - 1e-9}, {}), ({"min_p": 1e-60}, {}), ({"top_p": 0.1 + 1e-10}, {"top_p": 0.1})],
    ids=str,
)
def test_parameters_are_those_that_a_device_has(given: Any, off: Any) -> None:
    """float32, where these are the same."""
    scaled = logits(9, 2.5)
    assert np.array_equal(same(scaled, **given), same(scaled, **off))


def test_a_mass_is_what_it_says() -> None:
    below = -np.linspace(0, 26.9, 10001, dtype=np.float32)
    expected = np.exp(below.astype(np.float64))
    np.testing.assert_allclose(mass(below) * 2.0**-MASS_BITS, expected, rtol=4e-7, atol=2.0**-MASS_BITS)
    assert mass(np.array([0.0, -27.0, -27.1, -np.inf, np.nan], dtype=np.float32)).tolist() == [1 << 40, 0, 0, 0, 0]
    assert mass(np.array([np.nextafter(np.float32(-27), np.float32(0))]))[0] == math.floor(math.exp(-27) * 2**40)
    assert mass(below).dtype == np.int64
