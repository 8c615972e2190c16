"""Prompts beside decoding sequences: as many rows as their time allows, by a measured pace."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.engine.reading import FIRST_ROWS, LEAST_ROWS, TELLING_ROWS, ReadingPace
from paceline.kernels.base import Batch, Output
from paceline.models.shapes import shape_config
from paceline.runner.forwards.device_batch import padded_rows
from paceline.types import Request, SamplingParams
from tests.rig import build
from tests.runs import Run, prompt
from tests.toy import ToyForward

EVEN = 20_000


def seconds_of(start: int, count: int, *, each: float = 1e-5) -> float:
    """Add up row by row what a device takes whose attention costs as much as its products at EVEN positions."""
    return sum(each * (1 + position / EVEN) for position in range(start, start + count))


def test_rows_until_a_pace_is_known() -> None:
    pace = ReadingPace()
    pace.learn([(0, TELLING_ROWS - 1)], 9.0)
    pace.learn([(0, 5000)], 0.0)
    assert pace.rows(0.05, start=0) == FIRST_ROWS


@pytest.mark.parametrize("start", [0, 3000, 14_000, 120_000])
def test_a_chunk_takes_its_time(start: int) -> None:
    """Wherever it begins, and though the pace was measured elsewhere."""
    pace = ReadingPace(even_context=EVEN)
    pace.learn([(2000, 1024)], seconds_of(2000, 1024))
    rows = pace.rows(0.02, start=start)
    assert rows == padded_rows(rows), "no row of padding"
    assert seconds_of(start, rows) <= 0.0201
    assert seconds_of(start, math.ceil(rows * 3 / 2) + 64) > 0.02, "and the next size would not fit"


def test_several_prompts_teach_one_pace() -> None:
    pace, other = ReadingPace(even_context=EVEN), ReadingPace(even_context=EVEN)
    parts = [(0, 512), (9000, 700)]
    pace.learn(parts, sum(seconds_of(*part) for part in parts))
    other.learn([(0, 4096)], seconds_of(0, 4096))
    assert pace.rows(0.05, start=5000) == other.rows(0.05, start=5000)


def test_a_slow_step_is_forgotten() -> None:
    """The first one may have compiled a kernel; then chunks are small, and teach all the same."""
    pace = ReadingPace()
    pace.learn([(0, 512)], 10.0)
    assert pace.rows(0.05, start=0) == LEAST_ROWS
    for _ in range(2):
        count = pace.rows(0.05, start=0)
        pace.learn([(0, count)], 1e-5 * count)
    assert pace.rows(0.05, start=0) > 4000
    pace.learn([(0, 4096)], 5.0)
    assert pace.rows(0.05, start=0) > 2000, "one slow step among others counts little"


def test_the_cost_of_attention_is_learnt() -> None:
    """A device whose attention is four times as slow as the model's operations suggest, and one where it is free."""
    for even, slow in ((EVEN * 4, seconds_of), (EVEN, lambda start, count: 1e-5 * count)):
        pace, start, budget = ReadingPace(even_context=even), 0, 0.02
        took = []
        while start < 30_000:
            count = pace.rows(budget, start=start)
            took.append(slow(start, count))
            pace.learn([(start, count)], took[-1])
            start += count
        assert all(0.6 * budget < seconds < 1.08 * budget for seconds in took[3:]), took


def test_the_context_at_which_attention_costs_as_much_as_products() -> None:
    assert 26_000 < shape_config("llama-3.1-8b").even_context < 27_000
    assert 3_000 < shape_config("smollm2-135m").even_context < 3_200


# ── in the engine ──


class Timed(ToyForward):
    """A forward pass takes 1 ms, and 0.5 ms more for each row, on a clock of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now = 0.0
        self.rows: list[int] = []

    def __call__(self, batch: Batch) -> Output:
        self.rows.append(len(batch.tokens))
        self.now += 1e-3 + 0.5e-3 * len(batch.tokens)
        return super().__call__(batch)


def ask(name: str, length: int, tokens: int) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    return Request(id=name, prompt=prompt(length, seed=len(name)), sampling=sampling)


def rows_of(**options: Any) -> list[int]:
    """Rows of all passes: a long prompt alone, then two that decode, with a long prompt beside them."""
    forward = Timed(num_pages=400)
    rig = build("toy", forward=forward, max_context=2000, max_step_tokens=600, clock=lambda: forward.now, **options)
    going = Run(rig)
    going.submit([ask("first", 900, 1)])
    going.finish()
    going.submit([ask("a", 2, 60), ask("b", 2, 60)])
    for _ in range(3):
        going.step()
    going.submit([ask("long", 900, 2)])
    going.finish()
    return forward.rows


def test_prompts_alone_have_all_rows_and_beside_others_their_time() -> None:
    rows = rows_of(max_prompt_seconds=0.1)
    assert rows[:2] == [600, 300], "nobody waits for it"
    chunks = [count - 2 for count in rows[2:] if count > 4]
    assert len(chunks) > 4
    assert max(chunks) <= 192, "0.1 s at 0.5 ms a row, in steps of 64"
    assert min(chunks[:4]) >= 128
    assert sum(chunks) == 900


def test_without_a_limit_nothing_changes() -> None:
    """That is the default of a CPU."""
    assert rows_of() == rows_of(max_prompt_seconds=0.0)
    assert 600 in rows_of()[2:]
