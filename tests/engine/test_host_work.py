"""The host's work for one more sequence in a step on a device: a count of Python calls, which no busy machine changes.

The thread of the engine is the limit of a small model on a GPU: each call here costs every sequence in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from paceline.types import Request, SamplingParams
from tests.calls import count_calls
from tests.rig import build
from tests.rig_drafters import EagleMade, PortfolioRig
from tests.runs import prompt
from tests.tiny_models import TARGET

STEPS = 4  # within one page of each sequence
HOST = ("paceline/engine/", "paceline/kv/", "paceline/text/", "paceline/sampling/", "runner/lanes.py")


def calls_in(batch: int, on_device: Mapping[str, Any]) -> int:
    """Count the calls of `STEPS` steps in which `batch` sequences decode, without those of the device."""
    rig = build("toy", on_device=on_device, max_sequences=batch, max_draft_batch=batch, max_step_tokens=512)
    for i in range(batch):
        sampling = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)  # none ends in these steps
        rig.engine.submit(Request(id=f"{i}", prompt=prompt(18, seed=i), sampling=sampling))
    for _ in range(4):
        rig.engine.step()
    count, tokens = count_calls(
        lambda: sum(len(event.tokens) for _ in range(STEPS) for event in rig.engine.step()), of=HOST
    )
    assert tokens >= batch * STEPS
    return count


@pytest.mark.parametrize(
    ("on_device", "most"),
    [({}, 13), ({"good": TARGET}, 34), ({"eagle": EagleMade()}, 26), ({"portfolio": PortfolioRig(EagleMade())}, 33)],
    ids=["plain", "model", "head", "portfolio"],
)
def test_one_more_sequence_takes_few_calls(on_device: Mapping[str, Any], most: int) -> None:
    few, many = (calls_in(batch, on_device) for batch in (2, 8))
    assert (many - few) / 6 / STEPS <= most


def test_a_plain_step_of_one_sequence_on_the_host_takes_few_calls() -> None:
    """After a pass over all weights the caches of a CPU are cold, and each of these calls takes a microsecond."""
    rig = build("compiled")
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    rig.engine.submit(Request(id="one", prompt=prompt(18, seed=1), sampling=sampling))
    for _ in range(4):
        rig.engine.step()
    count, events = count_calls(rig.engine.step, of=HOST)
    assert len(events) == 1
    assert count <= 60
