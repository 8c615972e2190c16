"""Changes of the host to the lanes of a device: indices into one memory, each once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.runner.rounds.device_state import Changes, DeviceState
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams

VOCAB, SCRATCH = 97, 50


def sampler(*, seed: int = 0, **params: float) -> Sampler:
    return Sampler(SamplingParams.of(**params), seed=seed, vocab_size=VOCAB, eos_ids=())


def made() -> tuple[DeviceState, Changes]:
    state = DeviceState(lanes=3, width=40, scratch_page=SCRATCH, device="cpu")
    return state, Changes(state, vocab_size=VOCAB)


def apply(state: DeviceState, changes: Changes) -> None:
    places, values = (torch.from_numpy(each) for each in changes.take())
    assert len(places.unique()) == len(places), "a device writes places in any order"
    assert values.dtype == torch.int32
    state.memory[places] = values


def test_a_new_state_is_all_dummies() -> None:
    state, changes = made()
    assert state.dummy == 3
    assert state.lengths.tolist() == [1] * 4
    assert (state.pages == SCRATCH).all()
    assert state.pages.shape == (4, 3)
    assert state.top_p.tolist() == [1.0] * 4
    assert not changes


def test_a_sequence_enters_a_lane_and_touches_no_other() -> None:
    state, changes = made()
    before = state.memory.clone()
    changes.write(1, np.array([5, 6, 7]), sampler(temperature=0.5, top_k=9, top_p=0.75, min_p=0.125, seed=3))
    assert changes
    apply(state, changes)
    assert not changes
    assert state.tokens[1, :4].tolist() == [5, 6, 7, 0]
    assert (state.lengths[1], state.top_k[1], state.seed[1]) == (3, 9, 3)
    assert (state.inverse_temperature[1], state.top_p[1], state.min_p[1]) == (2.0, 0.75, 0.125)
    for tensor in (state.tokens, state.lengths, state.top_k, state.seed, state.inverse_temperature, state.min_p):
        assert not tensor[[0, 2]].sub(tensor[3]).any()
    state.tokens[1], state.lengths[1], state.top_k[1], state.seed[1] = 0, 1, 0, 0
    state.inverse_temperature[1], state.top_p[1], state.min_p[1] = 0, 1, 0
    assert torch.equal(state.memory, before)


@pytest.mark.parametrize("lane", [0, 2])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_seeds_of_64_bits(lane: int, seed: int) -> None:
    state, changes = made()
    changes.write(lane, np.array([1]), sampler(seed=seed))
    apply(state, changes)
    assert int(state.seed[lane]) % 2**64 == seed
    assert state.seed.count_nonzero() == (seed > 0)


@pytest.mark.parametrize(
    ("params", "inverse_temperature", "top_k"),
    [({"temperature": 0}, 0.0, 0), ({"temperature": 4}, 0.25, 0), ({"top_k": 1000}, 1.0, VOCAB)],
)
def test_what_is_asked_of_sampling(params: dict[str, float], inverse_temperature: float, top_k: int) -> None:
    state, changes = made()
    changes.write(0, np.array([1]), sampler(**params))
    apply(state, changes)
    assert (state.inverse_temperature[0], state.top_k[0]) == (inverse_temperature, top_k)


def test_later_over_earlier() -> None:
    """Later changes win: a sequence that comes and goes before a launch leaves nothing but tokens."""
    state, changes = made()
    changes.write(2, np.arange(1, 9), sampler(seed=2**40, top_k=3))
    changes.set_pages(2, 0, [10, 11, 12])
    changes.write(2, np.array([20, 21]), sampler(seed=4))
    changes.set_pages(2, 0, [13])
    changes.set_pages(2, 1, [14])
    changes.set_pages(2, 0, [15])
    apply(state, changes)
    assert state.tokens[2, :8].tolist() == [20, 21, 3, 4, 5, 6, 7, 8]  # tokens past the length are never read
    assert (state.lengths[2], state.top_k[2], state.seed[2]) == (2, 0, 4)
    assert state.pages[2].tolist() == [15, 14, SCRATCH]


def test_nothing_is_taken_twice() -> None:
    state, changes = made()
    changes.set_pages(0, 1, [7])
    apply(state, changes)
    changes.set_pages(0, 2, [8])
    assert len(changes.take()[0]) == 1
    assert state.pages[0].tolist() == [SCRATCH, 7, SCRATCH]


def test_a_lane_s_values_stay_in_its_lane() -> None:
    _, changes = made()
    with pytest.raises(AssertionError, match="41 values from 0 on in a lane of 40"):
        changes.write(0, np.arange(41), sampler())
    with pytest.raises(AssertionError, match="2 values from 2 on in a lane of 3"):
        changes.set_pages(0, 2, [1, 2])
