"""Seconds of a simulated step: its forward pass by a measured table, drafting and the host's work by fitted lines.

    pass     body(rows) + head(outs) + a · tokens read + b · tokens attended to, times what passes inside steps take,
             and a constant more if it reads a prompt
    draft    per call, per sequence asked for, per pass of the drafter, per prompt token that it reads first
    host     per step, per sequence with new tokens, per prompt row

All numbers are of one machine, model and drafter. Nothing here measures (`replay.meter`, `replay.sample`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

OUTLIER = 2.0  # factor over the fitted time from which a time does not count


class PassShape(NamedTuple):
    """The shape of a pass, on which its time depends."""

    rows: int
    outs: int  # rows with logits
    read: int  # tokens of context, once for each sequence
    attended: int  # tokens of context, once for each row
    drawing: int = 1  # sequences that draw a token
    drafted: bool = False  # any of them has a draft


@dataclass(frozen=True, slots=True)
class PassTable:
    """Seconds of passes that ran alone."""

    body: Mapping[int, float]  # rows → seconds without logits and without context
    head: Mapping[int, float]  # rows with logits → seconds more
    read_token: float  # seconds of a token of context, once for each sequence
    attended_token: float  # seconds of a token of context, once for each row

    def seconds(self, shape: PassShape) -> float:
        context = self.read_token * shape.read + self.attended_token * shape.attended
        return interpolated(self.body, shape.rows) + interpolated({0: 0.0, **self.head}, shape.outs) + context


def interpolated(table: Mapping[int, float], at: float) -> float:
    """Return the value at a place between two of the table; beyond the last one it grows as between the last two."""
    places = sorted(table)
    if len(places) > 1 and at > places[-1]:
        before, last = places[-2:]
        return table[last] + max(table[last] - table[before], 0.0) * (at - last) / (last - before)
    return float(np.interp(at, places, [table[place] for place in places]))


@dataclass(frozen=True, slots=True)
class StepTimes:
    passes: PassTable
    plain_scale: Mapping[int, float]  # sequences → seconds of a pass inside plain steps, by the table's
    drafted_scale: Mapping[int, float]  # sequences → the same, of passes that verify drafts
    prompt: tuple[float, float]  # of passes that read prompts: seconds beside the table's, and the scale of the table's
    host: tuple[float, float, float]  # seconds of a step, of a sequence with new tokens, of a prompt row
    draft: tuple[float, float, float, float]  # seconds of a call, of an ask, of a pass, of a prompt token read first

    def pass_seconds(self, shape: PassShape) -> float:
        alone = self.passes.seconds(shape)
        if shape.outs < shape.rows:  # rows without logits are of a prompt
            constant, scale = self.prompt
            return constant + scale * alone
        return interpolated(self.drafted_scale if shape.drafted else self.plain_scale, shape.drawing) * alone

    def host_seconds(self, *, sequences: int, prompt_rows: int) -> float:
        return self.host[0] + self.host[1] * sequences + self.host[2] * prompt_rows

    def draft_seconds(self, *, asks: int, passes: int, fresh: int) -> float:
        return self.draft[0] + self.draft[1] * asks + self.draft[2] * passes + self.draft[3] * fresh

    def scaled(self, factor: float, *, reading: float = 1.0) -> StepTimes:
        """Return times with every second `factor` times as long, and those of reading prompts `reading` times more."""
        call, ask, level, fresh = (factor * seconds for seconds in self.draft)
        step, sequence, row = (factor * seconds for seconds in self.host)
        constant, scale = self.prompt
        return replace(
            self,
            plain_scale={size: factor * scale for size, scale in self.plain_scale.items()},
            drafted_scale={size: factor * scale for size, scale in self.drafted_scale.items()},
            prompt=(factor * reading * constant, factor * reading * scale),
            host=(step, sequence, row * reading),
            draft=(call, ask, level, fresh * reading),
        )

    def record(self) -> dict[str, Any]:
        return asdict(self)


def fitted(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Fit weights, none below 0, by least squares. Times that are OUTLIER times the fitted ones are then left out, and
    the rest is fitted again: other work on the machine causes them."""
    x, y = np.asarray(features, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    usual = y <= OUTLIER * (x @ _solved(x, y))
    return tuple(float(weight) for weight in _solved(x[usual], y[usual]))


def _solved(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Solve x · weights = y by least squares. Of negative weights the lowest is set to 0, until none is left."""
    weights, kept = np.zeros(x.shape[1]), list(range(x.shape[1]))
    while len(y) and kept:
        solved = np.linalg.lstsq(x[:, kept], y, rcond=None)[0]
        if solved.min() >= 0:
            weights[kept] = solved
            break
        del kept[int(solved.argmin())]
    return weights
