"""The host's work for a round on a CUDA device that computes nothing: a count of Python calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.eagle.on_device import EagleOnDevice
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.cuda import CudaRounds
from paceline.runner.rounds.outcomes import Fetched, Outcomes
from paceline.runner.rounds.protocol import Seat
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams
from tests.calls import count_calls

LANES, DRAFT, VOCAB = 64, 4, 64
HEAD = EagleOnDevice(SimpleNamespace(ids=None), taps=(0, 1, 1))  # type: ignore[arg-type]  # nobody runs it


class Replayed:
    """A recorded round of which only the outcome exists: every seat drafts four tokens, of which two are right."""

    recorded, tree = True, False

    def __init__(self, bucket: Bucket) -> None:
        self._outcomes = Outcomes(bucket, torch.device("cpu"), tree=False)
        reports = self._outcomes.device.reports
        reports[:, :2] = torch.tensor([2, DRAFT]) if bucket.longest else 0

    def begin(self, seats: object) -> None:
        pass

    def end(self) -> Fetched:
        return self._outcomes.fetch()

    def tapped_states(self) -> None:
        return None


def rounds_on_nothing() -> CudaRounds:
    shape = SimpleNamespace(hidden_size=8, num_layers=2)
    decoder = SimpleNamespace(device=torch.device("cpu"), pdl=False, dtype=torch.float32, config=shape)
    target: Any = SimpleNamespace(decoder=decoder, kv=SimpleNamespace(scratch_page=0), vocab_size=VOCAB, taps=())
    rounds = CudaRounds(target, lanes=LANES, max_context=500, max_draft=DRAFT, drafters={"eagle": HEAD}, graphs=False)
    rounds._graphs._make = Replayed  # type: ignore[assignment]
    for lane in range(LANES):
        sampler = Sampler(SamplingParams(temperature=0), seed=lane, vocab_size=VOCAB, eos_ids=())
        rounds.write(lane, np.array([1, 2, 3], dtype=np.int32), sampler)
    return rounds


def calls_in_a_round(rounds: CudaRounds, seats: list[Seat], drafter: str | None) -> int:
    """Count the Python calls of the third round of these seats."""
    for _ in range(2):
        rounds.collect(rounds.launch([], [*seats], drafter=drafter, context=100))
    count, (_, landed, _) = count_calls(
        lambda: rounds.collect(rounds.launch([], [*seats], drafter=drafter, context=100))
    )
    assert [len(each.tokens) for each in landed] == [3 if drafter else 1] * len(seats)
    return count


@pytest.mark.parametrize(("drafter", "fixed", "each"), [(None, 52, 1), ("eagle", 64, 2)], ids=["plain", "drafting"])
def test_a_round_takes_few_calls(drafter: str | None, fixed: int, each: int) -> None:
    """If its seats are those of the round before, they are neither sent again, nor is their bucket computed anew."""
    rounds = rounds_on_nothing()
    few, many = (
        calls_in_a_round(rounds, [Seat(lane, DRAFT if drafter else 0) for lane in range(count)], drafter)
        for count in (2, LANES)
    )
    assert few <= fixed
    assert (many - few) / (LANES - 2) <= each
