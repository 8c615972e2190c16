"""The coarse replica of a plan against the engine's own step in simulated time (`paceline.replay`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.plan.cluster import simulate
from paceline.plan.service import PROMPT_GRAIN
from paceline.plan.workload import Workload, draw
from paceline.replay.simulate import simulate as replay
from tests.plan.plans import service
from tests.replay.recorded import arrival, setting, times

PASS, ROW = 0.01, 0.0001  # seconds of a pass, and of each row in it


@pytest.mark.parametrize(("rate", "most"), [(10, 16), (25, 16), (30, 8)])
def test_times_are_those_of_the_engine(rate: float, most: int) -> None:
    requests = draw(Workload(rate=rate, seconds=8, prompt_tokens=60, output_tokens=40, seed=5), longest=400)
    arrivals = [
        arrival(number, due=due, prompt=prompt, output=output)
        for number, (due, prompt, output) in enumerate(
            zip(requests.due, requests.prompts, requests.outputs, strict=True), start=1
        )
    ]
    known = times(pass_seconds=PASS, row_seconds=ROW)
    options = {"max_sequences": most, "max_step_tokens": 256, "prefix_cache": False, "pages": most * 40}
    outcomes = replay(setting(known=known, **options), arrivals).outcomes

    coarse = replace(
        service(most=most),
        steps=(0.0, *(PASS + ROW * count for count in range(1, most + 1))),
        prompts=tuple(ROW * PROMPT_GRAIN * grain for grain in range(130)),
        rows_beside=256 - most,
        rows_alone=256,
    )
    simulated = simulate(coarse, requests, replicas=1, routing="random")
    first, finish = np.asarray(simulated.first), np.asarray(simulated.finish)
    assert (first - requests.due).mean() == pytest.approx(np.mean([each.ttft for each in outcomes]), rel=0.1, abs=PASS)
    assert (finish - requests.due).mean() == pytest.approx(np.mean([each.latency for each in outcomes]), rel=0.05)
    assert simulated.seconds == pytest.approx(max(each.started + each.latency for each in outcomes), rel=0.02)
